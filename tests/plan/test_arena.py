"""Packing buffers with known lifetimes: nothing overlaps, nothing is wasted beyond reason."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ttrain.core.errors import PlanError
from ttrain.device.base import ALIGNMENT, align
from ttrain.plan.arena import Block, check_overlap, pack
from ttrain.train.forecast.step_cost import peak

SETTINGS = settings(max_examples=200, deadline=None, derandomize=True)


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
    with pytest.raises(PlanError, match="overlaps"):
        check_overlap(placed)


def test_the_error_tells_bytes_and_launches() -> None:
    one, other = Block("one", 100, 0, 3, 0), Block("other", 50, 3, 5, 64)
    with pytest.raises(PlanError) as error:
        check_overlap([one, other])
    said = "other (bytes 64 to 114, launches 3 to 5) overlaps one (bytes 0 to 100, launches 0 to 3)."
    assert str(error.value) == said


def test_a_block_without_a_place_is_named() -> None:
    with pytest.raises(PlanError, match="lost was given no place"):
        check_overlap([Block("lost", 8, 0, 0)])


def test_a_chain_needs_the_memory_of_two_links() -> None:
    chain = [Block(f"link{i}", 4096, i, i + 1) for i in range(100)]
    assert pack(chain) == peak(chain)[0] == 2 * 4096


def test_a_stack_as_backward_makes_it_packs_without_a_gap() -> None:
    """Activations that die in the opposite order, with short-lived scratch on top."""
    depth = 20
    stack = [Block(f"kept{i}", 1000 * (i % 3 + 1), i, 2 * depth - i) for i in range(depth)]
    stack += [Block(f"scratch{i}", 500, i, i) for i in range(2 * depth)]
    assert pack(stack) == peak(stack)[0]


def test_empty_blocks_take_nothing() -> None:
    empty = [Block("a", 0, 0, 9), Block("b", 0, 0, 9)]
    assert pack(empty) == 0 and pack([]) == 0
    check_overlap(empty)
