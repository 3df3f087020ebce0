"""Whole training steps in ttnn's reference functions, the same calls as on a card, against the fp32 CPU engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ttnn", reason="the package ttnn is not installed")

from tests.models.session import Session
from tests.ttnn.runs import Outcome, adamw, batch, cosine, cpu, golden, gpt, llama, mlp, run, same, sgd
from ttrain.core.spec import DType
from ttrain.models.agillm import AGILLM
from ttrain.models.settings import AGILLMConfig
from ttrain.nn.lora import attach
from ttrain.nn.settings import LoraConfig


@dataclass(frozen=True)
class Case:
    """A model, by the dtype that it computes in, and how it is trained."""

    model: Callable[..., Any]
    optimizer: Callable[[], Any] = adamw
    hosted: list[str] = field(default_factory=list)
    steps: int = 2

    def run(self, device: Any, dtype: DType = DType.FP32, **how: Any) -> Outcome:
        return run(self.model(dtype), self.optimizer(), device, **{"steps": self.steps, **how})

    def golden(self, dtype: DType = DType.FP32, fused: bool = True, **how: Any) -> Outcome:
        return self.run(golden(fused, host_resident=self.hosted), dtype, **how)


def of(make: Callable[..., Any], **sizes: Any) -> Callable[[DType], Any]:
    return lambda dtype: make(dtype, **sizes)


def agillm(compute: DType, **changes: Any) -> AGILLM:
    sizes = {"layers": 2, "heads": 4, "width": 64, "rank": 48, "context": 32, "vocabulary": 65, "pad_vocabulary": 32}
    return AGILLM(AGILLMConfig(**{**sizes, **changes}), compute)


def adapted(compute: DType) -> Any:
    """Frozen in the dtype that layers read, with adapters that drop inputs."""
    model = gpt(compute)
    attach(model, LoraConfig(rank=8, dropout=0.1))
    for parameter in model.parameters().values():
        parameter.master = DType.FP32 if parameter.trainable else compute
    return model


TILES = of(mlp, inputs=None, outputs=None, activation="tanh")
SWITCHES = {
    "qk_norm": True, "activation": "relu_squared", "logit_cap": 15.0, "tied": False, "value_embeddings": True,
    "future_weight": 0.3, "parametrization": "mup", "base_width": 32,
}  # fmt: skip
ODD = {"tied": False, "vocabulary": 97, "width": 40, "heads": 4, "context": 20, "dropout": 0.1, "recompute": "block"}
ONE_CHUNK = {"context": 96, "vocabulary": 90_000, "width": 16, "heads": 1, "rank": 16, "layers": 1, "dropout": 0.0}
EXPERTS: dict[str, Any] = {"experts": 4, "experts_per_token": 2, "expert_width": 24}
# Odd sizes: no dimension of these is a multiple of a tile but by chance.
CASES = {
    "mlp": Case(mlp),
    "mlp of whole tiles": Case(TILES),
    "sgd": Case(TILES, sgd),
    "nesterov": Case(TILES, lambda: sgd(momentum=0.9, nesterov=True, weight_decay=0.1)),
    "nano-gpt": Case(gpt),
    "nano-gpt with dropout": Case(of(gpt, dropout=0.1)),
    "odd vocabulary and head width": Case(of(gpt, vocabulary=97, width=96)),
    "odd everything": Case(of(gpt, vocabulary=50, width=40, heads=4, context=20, dropout=0.2, tied=False, bias=False)),
    "every switch": Case(of(gpt, **SWITCHES)),
    "packed documents": Case(lambda dtype: gpt(dtype).packing_documents()),
    "llama": Case(of(llama, vocabulary=50, context=20, head_width=12, hidden=70, rotary_share=0.5, window=7)),
    "mixture of experts": Case(of(llama, **EXPERTS)),
    "mixture, odd": Case(of(llama, **EXPERTS, vocabulary=50, width=40, context=21, recompute="block")),
    "mixture, biased router": Case(of(llama, **EXPERTS, router="biased", shared_experts=1), sgd),
    "recomputed blocks": Case(of(gpt, recompute="block", dropout=0.1)),
    "adapters": Case(adapted),
    "agillm, folded": Case(agillm, sgd),
    "agillm, unfolded": Case(of(agillm, fold="off"), sgd),
    "agillm, rank below a tile": Case(of(agillm, heads=8, rank=3), sgd),
    "agillm, standard alibi": Case(of(agillm, alibi="standard", context=21), sgd),
    "agillm, ar only, tied": Case(of(agillm, objective="ar_only", tied=True, recompute="block"), sgd),
    "agillm, windows": Case(of(agillm, sat_max_windows=3, context=40, pad_vocabulary=None), sgd),
    "agillm, 24 heads of 32": Case(of(agillm, heads=24, width=768, rank=96, layers=1), sgd, steps=1),
    "agillm, chunks of the vocabulary": Case(of(agillm, **ONE_CHUNK), steps=1),
    "hosted, tied": Case(gpt, hosted=["embedding"]),
    "hosted, odd": Case(of(gpt, **ODD), hosted=["embedding", "head"]),
    "hosted first block": Case(of(gpt, tied=False), hosted=["embedding", "blocks.0", "norm"]),
    "hosted adapters": Case(adapted, hosted=["embedding", "blocks.0"]),
    "hosted heads of agillm": Case(agillm, hosted=["embedding", "head"]),
}
# Rounding to bf16 after every op, in units of the last place at the tensor's largest value: peak, and 99th percentile.
GRADIENT_ULP = (4.0, 3.5)
PARAMETER_ULP = 4.0  # a bias starts at zero, so after one step it is its gradient


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_the_cpu(name: str) -> None:
    case = CASES[name]
    actual, expected = case.golden(), case.run(cpu())
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(actual.norms, expected.norms, rtol=1e-3)
    for mine, reference in ((actual.gradients, expected.gradients), (actual.state, expected.state)):
        assert mine.keys() == reference.keys()
        assert all(cosine(mine[path], value) > 0.9999 for path, value in reference.items())
    on_host = {path for path in actual.engine.state.names() if actual.engine.state.on_host(path)}
    assert bool(on_host) is bool(case.hosted)


@pytest.mark.parametrize(
    "name", ["mlp", "odd everything", "agillm, folded", "adapters", "hosted, odd", "hosted heads of agillm"]
)
def test_engines_are_bit_equal(name: str) -> None:
    """The host's part between two parts of the card is not captured, so there are three captures."""
    case = CASES[name]
    static, dynamic, traced = (case.golden(engine=each, steps=2) for each in ("static", "dynamic", "traced"))
    assert same(static, dynamic) and same(static, traced)
    assert (static.engine.counters.captures, dynamic.engine.counters.captures) == (0, 0)
    assert traced.engine.counters.captures == (3 if case.hosted else 1)


