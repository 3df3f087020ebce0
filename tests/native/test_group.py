"""The grouping pass: any graph computes what it did, and what belongs together is together."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.graph.tools import assert_same_meaning, recorded
from tests.plan.random_graphs import step_graphs
from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Graph, Kind, Stage, Value, op
from ttrain.graph.passes import remove_dead_code
from ttrain.graph.passes.group import group
from ttrain.graph.verify import verify

SPEC, SQUARE = TensorSpec((4, 6)), TensorSpec((6, 6))
KNOWN = {
    "x": SPEC, "bias": TensorSpec((6,)), "s": (Kind.PARAMETER, SPEC),
    "wide": TensorSpec((4, 6), DType.FP64), "seed": TensorSpec((), DType.INT64),
    "u": SQUARE, "dy": SQUARE, "weight": SQUARE, "gradient": (Kind.GRADIENT, SQUARE),
}  # fmt: skip


def gelu_grad(dy: Value, x: Value) -> Value:
    return op("gelu_grad").record(dy, x, approximate="tanh")


def grouped(graph: Graph) -> Graph:
    """The graph after the pass, which means what it did."""
    after = verify(remove_dead_code(group(verify(graph, "recording"))), "grouping")
    assert_same_meaning(graph, after, exact=True)
    return after


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=step_graphs(floats=(DType.FP32,) * 4 + (DType.FP64, DType.BF16)))
def test_any_graph_computes_what_it_did(graph: Graph) -> None:
    grouped(graph)


def backward_of_feed_forward(u: Value, dy: Value, weight: Value, gradient: Value) -> Value:
    """Gelu again and its gradient, with the product that feeds it in between."""
    ops.assign(gradient, ops.matmul(dy, ops.reshape(ops.gelu(u), (6, 6)), transpose_a=True))
    return gelu_grad(ops.reshape(ops.matmul(dy, weight), (6, 6)), u)


def state_between(x: Value, s: Value) -> Value:
    before = ops.add(x, s)
    ops.assign(s, ops.matmul(ops.matmul(before, x, transpose_b=True), x))
    return ops.tanh(before)


def two_stages(graph: Graph, x: Value) -> Value:
    y = ops.gelu(x)
    with graph.stage(Stage.BACKWARD):
        return gelu_grad(y, x)


# What is recorded, by name and by what it becomes, with the number of outputs of each node.
FORMS: dict[str, Any] = {
    "a chain: fused 1": lambda x, bias: ops.tanh(ops.scale(ops.gelu(ops.add(x, bias)), 0.5)),
    "a value that others read: fused 2 matmul 1": lambda u: ops.matmul(ops.gelu(y := ops.scale(u, 2.0)), y),
    "readers of one tensor, around products: matmul 1 fused 2 matmul 1 assign 1": backward_of_feed_forward,
    "a change of state between: fused 2 matmul 1 matmul 1 assign 1": state_between,
    "forward and backward: gelu 1 gelu_grad 1": two_stages,
    "dropout: fused 1": lambda x, seed: ops.dropout(ops.scale(x, 2.0), seed, 0.5, 3),
    "fp64: scale 1 tanh 1": lambda wide: ops.tanh(ops.scale(wide, 2.0)),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_joined_and_what_stays(form: str) -> None:
    nodes = [node for node in grouped(recorded(FORMS[form], KNOWN)).nodes if not node.op.view]
    found = [f"{node.op.name} {len(node.outputs)}" for node in nodes]
    assert sorted(found) == sorted(re.findall(r"\w+ \d", form.partition(": ")[2]))
