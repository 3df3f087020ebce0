"""Which values share a buffer: each case in which they may, and each in which they must not."""

from __future__ import annotations

import pytest

from tests.graph.tools import parameter
from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Delivery, Kernel
from ttrain.device.null import NullDevice
from ttrain.graph import Graph, Kind, Value
from ttrain.graph.verify import verify
from ttrain.plan import Plan, build_plan
from ttrain.train.forecast.step_cost import state_bytes

PAIR = TensorSpec((2, 3))


def planned(graph: Graph, fresh: tuple[str, ...] = ()) -> Plan:
    device = NullDevice()
    device.deliveries.update(dict.fromkeys(fresh, Delivery.RETURNS))
    return build_plan(verify(graph, "recording"), device.kernels)


def shared(plan: Plan, one: Value, other: Value) -> bool:
    return plan.placement.owner_of(one) is plan.placement.owner_of(other)


def launched(plan: Plan) -> list[str]:
    return [node.op.name for node in plan.launched]


def start(dtype: DType = DType.FP32) -> tuple[Graph, Value, Value]:
    graph = Graph()
    return graph, graph.input("x", PAIR), graph.state_value("w/gradient", PAIR.with_dtype(dtype), Kind.GRADIENT)


# Delivery into state: the kernel that makes the value writes it there, and the copy is dropped.


def test_a_result_is_delivered_into_the_state_that_it_is_assigned_to() -> None:
    graph, x, state = start()
    y = ops.relu(x)
    new = ops.assign(state, y)
    graph.output("z", ops.tanh(new))
    plan = planned(graph)
    assert launched(plan) == ["relu", "tanh"] and shared(plan, y, state) and shared(plan, new, state)
    assert plan.placement.owner_of(y) not in plan.owned


def test_a_view_is_delivered_too() -> None:
    graph, x, state = start()
    y = ops.transpose(ops.reshape(x, (3, 2)))
    ops.assign(state, ops.reshape(y, (2, 3)))
    assert launched(planned(graph)) == ["transpose"]


def test_a_fresh_result_is_copied_once_and_not_twice() -> None:
    graph, x, state = start()
    ops.assign(state, ops.relu(x))
    assert launched(planned(graph, fresh=("relu",))) == ["relu"]  # the engine copies it into the state


def test_readers_of_the_value_find_it_in_the_state() -> None:
    graph, x, state = start()
    y = ops.relu(x)
    ops.assign(state, y)
    graph.output("z", ops.tanh(y))
    plan = planned(graph)
    assert launched(plan) == ["relu", "tanh"] and shared(plan, y, state)


def test_a_state_that_is_still_read_takes_nothing_early() -> None:
    graph, x, state = start()
    y = ops.relu(x)
    graph.output("old", ops.tanh(state))
    ops.assign(state, y)
    plan = planned(graph)
    assert launched(plan) == ["relu", "tanh", "assign"] and not shared(plan, y, state)


def test_a_kernel_that_reads_the_state_does_not_write_over_it() -> None:
    graph, x, state = start()
    ops.assign(state, ops.matmul(ops.matmul(x, state, transpose_b=True), state))
    assert launched(planned(graph)) == ["matmul", "matmul", "assign"]


def test_a_value_that_is_read_after_the_next_change_of_the_state_keeps_its_own_buffer() -> None:
    graph, x, state = start()
    y = ops.relu(x)
    new = ops.assign(state, y)
    ops.accumulate(new, x)
    graph.output("z", ops.tanh(y))
    plan = planned(graph)
    assert launched(plan) == ["relu", "assign", "accumulate", "tanh"] and not shared(plan, y, state)


def test_a_value_that_is_read_up_to_the_next_change_may_live_in_the_state() -> None:
    graph, x, state = start()
    y = ops.relu(x)
    new = ops.assign(state, y)
    graph.output("z", ops.tanh(y))
    ops.accumulate(new, x)
    assert launched(planned(graph)) == ["relu", "tanh", "accumulate"]


def test_a_second_value_does_not_arrive_while_the_first_is_still_read() -> None:
    graph, x, state = start()
    first = ops.relu(x)
    new = ops.assign(state, first)
    second = ops.gelu(x)
    graph.output("z", ops.tanh(first))
    ops.assign(new, second)
    plan = planned(graph)
    assert shared(plan, first, state) and not shared(plan, second, state)
    assert launched(plan) == ["relu", "gelu", "tanh", "assign"]


def test_a_value_of_two_states_is_delivered_to_the_first_and_copied_to_the_second() -> None:
    graph, x, state = start()
    other = graph.state_value("other", PAIR, Kind.OPTIMIZER)
    y = ops.relu(x)
    ops.assign(state, y)
    ops.assign(other, y)
    plan = planned(graph)
    assert launched(plan) == ["relu", "assign"] and shared(plan, y, state)


@pytest.mark.parametrize("what", ["output", "input", "state", "other dtype"])
def test_what_has_a_home_of_its_own_is_copied(what: str) -> None:
    graph, x, state = start(DType.BF16 if what == "other dtype" else DType.FP32)
    y = {"input": x, "state": parameter(graph, "p", 2, 3)}.get(what) or ops.relu(x)
    if what == "output":
        graph.output("y", y)
    ops.assign(state, y)
    assert launched(planned(graph))[-1] == "assign"


# In-place reuse: an elementwise result takes the buffer of an input that dies.


def test_a_chain_of_elementwise_ops_takes_one_buffer() -> None:
    graph, x, _ = start()
    y = ops.matmul(x, ops.transpose(x))
    for _ in range(5):
        y = ops.scale(ops.tanh(y), 2.0)
    graph.output("y", y)
    plan = planned(graph)
    assert len(plan.placement.lifetimes) == 3  # x, its transpose, and one for the chain


