"""Faults put into a plan by hand: the checker finds each of them and names the place."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ttrain import ops
from ttrain.core.errors import PlanError
from ttrain.core.spec import TensorSpec
from ttrain.device.base import Delivery
from ttrain.device.null import NullDevice
from ttrain.graph import Graph, Kind, Value
from ttrain.plan import Plan, build_plan
from ttrain.plan.arena import Block
from ttrain.plan.check import check

PAIR = TensorSpec((2, 3))


class Example:
    """transpose -> relu (in place) -> assign (elided) -> accumulate -> tanh, and a value that lives across all."""

    def __init__(self) -> None:
        graph = self.graph = Graph()
        self.x = graph.input("x", PAIR)
        self.state = graph.state_value("s", PAIR, Kind.GRADIENT)
        self.moved = self.turned(self.x)
        self.relu = ops.relu(self.moved)
        self.kept = self.turned(self.relu)
        self.given = self.turned(self.kept)
        self.assigned = ops.assign(self.state, self.given)
        self.tanh = ops.tanh(self.assigned)
        self.added = ops.accumulate(self.assigned, self.x)
        self.last = ops.add(self.tanh, self.kept)
        ops.accumulate(graph.state_value("t", PAIR, Kind.OPTIMIZER), self.last)
        self.device = NullDevice()
        self.plan = build_plan(graph, self.device.kernels)

    def turned(self, x: Value) -> Value:
        return ops.transpose(ops.reshape(x, x.shape[::-1]))

    def own(self, value: Value, owner: Value) -> None:
        self.plan.placement.owner[value] = owner

    def fault(self) -> str:
        with pytest.raises(PlanError) as error:
            check(self.plan, self.device.kernels)
        return str(error.value)


def test_the_example_is_sound_and_uses_every_kind_of_sharing() -> None:
    example = Example()
    check(example.plan, example.device.kernels)
    owner_of = example.plan.placement.owner_of
    assert owner_of(example.relu) is example.moved and owner_of(example.given) is example.state


def _overwrite_a_kept_value(example: Example) -> None:
    example.own(example.tanh, example.kept)


def _overwrite_a_step_input(example: Example) -> None:
    example.own(example.relu, example.x)


def _drop_a_copy_that_is_needed(example: Example) -> None:
    example.own(example.given, example.given)
    example.plan.owned[example.given] = Block("given", PAIR.nbytes, 0, 99, 4096)


def _spoil_a_state_after_its_last_reader(example: Example) -> None:
    example.own(example.last, example.state)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_overwrite_a_kept_value, "but its buffer holds"),
        (_overwrite_a_step_input, "but its buffer holds"),
        (_drop_a_copy_that_is_needed, "but its buffer holds s:fp32[2, 3] by then"),
        (_spoil_a_state_after_its_last_reader, "the next step's s reads"),
    ],
)
def test_a_read_that_finds_another_value_is_named(fault: Callable[[Example], None], said: str) -> None:
    example = Example()
    fault(example)
    assert said in example.fault()


def test_a_use_outside_the_lifetime_is_named() -> None:
    example = Example()
    example.plan.owned[example.kept].end -= 1
    assert "outside the lifetime of its buffer" in example.fault()


def test_a_buffer_that_is_too_small_is_named() -> None:
    example = Example()
    graph = example.graph
    small = Value(graph, TensorSpec((2,)), Kind.NODE, "small")
    example.own(example.moved, small)
    example.plan.owned[small] = Block("small", 8, 0, 99, 4096)
    assert "does not fit the buffer of small" in example.fault()


def test_bytes_shared_by_live_buffers_are_named() -> None:
    example = Example()
    for block in example.plan.blocks:
        block.offset = 0
    assert "overlaps" in example.fault()


def test_a_kernel_that_delivers_in_place_needs_an_output_that_is_an_input() -> None:
    example = Example()
    example.device.deliveries["transpose"] = Delivery.INPLACE
    assert "transpose delivers in place, but" in example.fault()


@pytest.mark.parametrize("fresh", [False, True], ids=["not elementwise", "fresh"])
def test_a_kernel_does_not_write_over_what_it_reads(fresh: bool) -> None:
    example = Example()
    if fresh:
        example.device.deliveries["relu"] = Delivery.RETURNS
    else:
        example.own(example.kept, example.moved)
        example.plan.owned[example.moved] = Block("moved", PAIR.nbytes, 0, 99, 4096)
    assert "would write over its own input" in example.fault() or "but its buffer holds" in example.fault()


def test_the_plan_of_the_example() -> None:
    plan: Plan = Example().plan
    assert [node.op.name for node in plan.launched] == [
        "transpose", "relu", "transpose", "transpose", "tanh", "accumulate", "add", "accumulate",
    ]  # fmt: skip
