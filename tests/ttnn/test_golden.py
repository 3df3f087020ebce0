"""Whole training steps in ttnn's reference functions, the same calls as on a card, against the fp32 CPU engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ttnn", reason="the package ttnn is not installed")

from tests.ttnn.runs import ENGINES, Outcome, adamw, batch, cosine, cpu, golden, gpt, llama, mlp, run, sgd
from ttrain.core.spec import DType
from ttrain.engine.state import State
from ttrain.nn.initialize import initial_values
from ttrain.nn.lora import attach
from ttrain.nn.settings import LoraConfig
from ttrain.train.steps.step_graph import StepGraph

# Odd sizes: no dimension of these is a multiple of a tile but by chance.
MODELS: dict[str, Callable[..., Any]] = {
    "mlp": lambda dtype=DType.FP32: mlp(dtype),
    "mlp of whole tiles": lambda dtype=DType.FP32: mlp(dtype, inputs=None, outputs=None, activation="tanh"),
    "nano-gpt": lambda dtype=DType.FP32: gpt(dtype),
    "nano-gpt with dropout": lambda dtype=DType.FP32: gpt(dtype, dropout=0.1),
    "odd vocabulary and head width": lambda dtype=DType.FP32: gpt(dtype, vocabulary=97, width=96),
    "odd everything, dropout": lambda dtype=DType.FP32: gpt(
        dtype, vocabulary=50, width=40, heads=4, context=20, dropout=0.2, tied=False, bias=False
    ),
    "packed documents": lambda dtype=DType.FP32: gpt(dtype).packing_documents(),
    "llama": lambda dtype=DType.FP32: llama(
        dtype, vocabulary=50, context=20, head_width=12, hidden=70, rotary_share=0.5, window=7
    ),
    "recomputed blocks": lambda dtype=DType.FP32: gpt(dtype, recompute="block", dropout=0.1),
}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": adamw,
    "sgd": sgd,
    "nesterov": lambda: sgd(momentum=0.9, nesterov=True, weight_decay=0.1),
}
# Rounding to bf16 after every op, in units of the last place at the tensor's largest value: peak, and 99th percentile.
GRADIENT_ULP = (4.0, 3.5)
PARAMETER_ULP = 4.0  # a bias starts at zero, so after one step it is its gradient


def check_fp32(actual: Outcome, expected: Outcome) -> None:
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(actual.norms, expected.norms, rtol=1e-3)
    for mine, reference in ((actual.gradients, expected.gradients), (actual.state, expected.state)):
        assert all(cosine(mine[name], value) > 0.9999 for name, value in reference.items())


@pytest.mark.parametrize("model", MODELS)
def test_three_adamw_steps_equal_the_cpu(model: str) -> None:
    check_fp32(run(MODELS[model](), adamw(), golden()), run(MODELS[model](), adamw(), cpu()))


def test_every_switch_of_the_decoders_equals_the_cpu() -> None:
    switches: dict[str, Any] = {"qk_norm": True, "activation": "relu_squared", "logit_cap": 15.0, "tied": False}
    switches |= {"value_embeddings": True, "future_weight": 0.3, "parametrization": "mup", "base_width": 32}
    check_fp32(run(gpt(**switches), adamw(), golden()), run(gpt(**switches), adamw(), cpu()))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_equals_the_cpu(optimizer: str) -> None:
    make = MODELS["mlp of whole tiles"]
    check_fp32(run(make(), OPTIMIZERS[optimizer](), golden()), run(make(), OPTIMIZERS[optimizer](), cpu()))


@pytest.mark.parametrize("engine", ["dynamic", "traced"])
@pytest.mark.parametrize("model", ["mlp", "odd everything, dropout"])
def test_engines_are_bit_equal(model: str, engine: str) -> None:
    one, two = (run(MODELS[model](), adamw(), golden(), engine=name, steps=4) for name in ("static", engine))
    assert one.losses == two.losses
    assert all(np.array_equal(one.state[name], two.state[name]) for name in one.state)


def adapted(compute: DType = DType.FP32, **sizes: Any) -> Any:
    """Frozen in the dtype that layers read, with adapters that drop inputs."""
    model = gpt(compute, **sizes)
    attach(model, LoraConfig(rank=8, dropout=0.1))
    for parameter in model.parameters().values():
        parameter.master = DType.FP32 if parameter.trainable else compute
    return model


@pytest.mark.parametrize("hosted", [[], ["embedding", "blocks.0"]], ids=["on the card", "partly in host memory"])
def test_adapters_of_a_frozen_model_equal_the_cpu(hosted: list[str]) -> None:
    expected = run(adapted(), adamw(), cpu())
    actual = run(adapted(), adamw(), golden(host_resident=hosted))
    check_fp32(actual, expected)
    captured = run(adapted(), adamw(), golden(host_resident=hosted), engine="traced")
    assert captured.losses == actual.losses
    narrow = run(adapted(DType.BF16), adamw(), golden(host_resident=hosted))
    np.testing.assert_allclose(narrow.losses, expected.losses, rtol=5e-3)


def ulps(actual: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Peak and 99th percentile of the error, in bf16 units of the last place at the largest value expected."""
    top = float(np.abs(expected).max())
    unit = 2.0 ** (np.floor(np.log2(top)) - 7) if top else 1.0
    errors = np.abs(actual.astype(np.float64) - expected) / unit
    return float(errors.max()), float(np.quantile(errors, 0.99))


