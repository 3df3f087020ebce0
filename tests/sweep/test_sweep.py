"""Sweeps over a stub for `python -m ttrain`: each job in its own process and folder, failures, reruns, tables."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optuna
import pytest

from tests import forked
from tests.conftest import composed
from ttrain.cli import main
from ttrain.config.compose import Composer
from ttrain.core.errors import ConfigError, UserError
from ttrain.core.files import read_json
from ttrain.sweep import forks, outcome, run
from ttrain.sweep.jobs import STATUS, SweepFolder, read_sweep
from ttrain.train.logging.chart import COLORS, line_chart
from ttrain.train.logging.metrics import read_events, read_metrics
from ttrain.train.runs.run_directory import read_run

# What a job does follows from run.seed; the rest of a job is checked where real processes run.
STAND_IN = """
import json, os, pathlib, signal, sys, time
overrides = dict(w.split("=", 1) for w in sys.argv[1:] if "=" in w)
folder = pathlib.Path(overrides.get("run.dir", "elsewhere").strip("'\\""))
folder.mkdir(exist_ok=True)
seed = int(overrides.get("run.seed", 0))
with open("started.jsonl", "a") as file:
    record = {"overrides": sys.argv[1:], "threads": os.environ.get("OMP_NUM_THREADS"), "time": time.time()}
    file.write(json.dumps({**record, "group": os.environ.get("WANDB_RUN_GROUP"), "seed": seed}) + "\\n")
print("job speaks")
fixed = os.path.exists("fixed")
if seed == 101 and not fixed: raise RuntimeError("a bug")
if seed == 102 and not fixed: os._exit(7)
if seed == 103 and not fixed: os.kill(os.getpid(), signal.SIGKILL)
if seed == 104 and not fixed: sys.exit(print("ttrain: Step 3: train/loss is nan.\\n  more", file=sys.stderr) or 1)
if seed == 105 and not fixed: sys.exit(print("ttrain: no such corpus", file=sys.stderr) or 2)
if seed == 112: sys.exit(130)
if seed in (106, 108) and not fixed:  # the user interrupts; 108 does not stop for it
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130) if seed == 106 else None)
    (folder / "run.json").write_text("{}")
    os.kill(os.getppid(), signal.SIGINT)
    for _ in range(100): time.sleep(0.1); seed == 108 and _ == 3 and os.kill(os.getppid(), signal.SIGINT)
if seed == 107:  # four jobs that meet, or one that lasts
    meet = os.path.exists("meet")
    until = time.time() + (20 if meet else 0.3)
    while time.time() < until and not (meet and len(list(open("started.jsonl"))) == 4): time.sleep(0.01)