def made(graph: Graph, x: Value) -> Value:
    """A value of x's spec that is not elementwise in x."""
    return ops.transpose(ops.reshape(x, x.shape[::-1]))


def test_an_input_that_is_read_later_is_not_overwritten() -> None:
    graph, x, _ = start()
    y = made(graph, x)
    z = ops.relu(y)
    graph.output("sum", ops.add(z, y))
    assert not shared(planned(graph), z, y)


def test_an_input_that_is_an_output_of_the_step_is_not_overwritten() -> None:
    graph, x, _ = start()
    y = made(graph, x)
    graph.output("y", y)
    z = ops.relu(y)
    graph.output("z", z)
    assert not shared(planned(graph), z, y)


@pytest.mark.parametrize("what", ["step input", "state"])
def test_step_inputs_and_state_are_not_overwritten(what: str) -> None:
    graph, x, state = start()
    y = x if what == "step input" else state
    z = ops.relu(y)
    graph.output("z", z)
    assert not shared(planned(graph), z, y)


def test_a_broadcast_operand_is_not_overwritten() -> None:
    graph, x, _ = start()
    row = ops.reduce_sum(x, (0,))
    z = ops.add(x, row)
    graph.output("z", z)
    assert not shared(planned(graph), z, row)


def test_another_dtype_is_another_buffer() -> None:
    graph, x, _ = start()
    y = made(graph, ops.cast(x, DType.BF16))
    z = ops.add(x, y)  # has x's dtype
    graph.output("z", z)
    assert not shared(planned(graph), z, y)


def test_the_same_value_twice_is_taken_once() -> None:
    graph, x, _ = start()
    y = made(graph, x)
    z = ops.multiply(y, y)
    graph.output("z", z)
    assert shared(planned(graph), z, y)


def test_a_value_that_lives_on_through_a_view_is_not_overwritten() -> None:
    graph, x, _ = start()
    y = made(graph, x)
    view = ops.reshape(y, (6,))
    z = ops.relu(y)
    graph.output("z", z)
    graph.output("view", ops.tanh(view))
    plan = planned(graph)
    assert shared(plan, view, y) and not shared(plan, z, y)


def test_a_dying_view_gives_its_buffer_away() -> None:
    graph, x, _ = start()
    view = ops.reshape(made(graph, x), (6,))
    z = ops.relu(view)
    graph.output("z", z)
    assert shared(planned(graph), z, view)


def test_a_chain_that_ends_in_state_lies_there_from_its_start() -> None:
    graph, x, state = start()
    y = made(graph, x)
    z = ops.relu(y)
    ops.assign(state, z)
    plan = planned(graph)
    assert shared(plan, z, state) and shared(plan, z, y) and launched(plan) == ["transpose", "relu"]


def test_a_chain_that_starts_from_a_value_in_state_leaves_it_there() -> None:
    graph, x, state = start()
    y = made(graph, x)
    new = ops.assign(state, y)
    z = ops.relu(y)
    other = graph.state_value("other", PAIR, Kind.OPTIMIZER)
    ops.accumulate(other, ops.tanh(z))
    plan = planned(graph)
    assert shared(plan, y, state) and shared(plan, new, state) and not shared(plan, z, y)
    assert launched(plan) == ["transpose", "relu", "tanh", "accumulate"]


@pytest.mark.parametrize("delivery", ["fresh", "not elementwise"])
def test_only_an_elementwise_kernel_that_writes_in_place_takes_a_buffer(delivery: str) -> None:
    graph, x, _ = start()
    y = made(graph, x)
    seed = graph.input("seed", TensorSpec((), DType.INT64))
    z = ops.relu(y) if delivery == "fresh" else ops.dropout(y, seed, 0.5, 0)
    graph.output("z", z)
    assert not shared(planned(graph, fresh=("relu",)), z, y)


# Lifetimes.


def test_a_step_input_is_live_from_the_upload_to_its_last_reader() -> None:
    graph, x, _ = start()
    graph.output("y", ops.tanh(ops.relu(x)))
    unused = graph.input("unused", PAIR)
    lifetimes = planned(graph).placement.lifetimes
    assert lifetimes[x] == (-1, 0)
    assert lifetimes[unused] == (-1, -1)


def test_an_output_is_live_until_the_end() -> None:
    graph, x, _ = start()
    y = made(graph, x)
    graph.output("y", ops.reshape(y, (6,)))
    graph.output("z", made(graph, made(graph, x)))
    assert planned(graph).placement.lifetimes[y][1] == len(graph.nodes)


def test_workspace_lives_for_its_launch_beside_inputs_and_outputs() -> None:
    graph, x, _ = start()
    graph.output("y", made(graph, x))

    def kernel(name: str) -> Kernel:
        return Kernel(lambda *_: lambda: None, workspace=lambda i, o, a: [TensorSpec((100,)), TensorSpec((3,))])

    plan = build_plan(graph, {"transpose": kernel("transpose")})
    (scratch,) = plan.scratch.values()
    taken = {block.offset // 64 for block in (*scratch, *plan.owned.values())}
    assert len(scratch) == 2 and len(taken) == 4  # no two at one place
    assert plan.arena_bytes >= 400 + 12 + 2 * PAIR.nbytes


def test_a_plan_counts_bytes_by_kind() -> None:
    graph, x, state = start()
    weight = parameter(graph, "w", 2, 3)
    graph.output("y", ops.multiply(ops.accumulate(state, x), weight))
    found = state_bytes(planned(graph))
    assert {kind: nbytes for kind, nbytes in found.items() if nbytes} == {"parameter": 24, "gradient": 24}
    assert found.keys() == {kind.value for kind in Kind if kind.is_state}
