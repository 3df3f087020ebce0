"""Parameters that stay in host memory: the same numbers as without, two transfers each way, and their memory apart."""

from __future__ import annotations

import pytest

pytest.importorskip("ttnn", reason="the package ttnn is not installed")

from tests.ttnn.runs import adamw, golden, gpt, run
from ttrain import ops
from ttrain.autodiff import backward
from ttrain.core.errors import GraphError
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Graph, Kind, op
from ttrain.graph.passes import remove_dead_code
from ttrain.graph.place import place
from ttrain.graph.verify import verify
from ttrain.train.forecast.step_cost import TRANSFERS, transfer_bytes


def test_memory_is_counted_by_place_and_activations_and_gradients_cross_once_each_way() -> None:
    """To the card rows of the table and dhidden; to the host hidden states and the gradient of the rows."""
    here, there = (run(gpt(), adamw(), golden(host_resident=names), steps=1) for names in (["embedding"], []))
    table = 65 * 64 * 4
    for kind in (Kind.PARAMETER, Kind.GRADIENT):
        assert here.engine.state.nbytes(kind, on_host=True) == table
        assert here.engine.state.nbytes(kind, on_host=False) == there.engine.state.nbytes(kind) - table
    plan, rows = here.steps["train"].plan, 2 * 32 * 64 * 4  # bytes of [batch 2, context 32, width 64] in fp32
    transferred = transfer_bytes(plan.launched)
    assert set(transferred) == set(TRANSFERS)
    assert all(2 * rows <= transferred[name] <= 2 * rows + 64 for name in TRANSFERS)  # and a few scalars
    assert plan.host_arena_bytes > 0 and plan.host_blocks
    assert plan.arena_bytes < there.steps["train"].plan.arena_bytes + 4 * rows
    assert all(block.layout is None or block.on_host is False for block in plan.blocks)


def offloaded(name: str) -> bool:
    return name.startswith("here")


SPEC = TensorSpec((4, 8))


def test_nodes_are_placed_by_what_they_touch() -> None:
    graph = Graph()
    here, there = (graph.state_value(name, SPEC, Kind.PARAMETER) for name in ("here", "there"))
    y = op("add").record(graph.input("x", SPEC), here)  # offloaded state: on the host
    z = op("scale").record(y, factor=2.0)  # all of it made there: stays
    w = op("multiply").record(z, there)  # state of the card: over there
    op("add").record(z, there)
    graph.output("w", w)
    placed = verify(place(graph, offloaded), "placing")
    names = [node.label for node in placed.nodes]
    assert names == ["host_input", "host.add", "host.scale", "to_device", "multiply", "add"]  # z is transferred once
    assert [node.on_host for node in placed.nodes] == [True, True, True, False, False, False]
    assert (placed.state["here"].on_host, placed.state["there"].on_host) == (True, False)
    assert not placed.outputs["w"].on_host


def test_state_of_the_card_is_not_overwritten_on_the_host() -> None:
    graph = Graph()
    here, there = (graph.state_value(name, SPEC, Kind.PARAMETER) for name in ("here", "there"))
    ops.assign(there, here)
    with pytest.raises(GraphError, match="must lie on one side"):
        place(graph, offloaded)


def test_a_gradient_stays_where_its_node_is() -> None:
    """The gradient of a lookup is as large as the table, so dy is transferred and not the result."""
    graph = Graph()
    table = graph.state_value("here", TensorSpec((50, 8)), Kind.PARAMETER)
    other = graph.state_value("there", SPEC, Kind.PARAMETER)
    y = op("embedding").record(graph.input("ids", TensorSpec((4,), DType.INT64)), table)
    loss = op("reduce_sum").record(op("multiply").record(y, other), axes=(0, 1))
    (gradient,) = backward(loss, [table])
    graph.output("gradient", gradient)
    placed = place(graph, offloaded)
    assert placed.outputs["gradient"].on_host
    assert transfer_bytes(remove_dead_code(placed).nodes) == {"to_host": 4 * 8 * 4, "to_device": 0}
