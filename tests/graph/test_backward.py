"""Reverse-mode differentiation: what it records, and its gradients on random graphs against torch autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.graph.tools import names, parameter, tokens
from tests.plan.interpreter import random_tensors, run_plainly, specs
from ttrain import ops
from ttrain.autodiff import backward
from ttrain.core.errors import GraphError, ShapeError
from ttrain.core.spec import TensorSpec
from ttrain.graph import Graph, Stage, Value, op
from ttrain.graph.verify import verify

ROWS = TensorSpec((4, 3))


def squared(y: Value) -> Value:
    return ops.mean(ops.multiply(y, y))


def test_the_first_contribution_is_the_gradient() -> None:
    graph = Graph()
    weight = parameter(graph, "w", 5, 3)
    loss = ops.mean(ops.relu(ops.linear(graph.input("x", ROWS), weight)))
    backward(loss, [weight])
    recorded = names(graph, Stage.BACKWARD)
    assert "add" not in recorded and recorded.count("full") == 1  # no zeros to add to


def test_later_contributions_are_added() -> None:
    graph = Graph()
    x, weight = graph.input("x", ROWS), parameter(graph, "w", 5, 3)
    loss = ops.mean(ops.add(ops.add(ops.linear(x, weight), ops.relu(ops.linear(x, weight))), ops.linear(x, weight)))
    (gradient,) = backward(loss, [weight])
    assert names(graph, Stage.BACKWARD).count("add") == 2 and gradient.spec == weight.spec


def test_gradients_come_in_the_order_asked_for_and_in_their_parameters_spec() -> None:
    graph = Graph()
    first, second = parameter(graph, "a", 4, 3), parameter(graph, "b", 3)
    loss = squared(ops.add(ops.multiply(graph.input("x", ROWS), first), second))
    gradients = backward(loss, [second, first])
    assert [gradient.spec for gradient in gradients] == [second.spec, first.spec]
    assert set(names(graph, Stage.BACKWARD)) and {node.stage for node in graph.nodes} == {Stage.FORWARD, Stage.BACKWARD}


def test_backward_nodes_carry_the_scope_of_what_they_differentiate() -> None:
    graph = Graph()
    weight = parameter(graph, "w", 5, 3)
    with graph.scope("head"):
        y = ops.linear(graph.input("x", ROWS), weight)
    backward(ops.mean(y), [weight])
    assert {node.scope for node in graph.nodes if node.stage is Stage.BACKWARD and node.op.name == "matmul"} == {"head"}


def test_every_parameter_without_a_gradient_is_named() -> None:
    graph = Graph()
    used = parameter(graph, "used", 4, 3)
    unused = [parameter(graph, name, 3) for name in ("norm.weight", "norm.bias")]
    loss = squared(ops.multiply(graph.input("x", ROWS), used))
    ops.layer_norm(used, unused[0], unused[1])
    with pytest.raises(GraphError, match="no gradient reaches norm.weight, norm.bias: the loss does not depend on it"):
        backward(loss, [used, *unused])


def test_a_loss_that_depends_on_nothing_asked_for_is_refused() -> None:
    graph = Graph()
    weight = parameter(graph, "w", 3)
    with pytest.raises(GraphError, match="no gradient reaches w"):
        backward(ops.mean(graph.input("x", ROWS)), [weight])


def test_a_loss_with_elements_is_refused() -> None:
    graph = Graph()
    weight = parameter(graph, "w", 4, 3)
    with pytest.raises(GraphError, match=r"got a loss of fp32\[4, 3\], expected a scalar"):
        backward(ops.relu(weight), [weight])


def test_an_op_without_gradient_on_the_way_is_named() -> None:
    graph = Graph()
    weight = parameter(graph, "w", 4, 3)
    with pytest.raises(GraphError, match="sign has no gradient rule"):
        backward(ops.mean(weight.graph.apply("sign", weight)), [weight])


def test_a_fused_activation_without_gradient_is_refused() -> None:
    graph = Graph()
    weight = parameter(graph, "w", 5, 3)
    y = op("linear").record(graph.input("x", ROWS), weight, None, activation="gelu")
    with pytest.raises(ShapeError, match="relu or tanh where a gradient is needed"):
        backward(ops.mean(y), [weight])


def test_a_value_in_the_middle_has_a_gradient_too() -> None:
    graph = Graph()
    weight = parameter(graph, "w", 5, 3)
    hidden = ops.linear(graph.input("x", ROWS), weight)
    loss = squared(hidden)
    graph.output("loss", loss)
    for name, gradient in zip(("hidden", "w"), backward(loss, [hidden, weight]), strict=True):
        graph.output(name, gradient)
    inputs, state = random_tensors(specs(graph.inputs), 0), random_tensors(specs(graph.state), 1)
    outputs, _ = run_plainly(graph, inputs, state)
    expected = 2 * (inputs["x"] @ state["w"].T) / 20
    torch.testing.assert_close(outputs["hidden"], expected)
    torch.testing.assert_close(outputs["w"], expected.T @ inputs["x"])


def blocks(recomputing: bool, count: int = 3) -> Graph:
    """Blocks y = x + tanh(gelu(x A) B) with a loss on top."""
    graph = Graph()
    x = graph.input("x", ROWS)
    weights = []
    for index in range(count):
        weights += [parameter(graph, f"{index}.a", 6, 3), parameter(graph, f"{index}.b", 3, 6)]
        with graph.scope(f"blocks.{index}"):
            if recomputing:
                with graph.segment():
                    x = _block(x, *weights[-2:])
            else:
                x = _block(x, *weights[-2:])
    loss = squared(x)
    graph.output("loss", loss)
    for weight, gradient in zip(weights, backward(loss, weights), strict=True):
        graph.output(f"{weight.name}/gradient", gradient)
    return verify(graph, "recording")


def _block(x: Value, a: Value, b: Value) -> Value:
    return ops.add(x, ops.tanh(ops.linear(ops.gelu(ops.linear(x, a)), b)))


def test_a_recomputed_segment_gives_the_same_gradients() -> None:
    kept, again = blocks(False), blocks(True)
    inputs, state = random_tensors(specs(kept.inputs), 0), random_tensors(specs(kept.state), 1)
    (expected, _), (actual, _) = run_plainly(kept, inputs, state), run_plainly(again, inputs, state)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_backward_reads_of_a_segment_only_its_result() -> None:
    graph = blocks(True)
    inner = {
        output for node in graph.nodes if node.segment is not None and node.op.name != "add" for output in node.outputs
    }
    read = {value for node in graph.nodes if node.stage is Stage.BACKWARD for value in node.values}
    assert not inner & read


def test_a_segment_is_computed_again_once_and_right_before_it_is_needed() -> None:
    graph = blocks(True)
    copied = [node for node in graph.nodes if node.copy]
    assert all((node.copy, node.stage, node.segment) == (1, Stage.BACKWARD, None) for node in copied)
    assert [node.op.name for node in copied] == ["linear", "gelu", "linear", "tanh", "add"] * 3
    scopes = [node.scope for node in graph.nodes if node.stage is Stage.BACKWARD and "blocks" in node.scope]
    assert scopes == sorted(scopes, reverse=True)  # block 2 is recomputed and finished before block 1 begins


def test_integers_and_embeddings_pass_no_gradient_to_the_ids() -> None:
    graph = Graph()
    table = parameter(graph, "table", 2, 3)
    loss = squared(ops.embedding(tokens(graph, "ids", 5), table))
    (gradient,) = backward(loss, [table])
    assert gradient.spec == table.spec


def test_a_tied_weight_gets_both_contributions() -> None:
    graph = Graph()
    table = parameter(graph, "table", 2, 3)
    hidden = ops.embedding(tokens(graph, "ids", 5), table)
    loss = ops.cross_entropy(
        ops.linear(hidden, table), tokens(graph, "targets", 5), graph.input("weight", TensorSpec(()))
    )
    graph.output("gradient", backward(loss, [table])[0])
    inputs, state = random_tensors(specs(graph.inputs), 3), random_tensors(specs(graph.state), 4)
    leaf = state["table"].clone().requires_grad_(True)
    logits = leaf[inputs["ids"]] @ leaf.T
    picked = torch.nn.functional.cross_entropy(logits, inputs["targets"], reduction="sum") * inputs["weight"]
    picked.backward()
    torch.testing.assert_close(run_plainly(graph, inputs, state)[0]["gradient"], leaf.grad)


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
