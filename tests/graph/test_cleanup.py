"""Dead code and common subexpressions."""

from __future__ import annotations

from tests.graph.tools import assert_same_meaning, names, parameter
from ttrain import ops
from ttrain.core.spec import TensorSpec
from ttrain.graph import Graph, op
from ttrain.graph.passes import merge_common_subexpressions, remove_dead_code
from ttrain.graph.verify import verify

PAIR = TensorSpec((2, 3))


def test_what_nobody_reads_goes_and_what_leads_to_an_output_stays() -> None:
    graph = Graph()
    x = graph.input("x", PAIR)
    ops.tanh(ops.scale(x, 2.0))
    graph.output("y", ops.relu(x))
    cleaned = verify(remove_dead_code(graph), "dead code")
    assert names(cleaned) == ["relu"] and list(cleaned.inputs) == ["x"]
    assert len(graph.nodes) == 3  # the old graph is left as it was
    assert_same_meaning(graph, cleaned)


def test_a_change_of_state_stays_with_all_that_leads_to_it() -> None:
    graph = Graph()
    x, weight = graph.input("x", PAIR), parameter(graph, "w", 2, 3)
    ops.accumulate(weight, ops.relu(x))
    assert names(remove_dead_code(graph)) == ["relu", "accumulate"]


def test_a_node_stays_for_one_of_its_outputs() -> None:
    graph = Graph()
    _, mean, _ = op("layer_norm").record(graph.input("x", PAIR), parameter(graph, "w", 3), None, eps=1e-5)
    graph.output("mean", mean)
    assert names(remove_dead_code(graph)) == ["layer_norm"]


def test_places_survive_a_pass() -> None:
    graph = Graph()
    with graph.scope("a"), graph.scope("b"), graph.segment(), graph.within(copy=2):
        graph.output("y", ops.relu(graph.input("x", PAIR)))
    (node,) = remove_dead_code(graph).nodes
    assert (node.scope, node.segment, node.copy) == ("a/b", 0, 2)


def test_equal_nodes_on_equal_values_become_one() -> None:
    graph = Graph()
    x = graph.input("x", PAIR)
    for name in ("y", "z"):
        graph.output(name, ops.tanh(ops.scale(x, 2.0)))
    merged = verify(merge_common_subexpressions(graph), "merging")
    assert names(merged) == ["scale", "tanh"] and merged.outputs["y"] is merged.outputs["z"]
    assert_same_meaning(graph, merged)


def test_all_outputs_are_merged() -> None:
    graph = Graph()
    x, weight = graph.input("x", PAIR), parameter(graph, "w", 3)
    first, second = (op("layer_norm").record(x, weight, None, eps=1e-5) for _ in range(2))
    graph.output("y", ops.add(first[1], second[2]))
    merged = verify(merge_common_subexpressions(graph), "merging")
    assert names(merged) == ["layer_norm", "add"]
    assert_same_meaning(graph, merged)


def test_other_attributes_are_another_computation() -> None:
    graph = Graph()
    x = graph.input("x", PAIR)
    graph.output("y", ops.add(ops.scale(x, 2.0), ops.scale(x, 3.0)))
    assert names(merge_common_subexpressions(graph)) == ["scale", "scale", "add"]


def test_recomputed_copies_and_segments_stay_apart() -> None:
    graph = Graph()
    x = graph.input("x", PAIR)
    values = [ops.relu(x)]
    with graph.within(copy=1):
        values.append(ops.relu(x))
    with graph.segment():
        values.append(ops.relu(x))
    for number, value in enumerate(values):
        graph.output(f"y{number}", value)
    assert names(merge_common_subexpressions(graph)) == ["relu"] * 3


def test_a_state_before_and_after_a_change_are_two_values() -> None:
    graph = Graph()
    x, weight = graph.input("x", PAIR), parameter(graph, "w", 2, 3)
    before = ops.relu(weight)
    graph.output("y", ops.add(before, ops.relu(ops.accumulate(weight, x))))
    merged = verify(merge_common_subexpressions(graph), "merging")
    assert names(merged) == ["relu", "accumulate", "relu", "add"]
    assert_same_meaning(graph, merged)


def test_two_equal_changes_of_state_both_happen() -> None:
    graph = Graph()
    x, weight = graph.input("x", PAIR), parameter(graph, "w", 2, 3)
    ops.accumulate(ops.accumulate(weight, x), x)
    merged = verify(merge_common_subexpressions(graph), "merging")
    assert names(merged) == ["accumulate", "accumulate"]
    assert_same_meaning(graph, merged)