@pytest.mark.parametrize("fused", [True, False], ids=["fused kernels", "plain kernels"])
@pytest.mark.parametrize("model", [name for name in MODELS if name != "mlp"])
def test_bf16_stays_within_its_rounding(model: str, fused: bool) -> None:
    """One step; relu is left out, because units near zero flip."""
    expected = run(MODELS[model](), sgd(), cpu(), steps=1)
    actual = run(MODELS[model](DType.BF16), sgd(), golden(fused), steps=1)
    assert actual.losses[0] == pytest.approx(expected.losses[0], rel=2e-3)
    for name, value in expected.gradients.items():
        peak, most = ulps(actual.gradients[name], value)
        assert (peak <= GRADIENT_ULP[0] and most <= GRADIENT_ULP[1]) or np.abs(value).max() < 1e-7, (name, peak, most)
    for name, value in expected.state.items():
        peak, _ = ulps(actual.state[name], value)
        assert peak <= PARAMETER_ULP, (name, peak)


LR = 0.01  # of the first step in tests.ttnn.runs
CLEAR = 8.0  # units in the last place of a gradient beyond which its sign is certain
MOMENT_ULP = 5.0  # of the second moment, the square of a gradient
LARGEST_MOVE = 2.01 * LR  # AdamW moves by lr in the direction of the sign, so a flipped sign costs two


@pytest.mark.parametrize("fused", [True, False], ids=["fused kernels", "plain kernels"])
@pytest.mark.parametrize("model", [name for name in MODELS if name not in ("mlp", "recomputed blocks", "llama")])
def test_bf16_with_adamw_stays_within_its_rounding(model: str, fused: bool) -> None:
    """The first update divides a gradient by its size: where the gradient is clear of zero it moves as in fp32."""
    check_adamw(
        run(MODELS[model](DType.BF16), adamw(), golden(fused), steps=1), run(MODELS[model](), adamw(), cpu(), steps=1)
    )


def check_adamw(actual: Outcome, expected: Outcome) -> None:
    assert actual.losses[0] == pytest.approx(expected.losses[0], rel=2e-3)
    for name, gradient in expected.gradients.items():
        peak, most = ulps(actual.gradients[name], gradient)
        top = float(np.abs(gradient).max())
        assert (peak <= GRADIENT_ULP[0] and most <= GRADIENT_ULP[1]) or top < 1e-7, (name, peak, most)
        moved = np.abs(actual.state[name].astype(np.float64) - expected.state[name])
        clear = np.abs(gradient) > CLEAR * 2.0 ** (np.floor(np.log2(max(top, 1e-30))) - 7)
        assert moved[clear].max(initial=0) < 2e-4 * LR and moved.max() < LARGEST_MOVE, name
        for moment in ("first_moment", "second_moment"):
            value = expected.state[f"{name}/{moment}"]
            assert ulps(actual.state[f"{name}/{moment}"], value)[0] <= MOMENT_ULP or top < 1e-7, (name, moment)


