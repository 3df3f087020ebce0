"""Optimizers that torch lacks, or has in another form, and averages of weights, beside formulas on every engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.native.conftest import require_compiler
from tests.optim.updates import Parameters, Updates, gradient
from tests.ttnn.runs import agillm, golden, gpt, llama, mlp
from ttrain.config.build import made
from ttrain.core.spec import DType
from ttrain.graph import Graph, Kind
from ttrain.graph.verify import verify
from ttrain.nn.initialize import Normal
from ttrain.nn.layers import Embedding, LayerNorm, Linear
from ttrain.nn.module import Module, Role
from ttrain.optim.groups import learning_rates
from ttrain.optim.settings import (
    AdafactorConfig,
    AdamWConfig,
    LionConfig,
    MuonConfig,
    NorMuonConfig,
    ScheduleFreeConfig,
)
from ttrain.parallel.ranks import Ranks
from ttrain.train.steps.step_graph import StepGraph

PLACES = ("cpu dynamic", "cpu static", "cpu traced", "golden static")
STEPS = 20
Tensor = torch.Tensor


class Layers(Module):
    """A model with a table, a wide and a tall matrix with biases, a norm, a head."""

    def __init__(self) -> None:
        self.config, self.compute = None, DType.FP32
        self.embedding = Embedding(11, 8, Normal(1.0))
        self.wide, self.tall = Linear(20, 8), Linear(8, 24)
        self.packed = Linear(8, 24)
        self.packed.weight.parts = 3
        self.norm = LayerNorm(8)
        self.head = Linear(8, 11, role=Role.OUTPUT)
        self.name_parameters()


Formula = Callable[[str, Tensor, Tensor, dict[str, Tensor], float, int], Tensor]  # -> the new parameter


def decayed(p: Tensor, lr: float, weight_decay: float) -> Tensor:
    return p * (1 - lr * weight_decay * (p.dim() > 1))


def lion(name: str, p: Tensor, g: Tensor, kept: dict[str, Tensor], lr: float, step: int) -> Tensor:
    m = kept.get("m", torch.zeros_like(p))
    kept["m"] = 0.99 * m + 0.01 * g
    return decayed(p, lr, 0.5) - lr * (0.9 * m + 0.1 * g).sign()


def adam(g: Tensor, kept: dict[str, Tensor], step: int) -> Tensor:
    """The change of AdamW at a rate of 1."""
    m, v = (kept.get(key, torch.zeros_like(g)) for key in "mv")
    kept |= {"m": 0.9 * m + 0.1 * g, "v": 0.95 * v + 0.05 * g**2}
    return kept["m"] / (1 - 0.9**step) / ((kept["v"] / (1 - 0.95**step)).sqrt() + 1e-8)


def cautious(name: str, p: Tensor, g: Tensor, kept: dict[str, Tensor], lr: float, step: int) -> Tensor:
    change = adam(g, kept, step)
    agreeing = (change * p >= 0) & (p.dim() > 1)
    return p - lr * (change + 0.5 * torch.where(agreeing, p, 0))


def adamw(name: str, p: Tensor, g: Tensor, kept: dict[str, Tensor], lr: float, step: int) -> Tensor:
    return decayed(p, lr, 0.5) - lr * adam(g, kept, step)


def newton_schulz(x: Tensor) -> Tensor:
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def muon_direction(name: str, p: Tensor, g: Tensor, kept: dict[str, Tensor]) -> Tensor:
    kept["m"] = 0.95 * kept.get("m", torch.zeros_like(p)) + 0.05 * g
    look = 0.95 * kept["m"] + 0.05 * g
    parts = look.split(len(p) // 3) if name == "packed.weight" else [look]
    return torch.cat([newton_schulz(part) for part in parts])


def muon(name: str, p: Tensor, g: Tensor, kept: dict[str, Tensor], lr: float, step: int) -> Tensor:
    if name not in HIDDEN:
        return adamw(name, p, g, kept, lr / 2, step)
    rows = len(p) // 3 if name == "packed.weight" else len(p)
    return decayed(p, lr, 0.5) - lr * 0.2 * max(rows, p.shape[1]) ** 0.5 * muon_direction(name, p, g, kept)


def normuon(name: str, p: Tensor, g: Tensor, kept: dict[str, Tensor], lr: float, step: int) -> Tensor:
    if name not in HIDDEN:
        return adamw(name, p, g, kept, lr, step)
    o = muon_direction(name, p, g, kept)
    kept["v"] = 0.95 * kept.get("v", torch.zeros(len(p), 1)) + 0.05 * (o**2).mean(1, keepdim=True)
    o = o / (kept["v"].sqrt() + 1e-8)
    parts = o.split(len(p) // 3) if name == "packed.weight" else [o]
    return decayed(p, lr, 0.5) - lr * torch.cat([0.2 * part.numel() ** 0.5 * part / part.norm() for part in parts])


HIDDEN = ("wide.weight", "tall.weight", "packed.weight")


def rate(step: int) -> float:
    return 1 / (1 + step % 7)


def schedule_free(name: str, p: Tensor, g: Tensor, kept: dict[str, Tensor], lr: float, step: int) -> Tensor:
    x, z, v = (kept.get(key, start) for key, start in (("x", p), ("z", p), ("v", torch.zeros_like(p))))
    v = 0.999 * v + 0.001 * g**2
    z = z - lr * (g / ((v / (1 - 0.999**step)).sqrt() + 1e-8) + 0.5 * (p.dim() > 1) * p)
    share = 1 / max(1, step - 3)
    x = (1 - share) * x + share * z
    kept |= {"x": x, "z": z, "v": v}
    return 0.1 * z + 0.9 * x


def torch_adafactor(name: str, p: Tensor, g: Tensor, kept: dict[str, Any], lr: float, step: int) -> Tensor:
    leaf = kept.setdefault("leaf", p.clone().requires_grad_(True))
    decay = 0.5 * (p.dim() > 1)
    made = kept.setdefault("made", torch.optim.Adafactor([leaf], eps=(1e-15, 1e-3), weight_decay=decay))
    made.param_groups[0]["lr"], leaf.grad = lr, g
    made.step()
    return leaf.detach().clone()


TABLE: dict[str, tuple[Any, Formula]] = {
    "lion": (LionConfig(lr=0.01, weight_decay=0.5), lion),
    "muon": (MuonConfig(lr=0.01, adamw_lr=0.005, weight_decay=0.5), muon),
    "normuon": (NorMuonConfig(lr=0.01, weight_decay=0.5), normuon),
    "adafactor": (AdafactorConfig(lr=0.3, weight_decay=0.5), torch_adafactor),
    "schedule_free": (ScheduleFreeConfig(lr=0.01, weight_decay=0.5, average_after=3), schedule_free),
    "cautious": (AdamWConfig(lr=0.01, weight_decay=0.5, cautious=True), cautious),
}


def updates(place: str, optimizer: Any, model: Any, **options: Any) -> Updates:
    device, engine = place.split()
    if engine == "traced":
        require_compiler()
    return Updates(model, optimizer, engine, golden() if device == "golden" else None, rate=rate, **options)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", TABLE)
def test_twenty_updates_are_those_of_the_formula(name: str, place: str) -> None:
    config, formula = TABLE[name]
    optimizer = made("optimizer", replace(config, clip_norm=1.0))
    run = updates(place, optimizer, Layers())
    shapes = {path: parameter.shape for path, parameter in run.model.parameters().items()}
    values = {path: torch.from_numpy(gradient(path, shape, 99)).double() for path, shape in shapes.items()}
    kept: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for step in range(1, STEPS + 1):
        run.advance(step)
        gradients = {path: torch.from_numpy(gradient(path, shape, step)).double() for path, shape in shapes.items()}
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        lr = optimizer.config.lr * rate(step)
        for path, p in values.items():
            values[path] = formula(path, p, gradients[path] / (norm + 1e-6), kept[path], lr, step)
    for path, wanted in values.items():
        scale = float(wanted.abs().max())
        np.testing.assert_allclose(run.state.read(path), wanted.numpy(), rtol=0, atol=1e-5 * scale, err_msg=path)


def test_rows_that_pad_count_for_nothing_in_adafactor() -> None:
    runs = []
    for padding in (0, 5):
        model = Layers()
        for parameter in (model.embedding.weight, model.head.weight, model.head.bias):
            assert parameter is not None
            parameter.padding = padding
        runs.append(updates("cpu static", made("optimizer", AdafactorConfig(lr=0.3)), model))
        for step in range(1, 4):
            runs[-1].advance(step)
    for name in runs[0].state.names(Kind.PARAMETER, Kind.OPTIMIZER):
        plain, padded = (run.state.read(name) for run in runs)
        np.testing.assert_allclose(plain, padded, rtol=1e-5, atol=1e-6, err_msg=name)


def test_muon_takes_the_hidden_matrices_of_every_model() -> None:
    models: dict[Any, set[str]] = {
        gpt(layers=1): {"qkv", "projection", "up", "down"},
        gpt(layers=1, tied=False): {"qkv", "projection", "up", "down"},
        llama(layers=1): {"query", "key", "value", "projection", "gate", "up", "down"},
        mlp(layers=3): {"1"},
        agillm(layers=1, width=32, heads=2, rank=8, context=16, vocabulary=40): {
            "query", "key", "value", "projection", "rank_matrix", "up", "down",
        },
    }  # fmt: skip
    for model, expected in models.items():
        rules = {path: made("optimizer", MuonConfig()).rule(p, True) for path, p in model.parameters().items()}
        assert {rule.name for rule in rules.values()} == {"muon", "adamw"}
        names = {path.removesuffix(".weight").rpartition(".")[2] for path, rule in rules.items() if rule.whole}
        assert names == expected


def test_what_adamw_updates_has_a_rate_of_its_own() -> None:
    config = MuonConfig(lr=0.02, adamw_lr=0.003, lr_multipliers={"head": 0.5, "wide": 2.0})
    rates = learning_rates(Layers().parameters(), config, lambda step: 0.1)(1)
    wanted = {"lr": 0.002, "lr/wide": 0.004, "lr/adamw": 0.0003, "lr/adamw/head": 0.00015, "lr/adamw/wide": 0.0006}
    assert rates == pytest.approx(wanted) and next(iter(rates)) == "lr"


EMA = 0.75  # an exponential mean from step 4 on


def read_weights(run: Any, slot: str = "") -> dict[str, np.ndarray]:
    return {path: run.state.read(path + slot) for path in run.model.parameters()}


@pytest.mark.parametrize(("place", "compute"), [*((place, DType.FP32) for place in PLACES), (PLACES[1], DType.BF16)])
def test_an_average_is_the_mean_until_it_is_exponential(place: str, compute: DType) -> None:
    """The average is of the master weights, in every dtype that layers read."""
    model = Layers()
    model.compute = compute
    run = updates(place, made("optimizer", MuonConfig()), model, ema=EMA)
    wanted: dict[str, np.ndarray] = {}
    for step in range(1, 9):
        run.advance(step)
        for path, value in read_weights(run).items():
            share = max(1 - EMA, 1 / step)
            wanted[path] = value if step == 1 else wanted[path] + share * (value - wanted[path])
    for path, value in read_weights(run, "/average").items():
        np.testing.assert_allclose(value, wanted[path], rtol=1e-6, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("place", PLACES)
def test_weights_and_averages_take_each_others_place_bit_for_bit(place: str) -> None:
    for optimizer, ema in ((made("optimizer", AdamWConfig()), EMA), (made("optimizer", ScheduleFreeConfig()), None)):
        run = updates(place, optimizer, Layers(), ema=ema)
        for step in range(1, 4):
            run.advance(step)
        before = read_weights(run), read_weights(run, "/average")
        assert all(not np.array_equal(before[0][path], before[1][path]) for path in before[0])
        swap = run.engine.build("swap", run.graph.trace_swap)
        for places in (("/average", ""), ("", "/average")):
            swap({})
            for place_of, values in zip(places, before, strict=True):
                for path, value in read_weights(run, place_of).items():
                    assert np.array_equal(value, values[path]), path


def test_copies_that_layers_read_are_those_of_the_averages_meanwhile() -> None:
    run = Updates(Parameters(DType.BF16), made("optimizer", AdamWConfig()), ema=EMA)
    model, state = run.model, run.state
    for path, parameter in model.parameters().items():
        state.write(path, gradient(path, parameter.shape, 1))
        state.write(f"{path}/average", gradient(path, parameter.shape, 2))
    swap = run.engine.build("swap", run.graph.trace_swap)
    for number in (2, 1):
        swap({})
        for path, parameter in model.parameters().items():
            if parameter.has_copy(DType.BF16):
                wanted = torch.from_numpy(gradient(path, parameter.shape, number)).bfloat16().float()
                assert np.array_equal(state.read(f"{path}/compute"), wanted.numpy())


def test_they_cost_nothing_where_they_are_off() -> None:
    traced = {}
    for ema in (None, EMA):
        graph = Graph()
        steps = StepGraph(Layers(), made("optimizer", AdamWConfig()), rows=1, gradient_accumulation=2, ema=ema)
        steps.trace_update(graph)
        averages = [t for t in steps.state_tensors() if t.name.endswith("/average")]
        traced[ema] = sum(node.op.name == "update" for node in graph.nodes), len(averages)
        assert {t.kind for t in averages} <= {Kind.OPTIMIZER}
    assert traced[None] == (2, 0) and traced[EMA] == (4, len(Layers().parameters()))


def test_a_rank_averages_its_share_before_others_overwrite_it() -> None:
    graph = Graph()
    steps = StepGraph(Layers(), made("optimizer", MuonConfig()), rows=1, ema=EMA, ranks=Ranks(0, 2, 2, shards=True))
    steps.trace_update(graph)
    verify(graph, "of two ranks")
    averaged = {t.name: t for t in steps.state_tensors() if t.name.endswith("/average")}
    assert len(averaged) == len(Layers().parameters()) and not all(t.parts for t in averaged.values())