value = float(overrides.get("optimizer.lr", 1)) + seed
if seed in (110, 111):  # ten evaluations; 111 kills the sweep before the first one of its third job
    (folder / "run.json").write_text("{}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    for number in range(1, 11):
        time.sleep(0.0 if os.path.exists("fast") else 0.05)
        if seed == 111 and number == 1 and folder.name.startswith("002") and not fixed:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": number, "val/loss": value + 1 / number}) + "\\n")
if "plan.json" in overrides:
    plan = {"parameters": {"total": 7}, "memory": {"total": 2048}, "expected": {"step_ms": 2.0 * value}}
    sys.exit(pathlib.Path(overrides["plan.json"].strip("'\\"")).write_text(json.dumps(plan)) and 0)
if "bench.out" in overrides:
    out = pathlib.Path(overrides["bench.out"].strip("'\\""))
    if out.exists(): sys.exit(print("ttrain: holds results already", file=sys.stderr) or 2)
    out.mkdir()
    numbers = {"bf16 static_ms" if seed == 3 else "static_ms": value, "eager_ms": 6.0, "times_as_fast": 6.0 / value}
    if seed == 4: del numbers["times_as_fast"]  # no PyTorch beside
    (out / "results.json").write_text(json.dumps({"numbers": numbers}))
    sys.exit(1 if seed == 109 and not fixed else 0)
(folder / "summary.json").write_text(json.dumps({"best_val_loss": value, "step": 4, "tokens_per_s": 1000.0}))
"""

Sweep = Callable[..., int]


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sweep]:
    """Runs a sweep with the stub in a folder of its own: `sweep("run.seed=1,2")` -> exit code."""
    script = tmp_path / "stub.py"
    script.write_text(STAND_IN)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(run, "PROGRAM", (sys.executable, "-S", "-E", "-u", str(script)))
    monkeypatch.setattr(run, "_POLL_SECONDS", 0.005)
    monkeypatch.setattr(run, "forkable", lambda job: False)
    monkeypatch.setattr(outcome, "line_chart", lambda *given, **named: "<svg")

    def start(*overrides: str, name: str | None = None) -> int:
        with Composer(name) as composer:
            return run.run_sweep(composer, list(overrides))

    yield start


def started() -> list[dict[str, Any]]:
    path = Path("started.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def only_sweep() -> Path:
    (path,) = Path("outputs/sweeps").glob("*/*")
    return path


def statuses(sweep: Path) -> dict[str, dict[str, Any]]:
    return {path.name[:3]: read_json(path / STATUS) for path in sorted(sweep.iterdir()) if path.is_dir()}


def table(sweep: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((sweep / "sweep.csv").open()))


@pytest.fixture
def charts(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts are drawn, which takes longer than all else of a sweep."""
    monkeypatch.setattr(outcome, "line_chart", line_chart)


def test_every_combination_has_a_process_a_folder_a_log_and_a_status(sweep: Sweep, charts: None) -> None:
    assert sweep("engine=dynamic,static", "optimizer.lr=0.1,0.2", "train.steps=5") == 0
    path = only_sweep()
    names = ["000_engine=dynamic,lr=0.1", "001_engine=dynamic,lr=0.2", "002_engine=static,lr=0.1"]
    assert sorted(entry.name for entry in path.iterdir() if entry.is_dir())[:3] == names
    overrides = [entry["overrides"] for entry in started()]
    assert len(overrides) == 4
    assert overrides[1][:4] == ["train.steps=5", "engine=dynamic", "optimizer.lr=0.2", f'run.dir="{path / names[1]}"']
    assert overrides[1][4:] == ["hydra.job.num=1", "hydra.job.id='1'"]
    assert (path / names[0] / "log.txt").read_text() == "job speaks\n"
    status = statuses(path)["001"]
    assert (status["state"], status["exit_code"], status["objective"], status["attempts"]) == ("finished", 0, 0.2, 1)
    assert status["run"] == names[1]
    rows = table(path)
    assert [(row["engine"], row["optimizer.lr"], row["objective"]) for row in rows][-1] == ("static", "0.2", "0.2")
    assert all("</svg>" in (path / f"{key}.svg").read_text() for key in ("engine", "optimizer.lr"))
    assert read_sweep(path)["done"]


def test_one_failure_of_each_kind_stops_nothing_and_a_rerun_does_exactly_the_rest(sweep: Sweep, capfd: Any) -> None:
    """Exception, exit, kill, NaN, data error and config error; two that work."""
    overrides = ("run.seed=1,101,102,103,104,105,x,2", "device=cpu")
    assert sweep(*overrides) == 1
    path = only_sweep()
    found = statuses(path)
    states = [found[number]["state"] for number in sorted(found)]
    assert states == ["finished", *["failed"] * 6, "finished"]
    assert [found[f"00{n}"]["exit_code"] for n in range(1, 7)] == [1, 7, -9, 1, 2, 2]
    assert found["001"]["reason"] == "RuntimeError: a bug" and "Traceback (most recent" in found["001"]["traceback"]
    assert found["002"]["reason"] == "exit code 7" and "killed by SIGKILL" in found["003"]["reason"]
    assert found["004"]["reason"] == "Step 3: train/loss is nan.\n  more" and found["004"]["traceback"] is None
    assert found["005"]["reason"] == "no such corpus"
    assert found["006"]["reason"] == "run.seed='x': must be an integer, got text."
    printed = capfd.readouterr()
    assert printed.err.count(" failed: ") == 6 and "Step 3: train/loss is nan." in printed.out
    assert len(started()) == 7 and not read_sweep(path)["done"]

    Path("fixed").touch()
    Path("started.jsonl").unlink()
    assert sweep(*overrides) == 2  # the config error stays one
    assert [entry["seed"] for entry in started()] == [101, 102, 103, 104, 105]
    assert only_sweep() == path
    found = statuses(path)
    assert [found[number]["state"] for number in sorted(found)] == [*["finished"] * 6, "failed", "finished"]
    assert found["001"]["attempts"] == 2 and found["000"]["attempts"] == 1


def test_a_finished_sweep_is_followed_by_a_new_one_and_a_named_one_is_extended(sweep: Sweep) -> None:
    assert sweep("run.seed=1,2") == sweep("run.seed=1,2") == 0
    assert len(list(Path("outputs/sweeps").glob("*/*"))) == 2 and len(started()) == 4
    assert sweep("run.seed=1,2", "sweep.dir=mine") == sweep("run.seed=1,2,3", "sweep.dir=mine") == 0
    assert [entry["seed"] for entry in started()][4:] == [1, 2, 3]
    folders = sorted(path.name for path in Path("mine").iterdir() if path.is_dir())
    assert folders == ["000_seed=1", "001_seed=2", "002_seed=3"]


def test_a_job_that_alone_is_interrupted_ends_no_other(sweep: Sweep) -> None:
    assert sweep("run.seed=112,1") == 130
    assert [status["state"] for status in statuses(only_sweep()).values()] == ["interrupted", "finished"]


def test_an_unstarted_run_starts_and_a_started_one_resumes(sweep: Sweep) -> None:
    assert sweep("run.seed=106,1") == 130
    found = statuses(only_sweep())
    assert found["000"]["state"] == "interrupted" and "001" not in found
    Path("fixed").touch()
    assert sweep("run.seed=106,1") == 0
    overrides = [entry["overrides"] for entry in started()]
    assert "resume=auto" not in overrides[0] and "resume=auto" in overrides[1] and "resume=auto" not in overrides[2]


def test_a_second_interrupt_kills(sweep: Sweep) -> None:
    assert sweep("run.seed=108,1") == 130
    status = statuses(only_sweep())["000"]
    assert status["exit_code"] == -signal.SIGKILL and status["state"] == "interrupted"


def test_fail_fast(sweep: Sweep) -> None:
    assert sweep("run.seed=1,102,2", "sweep.fail_fast=true") == 1
    assert [entry["seed"] for entry in started()] == [1, 102]
    assert [row["state"] for row in table(only_sweep())] == ["finished", "failed", "missing"]


def test_parallel_jobs_share_the_threads(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    Path("meet").touch()
    assert sweep("run.seed=107", "optimizer.lr=0.1,0.2,0.3,0.4", "device=cpu", "sweep.parallel=4") == 0
    entries = started()
    assert [entry["threads"] for entry in entries] == ["2"] * 4
    assert max(entry["time"] for entry in entries) - min(entry["time"] for entry in entries) < 20  # none had ended
    assert {entry["group"] for entry in entries} == {only_sweep().name}


def test_slurm_starts_jobs_on_nodes_of_their_own(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("run.seed=1,2", "sweep.parallel=2", "device=cuda", "sweep.srun='--gpus=1 --time=2:00:00'")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="there is no srun here"):
        sweep(*given)
    Path("srun").write_text(f"#!{sys.executable}\nimport os, sys\n"
                            "open('srun.txt', 'a').write(' '.join(sys.argv[1:4]) + '\\n')\n"
                            "os.execv(sys.argv[4], sys.argv[4:])\n")  # fmt: skip
    Path("srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(Path.cwd()))
    assert sweep(*given) == 0
    assert Path("srun.txt").read_text() == 2 * "--ntasks=1 --gpus=1 --time=2:00:00\n"
    assert sorted(job["seed"] for job in started()) == [1, 2]


def test_a_card_takes_one_job_at_a_time(sweep: Sweep) -> None:
    assert sweep("run.seed=107", "optimizer.lr=0.1,0.2", "device=cuda", "sweep.parallel=4") == 0
    first, second = (entry["time"] for entry in started())
    assert second - first >= 0.3


def test_nothing_is_left_behind_where_no_job_can_run(sweep: Sweep) -> None:
    for overrides, problem in (
        (["train.steps=x,y"], r"\[train.steps=x\] train.steps='x': must be an integer"),
        (["train.stpes=1,2"], "train.stpes"),
        (["model=nano-gpt,gpt3"], "model=gpt3"),
        (["optimizer.lr=interval(0,1)"], "an interval has no list of values"),
        (["run.dir=same", "run.seed=1,2"], "run.dir=same: two jobs"),
        (["optimizer.lr=0.1,0.2", "sweep.prune=asha"], "sweep.prune=asha: ends jobs of a search"),
        (["run.seed=1,2", "sweep.objective=best_vall_loss"], "best_vall_loss.*Did you mean 'best_val_loss'"),
        ([*PRUNED[1:], "optimizer.lr=interval(0.1,1)", "sweep.prune=asha", "train.eval_every=null"], "at most 50"),
    ):
        with pytest.raises(ConfigError, match=problem):
            sweep(*overrides)
    assert list(Path().iterdir()) == []


def test_run_dir_by_job_number(sweep: Sweep) -> None:
    assert sweep("run.seed=1,2", "run.dir=out_${hydra:job.num}") == 0
    overrides = [override for entry in started() for override in entry["overrides"]]
    assert [each for each in overrides if each.startswith("run.dir")] == ["run.dir=out_0", "run.dir=out_1"]
    assert statuses(only_sweep())["001"]["objective"] == 3.0


def test_ten_sweeps_in_one_second_get_ten_folders(sweep: Sweep) -> None:
    with ThreadPoolExecutor(10) as pool:
        folders = list(pool.map(lambda number: SweepFolder.open(None, f"sweep {number}", []), range(10)))
    assert len({folder.path for folder in folders}) == 10
    for folder in folders:
        folder.close()


def test_a_folder_that_is_held_or_cannot_be_written(sweep: Sweep) -> None:
    held = SweepFolder.open("mine", "x", [])
    Path("file").touch()
    for folder, problem in (("mine", "another process runs this sweep"), ("file/sweep", r"can't write file/sweep")):
        with pytest.raises(UserError, match=rf"{problem}.*sweep\.dir"):
            sweep("run.seed=1,2", f"sweep.dir={folder}")
    held.close()


def test_a_search_learns_from_its_jobs_and_is_continued(sweep: Sweep) -> None:
    overrides = ("optimizer.lr=tag(log,interval(0.001,1))", "run.seed=choice(1,101)", "sweep.search=tpe")
    assert sweep(*overrides, "sweep.trials=6") == 1
    path = only_sweep()
    entries = started()
    assert len(entries) == 6
    tried = [
        next(override for override in entry["overrides"] if override.startswith("optimizer.lr=")) for entry in entries
    ]
    assert len(set(tried)) == 6 and all(0.001 <= float(override.partition("=")[2]) <= 1 for override in tried)
    failed = sum(entry["seed"] == 101 for entry in entries)
    assert failed
    Path("fixed").touch()
    Path("started.jsonl").unlink()
    assert sweep(*overrides, "sweep.trials=8") == 0
    assert only_sweep() == path and len(started()) == failed + 2
    assert [row["state"] for row in table(path)] == ["finished"] * 8
    assert (path / "optimizer.lr.svg").exists()
    with pytest.raises(UserError, match="holds another search"):
        sweep("optimizer.lr=interval(0.001,1)", "sweep.search=tpe", f"sweep.dir={path}")


def test_a_small_space_is_searched_once(sweep: Sweep) -> None:
    overrides = ("engine=dynamic,static", "sweep.search=random", "sweep.trials=5")
    assert sweep(*overrides) == 0  # two values only: proposals that are known are not run again
    assert len(started()) == 2


PRUNED = ("optimizer.lr=interval(0.1,1)", "train.steps=100", "train.eval_every=10", "sweep.search=random")


def test_a_pruned_search_takes_half_the_steps_and_finds_the_same(sweep: Sweep, charts: None, capfd: Any) -> None:
    """Draws are equal with and without pruning. The best job is the best of all, and pruned jobs are worse."""
    overrides = (*PRUNED, "run.seed=110", "sweep.trials=6")
    Path("fast").touch()
    assert sweep(*overrides, "sweep.dir=whole") == 0
    Path("fast").unlink()
    assert sweep(*overrides, "sweep.dir=pruned", "sweep.prune=asha") == 0
    told = [line for line in capfd.readouterr().err.splitlines() if "best: job" in line]
    assert len(told) == 2 and told[0] == told[1] and " optimizer.lr=0." in told[0]
    done = {
        name: [len(path.read_text().splitlines()) for path in Path(name).glob("*/metrics.jsonl")]
        for name in ("whole", "pruned")
    }
    assert len(done["pruned"]) == 6 and done["whole"] == [10] * 6 and sum(done["pruned"]) <= 30
    rows = table(Path("pruned"))
    finished = [float(row["optimizer.lr"]) for row in rows if row["state"] == "finished"]
    pruned = [float(row["optimizer.lr"]) for row in rows if row["state"] == "pruned"]
    assert finished and pruned and len(finished) + len(pruned) == 6 and min(finished) < min(pruned)
    noted = [event for path in Path("pruned").glob("*/events.jsonl") for event in read_events(path.parent)]
    assert [event["kind"] for event in noted] == ["pruned"] * len(pruned)
    drawn = Path("pruned/evaluations.svg").read_text()
    assert all(f": {color}" in drawn for color in COLORS[:6])
    Path("started.jsonl").unlink()
    assert sweep(*overrides, "sweep.dir=pruned", "sweep.prune=hyperband") == 0
    assert not started(), "a search that is done is not run again"


def test_a_killed_search_goes_on_where_it_was(sweep: Sweep) -> None:
    """Jobs that finished or were pruned are not repeated; the job that ran goes on."""
    overrides = [*PRUNED, "run.seed=111", "sweep.trials=5", "sweep.prune=median", "sweep.dir=mine"]
    program = f"""
from ttrain.config.compose import Composer
from ttrain.sweep import run
run.PROGRAM, run._POLL_SECONDS, run.forkable = {run.PROGRAM!r}, 0.005, lambda job: False
with Composer() as composer: run.run_sweep(composer, {overrides!r})
"""
    killed = forked.run("-c", program, cwd=Path.cwd())
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert statuses(Path("mine"))["002"]["state"] == "running" and len(started()) == 3
    before = {number: status["state"] for number, status in statuses(Path("mine")).items()}
    with open("mine/search.journal", "a") as journal:  # as if the kill had come amid a write
        journal.write('{"op_code":')
    Path("mine/search.journal.lock").symlink_to("search.journal")
    Path("fixed").touch()
    assert sweep(*overrides) == 0
    again = [next(word for word in entry["overrides"] if word.startswith("run.dir=")) for entry in started()][3:]
    assert len(again) == 3 and "002" in again[0], "the one that ran, and two that are new"
    assert "resume=auto" in started()[3]["overrides"] and "resume=auto" not in started()[4]["overrides"]
    after = statuses(Path("mine"))
    assert len(after) == 5 and {status["state"] for status in after.values()} <= {"finished", "pruned"}
    assert all(after[number]["state"] == state for number, state in before.items() if number != "002")
    assert after["000"]["attempts"] == 1 and after["002"]["attempts"] == 2
    backend = optuna.storages.journal.JournalFileBackend("mine/search.journal")
    study = optuna.load_study(study_name="ttrain", storage=optuna.storages.JournalStorage(backend))
    told = [trial.state.name for trial in study.trials]
    assert len(told) == 6 and told.count("FAIL") == 1 and told[2] == "FAIL", "that of the job that was killed"
    assert set(told) <= {"COMPLETE", "PRUNED", "FAIL"}


def test_a_search_without_its_journal_is_refused(sweep: Sweep) -> None:
    overrides = ("engine=dynamic,static", "sweep.search=random", "sweep.trials=2", "sweep.dir=mine")
    assert sweep(*overrides) == 0
    journal = Path("mine/search.journal")
    journal.write_text(f"no JSON\n{journal.read_text()}")
    with pytest.raises(UserError, match=r"search\.journal is damaged"):
        sweep(*overrides)
    journal.unlink()  # also where all its jobs are done
    with pytest.raises(UserError, match=r"search\.journal has nothing of job 000"):
        sweep(*overrides)


def test_benchmarks_are_listed_by_their_contenders_and_one_that_failed_starts_again(sweep: Sweep, capfd: Any) -> None:
    """Beside what it left."""
    overrides = ("task=bench", "bench=mlp", "run.seed=1,3,109,4")
    assert sweep(*overrides) == 1
    path = only_sweep()
    rows = table(path)
    assert [(row["eager_ms"], row["static_ms"], row["times_as_fast"], row["objective"]) for row in rows[:2]] == [
        ("6.0", "2.0", "3.0", "3.0"), ("6.0", "", "1.5", "1.5"),
    ]  # fmt: skip
    assert rows[1]["bf16 static_ms"] == "4.0"
    assert "compile_ms" not in rows[0] and "times_as_fast 3" in capfd.readouterr().err
    Path("fixed").touch()
    assert sweep(*overrides) == 0
    assert sorted(entry.name for entry in path.glob("*/bench_*")) == [*["bench_1"] * 4, "bench_2"]
    rows = table(path)
    assert rows[2]["static_ms"] == "110.0" and (rows[3]["state"], rows[3]["objective"]) == ("finished", "")


def test_plans_are_listed_by_what_they_need_and_an_unknown_objective_ends_the_sweep(sweep: Sweep, capfd: Any) -> None:
    """After the first job, where the names are not known before it."""
    assert sweep("task=plan", "run.seed=1,2", "sweep.objective=step_m", "sweep.dir=ended") == 2
    assert [row["state"] for row in table(Path("ended"))] == ["failed", "missing"]
    assert "sweep.objective=step_m: task=plan has no such number. Did you mean 'step_ms'?" in capfd.readouterr().err
    assert sweep("task=plan", "optimizer.lr=0.1,0.2", "run.seed=1", "sweep.dir=mine") == 0
    assert [(row["parameters"], row["memory_bytes"], row["objective"]) for row in table(Path("mine"))] == [
        ("7", "2048", "2.2"), ("7", "2048", "2.4"),
    ]  # fmt: skip
    assert Path("mine/000_lr=0.1/plan.json").exists() and Path("mine/optimizer.lr.svg").exists()
    printed = capfd.readouterr()
    assert "2.0 KiB" in printed.out and "step_ms 2.2" in printed.err and "train/loss" not in printed.out


def test_a_config_file_may_name_the_axes(sweep: Sweep, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = "defaults: [config, _self_]\nhydra: {mode: MULTIRUN, sweeper: {params: {run.seed: '3,4'}}}\n"
    (tmp_path / "mine.yaml").write_text(text, "utf-8")
    with Composer("mine", tmp_path) as composer:
        assert run.run_sweep(composer, ["train.steps=2"]) == 0
    files = ["--config-dir", str(tmp_path), "--config-name", "mine"]
    assert [(entry["overrides"][:4], entry["seed"]) for entry in started()] == [(files, 3), (files, 4)]
    best = best_command(capfd)
    assert best == f"python -m ttrain {' '.join(files)} hydra.mode=RUN train.steps=2 run.seed=3"


def best_command(capfd: pytest.CaptureFixture[str]) -> str:
    (told,) = (line for line in capfd.readouterr().err.splitlines() if "best: job" in line)
    return told.rpartition(": ")[2]


@pytest.mark.parametrize("search", [[], ["sweep.search=random", "sweep.trials=2"]])
def test_another_config_is_another_sweep_and_the_best_job_keeps_it(
    sweep: Sweep, capfd: pytest.CaptureFixture[str], search: list[str]
) -> None:
    for steps in (3, 4):
        Path(f"steps_{steps}.yaml").write_text(f"defaults: [config, _self_]\ntrain: {{steps: {steps}}}\n", "utf-8")
        lr = "interval(0.1,0.2)" if search else "0.1,0.2"
        assert sweep(f"optimizer.lr={lr}", "run.seed=1", *search, name=f"steps_{steps}") == 0
        best = best_command(capfd)
        assert f"--config-name steps_{steps} " in best and composed(best).train.steps == steps
    assert len(list(Path("outputs/sweeps").glob("*/*"))) == 2 and len(started()) == 4


QUICK = (
    "model=mlp", "data=regression", "data.examples=64", "device=cpu", "device.threads=1", "engine=static",
    "train.peak_tflops=1",
)  # fmt: skip


def test_jobs_of_ttrain_itself(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forks: one that trains as a process of its own does, to the bit, and one that ends in NaN."""
    monkeypatch.setenv("PYTHONPATH", str(Path(run.__file__).parents[2]))
    overrides = [
        *QUICK, "train.steps=4", "train.log_every=1", "optimizer.lr=0.01,1e38", "optimizer.clip_norm=null",
        "schedule=constant", "sweep.parallel=2",
    ]  # fmt: skip
    assert main(["-m", *overrides]) == 1
    path = only_sweep()
    rows = table(path)
    assert (path / "000_lr=0.01" / "loss.png").exists()
    assert [row["state"] for row in rows] == ["finished", "failed"] and rows[0]["step"] == "4"
    assert float(rows[0]["best_val_loss"]) == float(rows[0]["objective"])
    assert "NaN or Inf" in rows[1]["reason"] or "is nan" in rows[1]["reason"] or "is inf" in rows[1]["reason"]
    assert read_run(path / "000_lr=0.01").state == "finished" and read_run(next(path.glob("001_*"))).state == "failed"
    alone = [*(each for each in overrides if "," not in each), "optimizer.lr=0.01", "run.dir=alone"]
    subprocess.run([*run.PROGRAM, *alone], check=True, capture_output=True)
    folders = (Path("alone"), path / "000_lr=0.01")
    losses = [[line.get("train/loss") for line in read_metrics(each / "metrics.jsonl")] for each in folders]
    assert losses[0] == losses[1] and len(losses[0]) >= 4


def test_forks_are_as_good_as_processes_of_their_own(
    inside: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Output, exit codes, signals, session and environment of jobs are right; they end if the server is killed."""
    monkeypatch.setenv("PYTHONPATH", str(Path(run.__file__).parents[2]))
    server = forks.ForkServer({"OF_JOBS": "7"})

    def started(name: str, *arguments: str) -> forks.Fork:
        job = server.start(arguments, Path(name))
        assert job is not None
        return job

    def code_of(job: forks.Fork) -> int:
        while (code := job.poll()) is None:
            time.sleep(0.01)
        return code

    def first_step(log: str) -> None:
        while "First step" not in Path(log).read_text():
            time.sleep(0.01)

    Path("version").write_text("before\n")
    assert code_of(started("version", "--version")) == 0 and Path("version").read_text().startswith("before\nttrain 0.")
    assert code_of(started("wrong", "train.stepss=1")) == 2 and "train.stepss" in Path("wrong").read_text()
    jobs = {
        end: started(end, *QUICK, "train.steps=1000000", f"run.dir=run_{end}")
        for end in ("interrupt", "kill", "server")
    }
    for end, job in jobs.items():
        first_step(end)
        assert os.getsid(job.pid) == job.pid and job.poll() is None
    assert b"\0OF_JOBS=7" in Path(f"/proc/{job.pid}/environ").read_bytes()
    jobs["interrupt"].send(signal.SIGINT)
    jobs["kill"].kill()
    assert code_of(jobs["interrupt"]) == 130 and "the state is saved" in Path("interrupt").read_text()
    assert code_of(jobs["kill"]) == -signal.SIGKILL
    os.kill(int(Path(f"/proc/{job.pid}/stat").read_text().split()[3]), signal.SIGKILL)  # its parent
    assert code_of(job) == -signal.SIGKILL and server.start(["--version"], Path("late")) is None
    assert "ended (killed by SIGKILL" in capfd.readouterr().err
    while "the state is saved" not in Path("server").read_text():
        time.sleep(0.01)
    server.close()


def test_a_fork_is_killed_without_a_word_to_the_server_before_it_leads_a_session() -> None:
    """A signal may come amid a question, and the answer to that is not to be read by the handler."""
    process = subprocess.Popen(["sleep", "60"])
    forks.Fork(process.pid, forks.ForkServer({})).kill()
    assert process.wait(10) == -signal.SIGKILL


def test_a_job_is_not_started_where_a_signal_came_while_the_server_imported(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "forkable", lambda job: True)
    monkeypatch.setattr(forks.ForkServer, "open", lambda self: os.kill(os.getpid(), signal.SIGINT))
    assert sweep("run.seed=1,2") == 130
    assert not started() and statuses(only_sweep()) == {}
