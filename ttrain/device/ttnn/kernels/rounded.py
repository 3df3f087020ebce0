"""Rows of the optimizers on state that is rounded (ops/rounded.py).

State is widened to fp32 a piece at a time, so that what is saved by keeping it in bf16 is not asked for again during
the update. Random bits come from the hash of core/mask.py; an element's number is its place in the stack, which is
another than on a CPU, so the bits differ from those drawn there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt, prod
from typing import Any

import numpy as np

from ttrain.device.base import Kernel, Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, inplace
from ttrain.device.ttnn.kernels.random import key_of, mix_into
from ttrain.device.ttnn.kernels.update import Joined, Rates, UpdateGroup, adamw_wide, each, groups_of, on_wide, sgd_wide
from ttrain.device.ttnn.tensors.form import TILE, TileForm
from ttrain.device.ttnn.tensors.held import Held
from ttrain.device.ttnn.tensors.stack import Stack

PIECE = 2**23  # elements that are widened at a time
_LOW, _HIGH = 0xFFFF, -0x10000  # the bits of a fp32 number that a bf16 number lacks, and those that it has


@dataclass
class _Piece:
    """Rows of a stack, as a tensor."""

    t: Any
    form: TileForm


def _pieces(c: Context, group: UpdateGroup) -> Iterator[tuple[UpdateGroup, int]]:
    """A group cut where its stacks begin a bank anew, each piece with the number of its first element."""
    first = group.slots[0]
    if not isinstance(first, Stack):
        yield group, 0
        return
    rows, width = first.form.shape
    unit = c.store.banks * TILE
    length = max(1, PIECE // (unit * width)) * unit
    for start in range(0, rows, length):
        count = min(length, rows - start)

        def cut(whole: Joined, start: int = start, count: int = count) -> _Piece:
            return _Piece(c.tt.narrow(whole.t, 0, start, count), TileForm((count, width), whole.form.dtype))

        yield UpdateGroup([cut(slot) for slot in group.slots], cut(group.gradients)), start * width


class _Rounding:
    """Stochastic rounding of the slots of one update."""

    def __init__(self, c: Context, names: Sequence[str], attributes: Attributes, seed: Any) -> None:
        self.c, self.keys = c, {}  # by number of the slot
        for number, name in enumerate(names):
            if name in attributes["stochastic"]:
                self.keys[number] = key_of(c, seed, attributes["stream"] + number, per_chip=False)

    def of(self, form: TileForm, first: int) -> Callable[[int, Any], None]:
        """For tensors of this form whose first element has this number."""
        shape = _seen_as(form)
        rows, columns = (prod(shape[:-1]), shape[-1])
        row = self._counter((*shape[:-1], 1), rows, columns)
        column = self._counter((1,) * (len(shape) - 1) + (columns,), columns, 1)

        def run(number: int, slot: Any) -> None:
            if number in self.keys:
                start = self.c.tt.add(self.c.tt.add(column.t, self.keys[number].t), first)
                slot.t = self._rounded(slot.t, form.shape, shape, self.c.tt.add(row.t, start))

        return run

    def _counter(self, shape: tuple[int, ...], count: int, stride: int) -> Held:
        """0, stride, 2 stride and so on, as int32 that wraps."""

        def values() -> np.ndarray:
            return (np.arange(count, dtype=np.int64) * stride).astype(np.uint32).view(np.int32).reshape(shape)

        return self.c.constant(("counter", stride), TileForm(shape, "int32"), values)

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


def _seen_as(form: TileForm) -> tuple[int, ...]:
    """A shape of the same tiles in which the numbers of rows and of columns take little memory."""
    if form.shape[-1] != TILE or form.padded != form.shape or len(form.shape) != 2:
        return form.shape
    tiles = form.tiles
    across = next(count for count in range(isqrt(tiles), 0, -1) if tiles % count == 0)
    return tiles // across * TILE, across * TILE


def _adamw(c: Context) -> Kernel:
    def build(ins: Sequence[Any], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        count = attributes["count"]
        p, g, m, v = (list(ins[start : start + count]) for start in range(0, 4 * count, count))
        lr, step, factor, seed = ins[4 * count :]
        rates = Rates(c, lr, step, attributes)
        rounding = _Rounding(c, ("parameters", "first_moments", "second_moments"), attributes, seed)

        def update(wide: UpdateGroup) -> Launch:
            return adamw_wide(c, wide, rates, factor, attributes)

        return _launch(c, groups_of(c, g, [p, m, v]), update, rounding)

    return inplace(build)


def _sgd(c: Context) -> Kernel:
    def build(ins: Sequence[Any], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        count = attributes["count"]
        lists = [list(ins[start : start + count]) for start in range(0, len(ins) - 3, count)]
        lr, factor, seed = ins[-3:]
        update = partial(sgd_wide, c, lr=lr, factor=factor, attributes=attributes)
        rounding = _Rounding(c, ("parameters", "velocities"), attributes, seed)
        return _launch(c, groups_of(c, lists[1], [lists[0], *lists[2:]]), update, rounding)

    return inplace(build)


def _launch(
    c: Context, groups: Sequence[UpdateGroup], update: Callable[[UpdateGroup], Launch], rounding: _Rounding
) -> Launch:
    launches, numbered = [], 0
    for group in groups:
        for piece, first in _pieces(c, group):
            launches.append(on_wide(c, piece, update, rounding.of(piece.slots[0].form, numbered + first)))
        numbered += prod(group.slots[0].form.shape)
    return each(launches)


def table(c: Context) -> dict[str, Kernel]:
    return {"adamw_rounded": _adamw(c), "sgd_rounded": _sgd(c)}
