"""Reverse-mode differentiation: what it records, and its gradients on random graphs against torch autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.graph.tools import ROWS, assert_same_meaning, names, parameter, recorded
from tests.plan.interpreter import random_tensors, run_plainly, specs
from ttrain import ops
from ttrain.autodiff import backward
from ttrain.core.errors import GraphError, ShapeError
from ttrain.graph import Graph, Stage, Value
from ttrain.graph.verify import verify

KNOWN = {"x": ROWS, "w": (5, 3), "a": (4, 3), "b": (3,), "c": (3,)}


def squared(y: Value) -> Value:
    return ops.mean(y * y)


def test_the_first_contribution_is_the_gradient_and_later_ones_are_added() -> None:
    def once(x: Value, w: Value) -> None:
        backward(ops.mean(ops.relu(ops.linear(x, w))), [w])

    def thrice(x: Value, w: Value) -> None:
        loss = ops.mean(ops.linear(x, w) + ops.relu(ops.linear(x, w)) + ops.linear(x, w))
        assert backward(loss, [w])[0].spec == w.spec

    first, later = (names(recorded(make, KNOWN), Stage.BACKWARD) for make in (once, thrice))
    assert "add" not in first and first.count("full") == 1  # no zeros to add to
    assert later.count("add") == 2


def test_gradients_come_in_the_order_asked_for_and_in_their_parameters_spec() -> None:
    graph = Graph()
    first, second = parameter(graph, "a", 4, 3), parameter(graph, "b", 3)
    with graph.scope("head"):
        y = graph.input("x", ROWS) * first
    gradients = backward(squared(y + second), [second, first])
    assert [gradient.spec for gradient in gradients] == [second.spec, first.spec]
    assert {node.stage for node in graph.nodes} == {Stage.FORWARD, Stage.BACKWARD}
    # Backward nodes carry the scope of what they differentiate.
    assert graph.nodes[0].scope == graph.nodes[-1].scope == "head"


# What has no gradient, by what is told.
REFUSED: dict[str, Any] = {
    "no gradient reaches b, c: the loss does not depend on it": lambda x, a, b, c: (
        ops.layer_norm(a, b, c),
        backward(squared(x * a), [a, b, c]),
    ),
    "no gradient reaches b": lambda x, b: backward(ops.mean(x), [b]),
    r"got a loss of fp32\[4, 3\], expected a scalar": lambda a: backward(ops.relu(a), [a]),
    "sign has no gradient rule": lambda a: backward(ops.mean(ops.sign(a)), [a]),
    "relu or tanh where a gradient is needed": lambda x, w: backward(
        ops.mean(ops.linear(x, w, activation="gelu")), [w]
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_has_no_gradient_is_named(said: str) -> None:
    with pytest.raises((GraphError, ShapeError), match=said):
        recorded(REFUSED[said], KNOWN)


def test_a_value_in_the_middle_has_a_gradient_too() -> None:
    def make(x: Value, w: Value) -> dict[str, Value]:
        hidden = ops.linear(x, w)
        return dict(zip(("hidden", "w"), backward(squared(hidden), [hidden, w]), strict=True))

    graph = recorded(make, KNOWN)
    inputs, state = random_tensors(specs(graph.inputs), 0), random_tensors(specs(graph.state), 1)
    outputs, _ = run_plainly(graph, inputs, state)
    expected = 2 * (inputs["x"] @ state["w"].T) / 20
    torch.testing.assert_close(outputs["hidden"], expected)
    torch.testing.assert_close(outputs["w"], expected.T @ inputs["x"])


def blocks(recomputing: bool) -> Graph:
    """Blocks y = x + tanh(gelu(x A) B) with a loss on top."""
    graph = Graph()
    x = graph.input("x", ROWS)
    weights = []
    for index in range(3):
        a, b = parameter(graph, f"{index}.a", 6, 3), parameter(graph, f"{index}.b", 3, 6)
        weights += [a, b]
        with graph.scope(f"blocks.{index}"), graph.segment(recomputing):
            x = x + ops.tanh(ops.linear(ops.gelu(ops.linear(x, a)), b))
    loss = squared(x)
    graph.output("loss", loss)
    for weight, gradient in zip(weights, backward(loss, weights), strict=True):
        graph.output(f"{weight.name}/gradient", gradient)
    return verify(graph, "recording")


def test_a_recomputed_segment_is_computed_again_once_right_before_it_is_needed() -> None:
    kept, graph = blocks(False), blocks(True)
    assert_same_meaning(kept, graph, exact=True)
    copied = [node for node in graph.nodes if node.copy]
    assert all((node.copy, node.stage, node.segment) == (1, Stage.BACKWARD, None) for node in copied)
    assert [node.op.name for node in copied] == ["linear", "gelu", "linear", "tanh", "add"] * 3
    scopes = [node.scope for node in graph.nodes if node.stage is Stage.BACKWARD and "blocks" in node.scope]
    assert scopes == sorted(scopes, reverse=True)  # block 2 is recomputed and finished before block 1 begins
    # Backward reads of a segment its result alone.
    inner = {value for node in graph.nodes if node.segment is not None for value in node.outputs}
    read = {value for node in graph.nodes if node.stage is Stage.BACKWARD for value in node.values}
    assert {value.producer.op.name for value in inner & read if value.producer} == {"add"}


UNARY: tuple[Callable[[Value], Value], ...] = (
    ops.tanh, ops.gelu, ops.relu, ops.exp, lambda x: ops.scale(x, -0.7), ops.softmax,
)  # fmt: skip
SHAPES = ((2, 3), (3,), (1, 3), (2, 1), ())


@st.composite
def smooth_graphs(draw: Any) -> tuple[Graph, list[Value], Value]:
    """A random forward pass, its parameters and a loss that reads every one of them."""
    graph = Graph()
    leaves = [parameter(graph, f"p{i}", *draw(st.sampled_from(SHAPES))) for i in range(draw(st.integers(1, 3)))]
    values = list(leaves)
    for _ in range(draw(st.integers(1, 10))):
        x, y = draw(st.sampled_from(values[-3:])), draw(st.sampled_from(values))
        kind = draw(st.sampled_from(("unary", "binary", "divide", "sum", "move", "norm", "product")))
        if kind == "unary" and x.shape:
            values.append(ops.tanh(draw(st.sampled_from(UNARY))(x)))
        elif kind == "binary":
            values.append(draw(st.sampled_from((ops.add, ops.subtract, ops.multiply)))(x, y))
        elif kind == "divide":
            values.append(ops.divide(x, ops.exp(ops.tanh(y))))
        elif kind == "sum" and x.shape:
            axis = draw(st.integers(0, x.spec.rank - 1))
            kept = [1 if index == axis else size for index, size in enumerate(x.shape)]
            values.append(ops.reshape(ops.reduce_sum(x, [axis]), kept))
        elif kind == "move" and x.spec.rank == 2:
            values.append(ops.transpose(ops.transpose(ops.reshape(ops.reshape(x, (x.spec.size,)), x.shape))))
        elif kind == "norm" and x.shape == (2, 3):
            values.append(ops.layer_norm(x, ops.reshape(ops.reduce_sum(x, [0]), (3,)), None, 0.1))
        elif kind == "product" and x.shape == (2, 3):
            values.append(ops.matmul(ops.matmul(x, x, transpose_b=True), x, transpose_a=draw(st.booleans())))
    total = ops.mean(ops.tanh(values[-1]))
    for leaf in leaves:
        total = ops.add(total, ops.mean(leaf))
    return graph, leaves, total


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=smooth_graphs(), seed=st.integers(0, 99))
def test_gradients_on_random_graphs_equal_torch_autograd(drawn: tuple[Graph, list[Value], Value], seed: int) -> None:
    graph, leaves, loss = drawn
    forward = list(graph.nodes)
    for leaf, gradient in zip(leaves, backward(loss, leaves), strict=True):
        graph.output(leaf.name, gradient)
    state = random_tensors(specs(graph.state), seed)
    actual, _ = run_plainly(verify(graph, "recording"), {}, state)
    values: dict[Value, Any] = {leaf: state[leaf.name].double().requires_grad_(True) for leaf in leaves}
    for node in forward:
        attributes: Any = node.attributes
        results = node.op.reference(*[None if v is None else values[v] for v in node.inputs], **attributes)
        values.update(zip(node.outputs, [results] if torch.is_tensor(results) else results, strict=True))
    expected = torch.autograd.grad(values[loss], [values[leaf] for leaf in leaves])
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(actual[leaf.name].double(), gradient, rtol=1e-3, atol=1e-4)
