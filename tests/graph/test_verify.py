"""Each rule of the stage verifier, broken once."""

from __future__ import annotations

import pytest

from ttrain import ops
from ttrain.core.errors import GraphError
from ttrain.core.spec import TensorSpec
from ttrain.graph import Graph, Kind, Value
from ttrain.graph.verify import verify
from ttrain.optim.base import EXAMPLE
from ttrain.optim.settings import SGDConfig
from ttrain.optim.sgd import SGD

PAIR = TensorSpec((2, 3))


def start() -> tuple[Graph, Value, Value]:
    graph = Graph()
    return graph, graph.input("x", PAIR), graph.state_value("w", PAIR, Kind.PARAMETER)


def refused(graph: Graph) -> str:
    with pytest.raises(GraphError) as error:
        verify(graph, "some pass")
    assert str(error.value).startswith("after some pass: ")
    return str(error.value)


def test_a_sound_graph_is_returned() -> None:
    graph, x, weight = start()
    old = ops.multiply(x, weight)
    new = ops.accumulate(weight, old)
    graph.output("y", ops.add(ops.relu(new), old))
    graph.output("w", new)
    assert verify(graph, "some pass") is graph


def test_a_value_is_made_before_it_is_read() -> None:
    graph, x, _ = start()
    ops.tanh(ops.relu(x))
    graph.nodes.reverse()
    assert "= tanh(" in refused(graph) and "which no earlier node makes" in refused(graph)


def test_an_output_of_the_graph_is_made() -> None:
    graph, x, _ = start()
    graph.output("y", ops.relu(x))
    graph.nodes.clear()
    assert "output y reads" in refused(graph)


def test_outputs_have_the_spec_that_the_op_infers() -> None:
    graph, x, _ = start()
    ops.relu(x).spec = TensorSpec((3, 2))
    assert "has outputs that its op does not infer" in refused(graph)


def test_an_overwritten_state_is_not_read() -> None:
    graph, x, weight = start()
    ops.assign(weight, x)
    ops.relu(weight)
    assert "reads w:fp32[2, 3], but its buffer holds" in refused(graph)


@pytest.mark.parametrize("late", [False, True], ids=["view before", "view after"])
def test_an_overwritten_state_is_not_read_through_a_view(late: bool) -> None:
    graph, x, weight = start()
    view = None if late else ops.reshape(weight, (6,))
    ops.accumulate(weight, x)
    ops.relu(ops.reshape(weight, (6,)) if view is None else view)
    assert "but its buffer holds" in refused(graph)


def test_an_older_version_of_a_state_is_not_read() -> None:
    graph, x, weight = start()
    first = ops.accumulate(weight, x)
    ops.accumulate(first, x)
    ops.relu(first)
    assert "but its buffer holds" in refused(graph)


def test_an_overwritten_state_is_no_output() -> None:
    graph, x, weight = start()
    graph.output("before", weight)
    ops.assign(weight, x)
    assert "output before reads w:fp32[2, 3], but its buffer holds" in refused(graph)


@pytest.mark.parametrize("what", ["input", "node"])
def test_only_state_is_overwritten(what: str) -> None:
    graph, x, weight = start()
    ops.accumulate(x if what == "input" else ops.relu(x), weight)
    assert "which is not state" in refused(graph)


def test_a_node_overwrites_a_state_once() -> None:
    graph, x, weight = start()
    lr = graph.input("lr", TensorSpec(()))
    ops.update(SGD(SGDConfig()).rule(EXAMPLE, False), [[weight, weight], [x, x]], lr, lr)
    assert "overwrites w:fp32[2, 3] twice" in refused(graph)
