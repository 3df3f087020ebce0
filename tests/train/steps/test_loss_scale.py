"""precision=fp16: the scaled loss, overflows and resumes. Users can not ask it of the CPU, whose rows do it here."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.session import open_cpu, token_batch
from tests.train.reading import tensors
from ttrain.cli import main
from ttrain.config import build
from ttrain.config.compose import load
from ttrain.device.torch.info import Torch
from ttrain.graph import Kind
from ttrain.testing.verifier import check_model
from ttrain.train.logging.metrics import read_events, read_metrics
from ttrain.train.steps import step as module
from ttrain.train.steps.step import LossScale, StepResult, TrainStep

VOCABULARY = 31
SMALL = (
    "model=nano-gpt model.layers=1 model.width=32 model.heads=2 model.context=16 train.batch_size=4 "
    "engine=static device=cpu"
)


def at(scale: float, good_steps: int = 0) -> LossScale:
    return LossScale(loss_scale=scale, good_steps=good_steps)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Torch, "computes_in", lambda *given: True)


class Steps:
    """Training steps of a small GPT, on the same batches."""

    def __init__(self, overrides: str = "", precision: str = "fp16", scale: LossScale | None = None) -> None:
        config = load([*SMALL.split(), *overrides.split(), f"precision={precision}"])
        device = open_cpu()
        self.session = build.build_session(build.build_model(config, VOCABULARY), device, config)
        self.session.initialize(seed=3)
        steps = self.session.build_training(further=False)
        self.step: TrainStep = self.session.train_step(steps, seed=3, scale=scale)
        self.rates = build.build_rates(self.session.graph.model, config)

    def __call__(self, number: int) -> StepResult:
        return self.step(token_batch(VOCABULARY, 4, 16, number), self.rates(number), number)

    def state(self) -> dict[str, np.ndarray]:
        names = self.session.state.names(Kind.PARAMETER, Kind.OPTIMIZER, Kind.COPY)
        return {name: self.session.state.read(name) for name in names}


def test_gradients_are_those_of_torch() -> None:
    with closing(open_cpu()) as device:
        check_model(build.build_model(load([*SMALL.split(), "precision=fp16"]), VOCABULARY), device=device)


@pytest.mark.parametrize(
    "ways",
    [
        "engine=dynamic optimizer.clip_norm=null train.gradient_accumulation=2 train.noise_scale=true",
        "optimizer.clip_norm=0.1 optimizer.clip_scope=[blocks] guard.activations=true",
        "optimizer=muon",
        "optimizer=adafactor lora.rank=2",
    ],
)
def test_steps_are_those_of_fp32(ways: str) -> None:
    """Losses, norms and weights, at a scale at which nothing overflows."""
    given = f"{ways} schedule.warmup=0 optimizer.lr=1e-3"
    narrow, wide = Steps(given), Steps(given, "fp32")
    start = wide.state()
    for number in range(1, 6):
        found, expected = narrow(number), wide(number)
        assert found.applied and found.loss_scale == 2.0**16
        assert found.loss == pytest.approx(expected.loss, rel=1e-3)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-2)
        assert found.metrics == pytest.approx(expected.metrics, rel=0.1)
    ends = narrow.state()
    for name in wide.session.state.names(Kind.PARAMETER):
        way = wide.state()[name] - start[name]
        assert np.linalg.norm(ends[name] - wide.state()[name]) <= 0.1 * np.linalg.norm(way), name


def test_small_gradients_get_lost_without_a_scale() -> None:
    """So the tests above would see it if there were none."""
    expected = Steps(precision="fp32")(1).grad_norm
    errors = [abs(Steps(scale=at(2.0**power))(1).grad_norm / expected - 1) for power in (-12, 16)]
    assert errors[0] > 0.02 > 1e-3 > errors[1]


def test_an_overflow_leaves_the_state_as_it_was_and_halves_the_scale() -> None:
    scale = at(2.0**26)
    steps = Steps(scale=scale)
    before, halved = steps.state(), 0
    while not (result := steps(halved + 1)).applied:
        halved += 1
        assert result.overflowed and not np.isfinite(result.grad_norm) and np.isfinite(result.loss or np.nan)
        assert scale == at(2.0 ** (26 - halved))
        assert all(np.array_equal(value, before[name]) for name, value in steps.state().items())
    assert halved >= 2 and scale.good_steps == 1 and result.loss_scale == scale.loss_scale
    assert not all(np.array_equal(value, before[name]) for name, value in steps.state().items())


def test_the_scale_doubles_after_2000_good_steps() -> None:
    scale = at(2.0**16)
    for _ in range(1999):
        scale.adjust(good=True)
    assert scale == at(2.0**16, 1999)
    scale.adjust(good=True)
    assert scale == at(2.0**17, 0)
    scale.adjust(good=True)
    scale.adjust(good=False)
    assert scale == at(2.0**16, 0)
    plain = LossScale()
    plain.adjust(good=True)
    assert plain == LossScale()


def test_a_run_goes_on_with_its_scale_to_the_bit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """From a scale that overflows, which doubles every other step; so it overflows again and again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "FIRST_SCALE", 2.0**25)
    monkeypatch.setattr(module, "_GOOD_STEPS", 2)
    run = [*SMALL.split(), "precision=fp16", "train.log_every=1", "train.eval_every=6", "schedule.steps=12"]
    assert main([*run, "run.dir=whole", "train.steps=12"]) == 0
    told = capsys.readouterr()
    assert main([*run, "run.dir=parts", "train.steps=5"]) == 0
    assert main(["run.dir=parts", "resume=auto", "train.steps=12"]) == 0
    assert tensors("whole") == tensors("parts")
    found = [scales(name) for name in ("whole", "parts")]
    assert found[0] == found[1] and len(found[0]) == 12
    skipped = [event for event in read_events(Path("whole")) if event["kind"] == "skipped"]
    summary = json.loads(Path("whole/summary.json").read_text("utf-8"))
    assert summary["skipped_steps"] == len(skipped) == sum(bad for _, bad, _ in found[0]) > 3
    assert f"the updates of {len(skipped)} steps" in told.out
    assert "Step 1: grad_norm is" in told.err and "the loss scale is now 1.67772e+07" in told.err


def scales(name: str) -> list[tuple[Any, ...]]:
    lines = [line for line in read_metrics(Path(name) / "metrics.jsonl") if "loss_scale" in line]
    return [(line["loss_scale"], line["nonfinite_steps"], line["train/loss"]) for line in lines]


def test_a_scale_that_can_not_be_halved_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """Where the loss itself is not finite, no scale helps."""
    monkeypatch.chdir(tmp_path)
    assert not StepResult(1.0, np.inf, 4, loss_scale=1.0).overflowed
    assert not StepResult(np.nan, np.nan, 4, loss_scale=8.0).overflowed
    assert not StepResult(1.0, np.inf, 4).overflowed
    monkeypatch.setattr(module, "FIRST_SCALE", 1.0)
    monkeypatch.setattr(TrainStep, "_scale", 2.0**40)
    assert main([*SMALL.split(), "precision=fp16", "train.steps=3", "run.dir=run"]) == 1
    assert "Step 1: grad_norm is" in capsys.readouterr().err
