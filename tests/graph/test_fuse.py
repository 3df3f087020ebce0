"""Fused forms: where each pattern applies, where it must not, and that the numbers stay."""

from __future__ import annotations

import pytest

from tests.graph.tools import assert_same_meaning, names, parameter, tokens
from ttrain import ops
from ttrain.autodiff import backward
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import REGISTRY, Graph, Kind, Stage, Value, op
from ttrain.graph.passes import fuse, remove_dead_code
from ttrain.graph.verify import verify

ROWS = TensorSpec((4, 3))
CUBE = TensorSpec((2, 4, 3))


def fused(graph: Graph) -> list[str]:
    """Names after fusing; checks the result and its meaning."""
    after = verify(fuse(verify(graph, "recording"), REGISTRY), "fusion")
    assert_same_meaning(graph, after)
    return names(after)


def product(graph: Graph, x: Value, form: str) -> Value:
    weight = parameter(graph, "w", 5, 3)
    return ops.linear(x, weight) if form == "linear" else ops.matmul(x, weight, transpose_b=True)


@pytest.mark.parametrize("form", ["linear", "matmul"])
def test_product_and_bias(form: str) -> None:
    graph = Graph()
    y = ops.add(product(graph, graph.input("x", ROWS), form), parameter(graph, "b", 5))
    graph.output("y", y)
    assert fused(graph) == ["linear"]


def test_product_of_more_than_two_axes_and_bias() -> None:
    graph = Graph()
    graph.output("y", ops.add(product(graph, graph.input("x", CUBE), "linear"), parameter(graph, "b", 5)))
    assert fused(graph) == ["linear"]


@pytest.mark.parametrize("shape", [(4, 5), (1, 5), (4, 1), ()], ids=str)
def test_a_sum_of_another_shape_is_no_bias(shape: tuple[int, ...]) -> None:
    graph = Graph()
    graph.output("y", ops.add(product(graph, graph.input("x", ROWS), "linear"), parameter(graph, "b", *shape)))
    assert fused(graph) == ["linear", "add"]


def test_a_bias_of_another_dtype_is_no_bias() -> None:
    graph = Graph()
    bias = graph.state_value("b", TensorSpec((5,), DType.FP64), Kind.PARAMETER)
    graph.output("y", ops.add(product(graph, graph.input("x", ROWS), "linear"), bias))
    assert fused(graph) == ["linear", "add"]


@pytest.mark.parametrize(("left", "right"), [(True, True), (False, False)])
def test_other_products_have_no_linear_form(left: bool, right: bool) -> None:
    graph = Graph()
    x, weight = graph.input("x", TensorSpec((3, 3))), parameter(graph, "w", 3, 3)
    graph.output("y", ops.add(ops.matmul(x, weight, left, right), parameter(graph, "b", 3)))
    assert fused(graph) == ["matmul", "add"]


@pytest.mark.parametrize("reader", ["node", "output", "the same sum twice"])
def test_a_product_that_others_read_stays(reader: str) -> None:
    graph = Graph()
    y = product(graph, graph.input("x", TensorSpec((3,)) if reader == "the same sum twice" else ROWS), "linear")
    if reader == "the same sum twice":
        graph.output("y", ops.add(y, y))
    else:
        graph.output("y", ops.add(y, parameter(graph, "b", 5)))
        graph.output("other", ops.relu(y) if reader == "node" else y)
    assert "add" in fused(graph)


@pytest.mark.parametrize("name", ["relu", "tanh", "gelu", "gelu_tanh"])
def test_linear_and_activation(name: str) -> None:
    graph = Graph()
    y = ops.add(product(graph, graph.input("x", CUBE), "linear"), parameter(graph, "b", 5))
    graph.output("y", ops.activation(y, name))
    after = fuse(graph, REGISTRY)
    assert names(after) == ["linear"] and after.nodes[0].attributes == {"activation": name}
    assert_same_meaning(graph, after)


@pytest.mark.parametrize(("name", "joined"), [("relu", True), ("tanh", True), ("gelu", False), ("gelu_tanh", False)])
def test_an_activation_is_joined_in_training_only_where_backward_reads_its_result(name: str, joined: bool) -> None:
    graph = Graph()
    weight = parameter(graph, "w", 5, 3)
    y = ops.activation(ops.linear(graph.input("x", ROWS), weight), name)
    loss = ops.mean(ops.multiply(y, y))
    graph.output("loss", loss)
    (gradient,) = backward(loss, [weight])
    graph.output("gradient", gradient)
    assert ("relu" not in fused(graph) and "tanh" not in fused(graph) and "gelu" not in fused(graph)) is joined


def test_two_activations_in_a_row_are_not_one() -> None:
    graph = Graph()
    graph.output("y", ops.tanh(ops.relu(product(graph, graph.input("x", ROWS), "linear"))))
    assert fused(graph) == ["linear", "tanh"]


def residual(graph: Graph) -> tuple[Value, Value]:
    return graph.input("x", CUBE), ops.scale(graph.input("branch", CUBE), 0.5)


def test_residual_sum_and_norm() -> None:
    graph = Graph()
    total = ops.add(*residual(graph))
    y = ops.layer_norm(total, parameter(graph, "w", 3), parameter(graph, "b", 3))
    graph.output("y", ops.add(y, total))
    assert fused(graph) == ["scale", "add_layer_norm", "add"]


