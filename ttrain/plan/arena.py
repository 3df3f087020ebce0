"""Pack buffers with known lifetimes into one range of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ttrain.core.errors import PlanError
from ttrain.device.base import Layout, align
from ttrain.graph import Node, Value

UNPLACED = -1  # no block begins there, since offsets are aligned


@dataclass
class Block:
    """A buffer to place: its bytes, the launches between which it is live (inclusive), and where it came to lie.

    `what` it is for: the value that owns it, the node whose scratch it is, or a name. Offsets below zero lie in reused
    gradients, which end at zero.
    `layout` is for devices without arenas: only blocks of equal layout may lie at the same offset. `on_host` tells that
    the block lies in the host's arena beside that of the device.
    """

    what: Value | Node | str
    nbytes: int
    start: int
    end: int
    offset: int = UNPLACED
    layout: Layout | None = None
    on_host: bool = False


@dataclass(frozen=True)
class GradientReuse:
    """Memory of state that a step may use before it overwrites what lies there, as that of gradients.

    `nbytes` in all; for each tensor that may be overwritten its first byte and its bytes.
    """

    nbytes: int
    tensors: Mapping[str, tuple[int, int]]

    def fixed(self, written: Mapping[str, int], end: int) -> dict[str, Block]:
        """Return the blocks that lie there, by tensor: a `written` one from its launch to the `end`, others always."""
        found, reach = {}, -self.nbytes
        for name, (first, nbytes) in sorted(self.tensors.items(), key=lambda item: item[1]):
            if name in written:
                if first - self.nbytes > reach:
                    found[f"before {name}"] = Block(f"before {name}", first - self.nbytes - reach, -1, end, reach)
                found[name] = Block(name, nbytes, written[name], end, first - self.nbytes)
                reach = first - self.nbytes + nbytes
        return {**found, "": Block("what follows", -reach, -1, end, reach)} if found else {}


def pack(blocks: Sequence[Block], fixed: Sequence[Block] = ()) -> int:
    """Give every block an offset beside what is `fixed` in reused gradients; returns the bytes of the arena.

    Greedy by size: the largest block first, each at the lowest offset where it overlaps nothing that is live with it
    (the greedy-by-size strategy of Pisarchyk and Lee, 2020, arXiv:2001.03288). In reused gradients, whose parts are
    free up to some launch, it may be better to begin with those that live longest.
    """
    by_size = sorted(blocks, key=lambda block: (-block.nbytes, block.start))
    orders = [by_size, *([sorted(by_size, key=lambda block: block.start - block.end)] if fixed else [])]
    total, order, offsets = min((_packed(order, fixed) for order in orders), key=lambda packed: packed[0])
    for block, offset in zip(order, offsets.tolist(), strict=True):
        block.offset = offset
    return total


def _packed(order: Sequence[Block], fixed: Sequence[Block]) -> tuple[int, Sequence[Block], np.ndarray]:
    """Bytes of the arena, the blocks in the order given, and their offsets."""
    every, first = [*fixed, *order], len(fixed)
    starts = np.array([block.start for block in every])
    ends = np.array([block.end for block in every])
    offsets = np.array([block.offset for block in every], dtype=np.int64)
    tops = offsets + np.array([block.nbytes for block in every], dtype=np.int64)
    lowest, total = min((block.offset for block in fixed), default=0), 0
    for index, block in enumerate(order, first):
        together = np.flatnonzero((starts[:index] <= block.end) & (ends[:index] >= block.start))
        offsets[index] = _lowest_gap(offsets[together], tops[together], align(block.nbytes), lowest)
        tops[index] = offsets[index] + align(block.nbytes)
        total = max(total, int(tops[index]))
    return total, order, offsets[first:]


def take_turns(blocks: Sequence[Block]) -> int:
    """Give every block an offset that stands for one tensor; returns the bytes of all tensors.

    Blocks of equal layout share a tensor where they are not live together. First come, first served is optimal here:
    per layout it needs as many tensors as blocks are live at once (colouring of an interval graph).
    """
    free: dict[Layout | None, list[tuple[int, int]]] = {}  # per layout: (live until, offset) of its tensors
    total = 0
    for block in sorted(blocks, key=lambda block: block.start):
        tensors = free.setdefault(block.layout, [])
        taken = max((tensor for tensor in tensors if tensor[0] < block.start), default=None)
        if taken is not None:
            tensors.remove(taken)
            block.offset = taken[1]
        else:
            block.offset, total = total, total + align(max(block.nbytes, 1))
        tensors.append((block.end, block.offset))
    return total


def _lowest_gap(offsets: np.ndarray, tops: np.ndarray, size: int, reach: int) -> int:
    """The lowest offset from `reach` on at which `size` bytes fit between ranges that may overlap one another."""
    by_offset = np.argsort(offsets, kind="stable")
    for offset, top in zip(offsets[by_offset].tolist(), tops[by_offset].tolist(), strict=True):
        if offset - reach >= size:
            break
        reach = max(reach, top)
    return reach


def check_overlap(blocks: Sequence[Block]) -> None:
    """Raise PlanError naming two blocks that are live together and share bytes."""
    order = sorted((block for block in blocks if block.nbytes), key=lambda block: block.start)
    live: list[Block] = []
    for block in order:
        if block.offset == UNPLACED:
            raise PlanError(f"{block.what} was given no place in the arena.")
        live = [other for other in live if other.end >= block.start]
        for other in live:
            if block.offset < other.offset + other.nbytes and other.offset < block.offset + block.nbytes:
                raise PlanError(
                    f"{block.what} (bytes {block.offset} to {block.offset + block.nbytes}, launches {block.start} to "
                    f"{block.end}) overlaps {other.what} (bytes {other.offset} to {other.offset + other.nbytes}, "
                    f"launches {other.start} to {other.end})."
                )
        live.append(block)
