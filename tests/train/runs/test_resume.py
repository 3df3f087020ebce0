"""The place from which a run continues, refusals, and run directories: one process each, and all survives a move."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import ttrain
from tests.conftest import Told
from tests.train.reading import attempts, losses, tensors, write_documents
from ttrain.cli import main
from ttrain.config import build
from ttrain.config.compose import load
from ttrain.config.schema import to_dict
from ttrain.core.errors import CheckpointError, ConfigError, UserError
from ttrain.models.settings import AGILLMConfig, GPTConfig
from ttrain.tasks.report import _best
from ttrain.train.checkpoint.checkpoint import held_out_hash
from ttrain.train.checkpoint.retention import best_checkpoint, find_checkpoint, list_checkpoints
from ttrain.train.logging.metrics import read_events
from ttrain.train.runs.record import environment_record, git_state
from ttrain.train.runs.resume import check_architecture, config_difference, find_resume_point
from ttrain.train.runs.run_directory import RunDirectory, read_config, read_run


@pytest.fixture
def run(make_training: Any, tmp_path: Path) -> Path:
    make_training(keep_last=9).run().close()
    return tmp_path / "run"


def test_none_and_a_first_auto_start_anew(tmp_path: Path, make_training: Any) -> None:
    assert find_resume_point("none", None) is None
    assert find_resume_point("auto", str(tmp_path / "new")) is None
    (tmp_path / "empty").mkdir()
    assert find_resume_point("auto", str(tmp_path / "empty")) is None
    make_training("killed early").close()
    assert find_resume_point("auto", str(tmp_path / "killed early")) is None


@pytest.mark.parametrize("name", ["runs", "rn", "Run", "urn", "ran", "r_un"])
def test_a_new_run_that_nearly_has_the_name_of_another_is_taken_for_a_slip(run: Path, name: str) -> None:
    given = run.with_name(name)
    with pytest.raises(CheckpointError, match=f"there is no run {given}, but {run} is one. Give run.dir={run}"):
        find_resume_point("auto", str(given))
    given.mkdir()
    assert find_resume_point("auto", str(given)) is None


def test_names_that_differ_in_more_than_a_letter_are_meant(run: Path) -> None:
    for name in ("run2", "run_b", "nur", "other", "x/run"):
        assert find_resume_point("auto", str(run.parent / name)) is None
    run.rename(run.parent / "run1")
    assert find_resume_point("auto", str(run.parent / "run2")) is None


def test_a_run_and_a_checkpoint_by_path(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoints" / "step_00000004", tmp_path / "alone")
    for resume, step, owner in (
        ("auto", 12, run), (run, 12, run), (run / "checkpoints/step_00000004", 4, run), (tmp_path / "alone", 4, None)
    ):  # fmt: skip
        point = find_resume_point(str(resume), str(run))
        assert point is not None and (point.checkpoint.step, point.run, point.notes) == (step, owner, [])


def test_damaged_ones_are_skipped_and_named(run: Path) -> None:
    """If all are damaged, there is no fresh start."""
    first, second, third = sorted((run / "checkpoints").iterdir())
    (third / "manifest.json").unlink()
    (second / "config.json").write_text("{}")
    for resume in ("auto", str(run)):
        point = find_resume_point(resume, str(run))
        assert point is not None and point.checkpoint.step == 4 and len(point.notes) == 2
        assert third.name in point.notes[0] and "no manifest" in point.notes[0]
        assert second.name in point.notes[1] and "truncated" in point.notes[1]
    with pytest.raises(CheckpointError, match="truncated") as raised:
        find_resume_point(str(second), None)
    assert raised.value.exit_code == 2
    (first / "manifest.json").unlink()
    for resume in ("auto", str(run)):
        with pytest.raises(
            CheckpointError, match=rf"no checkpoint that can be resumed[\s\S]*{third.name}[\s\S]*{first.name}"
        ):
            find_resume_point(resume, str(run))


@pytest.mark.parametrize("resume", ["folder", "folder/file", "nowhere", "checkpoints/step_00000001"])
def test_what_is_neither_run_nor_checkpoint(tmp_path: Path, resume: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("x")
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    with pytest.raises(CheckpointError):
        find_resume_point(str(tmp_path / resume), None)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="no checkpoint that can be resumed"):
        find_resume_point(str(tmp_path / "run"), None)
    with pytest.raises(CheckpointError, match="not a run"):
        find_resume_point("auto", str(tmp_path))


def test_keys_are_those_of_the_options_that_the_run_has(tmp_path: Path) -> None:
    given = ["data=documents", "data.sources=[book.txt]", "optimizer=muon", "optimizer.momentum=0.8"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(to_dict(load(given))))
    keys = [f"run.dir={tmp_path / 'run'}", "resume=auto", "data.shuffle_buffer=50", "optimizer.iterations=3"]
    again = load(keys)
    assert (again.data.name, again.data.shuffle_buffer, again.data.sources) == ("documents", 50, ["book.txt"])
    assert (again.optimizer.name, again.optimizer.momentum, again.optimizer.iterations) == ("muon", 0.8, 3)
    with pytest.raises(ConfigError, match=r"data.shuffle_buffer: unknown key"):
        load([*keys[:3], "data=text"])


def test_a_key_of_an_objective_leaves_the_rows_as_they_are(tmp_path: Path) -> None:
    given = ["objective=dpo", "data=documents", "data.sources=[rows.jsonl]"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_dict(load(given))))
    again = load([f"run.dir={tmp_path}", "resume=auto", "objective.beta=0.5"])
    assert (again.objective.name, again.objective.beta, again.data.sources) == ("dpo", 0.5, ["rows.jsonl"])


MODEL = {"name": "gpt", "layers": 4, "heads": 4, "dropout": 0.0, "recompute": "none"}


def test_another_architecture_names_the_keys() -> None:
    path = Path("step_00000001")
    check_architecture({"model": MODEL}, GPTConfig(layers=4, heads=4, dropout=0.2, recompute="block"), path)
    sized = GPTConfig(preset="124M")
    check_architecture({"model": asdict(sized)}, replace(sized, preset=None), path)
    padded = {"name": "agillm", "pad_vocabulary": 1}
    check_architecture({"model": padded}, AGILLMConfig(pad_vocabulary=32), path)
    with pytest.raises(CheckpointError) as raised:
        check_architecture({"model": MODEL}, GPTConfig(layers=6, width=8, heads=4), path)
    message = str(raised.value)
    assert "model.layers: 4 where the weights come from, 6 given" in message
    assert "model.width: None where the weights come from, 8 given" in message and "heads" not in message
    with pytest.raises(CheckpointError, match="model.sat_target: 'future_window' where .* 'legacy' given"):
        check_architecture({"model": padded}, AGILLMConfig(sat_target="legacy"), path)


def test_changes_are_listed() -> None:
    optimizer = {"lr": 1e-3, "betas": [0.9, 0.95]}
    old = {"optimizer": optimizer, "train": {"steps": 10}, "run": {"dir": None, "seed": 1}, "resume": "none"}
    new = {**old, "optimizer": {**optimizer, "lr": 3e-4, "eps": 1e-8}, "train": {"steps": 20}, "resume": "auto"}
    new["run"] = {"dir": "x", "seed": 1}
    expected = ["optimizer.lr: 0.001 -> 0.0003", "optimizer.eps: None -> 1e-08", "train.steps: 10 -> 20"]
    assert config_difference(old, new) == expected
    assert config_difference(old, old) == []


def test_checkpoints_to_sample_from(run: Path) -> None:
    assert find_checkpoint(run, "last").step == 12
    assert find_checkpoint(run, "8").step == 8
    found = {step: find_checkpoint(run, str(step)).val_loss or 0 for step in (4, 8, 12)}
    assert find_checkpoint(run, "best").step == min(found, key=lambda step: found[step])
    with pytest.raises(CheckpointError, match="no checkpoint of step 5. It has: 4, 8, 12"):
        find_checkpoint(run, "5")
    with pytest.raises(CheckpointError, match="not a run"):
        find_checkpoint(run / "checkpoints", "last")


SMALL = [
    "model.layers=1", "model.width=16", "model.heads=1", "model.context=8", "train.batch_size=4", "train.eval_every=4",
    "train.save_every=4", "train.log_every=1", "logger=jsonl", "device=cpu", "device.threads=1", "sample.tokens=2",
    "data=text", "train.peak_tflops=1", "optimizer.lr=0.01", "schedule=constant",
]  # fmt: skip


@pytest.fixture
def texts(inside: Path) -> None:
    """Return two texts of the same characters: one easy to predict, one random."""
    Path("easy.txt").write_text("ab" * 2000)
    Path("hard.txt").write_text("".join(np.random.default_rng(0).choice(["a", "b"], 4000)))


def hash_of(samples: int = 20, *overrides: str) -> str:
    config = load([*SMALL, *overrides])
    return held_out_hash(build.build_dataset(config), samples)


def test_the_hash_is_of_what_is_read(texts: None) -> None:
    easy = hash_of(20, "data.path=hard.txt")
    assert easy == hash_of(20, "data.path=hard.txt", "train.batch_size=8", "run.seed=3")
    Path("hard.txt").rename("moved.txt")
    assert easy == hash_of(20, "data.path=moved.txt")
    others = [hash_of(20, "data.path=easy.txt"), hash_of(19, "data.path=moved.txt")]
    for other in ("model.context=7", "data.held_out=0.2", "data.tokenizer=byte"):
        others.append(hash_of(20, "data.path=moved.txt", other))
    assert len({easy, *others}) == 6


def val_losses(run: str) -> dict[int, float]:
    return {step: loss for step, key, loss in losses(run) if key == "val/loss"}


def test_other_text_starts_best_anew(texts: None, told: Told) -> None:
    """The first text's losses are all lower than any of the second's."""
    assert main([*SMALL, "data.path=easy.txt", "run.dir=run", "train.steps=20"]) == 0
    reached, overrides = val_losses("run")[20], ["run.dir=run", "resume=auto"]
    said = told(*overrides, "data.path=hard.txt", "train.steps=28", "optimizer.lr=0.003")
    assert said.count("The held-out data is not what it was") == 1
    after = {step: loss for step, loss in val_losses("run").items() if step >= 20}
    summary = json.loads(Path("run/summary.json").read_text())
    best = min((loss, step) for step, loss in after.items())
    assert reached < best[0] and (summary["best_val_loss"], summary["best_step"]) == best
    assert find_checkpoint(Path("run"), "best").step == best[1]
    assert _best(read_run(Path("run"))) == f"{best[0]:.4f} at step {best[1]}"
    assert "held-out data is not" not in told(*overrides, "train.steps=32")


def attempt(make_training: Any, held_out: str, values: list[float], **settings: Any) -> Any:
    settings |= {"eval_every": 2, "save_every": 2, "keep_last": 1, "async_save": False}
    training = make_training(held_out=held_out, losses=values, **settings).run()
    training.close()
    return training


def test_patience_best_and_what_is_kept(make_training: Any) -> None:
    """Steps 2 to 6 on one text, from 6 on another: the checkpoint of step 6 is measured again, on the new one."""
    first = attempt(make_training, "one", [1.0, 2.0, 3.0], steps=6, early_stop=3)
    folder = first.run_directory.checkpoints
    assert (first.loop.context.progress.best_step, first.loop.context.progress.stale_evaluations) == (2, 2)
    second = attempt(make_training, "two", [9.0, 7.0, 8.0], steps=10, early_stop=3, resume=True)
    progress = second.loop.context.progress
    assert (progress.step, progress.best_step, progress.best_val_loss, progress.stale_evaluations) == (10, 8, 7.0, 1)
    best = best_checkpoint(list_checkpoints(folder)[0])
    assert best is not None and (best.step, best.val_loss) == (8, 7.0)
    assert [event["step"] for event in read_events(second.run_directory.path) if event["kind"] == "held_out"] == [6]


# runs on documents

DATA = ["data=documents", "data.sources=[a.jsonl,b.jsonl]", "data.tokenizer=byte"]
QUIET = [
    "logger=jsonl", "device=cpu", "device.threads=1", "sample.tokens=1", "train.log_every=1", "train.peak_tflops=1",
    "train.eval_every=null", "train.eval_sequences=2",
]  # fmt: skip
TINY = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "train.batch_size=2"]


@pytest.fixture
def documents(inside: Path) -> None:
    write_documents(a=100, b=100)


def test_agillm_resumed_within_a_phase_has_the_same_bits(documents: None) -> None:
    """Joint objective with dropout, growing sequences; what was trained after the checkpoint is trained again."""
    sizes = ["model.width=32", "model.heads=2", "model.rank=24", "model.layers=2", "model.context=24"]
    overrides = ["model=agillm", "model.preset=null", *sizes, "train.batch_size=1", *DATA, *QUIET, "schedule.steps=4"]
    overrides += ["train.length_schedule=[12,24]", "train.phase_steps=2", "train.save_every=1", "train.keep_last=9"]
    assert main([*overrides, "train.steps=4", "run.dir=whole"]) == 0
    assert main([*overrides, "train.steps=3", "run.dir=parts"]) == 0
    assert main(["resume=parts/checkpoints/step_00000001", "train.steps=4"]) == 0
    second = attempts("parts")[1]
    assert second["resumed_from"] == "step_00000001"
    assert not [change for change in second["changes"] if change.startswith("data")]
    trained = [[each for each in losses(run) if each[1] == "train/loss"] for run in ("parts", "whole")]
    ours, expected = tensors("parts"), tensors("whole")
    assert trained[0] == trained[1] and ours == expected and len(ours) == 3 * 35


def test_changed_documents_are_refused_and_other_ones_are_not(documents: None, told: Told, refused: Told) -> None:
    refused("data.template=robot: ", *DATA, *QUIET, *TINY, "data.template=robot", "run.dir=run")
    assert main([*DATA, *QUIET, *TINY, "run.dir=run", "train.steps=2"]) == 0
    with open("a.jsonl", "a") as file:
        file.write('{"text": "one more"}\n')
    before = sorted(path.name for path in Path("run").rglob("*"))
    error = refused("other content of a.jsonl, b.jsonl", "run.dir=run", "resume=auto", "train.steps=4")
    assert "train.init_from" in error
    assert sorted(path.name for path in Path("run").rglob("*")) == before
    other = [DATA[0], "data.sources=[a.jsonl]", DATA[2]]
    error = told("run.dir=run", "resume=auto", "train.steps=4", *other)
    assert "Changed since the checkpoint: data.sources: ['a.jsonl', 'b.jsonl'] -> ['a.jsonl'];" in error
    assert "; data: sha256: " in error


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_own_kernels_have_the_same_bits_on_any_number_of_threads(documents: None, told: Told) -> None:
    words = [*DATA, *QUIET, *TINY, "engine=traced", "device.matmul=own", "schedule.steps=4"]
    assert main([*words, "run.dir=one", "train.steps=4", "device.threads=1"]) == 0
    assert main([*words, "run.dir=two", "train.steps=2", "device.threads=1"]) == 0
    assert "kernels ran with" not in told("run.dir=two", "resume=auto", "train.steps=4", "device.threads=2")
    assert tensors("one") == tensors("two")


def test_touched_but_equal_documents_go_on_and_other_bits_are_told(documents: None, told: Told) -> None:
    assert main([*DATA, *QUIET, *TINY, "run.dir=run", "train.steps=2"]) == 0
    os.utime("a.jsonl", ns=(1, 1))
    more = ["run.dir=run", "resume=auto"]
    error = told(*more, "train.steps=4")
    assert "changed since the checkpoint: data" not in error.lower() and "thread" not in error
    error = told(*more, "train.steps=5", "device.threads=2")
    assert "kernels ran with 1 thread(s) before and run with 2 now" in error
    record = json.loads(Path("run", "run.json").read_text())
    products = record["attempts"][-1]["device"]["products"]
    assert set(products.values()) == {"aten"}
    products[next(iter(products))] = "onednn"
    Path("run", "run.json").write_text(json.dumps(record))
    error = told(*more, "train.steps=6", "device.threads=2")
    assert "products or attention go another way than before (1 onednn -> aten)" in error
    record["attempts"][-1] |= {"device": ["cpu"], "data": 5}  # a record that somebody has edited tells nothing
    Path("run", "run.json").write_text(json.dumps(record))
    assert "last bits" not in told(*more, "train.steps=7")


def test_a_plan_tells_the_phases_of_growing_sequences(documents: None, capsys: Any) -> None:
    grows = ["train.length_schedule=[8,16]", "train.phase_steps=5", "plan.time=false", "train.batch_schedule=[1,2]"]
    assert main(["task=plan", *DATA, *QUIET, *TINY, *grows, "train.gradient_accumulation=2"]) == 0
    printed = capsys.readouterr().out
    assert "phases of 5 steps with sequences x tokens of 1 x 8, 2 x 16; this is the plan of the largest" in printed


# run directories


class Noon(datetime):
    """A clock that stands."""

    @classmethod
    def now(cls, tz: Any = None) -> Noon:
        return cls(2026, 11, 28, 12, 0, 0)


def test_runs_in_the_same_second_get_a_directory_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ttrain.core.folders.datetime", Noon)

    def claim(_: int) -> RunDirectory:
        return RunDirectory.claim(None, "gpt_cpu_static")

    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(claim, range(40)))
    names = {"12-00-00_gpt_cpu_static", *(f"12-00-00_gpt_cpu_static_{number}" for number in range(2, 41))}
    assert {run.path for run in runs} == {Path("outputs", "2026-11-28", name) for name in names}
    for run in runs:
        run.close()


def test_a_named_directory_is_claimed_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "notes.txt").write_text("mine")  # a folder without a run is fine
    run = RunDirectory.claim(str(tmp_path / "a" / "b"), "x")
    with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        RunDirectory.claim(str(tmp_path / "a" / "b"), "x")
    with pytest.raises(UserError, match="in use"):
        RunDirectory.open(tmp_path / "a" / "b")
    (run.checkpoints / "step_00000002").mkdir()
    run.close()
    run.close()
    with pytest.raises(UserError, match="already holds a run.*resume=auto to continue it"):
        RunDirectory.claim(str(tmp_path / "a" / "b"), "x")
    RunDirectory.open(tmp_path / "a" / "b").close()
    assert (tmp_path / "a" / "b" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "left",
    [
        ("checkpoints/step_00000001/manifest.json", "{}"),
        ("checkpoints/abandoned_after_00000001/x", ""),
        ("metrics.jsonl", '{"step": 10, "train/loss": 2.5}\n'),
        ("summary.json", "{}"),
    ],
    ids=lambda left: left[0],
)
def test_a_run_with_something_to_lose_is_not_written_over(tmp_path: Path, left: tuple[str, str]) -> None:
    RunDirectory.claim(str(tmp_path / "a"), "x").close()
    path = tmp_path / "a" / left[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(left[1])
    with pytest.raises(UserError, match="already holds a run"):
        RunDirectory.claim(str(tmp_path / "a"), "x")
    assert path.read_text() == left[1]


def test_a_run_that_ended_before_it_did_anything_gives_its_place(tmp_path: Path) -> None:
    """After a NaN in the first steps, or a save that was cut off, nothing of worth is there."""
    run = RunDirectory.claim(str(tmp_path / "a"), "x")
    run.metrics.write_text('{"step": 2, "train/loss": null}\n{"step": 3, "tra')
    (run.checkpoints / ".unfinished_step_00000002").mkdir()
    run.config.write_text("x")
    run.close()
    again = RunDirectory.claim(str(tmp_path / "a"), "x")
    assert again.note is not None and "takes its place" in again.note and again.attempts() == []
    again.close()


@pytest.mark.parametrize("wanted", ["file/run", "file", None])
def test_a_place_that_can_not_be_written_is_a_user_error(
    tmp_path: Path, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one by a simulated refusal, because the superuser may write everywhere."""
    monkeypatch.chdir(tmp_path)
    for name in ("file", "outputs"):
        Path(name).write_text("in the way")
    with pytest.raises(UserError, match="can't be written.*run.dir="):
        RunDirectory.claim(None if wanted is None else str(tmp_path / wanted), "x")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match="Permission denied"):
        RunDirectory.claim(str(tmp_path / "run"), "x")


