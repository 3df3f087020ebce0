"""Training on longer sequences and larger batches as a run goes on: phases, data position, resume, what is refused."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import Told
from tests.models.decoder.plain_decoder import PlainDecoder
from tests.models.session import Session as BareSession
from tests.models.session import initial_values, relative_error, token_batch
from tests.train.reading import arrays, events, losses, tensors, write_documents
from ttrain.cli import main
from ttrain.config import build
from ttrain.config.compose import load
from ttrain.core.errors import ConfigError
from ttrain.data.batches import Sizes, TokenDataset
from ttrain.data.settings import RegressionConfig, TextConfig
from ttrain.data.synthetic.regression import open_regression
from ttrain.models.decoder import Decoder
from ttrain.models.gpt import GPT
from ttrain.models.settings import GPTConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig
from ttrain.train.logging.metrics import read_metrics
from ttrain.train.settings import TrainConfig
from ttrain.train.steps.phases import BatchReader, Phase, PhaseSchedule, Position
from ttrain.train.steps.session import Session
from ttrain.train.steps.step import StepResult, TrainStep

MODEL = ["model.layers=1", "model.width=32", "model.heads=2", "model.context=32", "model.dropout=0.1"]
PHASES = ["train.length_schedule=[8,16,32]", "train.phase_steps=6"]
TRAIN = ["train.batch_size=4", "train.log_every=1", "train.eval_every=6", "train.eval_sequences=8"]
TRAIN += ["train.save_every=5"]
QUIET = ["logger=jsonl", "device=cpu", "device.threads=1", "sample.tokens=4", "train.keep_last=9", "schedule.steps=40"]
DOCUMENTS = ["data=documents", "data.sources=[a.jsonl,b.jsonl]", "data.tokenizer=byte"]
GIVEN = [*DOCUMENTS, *MODEL, *PHASES, *TRAIN, *QUIET]


@pytest.fixture
def train(inside: Path) -> Any:
    """Runs the command line on documents in this process: `train("run.dir=..", ...)` -> exit code."""
    write_documents(a=150, b=60)
    return lambda *overrides: main([*GIVEN, *overrides])


def test_phases_and_what_came_before_them() -> None:
    config = TrainConfig(length_schedule=[8, 16, 32], batch_schedule=[2, 4], batch_size=4, phase_steps=6)
    schedule = PhaseSchedule.of(config, 32)
    assert [schedule.number(step) for step in (1, 6, 7, 12, 13, 99)] == [0, 0, 1, 1, 2, 2]
    assert schedule.phases == (Phase(8, 2), Phase(16, 4), Phase(32, 4))
    for done, step in ((0, 1), (0, 9), (4, 7), (8, 20), (14, 15)):  # counted step by step
        read = [schedule.at(each) for each in range(done + 1, step)]
        samples, tokens = sum(phase.rows for phase in read), sum(phase.rows * phase.length for phase in read)
        data = TokenDataset(*[np.zeros(99, np.uint16)] * 2, 32, 9, TextConfig(order="sequential"))
        assert BatchReader(data, 0, schedule, done, Position(5, 7)).before(step) == Position(5 + samples, 7 + tokens)
    assert PhaseSchedule.of(TrainConfig(), 32).phases == (Phase(32, 16),)


@pytest.mark.parametrize("engine", ["static", "traced"])
def test_stopped_anywhere_and_resumed_it_has_the_same_bits(train: Any, engine: str) -> None:
    """Within a phase, at the last step of one and at the first of another."""
    phases = [(7, 32)] if engine == "traced" else [(7, 16), (13, 32)]  # compiling is slow
    lengths = ",".join(str(length) for _, length in phases)
    overrides = [f"engine={engine}", "train.gradient_accumulation=2", f"train.length_schedule=[8,{lengths}]"]
    overrides.append("train.batch_schedule=[2,4]")
    assert train(*overrides, "run.dir=whole", "train.steps=14") == 0
    for stop in (4, 6, 7) if engine == "static" else (6,):
        assert train(*overrides, f"run.dir=stopped{stop}", f"train.steps={stop}") == 0
        assert main([f"run.dir=stopped{stop}", "resume=auto", "train.steps=14"]) == 0
        assert tensors(f"stopped{stop}", 14) == tensors("whole", 14)
        trained = [[each for each in losses(run) if each[1] == "train/loss"] for run in (f"stopped{stop}", "whole")]
        assert trained[0] == trained[1]
    assert [(event["step"], event["length"]) for event in events("whole", "phase")] == phases
    later = [(event["step"], event["length"]) for event in events("stopped6", "phase")]
    assert later == phases[1:]  # step 7 began the second attempt
    summary = json.loads(Path("whole", "summary.json").read_text())
    if engine == "traced":
        assert summary["engine"]["captures"] >= 2


def test_a_resume_may_give_a_schedule_without_the_model(train: Any, refused: Told) -> None:
    """The lengths are held against the model of the checkpoint, not against a default one."""
    assert train("run.dir=first", "train.steps=2", "train.length_schedule=[]") == 0
    overrides = ["resume=first", "train.steps=4", "train.phase_steps=3"]
    assert main([*overrides, "run.dir=on", "train.length_schedule=[8,32]"]) == 0
    assert [event["length"] for event in events("on", "phase")] == [32]
    refused("must end with model.context=32", *overrides, "run.dir=off", "train.length_schedule=[8,24]")


@pytest.mark.parametrize("parallel", [(), ("parallel.slices=2",)], ids=["one slice", "two slices"])
def test_a_growing_batch_trains_as_pytorch_in_fp64_does(tmp_path: Path, parallel: tuple[str, ...]) -> None:
    """Gradient descent by hand on the samples of the stream: 4 of a step, then 6, then 12."""
    run, steps, sizes = str(tmp_path / "run"), 8, [4] * 3 + [6] * 3 + [12] * 2
    plain = ["model=mlp", "model.width=6", "model.layers=2", "data=regression", "optimizer=sgd", "optimizer.momentum=0"]
    plain += parallel
    plain += ["optimizer.clip_norm=null", "optimizer.weight_decay=0", "schedule=constant", "guard.check_learning=null"]
    plain += ["train.batch_size=12", "train.gradient_accumulation=6", "train.batch_schedule=[4,6,12]"]
    plain += ["train.phase_steps=3"]
    plain += [*QUIET[:3], "train.save_every=1", "train.eval_every=null", "train.log_every=1", "train.noise_scale=true"]
    assert main([*plain, f"run.dir={run}0", "optimizer.lr=0", "train.steps=1"]) == 0
    assert main([*plain, f"run.dir={run}", "optimizer.lr=0.1", f"train.steps={steps}", "train.keep_last=1"]) == 0
    weights = {
        name: torch.from_numpy(value).double().requires_grad_()
        for name, value in arrays(f"{run}0", 1, "parameters-*").items()
    }
    stream = open_regression(RegressionConfig(), Sizes(inputs=6, outputs=6)).batch("train", 1337, 0, sum(sizes))
    inputs, targets = (torch.from_numpy(stream[name]).double().split(sizes) for name in ("inputs", "targets"))
    found = [line for line in read_metrics(Path(run, "metrics.jsonl")) if "train/loss" in line]
    for line, x, wanted in zip(found, inputs, targets, strict=True):
        for layer in range(2):
            x = torch.nn.functional.linear(x, weights[f"layers.{layer}.weight"], weights[f"layers.{layer}.bias"])
            x = x if layer else x.relu()
        loss = (x - wanted).square().mean()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        for weight, gradient in zip(weights.values(), gradients, strict=True):
            weight.data -= 0.1 * gradient
        assert line["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert line["grad_norm"] == pytest.approx(sum(g.square().sum().item() for g in gradients) ** 0.5, rel=1e-5)
    for name, value in arrays(run, steps, "parameters-*").items():
        np.testing.assert_allclose(value, weights[name].detach(), rtol=1e-5, atol=1e-7)
    assert [line["tokens"] for line in found] == list(np.cumsum(sizes) * 6)  # values of targets
    assert [(event["step"], event["rows"]) for event in events(run, "phase")] == [(4, 6), (7, 12)]
    assert json.loads(Path(run, "summary.json").read_text())["engine"]["captures"] <= 4  # nothing was built anew


def test_val_loss_is_that_of_the_whole_context_throughout(train: Any) -> None:
    """A run that is stopped in its first phase evaluates as task=train of that checkpoint without a schedule does."""
    assert train("run.dir=first", "train.steps=6") == 0
    assert main(["resume=first", "run.dir=second", "train.steps=7", "train.length_schedule=[]", "optimizer.lr=0"]) == 0
    by_run = {run: [entry[2] for entry in losses(run) if entry[1] == "val/loss"] for run in ("first", "second")}
    assert by_run["second"][0] == by_run["first"][0]
    assert by_run["second"][-1] == pytest.approx(by_run["first"][0], rel=1e-3)


def test_a_rollback_over_a_phase_goes_back_to_the_shorter_length(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start, poisoned = TrainStep.__call__, []

    def sometimes(self: TrainStep, batch: Any, rates: Any, step: int, *given: Any) -> StepResult:
        result = start(self, batch, rates, step, *given)
        if step == 8 and not poisoned:
            poisoned.append(batch["tokens"].shape)
            result.loss = float("nan")
        return result

    monkeypatch.setattr(TrainStep, "__call__", sometimes)
    assert train("run.dir=first", "train.steps=9", "guard.nonfinite=rollback", "train.eval_every=9") == 0
    assert poisoned == [(4, 16)]
    assert [(event["step"], event["length"]) for event in events("first", "phase")] == [(7, 16), (6, 8), (7, 16)]
    assert events("first", "rollback")[0]["to"] == 5


def test_gpt_on_shorter_sequences_against_pytorch() -> None:
    """Loss and every gradient; the positions beyond have none."""
    model, length = GPT(GPTConfig(layers=2, heads=4, width=32, context=24, vocabulary=61)), 11
    values, batch = initial_values(model, 0), token_batch(61, 3, length, 0, masked=2)
    weights = {path: torch.tensor(value, requires_grad=True) for path, value in values.items()}
    loss = PlainDecoder(model.config, weights).loss(*(torch.from_numpy(batch[name]) for name in ("tokens", "targets")))
    loss.backward()
    ours = BareSession(model.at_length(length), AdamW(AdamWConfig(clip_norm=None)), 3, values=values)
    assert ours.train(batch, 1, {"lr": 0.0})["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for path, gradient in ours.gradients().items():
        assert relative_error(gradient, weights[path].grad.numpy()) < 1e-4, path
    assert not ours.gradients()["positions.weight"][length:].any()
    assert model.length == 24 and model.batch_specs(3)["tokens"].shape == (3, 24)


def test_the_memory_of_the_old_steps_is_free_before_new_ones_take_theirs(train: Any, monkeypatch: Any) -> None:
    alive: list[list[bool]] = []
    steps: list[weakref.ref[Any]] = []
    original = Session.build_training

    def recorded(self: Session) -> Any:
        alive.append([step() is not None for step in steps] + list(getattr(self.engine, "_arenas", {})))
        built = original(self)
        steps.append(weakref.ref(next(iter(built.values()))))
        return built

    monkeypatch.setattr(Session, "build_training", recorded)
    assert train("run.dir=run", "train.steps=14") == 0
    assert alive == [[], [False], [False, False]]


def test_token_files_take_a_schedule_too(train: Any) -> None:
    assert train("task=prepare", "prepare.dir=tokens") == 0
    overrides = [*MODEL, *PHASES, *TRAIN, *QUIET, "data=tokens", "data.path=tokens", "train.steps=13"]
    assert main([*overrides, "data.order=epoch", "run.dir=run"]) == 0
    assert [event["length"] for event in events("run", "phase")] == [16, 32]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.length_schedule=[16,8]"], "none may be smaller than the one before it"),
        (["train.length_schedule=[8,64]"], "must end with model.context=32."),
        (["train.length_schedule=[8,16]"], "Give model.context=16, or end with 32."),
        (["train.length_schedule=8"], "must be a list of integers"),
        (["train.batch_schedule=[4,2,4]"], "none may be smaller than the one before it"),
        (["train.batch_schedule=[2,8]"], "must end with train.batch_size=4. Give train.batch_size=8, or end with 4."),
        (["train.batch_schedule=[1,2,4]"], "must be a multiple of it. Give train.gradient_accumulation=4."),
        (["train.batch_schedule=[0,4]"], "must be at least 1"),
        (["device=n150", "device.subdevices=2"], "Give device.subdevices=1."),
        (["model=mlp", "data=regression"], "model=mlp does not train on sequences"),
    ],
)
def test_schedules_that_are_refused(train: Any, overrides: list[str], message: str, refused: Told) -> None:
    given = [*PHASES, *QUIET] if "model=mlp" in overrides else GIVEN
    refused(message, *given, *overrides, "run.dir=run")


def test_data_and_models_of_one_length_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed:
        vocabulary = 5

    config = load(["data.path=x", *PHASES, *MODEL])
    (problem,) = build.data_problems(Fixed(), config)
    assert "can't change the length of its sequences" in problem
    model = build.build_model(config, 50)
    assert build.shorter_model(model, 32, config) is None
    monkeypatch.delattr(Decoder, "at_length")
    with pytest.raises(ConfigError, match="whose shapes depend on model.context"):
        build.shorter_model(model, 8, config)
