"""Runs side by side: what each is given, what it leaves, and how it ends. The parts of the chip are CPUs here."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Told
from tests.train.reading import losses, steps_on_disk, tensors
from ttrain.cli import main
from ttrain.config import build
from ttrain.core.errors import NonFiniteError
from ttrain.device.torch.device import TorchDevice
from ttrain.tasks.training.replicas import Baton, side_by_side
from ttrain.train.loop.interrupt import StopRequests
from ttrain.train.runs.run_directory import read_config
from ttrain.train.steps.step import StepResult, TrainStep

COMMON = [
    "model=mlp", "model.width=8", "train.batch_size=4", "train.eval_every=3", "train.eval_sequences=8", "train.steps=6",
    "train.log_every=1", "logger=jsonl", "guard.check_learning=null", "schedule.steps=6",
]  # fmt: skip
TWO = ["device=n150", "device.mode=mock", "device.subdevices=2", "device.command_queues=2"]
ONE = ["device=cpu", "device.threads=1"]
SKIP = "guard.nonfinite=skip"


class Chip(TorchDevice):
    """A whole that is divided into two CPUs whose steps are launched before they are read."""

    def __init__(self) -> None:
        super().__init__("cpu", threads=1)
        self.parts = [TorchDevice("cpu", threads=1), TorchDevice("cpu", threads=1)]
        for part in self.parts:
            part.overlaps = True

    def replicas(self) -> list[Any]:
        return self.parts


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> None:
    original = build.build_device

    def opened(config: Any, precision: Any, world: Any = None) -> Any:
        return Chip() if config.name == "n150" else original(config, precision, world)

    monkeypatch.setattr(build, "build_device", opened)


@pytest.mark.parametrize(
    ("overrides", "alone"),
    [
        (["train.gradient_accumulation=2", "run.seed=7"], ["run.seed=8", "train.gradient_accumulation=2"]),
        (["replicas.seed=[4,5]", "replicas.lr=[1e-2,2e-2]", SKIP], ["run.seed=5", "optimizer.lr=2e-2", SKIP]),
    ],
    ids=["next seed", "own seed and rate"],
)
def test_a_replica_is_the_run_that_it_would_be_alone(
    chip: None, tmp_path: Path, overrides: list[str], alone: list[str]
) -> None:
    assert main([*COMMON, *TWO, *overrides, f"run.dir={tmp_path / 'two'}"]) == 0
    assert main([*COMMON, *ONE, *alone, f"run.dir={tmp_path / 'one'}"]) == 0
    first, second = (tmp_path / "two" / f"replica-{number}" for number in (0, 1))
    assert losses(second) == losses(tmp_path / "one") != losses(first)
    assert tensors(second) == tensors(tmp_path / "one") != tensors(first)
    config = read_config(second)
    assert (config["device"]["subdevices"], config["device"]["command_queues"]) == (1, 1)
    assert config["replicas"] == {"seed": None, "lr": None}
    assert json.loads((second / "summary.json").read_text("utf-8"))["best_val_loss"] > 0


def test_both_stop_at_a_signal_and_resume_together_or_alone(
    chip: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The signal comes while the first is in step 2 and the second after step 1: each ends the step that it is in."""
    original, before = TrainStep.__call__, signal.getsignal(signal.SIGTERM)
    calls: list[int] = []

    def start(self: TrainStep, batch: Any, rates: Any, step: int) -> StepResult:
        calls.append(step)
        if calls.count(2) == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            while signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # until the main thread has noted it
                time.sleep(0.001)
        return original(self, batch, rates, step)

    two = [*COMMON, *TWO, "replicas.seed=[4,5]"]
    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "__call__", start)
        assert main([*two, f"run.dir={tmp_path / 'two'}"]) == 130
    assert signal.getsignal(signal.SIGTERM) == before
    folders = [tmp_path / "two" / f"replica-{number}" for number in (0, 1)]
    assert [steps_on_disk(folder) for folder in folders] == [[2], [1]]
    said = capsys.readouterr().err
    assert all(f"resume=auto run.dir={folder}" in said for folder in folders)
    assert main([*two, f"run.dir={tmp_path / 'two'}", "resume=auto", "train.steps=4"]) == 0
    assert main(["resume=auto", f"run.dir={folders[1]}", "train.steps=6", *ONE, "logger=jsonl"]) == 0
    assert main([*COMMON, *ONE, "run.seed=5", f"run.dir={tmp_path / 'whole'}"]) == 0
    assert losses(folders[1])[-1] == losses(tmp_path / "whole")[-1]


def test_turns_alternate_and_a_failure_waits_for_the_others() -> None:
    log: list[str] = []

    def run(baton: Baton, number: int, turns: int, ends: float) -> Callable[[], float]:
        def body() -> float:
            for _ in range(turns):
                log.append("ab"[number])
                baton.pass_on(number)
            if ends < 0:
                raise NonFiniteError("train/loss is nan")
            return ends

        return body

    baton = Baton(2)
    assert side_by_side([run(baton, 0, 2, 1.5), run(baton, 1, 3, 0.5)], baton) == [1.5, 0.5]
    assert "".join(log) == "ababb"
    log.clear()
    told: list[int] = []
    baton = Baton(2)
    with pytest.raises(NonFiniteError, match="train/loss is nan"):
        side_by_side([run(baton, 0, 1, -1.0), run(baton, 1, 3, 0.5)], baton, lambda number, error: told.append(number))
    assert ("".join(log), told) == ("abbb", [0])


def test_several_runs_share_the_requests_to_stop() -> None:
    before, requests = signal.getsignal(signal.SIGINT), StopRequests()
    with requests:
        with requests:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert [requests.take_save() for _ in range(3)] == [True, True, False]
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["device=n150", "device.subdevices=3", "device.command_queues=2"], "must be at most 2"),
        (["device=cpu", "device.subdevices=2"], "It belongs to device tt"),
        (["device=n150", "device.subdevices=2"], "Give device.command_queues=2"),
        ([*TWO, "device.core_grid=[2,2]"], "Give device.core_grid=null"),
        (["device=n300", *TWO[1:], "device.mesh=[1,2]"], "Give device.mesh=[1,1]"),
        ([*TWO, "device.host_resident=[embedding]"], "Give device.host_resident="),
        ([*TWO, "logger=wandb"], "Give logger=console"),
        ([*TWO, "supervise=true"], "Give supervise.enabled=false"),
        ([*TWO, "recover.oom=shrink"], "Give recover.oom=stop"),
        ([*TWO, "task=verify"], "Give device.subdevices=1"),
        ([*TWO, "replicas.seed=[1]"], "one value for each of the 2 replicas"),
        ([*TWO, "replicas.lr=[1e-3,-1]"], "must be 0 or more"),
        ([*TWO, "replicas.lr=[a,b]"], "must be a list of numbers"),
        ([*TWO, "run.seed=2147483647"], "the largest seed would be 2147483648"),
        (["device=cpu", "replicas.seed=[1,2]"], "there is one run"),
    ],
)
def test_bad_input_is_one_message_before_anything_runs(
    inside: Path, refused: Told, overrides: list[str], said: str
) -> None:
    refused(said, *COMMON, *overrides, "run.dir=run")