def test_config_and_attempts_go_with_a_moved_run(tmp_path: Path) -> None:
    config = {"model": {"name": "gpt", "layers": None}, "eps": 1e-8, "s": "1e-3"}
    config["texts"] = ["é\n: [x", "a\x85b", "a\u2028b", "a\rb\x0cc", "\ufeffa"]
    run = RunDirectory.claim(str(tmp_path / "before"), "x")
    run.record(config, {"attempt": 1})
    run.record(config, {"attempt": 2})
    followed = RunDirectory(run.path)  # by another rank, which writes nothing
    followed.record({}, {"attempt": 3})
    followed.write(followed.plan, "its own")
    assert run.attempts() == [{"attempt": 1}, {"attempt": 2}]
    assert read_config(run.path) == config and not run.plan.exists()
    run.write(run.plan, "plan")
    run.write(run.summary, {"step": 1})
    run.close()
    os.rename(tmp_path / "before", tmp_path / "after")
    files = [path for path in (tmp_path / "after").rglob("*") if path.is_file()]
    assert len(files) == 5
    assert all(str(tmp_path) not in path.read_text() for path in files)
    moved = RunDirectory.open(tmp_path / "after")
    assert moved.attempts() == [{"attempt": 1}, {"attempt": 2}] and moved.path == tmp_path / "after"
    moved.close()


def test_environment_record_is_json_and_complete() -> None:
    record = environment_record({"a": 1}, {"name": "cpu"}, {"source": "x"}, "abc", "python -m ttrain model=gpt2")
    assert json.loads(json.dumps(record)) == record
    assert record["command"] == "python -m ttrain model=gpt2"
    assert record["versions"]["ttrain"] == ttrain.__version__ and "numpy" in record["versions"]
    assert record["config_hash"] == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"
    other = environment_record({"a": 2}, {"name": "cpu"}, {"source": "x"}, "abc", "")
    assert other["config_hash"] != record["config_hash"]


def test_git_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    assert git_state(tmp_path) is None  # no commit yet
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-q", "-m", "first")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "changed": False}
    (tmp_path / "a").write_text("2")
    state = git_state(tmp_path)
    assert state is not None and state["changed"] is True
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) is None
