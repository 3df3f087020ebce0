"""Values that end up in state go there as soon as they are made."""

from __future__ import annotations

from typing import Any

import pytest

from tests.graph.tools import assert_same_meaning, names, parameter
from ttrain import ops
from ttrain.core.spec import TensorSpec
from ttrain.device.null import NullDevice
from ttrain.graph import Graph, Kind, Stage, Value
from ttrain.graph.composite import Primitive
from ttrain.graph.passes import store_early
from ttrain.graph.verify import verify
from ttrain.plan import build_plan
from ttrain.train.forecast.step_cost import peak

PAIR = TensorSpec((2, 3))


def start() -> tuple[Graph, Value, Value]:
    graph = Graph()
    return graph, graph.input("x", PAIR), graph.state_value("s", PAIR, Kind.GRADIENT)


def ordered(graph: Graph) -> list[str]:
    after = verify(store_early(verify(graph, "recording")), "ordering")
    assert_same_meaning(graph, after)
    return names(after)


@pytest.mark.parametrize("store", [ops.assign, ops.accumulate])
def test_a_value_is_stored_right_behind_its_maker(store: Primitive[..., Any]) -> None:
    graph, x, state = start()
    y = ops.relu(x)
    graph.output("z", ops.tanh(x))
    store(state, y)
    assert ordered(graph) == ["relu", store.name, "tanh"]


@pytest.mark.parametrize("touch", ["read", "overwritten"])
def test_a_state_that_is_used_meanwhile_changes_when_it_did(touch: str) -> None:
    graph, x, state = start()
    y = ops.relu(x)
    if touch == "read":
        graph.output("z", ops.tanh(state))
    else:
        state = ops.accumulate(state, x)
    ops.accumulate(state, y)
    assert ordered(graph) == ["relu", "tanh" if touch == "read" else "accumulate", "accumulate"]


def test_a_step_input_is_stored_when_it_was() -> None:
    graph, x, state = start()
    graph.output("z", ops.tanh(x))
    ops.accumulate(state, x)
    assert ordered(graph) == ["tanh", "accumulate"]


def test_a_state_that_depends_on_another_store_stays_behind_it() -> None:
    graph, x, state = start()
    other = graph.state_value("t", PAIR, Kind.OPTIMIZER)
    y = ops.relu(x)
    graph.output("z", ops.tanh(other))
    ops.assign(other, ops.accumulate(state, y))
    assert ordered(graph) == ["relu", "accumulate", "tanh", "assign"]


def test_an_update_follows_what_it_reads_and_ranks_act_together_in_one_order() -> None:
    graph, x, state = start()
    y = ops.relu(x)
    graph.output("z", z := ops.tanh(y))
    with graph.stage(Stage.UPDATE):
        graph.output("sum", ops.all_reduce(z))  # a rank may have nothing to move this for
        ops.all_reduce_state([ops.assign(state, ops.exp(y))])
    assert ordered(graph) == ["relu", "exp", "assign", "tanh", "all_reduce", "all_reduce_state"]


def test_an_exchange_starts_behind_the_last_of_what_it_sends() -> None:
    graph, x, state = start()
    other = graph.state_value("t", PAIR, Kind.GRADIENT)
    y = ops.relu(x)
    graph.output("z", ops.tanh(ops.exp(y)))
    values = ops.reduce_start([ops.assign(other, y), ops.accumulate(state, ops.relu(y))], (), scatters=False)
    ops.collectives_done(values, [])
    expected = ["relu", "assign", "exp", "tanh", "relu", "accumulate", "all_reduce_start", "collectives_done"]
    assert ordered(graph) == expected


def test_gradients_are_not_all_live_at_once() -> None:
    graph = Graph()
    y, count = graph.input("x", TensorSpec((64, 64))), 10
    values = []
    for _ in range(count):
        y = ops.matmul(y, y)
        values.append(y)
    for index, value in enumerate(values):
        ops.accumulate(parameter(graph, f"p{index}", 64, 64), value)
    kernels, size = NullDevice().kernels, 64 * 64 * 4
    assert peak(build_plan(graph, kernels).blocks)[0] == count * size
    assert peak(build_plan(store_early(graph), kernels).blocks)[0] == 2 * size
