"""Dropout: the hash of core/random_bits.py in int32 arithmetic that wraps, a cache-sized block at a time."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from ttrain.core.random_bits import MIX_MULTIPLIERS, MIX_SHIFTS, SIGN, keep_threshold, mix, signed, stream_key
from ttrain.device.torch.kernels.common import Call, Tensor, constant_like, row, shaped


@lru_cache(maxsize=4)
def counting(size: int, device: torch.device) -> Tensor:
    """Return 0, 1, ..., size - 1 as int32 [size]."""
    return torch.arange(size, dtype=torch.int32, device=device)


class Dropout:
    """The mask of a dropout: every element is kept with probability 1 - p, by a hash of its number, seed and stream."""

    def __init__(self, call: Call, seed: Tensor, size: int, dtype: torch.dtype, rows: tuple[int, int] = (0, 0)) -> None:
        """Take scratch for `size` elements. `rows` and width of the whole are those of one head for `mask_rows`."""
        self.call, self.seed = call, seed
        self.p, self.stream = call.attributes["p"], call.attributes.get("stream", 0)
        block = max(min(size, call.context.block), math.prod(rows))
        self.keys = call.scratch((8,), torch.int32)
        self.hashes, self.temporary = (call.scratch((block,), torch.int32) for _ in range(2))
        self.kept = call.scratch((block,), dtype)
        self.columns = call.scratch(rows[1:], torch.int32) if rows[1] else None

    def mask(self, x: Tensor, y: Tensor) -> None:
        """y <- x * mask / (1 - p) over the elements in row-major order; y may be x."""
        flat_x, flat_y, size = x.view(-1), y.view(-1), self.hashes.numel()
        emit_key(self.call, self.seed, self.stream, self.keys)
        counter = counting(size, x.device)
        for start in range(0, flat_x.numel(), size):
            part_x, part_y = flat_x[start : start + size], flat_y[start : start + size]
            key = self._shifted(start)
            self.call.emit(torch.add, counter[: part_x.numel()], key, out=self.hashes[: part_x.numel()])
            self._apply(part_x, part_y)

    def mask_rows(self, x: Tensor, y: Tensor, at: Rows) -> None:
        """y <- x * mask / (1 - p) with the mask of the whole that x is a part of."""
        assert self.columns is not None
        count, rows, width = x.shape
        together = min(max(self.hashes.numel() // (rows * at.time), 1), count)
        emit_key(self.call, self.seed, self.stream, self.keys)
        first = _first_of_rows(together, rows, at.time, x.device)
        row, counter = self.columns[:width], counting(at.time, x.device)[:width]
        for start in range(0, count, together):
            part_x, part_y = x[start : start + together], y[start : start + together]
            self.call.emit(torch.add, counter, self._shifted((start * at.time + at.row) * at.time + at.column), out=row)
            self.call.emit(torch.add, first[: part_x.shape[0]], row, out=shaped(self.hashes, part_x.shape))
            self._apply(part_x, part_y)

    def _shifted(self, start: int) -> Tensor:
        """The key of elements from number `start` on; numbers wrap at 2^32."""
        if not start:
            return self.keys[0]
        number = constant_like(signed(start & 0xFFFFFFFF), self.keys)
        self.call.emit(torch.add, self.keys[0], number, out=self.keys[1])
        return self.keys[1]

    def _apply(self, x: Tensor, y: Tensor) -> None:
        """y <- x * mask / (1 - p), where the scratch for hashes holds numbers of elements with the key added."""
        hashes, temporary, mask = (shaped(part, x.shape) for part in (self.hashes, self.temporary, self.kept))
        emit_mix(self.call, hashes, temporary)
        self.call.emit(torch.bitwise_xor, hashes, constant_like(-SIGN, hashes), out=hashes)
        # The hash has its top bit flipped, so a signed comparison orders it as unsigned.
        threshold = constant_like(signed(keep_threshold(self.p) ^ SIGN), hashes)
        self.call.emit(torch.ge, hashes, threshold, out=hashes)
        self.call.emit(mask.copy_, hashes)
        self.call.emit(torch.addcmul, constant_like(0.0, x), x, mask, value=1 / (1 - self.p), out=y)


class Rows(NamedTuple):
    """Rows from `row` on, and columns from `column` on, that x [N, R, K] holds of a whole [N, time, time]."""

    row: int
    column: int
    time: int


@lru_cache(maxsize=8)
def _first_of_rows(count: int, rows: int, time: int, device: torch.device) -> Tensor:
    """int32 [count, rows, 1]: numbers of the first elements of rows in [count, time, time], which wrap at 2^32."""
    heads, numbers = torch.arange(count)[:, None, None], torch.arange(rows)[:, None]
    return ((heads * time + numbers) * time).to(torch.int32).to(device)


def emit_mix(call: Call, x: Tensor, temporary: Tensor) -> None:
    """x <- mix(x) in place. A shift is arithmetic, so its sign bits are cut off."""
    for shift, multiplier in zip(MIX_SHIFTS, (*MIX_MULTIPLIERS, None), strict=True):
        call.emit(torch.bitwise_right_shift, x, constant_like(shift, x), out=temporary)
        call.emit(torch.bitwise_and, temporary, constant_like((1 << 32 - shift) - 1, x), out=temporary)
        call.emit(torch.bitwise_xor, x, temporary, out=x)
        if multiplier is not None:
            call.emit(torch.mul, x, constant_like(signed(multiplier), x), out=x)


def emit_key(call: Call, seed: Tensor, stream: int, keys: Tensor) -> None:
    """keys[0] <- stream_key(seed, stream)."""
    if call.context.on_cpu:
        first = keys[0]
        call.emit(lambda: first.fill_(signed(stream_key(int(seed), stream))))
        return
    halves = seed.view(1).view(torch.int32)
    key, temporary = keys[0:1], keys[2:3]
    call.emit(torch.bitwise_xor, halves[1:2], constant_like(signed(mix(stream & 0xFFFFFFFF)), keys), out=key)
    emit_mix(call, key, temporary)
    call.emit(torch.bitwise_xor, key, halves[0:1], out=key)
    emit_mix(call, key, temporary)


@row("dropout", overwrites=(0,))
def _dropout(call: Call) -> None:
    y = call.outs[0]
    Dropout(call, call.ins[1], y.numel(), y.dtype).mask(call.ins[0], y)


@row("dropout_mask")
def _dropout_mask(call: Call) -> None:
    mask = call.outs[0]
    dropout = Dropout(call, call.ins[0], mask.numel(), mask.dtype)
    call.emit(mask.fill_, 1)
    dropout.mask(mask, mask)
