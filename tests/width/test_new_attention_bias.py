"""An attention bias that nobody wrote a kernel for, on heads that share keys: one function over ops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.session import ENGINES
from tests.native.conftest import require_compiler
from tests.ttnn.runs import cpu, golden
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
from ttrain.testing import check_model

PLACES = ("cpu dynamic", "cpu static", "cpu traced", "golden dynamic", "golden static")
HEADS, KV_HEADS = 4, 2
ROWS, TIME, WIDTH = 2, 9, 24


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
        self.key = Linear(WIDTH, WIDTH // HEADS * KV_HEADS, bias=False)  # one would have no gradient
        self.value = Linear(WIDTH, WIDTH // HEADS * KV_HEADS)
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


@pytest.mark.parametrize("place", PLACES)
def test_the_loss_and_every_gradient_are_right(place: str) -> None:
    """Held to autograd over the fp64 references of ops."""
    device, engine = place.split()
    if engine == "traced":
        require_compiler()
    check_model(model(), ROWS, golden() if device == "golden" else cpu(), ENGINES[engine])


def test_a_mocked_board_takes_its_ops_and_those_of_rules_of_whole_matrices(tmp_path: Path) -> None:
    """The board's validators take every op."""
    from tests.ttnn.test_mock import child  # which skips where ttnn is not installed

    *_, found = child(str(tmp_path), json.dumps({"board": "n150", "modules": [__name__]}))
    assert found == {"computes": False, "zero": True, "steps": 3}