@pytest.mark.parametrize("width", [40, 64, 96])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_bf16_with_relu_stays_within_its_rounding(optimizer: str, width: int) -> None:
    """Of one example, whose units lie clear of zero: a unit that rounds across it would be off by all of its output."""
    make = OPTIMIZERS[optimizer]
    expected = run(mlp(width=width, activation="relu"), make(), cpu(), steps=1, rows=1)
    actual = run(mlp(DType.BF16, width=width, activation="relu"), make(), golden(), steps=1, rows=1)
    if optimizer == "adamw":
        check_adamw(actual, expected)
        return
    assert actual.losses[0] == pytest.approx(expected.losses[0], rel=2e-3)
    for name, value in expected.gradients.items():
        assert ulps(actual.gradients[name], value)[0] <= GRADIENT_ULP[0], name
        assert ulps(actual.state[name], expected.state[name])[0] <= PARAMETER_ULP, name


def test_pure_bf16_trains() -> None:
    losses = {}
    for master in (DType.FP32, DType.BF16):
        model = gpt(DType.BF16)
        for parameter in model.parameters().values():
            parameter.master = master
        losses[master] = run(model, adamw(), golden(), steps=4).losses
    np.testing.assert_allclose(losses[DType.BF16], losses[DType.FP32], rtol=2e-2)


def test_captured_and_launched_pure_bf16_updates_agree() -> None:
    """The fused update takes its rates as numbers, so a captured step computes it otherwise."""
    results = []
    for engine in ("static", "traced"):
        model = gpt(DType.BF16)
        for parameter in model.parameters().values():
            parameter.master = DType.BF16
        results.append(run(model, adamw(), golden(), engine=engine, steps=3).losses)
    np.testing.assert_allclose(results[0], results[1], rtol=2e-2)


def test_masks_move_with_the_seed() -> None:
    """A replay must not repeat yesterday's mask: losses of a model that does not learn differ from step to step."""
    losses = []
    for engine in ("static", "traced"):
        outcome = run(gpt(dropout=0.5), sgd(lr=0.0), golden(), engine=engine, steps=5)
        losses.append(outcome.losses)
        assert outcome.engine.counters.captures == (engine == "traced")
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 5


@pytest.mark.parametrize("engine", ["dynamic", "static", "traced"])
def test_evaluation_and_sampling_between_steps(engine: str) -> None:
    """Steps of one engine keep their tensors apart: whoever runs in between, training goes on as without."""
    outcomes = []
    for device, kind in ((cpu(), "static"), (golden(), engine)):
        model = gpt(vocabulary=50, width=40, context=20)
        if device.uniform_compute:
            model.follow_compute()
        graph = StepGraph(model, adamw(), rows=2)
        state = State(device, graph.state_tensors())
        for path, value in initial_values(model, 7).items():
            state.write(path, value)
        runner = ENGINES[kind](device, state)
        traces = {"train": graph.trace_train, "evaluate": graph.trace_evaluate, "logits": graph.trace_logits}
        steps = {name: runner.build(name, trace) for name, trace in traces.items()}
        seen = []
        for number in range(1, 5):
            given = batch(model, 2, number)
            weight = {"loss_weight": 1 / 37}
            seen.append(steps["train"]({**given, **weight, "seed": 1, "lr": 0.01, "step": number})["loss"])
            seen.append(steps["evaluate"]({**given, **weight})["loss"])
            seen.append(float(steps["logits"]({"tokens": given["tokens"][:1], "position": number})["logits"].sum()))
        outcomes.append(seen)
    np.testing.assert_allclose(outcomes[1], outcomes[0], rtol=1e-4, atol=1e-4)
