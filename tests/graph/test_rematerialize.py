"""Cheap activations computed again in backward."""

from __future__ import annotations

import pytest

from tests.graph.tools import assert_same_meaning, names, parameter
from ttrain import ops
from ttrain.autodiff import backward
from ttrain.autodiff.rematerialize import rematerialize
from ttrain.core.spec import TensorSpec
from ttrain.device.null import NullDevice
from ttrain.graph import REGISTRY, Graph, Kind, Stage
from ttrain.graph.passes import fuse, remove_dead_code
from ttrain.graph.verify import verify
from ttrain.plan import build_plan
from ttrain.train.forecast.step_cost import activation_bytes

ROWS = TensorSpec((64, 16))


def feed_forward(blocks: int = 3, activation: str = "gelu") -> Graph:
    """x <- x + W2 f(W1 norm(x)), with gradients of every weight."""
    graph = Graph()
    x, weights = graph.input("x", ROWS), []
    for index in range(blocks):
        up, down = parameter(graph, f"{index}.up", 64, 16), parameter(graph, f"{index}.down", 16, 64)
        norm = parameter(graph, f"{index}.norm", 16)
        weights += [norm, up, down]
        x = x + ops.linear(ops.activation(ops.linear(ops.layer_norm(x, norm, None), up), activation), down)
    loss = ops.mean(x * x)
    graph.output("loss", loss)
    for weight, gradient in zip(weights, backward(loss, weights), strict=True):
        graph.output(f"{weight.name}/gradient", gradient)
    return verify(graph, "recording")


def read_by_backward(graph: Graph) -> set[str]:
    """Ops of the forward values that backward reads."""
    values = [value for node in graph.nodes if node.stage is Stage.BACKWARD for value in node.values]
    return {v.producer.op.name for v in values if v.producer is not None and v.producer.stage is Stage.FORWARD}


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_forward_values_are_dropped_and_the_numbers_stay(activation: str) -> None:
    graph = feed_forward(activation=activation)
    again = verify(remove_dead_code(rematerialize(graph)), "rematerialization")
    assert_same_meaning(graph, again, exact=True)
    if activation == "gelu":
        assert {"gelu"} <= read_by_backward(graph) and not {"gelu"} & read_by_backward(again)
        assert [node.copy for node in again.nodes if node.op.name == "gelu"] == [0, 0, 0, 1, 1, 1]


def test_the_plan_keeps_less_between_forward_and_backward() -> None:
    graph = feed_forward()
    kernels = NullDevice().kernels
    before, after = build_plan(graph, kernels), build_plan(remove_dead_code(rematerialize(graph)), kernels)
    hidden, normed = 64 * 64 * 4, ROWS.nbytes  # of one block; the last block's hidden is at hand at the boundary
    assert activation_bytes(before) - activation_bytes(after) >= 2 * hidden + 2 * normed
    assert after.arena_bytes < before.arena_bytes


def test_a_copy_is_made_right_before_its_first_reader() -> None:
    graph = remove_dead_code(rematerialize(feed_forward(blocks=1)))
    copies = [index for index, node in enumerate(graph.nodes) if node.copy]
    assert copies
    for index in copies:
        assert set(graph.nodes[index].outputs) & set(graph.nodes[index + 1].values)
        assert graph.nodes[index].stage is Stage.BACKWARD


def test_a_fused_norm_is_computed_again_from_its_sum() -> None:
    graph = fuse(feed_forward(), REGISTRY)
    assert "add_layer_norm" in names(graph)
    again = verify(remove_dead_code(rematerialize(graph)), "rematerialization")
    sources = [node.values[0].producer for node in again.nodes if node.copy and node.op.name == "layer_norm"]
    assert "add_layer_norm" in {source.op.name for source in sources if source is not None}
    assert_same_meaning(graph, again, exact=True)


@pytest.mark.parametrize(("changed", "kept"), [(False, False), (True, False), (False, True)])
def test_only_what_has_to_be_computed_again_is_from_state_that_did_not_change(changed: bool, kept: bool) -> None:
    """y = relu(state), where the state may change before backward, and y may be kept anyway."""
    graph = Graph()
    weight, scale = parameter(graph, "w", 4, 4), graph.state_value("scale", TensorSpec((4, 4)), Kind.OPTIMIZER)
    y = ops.relu(scale)
    loss = ops.mean(y * weight * y)
    if changed:
        ops.accumulate(scale, ops.expand(ops.reshape(loss, (1, 1)), (4, 4)))
    graph.output("loss", loss)
    graph.output("gradient", backward(loss, [weight])[0])
    if kept:
        graph.output("y", y)
    again = verify(remove_dead_code(rematerialize(verify(graph, "recording"))), "rematerialization")
    assert ("relu" in read_by_backward(again)) is (changed or kept)
    assert_same_meaning(graph, again, exact=True)


def test_values_of_low_rank_and_graphs_without_backward_are_left_alone() -> None:
    graph = Graph()
    bias, weight = parameter(graph, "b", 4), parameter(graph, "w", 4)
    graph.output("gradient", backward(ops.mean(ops.gelu(bias) * weight), [weight])[0])
    forward = Graph()
    forward.output("y", ops.gelu(forward.input("x", ROWS)))
    for each in (graph, forward):
        assert names(rematerialize(each)) == names(each)