def test_residual_sum_and_rms_norm_and_their_gradients() -> None:
    graph = Graph()
    x = graph.input("x", CUBE)
    total = ops.add(x, ops.scale(graph.input("branch", CUBE), 0.5))
    y = ops.rms_norm(total, parameter(graph, "w", 3))
    (dx,) = backward(ops.reduce_sum(ops.add(ops.exp(y), total), (0, 1, 2)), [x])
    graph.output("dx", dx)
    found = fused(graph)
    assert "add_rms_norm" in found and "rms_norm" not in found
    assert found[-1] == "rms_norm_grad"  # which adds the gradient beside the norm


def test_a_sum_that_is_read_before_the_norm_stays() -> None:
    graph = Graph()
    total = ops.add(*residual(graph))
    other = ops.relu(total)
    graph.output("y", ops.add(ops.layer_norm(total, parameter(graph, "w", 3), None), other))
    assert fused(graph) == ["scale", "add", "relu", "layer_norm", "add"]


def test_a_sum_that_is_an_output_stays_readable() -> None:
    graph = Graph()
    total = ops.add(*residual(graph))
    graph.output("y", ops.layer_norm(total, parameter(graph, "w", 3), None))
    graph.output("total", total)
    assert fused(graph) == ["scale", "add_layer_norm"]


def test_a_sum_with_broadcasting_is_no_residual() -> None:
    graph = Graph()
    total = ops.add(graph.input("x", CUBE), parameter(graph, "p", 4, 3))
    graph.output("y", ops.layer_norm(total, parameter(graph, "w", 3), None))
    assert fused(graph) == ["add", "layer_norm"]


def test_a_sum_that_is_its_own_norms_weight_stays() -> None:
    graph = Graph()
    total = ops.add(parameter(graph, "a", 3), parameter(graph, "b", 3))
    graph.output("y", ops.layer_norm(total, total, None))
    assert fused(graph) == ["add", "layer_norm"]


def test_one_sum_under_two_norms_is_joined_once() -> None:
    graph = Graph()
    total = ops.add(*residual(graph))
    graph.output("y", ops.add(*[ops.layer_norm(total, parameter(graph, name, 3), None) for name in "ab"]))
    assert fused(graph) == ["scale", "add_layer_norm", "layer_norm", "add"]


def test_a_copy_of_a_norm_does_not_take_the_sum_of_the_original() -> None:
    graph = Graph()
    total = ops.add(*residual(graph))
    with graph.stage(Stage.BACKWARD), graph.within(copy=1):
        graph.output("y", ops.layer_norm(total, parameter(graph, "w", 3), None))
    assert fused(graph) == ["scale", "add", "layer_norm"]


def head(graph: Graph) -> tuple[Value, Value]:
    logits = ops.linear(graph.input("hidden", ROWS), parameter(graph, "head", 2, 3))
    return logits, ops.cross_entropy(logits, tokens(graph, "targets", 4), graph.input("weight", TensorSpec(())))


def test_head_and_cross_entropy_in_evaluation() -> None:
    graph = Graph()
    graph.output("loss", head(graph)[1])
    after = remove_dead_code(fuse(graph, REGISTRY))
    assert names(after) == ["head_cross_entropy"]
    assert after.nodes[0].attributes == {"smoothing": 0.0, "live": 2, "gradients": False}
    assert_same_meaning(graph, after)


def test_logits_that_are_an_output_stay() -> None:
    graph = Graph()
    logits, loss = head(graph)
    graph.output("loss", loss)
    graph.output("logits", logits)
    assert fused(graph) == ["linear", "cross_entropy"]


def test_logits_that_backward_reads_stay() -> None:
    graph = Graph()
    _, loss = head(graph)
    graph.output("loss", loss)
    graph.output("gradient", backward(loss, [graph.state["head"]])[0])
    assert "head_cross_entropy" not in fused(graph)


@pytest.mark.parametrize("pattern", ["bias", "activation", "residual"])
def test_nothing_is_moved_behind_a_change_of_what_it_reads(pattern: str) -> None:
    graph = Graph()
    x, weight = graph.input("x", ROWS), parameter(graph, "w", 3, 3)
    if pattern == "residual":
        state = graph.state_value("s", ROWS, Kind.OPTIMIZER)
        total = ops.add(x, state)
        ops.accumulate(state, x)
        graph.output("y", ops.layer_norm(total, parameter(graph, "n", 3), None))
        assert fused(graph) == ["add", "accumulate", "layer_norm"]
        return
    y = ops.linear(x, weight)
    ops.accumulate(weight, ops.matmul(x, x, transpose_a=True))
    graph.output("y", ops.add(y, parameter(graph, "b", 3)) if pattern == "bias" else ops.relu(y))
    assert fused(graph) == ["linear", "matmul", "accumulate", "add" if pattern == "bias" else "relu"]


def test_a_lookup_gradient_goes_into_its_sum() -> None:
    graph = Graph()
    base, dy = graph.input("base", TensorSpec((4, 6))), graph.input("dy", TensorSpec((3, 6)))
    gradients = [op("embedding_grad").record(dy, tokens(graph, "ids", 3), vocabulary=4) for _ in range(3)]
    graph.output("sum", ops.add(ops.add(base, gradients[0]), ops.add(*gradients[1:])))
    assert fused(graph) == ["embedding_grad", "add_embedding_grad", "add_embedding_grad", "add"]
