"""An attention bias that nobody wrote a kernel for, on heads that share keys: one function over ops."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import forked
from tests.models.session import initial_values
from tests.native.conftest import require_compiler
from tests.ttnn.runs import cpu, golden, run, sgd, step_inputs
from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import REGISTRY, Graph, Value, composite
from ttrain.models.base import LOSS_WEIGHT, SCALAR
from ttrain.nn.initialize import Normal
from ttrain.nn.layers import Linear
from ttrain.nn.module import Buffer, Module, Parameter, use, use_buffer
from ttrain.ops.update import Rule
from ttrain.optim.adafactor import Adafactor
from ttrain.optim.groups import orthogonalised
from ttrain.optim.muon import NorMuon
from ttrain.optim.settings import AdafactorConfig, NorMuonConfig

PLACES = ("cpu dynamic", "cpu static", "cpu traced", "golden dynamic", "golden static")
HEADS, KV_HEADS = 4, 2
ROWS, TIME, WIDTH, STEPS = 2, 9, 24, 3


def relative_bias_of_test(distances: Value, table: Value) -> Value:
    """bias [1, H, T, T]: table [distances, H] at distances int64 [T, T] (Raffel et al., 2020)."""
    time, heads = distances.shape[0], table.shape[1]
    by_pair = ops.reshape(ops.embedding(distances, table), (time * time, heads))
    return ops.reshape(ops.transpose(by_pair), (1, heads, time, time))


def distances(shape: tuple[int, ...]) -> np.ndarray:
    """Row of the table for each query and key."""
    query, key = np.indices(shape)
    return key - query + TIME - 1


class Biased(Module):
    """Squared error of causal attention over a window of 6 keys, each with a learned bias for its distance."""

    config: Any = None
    compute = DType.FP32

    def __init__(self) -> None:
        self.query, self.projection = Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH)
        self.key, self.value = (Linear(WIDTH, WIDTH // HEADS * KV_HEADS) for _ in range(2))
        self.table = Parameter((2 * TIME - 1, HEADS), Normal(1.0))
        self.distances = Buffer((TIME, TIME), distances, dtype=DType.INT64)
        self.name_parameters()

    def batch_specs(self, rows: int) -> dict[str, TensorSpec]:
        return {name: TensorSpec((rows, TIME, WIDTH)) for name in ("inputs", "targets")}

    def loss(self, graph: Graph, rows: int, training: bool) -> Value:
        x, targets = (graph.input(name, spec) for name, spec in self.batch_specs(rows).items())
        table, distances = use(graph, self.table, x.spec.dtype), use_buffer(graph, self.distances)
        bias = graph.apply("relative_bias_of_test", distances, table)
        given = (self.query(x), self.key(x), self.value(x))
        mixed = ops.attention(*given, heads=HEADS, kv_heads=KV_HEADS, bias=bias, window=6)
        return ops.squared_error(self.projection(mixed), targets, graph.input(LOSS_WEIGHT, SCALAR))


class Whole:
    """Rules of whole matrices: NorMuon for hidden ones, Adafactor for the rest."""

    def __init__(self) -> None:
        self.config = NorMuonConfig()

    def rule(self, parameter: Parameter, decays: bool) -> Rule:
        hidden = orthogonalised(parameter)
        return (NorMuon(self.config) if hidden else Adafactor(AdafactorConfig())).rule(parameter, decays)


def declare() -> None:
    composite(relative_bias_of_test)


def model() -> Any:
    return Biased()


optimizer = Whole  # on the mocked board


@pytest.fixture(autouse=True)
def _declared() -> Iterator[None]:
    """The op is gone afterwards: other tests run every op of the registry."""
    before = dict(REGISTRY)
    declare()
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def in_torch(parameters: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, parameters[f"{name}.weight"], parameters[f"{name}.bias"])

    def by_heads(name: str, heads: int) -> torch.Tensor:
        split = linear(name, x).unflatten(-1, (heads, WIDTH // HEADS)).transpose(1, 2)
        return split.repeat_interleave(HEADS // heads, 1)

    bias = parameters["table"][torch.from_numpy(distances((TIME, TIME)))].permute(2, 0, 1)[None]
    behind = torch.arange(TIME)[:, None] - torch.arange(TIME)
    bias = bias.masked_fill((behind < 0) | (behind >= 6), float("-inf"))
    q, k, v = by_heads("query", HEADS), by_heads("key", KV_HEADS), by_heads("value", KV_HEADS)
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)
    return linear("projection", mixed.transpose(1, 2).flatten(2))


class _AnyInputs:
    inputs: tuple[str, ...] = ()


@pytest.mark.parametrize("place", PLACES)
def test_it_trains_as_torch_does(place: str) -> None:
    """fp32 beside plain descent in fp64, over STEPS steps."""
    device, engine = place.split()
    if device == "golden":
        pytest.importorskip("ttnn", reason="the package ttnn is not installed")
    elif engine == "traced":
        require_compiler()
    descent = sgd(momentum=0, clip_norm=None, weight_decay=0)
    opened = golden() if device == "golden" else cpu()
    outcome = run(model(), descent, opened, engine=engine, rows=ROWS, steps=STEPS)

    first = initial_values(model(), 7)
    parameters = {name: torch.from_numpy(np.array(value)).double().requires_grad_() for name, value in first.items()}
    losses = []
    for step in range(1, STEPS + 1):
        given = step_inputs(model(), _AnyInputs(), ROWS, step)
        x, targets = (torch.from_numpy(given[name]).double() for name in ("inputs", "targets"))
        loss = float(given[LOSS_WEIGHT]) * ((in_torch(parameters, x) - targets) ** 2).sum()
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for parameter, gradient in zip(parameters.values(), gradients, strict=True):
                parameter -= float(given["lr"]) * gradient
    np.testing.assert_allclose(outcome.losses, losses, rtol=1e-4)
    for name, wanted in parameters.items():
        scale = float(wanted.abs().max())
        np.testing.assert_allclose(outcome.state[name], wanted.detach(), rtol=0, atol=1e-4 * scale, err_msg=name)


def test_a_mocked_board_takes_its_ops_and_those_of_rules_of_whole_matrices(tmp_path: Path) -> None:
    """The board's validators take every op."""
    pytest.importorskip("ttnn", reason="the package ttnn is not installed")
    order = json.dumps({"board": "n150", "modules": [__name__]})
    done = forked.run("tests.ttnn.mock_child", order, TTRAIN_CACHE=str(tmp_path), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"computes": False, "zero": True, "steps": 3}
