"""Packing buffers with known lifetimes, and faults put into a plan by hand: the checker names the place of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.engine.recording_device import RecordingDevice
from ttrain import ops
from ttrain.core.errors import PlanError
from ttrain.core.spec import TensorSpec
from ttrain.device.base import ALIGNMENT, Delivery, align
from ttrain.graph import Graph, Kind, Value
from ttrain.plan import build_plan
from ttrain.plan.arena import Block, check_overlap, pack
from ttrain.plan.check import check
from ttrain.train.forecast.step_cost import peak

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
        self.small = Value(graph, TensorSpec((2,)), Kind.NODE, "small")
        self.device = RecordingDevice()
        self.plan = build_plan(graph, self.device.kernels)

    def turned(self, x: Value) -> Value:
        return ops.transpose(ops.reshape(x, x.shape[::-1]))

    def own(self, value: Value, owner: Value, nbytes: int = 0) -> None:
        """Let a value lie in another's buffer; with `nbytes`, in a new one of that size."""
        self.plan.placement.owner[value] = owner
        if nbytes:
            self.plan.owned[owner] = Block(owner, nbytes, 0, 99, 4096)


def test_the_example_is_sound_and_uses_every_kind_of_sharing() -> None:
    example = Example()
    check(example.plan, example.device.kernels)
    owner_of = example.plan.placement.owner_of
    assert owner_of(example.relu) is example.moved and owner_of(example.given) is example.state
    launched = " ".join(node.op.name for node in example.plan.launched)
    assert launched == "transpose relu transpose transpose tanh accumulate add accumulate"


# Faults, by what is told.
FAULTS: dict[str, Callable[[Example], Any]] = {
    r"add\(.* reads .*, but its buffer holds": lambda it: it.own(it.tanh, it.kept),
    r"transpose\(.* reads .*, but its buffer holds": lambda it: it.own(it.relu, it.x),
    r"but its buffer holds s:fp32\[2, 3\] by then": lambda it: it.own(it.given, it.given, PAIR.nbytes),
    "the next step's s reads": lambda it: it.own(it.last, it.state),
    "outside the lifetime of its buffer": lambda it: setattr(it.plan.owned[it.kept], "end", 3),
    "does not fit the buffer of small": lambda it: it.own(it.moved, it.small, 8),
    "overlaps": lambda it: [setattr(block, "offset", 0) for block in it.plan.blocks],
    "transpose delivers in place, but": lambda it: it.device.deliveries.update(transpose=Delivery.INPLACE),
    "would write over its own input|but its buffer holds": lambda it: it.own(it.kept, it.moved, PAIR.nbytes),
    "would write over its own input": lambda it: it.device.deliveries.update(relu=Delivery.RETURNS),
}


@pytest.mark.parametrize("said", FAULTS)
def test_a_fault_is_named(said: str) -> None:
    example = Example()
    FAULTS[said](example)
    with pytest.raises(PlanError, match=said):
        check(example.plan, example.device.kernels)


SETTINGS = settings(max_examples=100, deadline=None, derandomize=True)


@st.composite
def blocks(draw: st.DrawFn, least: int = 0) -> list[Block]:
    def block(index: int) -> Block:
        start = draw(st.integers(-1, 30))
        size = draw(st.one_of(st.integers(0, 300), st.sampled_from((64, 1024, 4096))))
        return Block(f"b{index}", size, start, start + draw(st.integers(0, 12)))

    return [block(index) for index in range(draw(st.integers(least, 25)))]


def live_together(a: Block, b: Block) -> bool:
    return a.start <= b.end and b.start <= a.end


def bytes_of(block: Block) -> set[int]:
    return set(range(block.offset, block.offset + block.nbytes))


@SETTINGS
@given(blocks())
def test_no_two_live_blocks_share_a_byte(placed: list[Block]) -> None:
    total = pack(placed)
    for index, one in enumerate(placed):
        assert one.offset >= 0 and one.offset % ALIGNMENT == 0 and one.offset + one.nbytes <= total
        for other in placed[:index]:
            assert not (live_together(one, other) and bytes_of(one) & bytes_of(other))
    check_overlap(placed)


@SETTINGS
@given(blocks())
def test_the_arena_lies_between_the_peak_and_no_reuse_at_all(placed: list[Block]) -> None:
    most = peak(placed)[0]
    brute = max((sum(align(b.nbytes) for b in placed if b.start <= t <= b.end) for t in range(-1, 50)), default=0)
    assert most == brute
    assert most <= pack(placed) <= sum(align(block.nbytes) for block in placed)


@SETTINGS
@given(blocks(least=1))
def test_packing_is_a_function_of_its_input(placed: list[Block]) -> None:
    again = [Block(block.what, block.nbytes, block.start, block.end) for block in placed]
    assert pack(placed) == pack(again) and [b.offset for b in placed] == [b.offset for b in again]


@SETTINGS
@given(blocks(least=2), st.data())
def test_an_overlap_is_found_and_both_blocks_are_named(placed: list[Block], data: st.DataObject) -> None:
    pack(placed)
    pairs = [
        (one, other)
        for one in placed
        for other in placed
        if one is not other and one.nbytes and other.nbytes and live_together(one, other)
    ]
    assume(pairs)
    one, other = data.draw(st.sampled_from(pairs))
    one.offset = other.offset + data.draw(st.integers(0, other.nbytes - 1))
    with pytest.raises(PlanError, match=r"b\d+ \(bytes \d+ to \d+, launches .*\) overlaps b\d+ \(bytes"):
        check_overlap(placed)


def test_a_block_without_a_place_is_named() -> None:
    with pytest.raises(PlanError, match="lost was given no place"):
        check_overlap([Block("lost", 8, 0, 0)])


def test_a_chain_and_a_stack_as_backward_makes_it_pack_without_a_gap() -> None:
    """The stack is of activations that die in the opposite order, with short-lived scratch on top."""
    chain = [Block(f"link{i}", 4096, i, i + 1) for i in range(100)]
    assert pack(chain) == peak(chain)[0] == 2 * 4096
    depth = 20
    stack = [Block(f"kept{i}", 1000 * (i % 3 + 1), i, 2 * depth - i) for i in range(depth)]
    stack += [Block(f"scratch{i}", 500, i, i) for i in range(2 * depth)]
    assert pack(stack) == peak(stack)[0]
