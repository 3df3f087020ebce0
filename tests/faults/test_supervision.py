"""Supervision: what is restarted, from where, how often; what is not; one real run with every kind of fault."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import losses
from tests.forked import ForkedChild
from tests.train.conftest import ArrayState
from tests.train.reading import tensors
from ttrain.config.compose import load
from ttrain.core.errors import ConfigError
from ttrain.tasks.training import supervised
from ttrain.train.checkpoint.save import CheckpointContent, save_checkpoint
from ttrain.train.logging.metrics import read_events
from ttrain.train.settings import SuperviseConfig
from ttrain.train.supervise import supervisor as module
from ttrain.train.supervise.child import VARIABLE
from ttrain.train.supervise.supervisor import Supervisor, continuing

REPO = Path(__file__).parents[2]

# Stands for `python -m ttrain` and starts in a moment: does the next of the words given, then exits.
STAND_IN = """
import json, os, pathlib, signal, sys, time
run, plan = pathlib.Path(sys.argv[1]), sys.argv[2].split(",")
beat = pathlib.Path(os.environ["TTRAIN_HEARTBEAT"])
starts = run / "starts.txt"
number = len(starts.read_text().splitlines()) if starts.exists() else 0
kind, _, argument = plan[min(number, len(plan) - 1)].partition("@")
with open(starts, "a") as file: file.write(f"{time.time()} {' '.join(sys.argv[3:])}\\n")
told = {} if kind == "early" else {"run": str(run)}
if kind == "nan": told |= {"error": "NonFiniteError", "message": "Step is nan", "step": int(argument)}
beat.write_text(json.dumps(told))
if kind == "save": (run / "checkpoints" / f"step_{int(argument):08d}").symlink_to(run / f"made_{argument}")
if kind == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
if kind == "kill": os.kill(os.getpid(), signal.SIGKILL)
if kind == "stop":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
sys.exit({"done": 0, "user": 2, "busy": 75}.get(kind, 1))
"""


class Run:
    """A supervisor over the stub; `run("kill", "done")` -> exit code."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, []  # type: ignore[var-annotated]
        (folder / "checkpoints").mkdir(parents=True)
        self.script = folder / "stub.py"
        self.script.write_text(STAND_IN)

    def __call__(self, *plan: str, **settings: Any) -> int:
        config = SuperviseConfig(**{"backoff": 0.0, "hang_timeout": 30.0, **settings})

        def command(run: Path | None) -> list[str]:
            overrides = continuing(["a=1", "resume=none"], run)
            return [sys.executable, "-S", "-E", str(self.script), str(self.folder), ",".join(plan), *overrides]

        return Supervisor(config, command, self.said.append).run()

    @property
    def starts(self) -> list[str]:
        return [line.partition(" ")[2] for line in (self.folder / "starts.txt").read_text().splitlines()]

    @property
    def kinds(self) -> list[str]:
        return [event["kind"] for event in read_events(self.folder)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(module, "_DUMP_SECONDS", 0.2)
    made = Run(tmp_path / "run")
    for step in (10, 20):
        save_checkpoint(made.folder, ArrayState({}), CheckpointContent(step, {}))
        (made.folder / f"step_{step:08d}").rename(made.folder / f"made_{step}")
    return made


def test_a_kill_is_followed_by_a_restart_that_resumes(run: Run) -> None:
    assert run("kill", "crash", "done") == 0
    again = f"a=1 run.dir={run.folder} resume=auto"
    assert run.starts == ["a=1 resume=none", again, again]
    assert run.kinds == ["restart", "restart"]
    assert "Restart 1 from the beginning in 0 ms, after killed by SIGKILL" in run.said[0]
    assert "after exit code 1." in run.said[1]


def test_before_a_run_has_a_directory_the_same_words_start_again(run: Run) -> None:
    assert run("early", "done") == 0
    assert run.starts == ["a=1 resume=none"] * 2


@pytest.mark.parametrize(("kind", "code"), [("done", 0), ("user", 2)])
def test_what_ends_at_once(run: Run, kind: str, code: int) -> None:
    assert run(kind) == code
    assert len(run.starts) == 1 and run.kinds == []


def test_repeated_failures_without_progress_end_with_a_reason(run: Run) -> None:
    assert run("crash", max_restarts=2) == 1
    assert len(run.starts) == 3 and run.kinds == ["restart", "restart", "gave_up"]
    assert "gives up: 3 failures in a row without a new checkpoint. The last failure: exit code 1" in run.said[-1]


def test_a_new_checkpoint_counts_as_progress(run: Run) -> None:
    assert run("crash", "save@10", "crash", "save@20", "crash", "done", max_restarts=1) == 1
    assert len(run.starts) == 3  # the one after step 10 was the last that it had
    (run.folder / "starts.txt").unlink()
    assert run("save@10", "crash", "save@20", "crash", "done", max_restarts=2) == 0
    assert "from step 20" in run.said[-1]


def test_nan_at_the_same_step_twice_ends_at_once(run: Run) -> None:
    assert run("nan@7", "nan@7", max_restarts=9) == 1
    assert len(run.starts) == 2
    assert "step 7 is not finite again" in run.said[-1]
    (run.folder / "starts.txt").unlink()
    assert run("nan@7", "nan@8", "done", max_restarts=9) == 0


def test_a_missed_heartbeat_is_killed_and_restarted(run: Run) -> None:
    assert run("hang", "done", hang_timeout=0.4) == 0
    assert run.kinds == ["hang", "restart"] and "no sign of life" in run.said[-1]


def test_a_busy_device_is_tried_again_later_and_later(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_WAIT", 0.2)
    assert run("busy", "busy", "busy", "done", backoff=0.1) == 0
    times = [float(line.split()[0]) for line in (run.folder / "starts.txt").read_text().splitlines()]
    waits = [after - before for before, after in itertools.pairwise(times)]
    assert waits[0] >= 0.1 and waits[1] >= 0.2 and waits[2] >= 0.2


def test_on_restart(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = run.folder / "reset"
    assert run("crash", "crash", "done", on_restart=f"echo x >> '{marker}'; exit 3") == 0
    assert marker.read_text() == "x\nx\n" and run.kinds.count("on_restart") == 2
    assert "exit code 3" in run.said[1]
    (run.folder / "starts.txt").unlink()
    monkeypatch.setattr(module, "HOOK_SECONDS", 0.1)
    assert run("crash", "done", on_restart="sleep 30") == 0


def test_a_signal_is_passed_on_and_ends_supervision(run: Run) -> None:
    assert run("stop", "done") == 130
    assert len(run.starts) == 1


def test_when_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def wanted(*overrides: str) -> bool:
        config = load(overrides)
        return supervised.wanted(config.task.name, config.supervise, config.source)

    monkeypatch.delenv(VARIABLE, raising=False)
    assert not wanted()
    assert wanted("supervise=true") and wanted("supervise.max_restarts=5")
    assert not wanted("supervise.max_restarts=5", "supervise=false")
    assert not wanted("supervise=true", "task=plan")
    monkeypatch.setenv(VARIABLE, "x")
    assert not wanted("supervise=true")


def test_only_the_command_line_may_name_a_command(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nsupervise: {on_restart: touch x}\n")
    with pytest.raises(ConfigError, match="a config file can't name a command"):
        load([], "mine", tmp_path)
    assert load(["supervise.on_restart='touch x'"]).supervise.on_restart == "touch x"


def test_a_real_run_comes_through_every_fault(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, plugins_taken_back: None
) -> None:
    """Kill, out of memory and a hang in one run: it ends as an undisturbed one does, bit for bit."""
    faults = ["kill@3", "memory@5", "hang@8"]
    monkeypatch.setattr(module, "Child", ForkedChild)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{REPO}{os.pathsep}{REPO / 'tests' / 'faults'}")
    monkeypatch.syspath_prepend(REPO / "tests" / "faults")
    assert train("run.dir=whole", "train.steps=10") == 0
    overrides = ["plugins=[faulty]", "engine=faulty", f"engine.faults=[{','.join(faults)}]", "train.steps=10"]
    overrides += ["supervise.backoff=0.01", "supervise.hang_timeout=5", "supervise.max_restarts=9"]
    assert train("run.dir=run", *overrides) == 0
    assert Path("faults.txt").read_text().split() == [fault.partition("@")[0] for fault in faults]
    kinds = [event["kind"] for event in read_events(Path("run"))]
    # A machine with much else to do may be so slow that a start or an end is taken for a hang: one more restart.
    assert kinds.count("restart") >= 3 and kinds.count("hang") >= 1 and kinds[-1] == "finished"
    assert tensors("run") == tensors("whole") and losses("run") == losses("whole")
    assert "faulty.py" in capfd.readouterr().err  # where the hung process was
    attempts = json.loads(Path("run/run.json").read_text())["attempts"]
    print(f"faults survived: {len(faults)}; attempts: {len(attempts)}")
