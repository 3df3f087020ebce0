"""Groups of state that an optimizer's rule updates together; state that is kept in bf16, and how it is rounded.

State is widened to fp32 a piece at a time, so that what is saved by keeping it in bf16 is not asked for again during
the update. Random bits come from core/random_bits.py; an element's number is its place in the stack, which is
another than on a CPU, so the bits differ from those drawn there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any

import numpy as np

from ttrain.device.base import Launch
from ttrain.device.ttnn.kernels.common import Context
from ttrain.device.ttnn.kernels.random import key_of, mix_into
from ttrain.device.ttnn.tensors.device_tensor import DeviceTensor, Tensors
from ttrain.device.ttnn.tensors.layout import TILE, TileLayout
from ttrain.device.ttnn.tensors.stack import Stack, stacked

Joined = Any  # a stack or a tensor by itself: both have `t` and `layout`


@dataclass
class UpdateGroup:
    """Tensors that one chain of launches updates: a buffer per written slot, and the gradients arranged alike."""

    slots: list[Joined]
    gradients: Joined


def groups_of(c: Context, gradients: Tensors, slots: Sequence[Tensors]) -> list[UpdateGroup]:
    joined = [stacked(c.store, tensors) for tensors in (gradients, *slots)]
    return [UpdateGroup(list(rest), first) for first, *rest in zip(*joined, strict=True)]


Update = Callable[[UpdateGroup], Launch]


@dataclass
class Scalars:
    """Scalar inputs of a rule."""

    lr: DeviceTensor
    step: DeviceTensor
    factor: DeviceTensor | None


def scaled_gradient(c: Context, gradient: Any, factor: DeviceTensor | None) -> Any:
    """A new fp32 tensor: the gradient times the clip factor."""
    tt = c.tt
    return tt.typecast(gradient, tt.float32) if factor is None else tt.multiply(gradient, factor.t, dtype=tt.float32)


@dataclass
class _Buffer:
    """A tensor that exists for the time of one launch."""

    t: Any


def on_wide(
    c: Context,
    group: UpdateGroup,
    update: Callable[[UpdateGroup], Launch],
    rounding: Callable[[int, Any], None] | None = None,
) -> Launch:
    """An update of fp32 tensors on state of which some is bf16: widened before, rounded after.

    `rounding` turns the fp32 numbers of a slot into numbers that bf16 has.
    """
    tt = c.tt
    narrow = [slot.layout.dtype != "float32" for slot in group.slots]
    wide = UpdateGroup(
        [_Buffer(None) if cut else slot for cut, slot in zip(narrow, group.slots, strict=True)], group.gradients
    )
    launch = update(wide)

    def run() -> None:
        for slot, temporary, cut in zip(group.slots, wide.slots, narrow, strict=True):
            if cut:
                temporary.t = tt.typecast(slot.t, tt.float32)
        launch()
        for number, (slot, temporary) in enumerate(zip(group.slots, wide.slots, strict=True)):
            if narrow[number]:
                if rounding is not None:
                    rounding(number, temporary)
                tt.typecast(temporary.t, tt.bfloat16, output_tensor=slot.t)
                temporary.t = None

    return run


def each(launches: Sequence[Launch]) -> Launch:
    def run() -> None:
        for launch in launches:
            launch()

    return run


PIECE = 2**23  # elements that are widened at a time
_LOW, _HIGH = 0xFFFF, -0x10000  # the bits of a fp32 number that a bf16 number lacks, and those that it has


@dataclass
class _Piece:
    """Rows of a stack, as a tensor."""

    t: Any
    layout: TileLayout


def pieces(c: Context, group: UpdateGroup) -> Iterator[tuple[UpdateGroup, int]]:
    """A group cut where its stacks begin a bank anew, each piece with the number of its first element."""
    first = group.slots[0]
    if not isinstance(first, Stack):
        yield group, 0
        return
    rows, width = first.layout.shape
    unit = c.store.banks * TILE
    length = max(1, PIECE // (unit * width)) * unit
    for start in range(0, rows, length):
        count = min(length, rows - start)

        def cut(whole: Joined, start: int = start, count: int = count) -> _Piece:
            return _Piece(c.tt.narrow(whole.t, 0, start, count), TileLayout((count, width), whole.layout.dtype))

        yield UpdateGroup([cut(slot) for slot in group.slots], cut(group.gradients)), start * width


class Rounding:
    """Stochastic rounding of the slots of one update."""

    def __init__(self, c: Context, numbers: Sequence[int], stream: int, seed: Any) -> None:
        self.c = c
        self.keys = {number: key_of(c, seed, stream + number, per_chip=False) for number in numbers}

    def of(self, layout: TileLayout, first: int) -> Callable[[int, Any], None]:
        """For tensors of this layout whose first element has this number."""
        shape = _seen_as(layout)
        rows, columns = (prod(shape[:-1]), shape[-1])
        row = self._counter((*shape[:-1], 1), rows, columns)
        column = self._counter((1,) * (len(shape) - 1) + (columns,), columns, 1)

        def run(number: int, slot: Any) -> None:
            if number in self.keys:
                start = self.c.tt.add(self.c.tt.add(column.t, self.keys[number].t), first)
                slot.t = self._rounded(slot.t, layout.shape, shape, self.c.tt.add(row.t, start))

        return run

    def _counter(self, shape: tuple[int, ...], count: int, stride: int) -> DeviceTensor:
        """0, stride, 2 stride and so on, as int32 that wraps."""

        def values() -> np.ndarray:
            return (np.arange(count, dtype=np.int64) * stride).astype(np.uint32).view(np.int32).reshape(shape)

        return self.c.constant(("counter", stride), TileLayout(shape, "int32"), values)

    def _rounded(self, x: Any, given: tuple[int, ...], shape: tuple[int, ...], hashes: Any) -> Any:
        tt = self.c.tt
        mix_into(tt, hashes)
        tt.bitwise_and(hashes, _LOW, output_tensor=hashes)
        seen = x if shape == given else tt.experimental.view(x, shape)
        bits = tt.bitcast(tt.bitcast(seen, tt.uint32), tt.int32)
        tt.add(bits, hashes, output_tensor=bits)
        tt.bitwise_and(bits, _HIGH, output_tensor=bits)
        cut = tt.bitcast(tt.bitcast(bits, tt.uint32), tt.float32)
        return cut if shape == given else tt.experimental.view(cut, given)


def _seen_as(layout: TileLayout) -> tuple[int, ...]:
    """A shape of the same tiles in which the numbers of rows and of columns take little memory."""
    if layout.shape[-1] != TILE or layout.padded != layout.shape or len(layout.shape) != 2:
        return layout.shape
    tiles = layout.tiles
    across = next(count for count in range(isqrt(tiles), 0, -1) if tiles % count == 0)
    return tiles // across * TILE, across * TILE