def ulps(actual: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Peak and 99th percentile of the error, in bf16 units of the last place at the largest value expected."""
    top = float(np.abs(expected).max())
    unit = 2.0 ** (np.floor(np.log2(top)) - 7) if top else 1.0
    errors = np.abs(actual.astype(np.float64) - expected) / unit
    return float(errors.max()), float(np.quantile(errors, 0.99))


@pytest.mark.parametrize("fused", [True, False], ids=["fused kernels", "plain kernels"])
@pytest.mark.parametrize(
    "name",
    ["mlp of whole tiles", "nano-gpt with dropout", "odd everything", "packed documents", "llama", "recomputed blocks"],
)
def test_bf16_stays_within_its_rounding(name: str, fused: bool) -> None:
    """One step; relu is left out, because units near zero flip."""
    case = Case(CASES[name].model, sgd, steps=1)
    expected, actual = case.run(cpu()), case.golden(DType.BF16, fused)
    assert actual.losses[0] == pytest.approx(expected.losses[0], rel=2e-3)
    for path, value in expected.gradients.items():
        peak, most = ulps(actual.gradients[path], value)
        assert (peak <= GRADIENT_ULP[0] and most <= GRADIENT_ULP[1]) or np.abs(value).max() < 1e-7, (path, peak, most)
    for path, value in expected.state.items():
        peak, _ = ulps(actual.state[path], value)
        assert peak <= PARAMETER_ULP, (path, peak)


@pytest.mark.parametrize("name", ["adapters", "hosted adapters", "hosted, tied", "agillm, folded"])
def test_bf16_with_fp32_masters_trains_alike(name: str) -> None:
    case = CASES[name]
    np.testing.assert_allclose(case.golden(DType.BF16).losses, case.run(cpu()).losses, rtol=5e-3)


def evaluated(model: Any, steps: Any, number: int) -> list[float]:
    """Steps of one engine keep their tensors apart: whoever runs in between, training goes on as without."""
    given, weight = batch(model, 2, number), {"loss_weight": 1 / 37}
    trained = steps["train"]({**given, **weight, "seed": 1, "lr": 0.01, "step": number})["loss"]
    loss = steps["evaluate"]({**given, **weight})["loss"]
    scores = steps["logits"]({"tokens": given["tokens"][:1], "position": number})["logits"]
    return [trained, loss, float(np.abs(scores).sum())]


def accumulated(model: Any, steps: Any, number: int) -> list[float]:
    """Gradients are summed in host memory too, and the norm is over both sides."""
    losses = [
        steps[name]({**batch(model, 2, 2 * number + part), "loss_weight": 1 / 74, "seed": number})["loss"]
        for part, name in enumerate(("accumulate_first", "accumulate_next"))
    ]
    norm = steps["norm"]({})["grad_norm"]
    steps["update"]({"lr": 0.01, "step": number, "grad_norm": norm})
    return [*losses, norm]


@pytest.mark.parametrize("engine", ["dynamic", "static", "traced"])
@pytest.mark.parametrize(
    ("take", "how", "hosted"),
    [
        (evaluated, {}, []),
        (evaluated, {}, ["embedding", "head"]),
        (accumulated, {"gradient_accumulation": 2, "guarded": True}, ["embedding"]),
    ],
    ids=["evaluation on the card", "evaluation partly in host memory", "micro-batches partly in host memory"],
)
def test_other_steps_than_training(engine: str, take: Any, how: dict[str, Any], hosted: list[str]) -> None:
    outcomes = []
    for device, kind in ((cpu(), "static"), (golden(host_resident=hosted), engine)):
        model = gpt(tied=take is accumulated, vocabulary=50, width=40, context=20, layers=1)
        run = Session(model, adamw(), 2, engine=kind, device=device, **how)
        others = {"evaluate": run.graph.trace_evaluate, "logits": run.graph.trace_logits}
        steps = run.steps | {name: run.engine.build(name, trace) for name, trace in others.items()}
        outcomes.append([take(model, steps, number) for number in range(1, 4)])
    np.testing.assert_allclose(outcomes[1], outcomes[0], rtol=1e-4)
