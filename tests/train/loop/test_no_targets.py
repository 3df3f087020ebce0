"""Rows without a target have no loss, and are told or refused; and task=lr_finder, what a range test finds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Told
from tests.models.session import Session, token_batch
from tests.train.conftest import FakeWandb
from tests.train.reading import write_rows
from ttrain import Training, load_config
from ttrain.cli import main
from ttrain.config import build
from ttrain.config.schema import LrFinderConfig
from ttrain.core.spec import DType, TensorSpec
from ttrain.models.agillm import AGILLM
from ttrain.models.gpt import GPT
from ttrain.models.settings import AGILLMConfig, GPTConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig
from ttrain.sweep.outcome import measured, numbers_of
from ttrain.tasks.training.lr_finder import find, has_diverged, rate_of
from ttrain.tasks.training.start import empty_rows
from ttrain.train.logging.metrics import read_metrics
from ttrain.train.steps.step import NoiseScale, TrainStep
from ttrain.train.steps.step_graph import StepGraph

STEPS, CONTEXT = 40, 16
DATA = ["data=documents", "data.sources=[chats.jsonl]", "data.template=chatml", "data.loss_on=replies",
        "data.tokenizer=byte", f"model.context={CONTEXT}"]  # fmt: skip
QUIET = ["device=cpu", "device.threads=1", "sample.tokens=1", "model.layers=1", "model.heads=2", "model.width=32",
         "train.peak_tflops=1", "train.log_every=1"]  # fmt: skip


@pytest.fixture(autouse=True)
def here(inside: Path) -> None:
    write_chats(12)


def write_chats(stones: int) -> None:
    rows = [
        [{"role": "user", "content": f"{number} " + "stone " * stones}, {"role": "assistant", "content": "Yes, it is."}]
        for number in range(60)
    ]
    write_rows("chats.jsonl", [{"messages": row} for row in rows])


def targets_of(rows: int, split: str = "train") -> np.ndarray:
    """Return the number of targets of each of the first rows."""
    config = load_config(*DATA)
    dataset: Any = build.build_dataset(config)
    return (dataset.batch(split, config.run.seed, 0, rows)["targets"] >= 0).sum(1)


@pytest.mark.parametrize(
    ("rows", "more"),
    [
        (1, []),
        (2, ["train.gradient_accumulation=2"]),
        (1, ["guard.nonfinite=skip", "guard.spike=warn", "guard.spike_window=2"]),
    ],
)
def test_a_step_without_targets_has_no_loss(rows: int, more: list[str], fake: FakeWandb, capsys: Any) -> None:
    """A row is counted by its targets; a loss of 0.0 would be the best of all."""
    every = ["train.eval_every=10", "train.early_stop=9", "logger=wandb", "logger.mode=offline"]
    assert main([*DATA, *QUIET, *every, *more, f"train.steps={STEPS}", f"train.batch_size={rows}", "run.dir=run"]) == 0
    counts = targets_of(STEPS * rows)
    empty = counts.reshape(STEPS, rows).sum(1) == 0
    assert 0 < empty.sum() < STEPS
    lines = list(read_metrics(Path("run/metrics.jsonl")))
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert [loss is None for loss in losses] == empty.tolist()
    told = [line.get("train/loss") for run in fake.runs for line in run.logged]
    told += [line.get("val/loss") for line in lines]
    assert all(loss > 1 for loss in (*losses, *told) if loss is not None)
    assert not any(line["nonfinite_steps"] for line in lines if "train/loss" in line)
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["train/loss"] == [loss for loss in losses if loss is not None][-1]
    assert summary["best_val_loss"] == min(measured(Path("run"), "best_val_loss")) > 1
    assert numbers_of("train", Path("run"), None)["train/loss"] > 1
    said = capsys.readouterr().err
    assert "is a spike" not in said
    of = f"WARNING: {(counts == 0).sum()} of the {STEPS * rows} training sequences that are read have no target"
    assert of in said and "data.loss_on=replies" in said and "data.long_documents=skip" in said


def test_a_loss_over_some_rows_is_the_mean_over_their_targets() -> None:
    """Rows without a target change neither the loss nor the gradient of the others."""
    given = token_batch(7, 2, 8, index=1)
    given["targets"][1] = -1
    steps = []
    for batch in (given, {name: array[:1] for name, array in given.items()}):
        rows = len(batch["tokens"])
        session = Session(agillm(), AdamW(AdamWConfig()), 1, gradient_accumulation=rows)
        step = TrainStep(session.steps, 1, 0, session.graph.model.prepare)
        steps.append((step(batch, {"lr": 1e-2}, 1), session.gradients()))
    (one, gradients), (other, alone) = steps
    assert one.loss == pytest.approx(other.loss) and one.metrics == pytest.approx(other.metrics)
    assert all(np.allclose(gradients[name], alone[name], atol=1e-6) for name in alone)


def agillm() -> Any:
    return AGILLM(AGILLMConfig(layers=1, heads=2, width=8, rank=4, context=8, vocabulary=7, preset=None))


@pytest.mark.parametrize(("kept", "expected"), [(8, "ar sat gate"), (1, "ar"), (0, "")])
def test_each_term_of_a_loss_has_targets_of_its_own(kept: int, expected: str) -> None:
    """The SAT head predicts the tokens after a window, so that the first targets alone are none of its own."""
    session = Session(agillm(), AdamW(AdamWConfig()), 2)
    batch = token_batch(7, 2, 8, index=3)
    batch["targets"][:, kept:] = -1
    found = TrainStep(session.steps, 2, 0, session.graph.model.prepare)(batch, {"lr": 0.0}, 1)
    assert found.finite and (found.loss is None) == (kept == 0)
    assert found.metrics.keys() == {"ar/ce", "sat/ce", "gate/ce"}
    assert [name.removesuffix("/ce") for name, value in found.metrics.items() if value is not None] == expected.split()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.steps=4"], "none of the 4 training sequences that are read has a target"),
        (["train.steps=400", "train.eval_sequences=2"], "none of the 2 held-out sequences that are read has a target"),
        (["task=lr_finder", "lr_finder.steps=10"], "none of the 10 training sequences that are read has a target"),
    ],
)
def test_a_run_without_any_target_is_refused(overrides: list[str], message: str, refused: Told) -> None:
    write_chats(300)
    said = refused(message, *DATA, *QUIET, "train.batch_size=1", "run.dir=run", *overrides)
    assert "model.context" in said and ("train.eval_sequences." in said) == ("held-out" in message)


def test_more_rows_are_looked_at_where_the_first_have_no_target() -> None:
    class Late:
        fields = {"targets": TensorSpec((4,), DType.INT64)}

        def batch(self, split: str, seed: int, first: int, rows: int) -> dict[str, np.ndarray]:
            numbers = np.arange(first, first + rows)[:, None]
            return {"targets": np.where(numbers < 5000, -1, np.ones((rows, 4), np.int64))}

    assert empty_rows(Late(), "train", 0, 10_000)[1] == 5000  # type: ignore[arg-type]
    assert empty_rows(Late(), "train", 0, 10_000_000)[0] < 6000  # type: ignore[arg-type]


def test_the_ramp_leaves_out_steps_without_a_loss(told: Told) -> None:
    command = ["task=lr_finder", "lr_finder.steps=40", "lr_finder.high=1e-2", "lr_finder.out=found"]
    assert "have no target" in told(*DATA, *QUIET, *command, "train.batch_size=1")
    found = json.loads(Path("found/results.json").read_text())
    empty = (targets_of(STEPS) == 0).sum()
    assert len(found["losses"]) == len(found["rates"]) == STEPS - empty and min(found["losses"]) > 1


def test_the_noise_is_not_that_of_a_micro_batch_without_targets() -> None:
    given = token_batch(7, 2, 8, index=1)
    given["targets"][0] = -1
    session = Session(agillm(), AdamW(AdamWConfig()), 1, gradient_accumulation=2)
    session.graph.noise = True
    steps = {name: session.engine.build(name, trace) for name, trace in session.graph.train_steps().items()}
    noise = NoiseScale(1)
    found = TrainStep(steps, 1, 0, session.graph.model.prepare, noise=noise)(given, {"lr": 0.0}, 1)
    assert found.grad_norm > 0 and math.isfinite(found.loss or math.nan) and noise.noise == noise.signal == 0.0


def test_a_batch_of_ones_own_without_targets_has_no_loss() -> None:
    config = load_config(*QUIET, "model.vocabulary=7", "model.context=8", "train.batch_size=2", "engine=dynamic")
    batch = token_batch(7, 2, 8, index=1)
    none = {**batch, "targets": np.full_like(batch["targets"], -1)}
    with Training(config) as training:
        assert training.step(none).loss is None and training.evaluate(none) is None
        assert (training.step(batch).loss or 0) > 1 and (training.evaluate(batch) or 0) > 1


# the gradient-noise scale


@pytest.mark.parametrize("parts", [2, 4])
def test_known_noise_is_found(parts: int) -> None:
    """Gradients of rows are G plus noise of covariance S: the scale is tr(S) / |G|^2."""
    generator, rows, size, deviation = np.random.default_rng(0), 32, 400, 0.7
    mean = generator.standard_normal(size) / 20
    noise, found = NoiseScale(rows // parts), []
    for _ in range(300):
        small = mean + deviation * generator.standard_normal((parts, size)) / np.sqrt(rows / parts)
        found.append(noise.add(float(np.linalg.norm(small[0] / parts)), float(np.linalg.norm(small.mean(0))), parts))
    wanted = size * deviation**2 / float(mean @ mean)
    assert np.mean([each for each in found[100:] if each is not None]) == pytest.approx(wanted, rel=0.15)
    assert noise.add(float("nan"), 1.0, parts) is None and noise.add(1.0, 1.0, 1) is None


def test_the_first_micro_batch_tells_its_norm() -> None:
    model, optimizer = GPT(GPTConfig(layers=1, heads=2, width=16, context=8, vocabulary=11)), AdamW(AdamWConfig())
    session = Session(model, optimizer, 2, gradient_accumulation=2)
    graph = StepGraph(model, optimizer, 2, 2, noise=True)
    fields, weights = session.prepared(token_batch(11, 2, 8, 1))
    step = session.engine.build("noise", lambda g: graph.trace_accumulate(g, first=True))
    told = step({**fields, **weights, "seed": 0})["noise_norm"]
    whole = np.concatenate([gradient.ravel() for gradient in session.gradients().values()])
    assert told == pytest.approx(float(np.linalg.norm(whole.astype(np.float64))), rel=1e-6)
    assert "noise_norm" not in session.steps["accumulate_first"]({**fields, **weights, "seed": 0})


# task=lr_finder: what a range test finds in losses with known answers, and the task on whole configs


MLP = ["task=lr_finder", "model=mlp", "data=regression", "device=cpu", "device.threads=1", "lr_finder.out=out"]


def losses_of(rates: Any, steep: float, end: float, noise: float) -> Any:
    """A fall from 4 to 2 whose middle is at `steep`, and a rise without end from `end` on."""
    log = np.log10(rates)
    fall = 4 - 2 / (1 + np.exp(-4 * (log - math.log10(steep))))
    rise = np.where(log > math.log10(end), np.expm1(np.minimum(4 * (log - math.log10(end)), 80)), 0)
    return fall + rise + noise * np.random.default_rng(0).standard_normal(len(log))


@pytest.mark.parametrize(("steep", "end"), [(1e-4, 1e-2), (1e-2, 1.0)])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_rates_of_a_curve_with_known_answers(steep: float, end: float, noise: float) -> None:
    settings = LrFinderConfig(low=1e-6, high=10.0, steps=200)
    rates = [rate_of(settings, step) for step in range(1, 201)]
    assert (rates[0], rates[-1]) == pytest.approx((1e-6, 10.0))
    losses = losses_of(rates, steep, end, noise)
    stopped = next(n for n in range(1, 201) if has_diverged(losses[:n].tolist(), settings))
    assert end < rates[stopped - 1] < 6 * end
    found = find(rates[:stopped], losses[:stopped].tolist())
    assert found["steepest"] == pytest.approx(steep, rel=1.0 if noise else 0.1)
    assert steep < found["lowest"] <= found["last"] and end / 1.5 < found["last"] < 3 * end
    assert found["suggested"] == pytest.approx(math.sqrt(found["steepest"] * found["lowest"]))


def test_noise_alone_is_no_fall_and_no_divergence() -> None:
    settings = LrFinderConfig(steps=200)
    rates = [rate_of(settings, step) for step in range(1, 201)]
    for seed in range(20):
        losses = (1 + 0.2 * np.random.default_rng(seed).standard_normal(200)).tolist()
        assert not any(has_diverged(losses[:n], settings) for n in range(1, 201))
        assert find(rates, losses)["steepest"] is None


@pytest.mark.parametrize(
    "more", [[], ["engine=traced", "optimizer=sgd", "train.gradient_accumulation=2", "parallel.slices=4"]]
)
def test_the_task(capsys: Any, more: list[str]) -> None:
    ramp = ["lr_finder.steps=120", "lr_finder.low=1e-5", "lr_finder.high=1e4"]
    assert main([*MLP, *ramp, "train.batch_size=64", *more]) == 0
    results = json.loads(Path("out/results.json").read_text())
    assert results["diverged"] and 5 < len(results["rates"]) == len(results["losses"]) < 120
    assert 1e-5 < results["steepest"] <= results["suggested"] <= results["lowest"] <= results["last"] < 1e4
    assert Path("out/plot.png").read_bytes().startswith(b"\x89PNG")
    given = " ".join(["model=mlp", "data=regression", "device=cpu", "device.threads=1", "train.batch_size=64", *more])
    assert results["command"] == f"python -m ttrain {given} optimizer.lr={results['suggested']:.1e}"
    assert results["command"] in capsys.readouterr().out
    assert {path.name for path in Path().iterdir()} == {"cache", "chats.jsonl", "out"}, "nothing else is written"
    first = np.array(results["losses"][:10])
    trained = load_config(*given.split(), "optimizer.lr=1e-5", "schedule=constant")
    with Training(trained) as training:  # the same steps by hand, with the test's rates
        data = build.build_dataset(trained)
        by_hand = [
            training.step(data.batch("train", trained.run.seed, 64 * step, 64), lr=rate).loss
            for step, rate in enumerate(results["rates"][:10])
        ]
    np.testing.assert_allclose(first, by_hand, rtol=1e-6)


def test_what_it_refuses(refused: Told) -> None:
    for overrides, said in (
        (["device=null"], "device=null: computes no values."),
        (["lr_finder.low=1", "lr_finder.high=0.1"], "lr_finder.low=1: must be less than lr_finder.high=0.1."),
        (["optimizer.lr=0"], "optimizer.lr=0: task=lr_finder tries rates in proportion to it."),
    ):
        refused(said, *MLP, *overrides)
    Path("out").mkdir()
    Path("out/results.json").touch()
    refused("lr_finder.out=out: holds results already", *MLP)
