"""Dropout: the hash of core/random_bits.py in int32 arithmetic that wraps, a cache-sized block at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from ttrain.core.random_bits import MIX_MULTIPLIERS, MIX_SHIFTS, keep_threshold, mix, stream_key
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.torch.kernels.common import Call, Context, Emitter, Tensor, constant_like, row, shaped

_SIGN = 1 << 31


def signed(number: int) -> int:
    """The int32 that has the same bits as a 32-bit unsigned number."""
    return number - (1 << 32) if number >= _SIGN else number


@lru_cache(maxsize=4)
def counting(size: int, device: torch.device) -> Tensor:
    """Return 0, 1, ..., size - 1 as int32 [size]."""
    return torch.arange(size, dtype=torch.int32, device=device)


def mask_workspace(context: Context, size: int, dtype: DType, row: int = 0) -> list[TensorSpec]:
    """Scratch of `mask` for `size` elements: key, hash, a temporary, and the mask in x's dtype.

    That of `mask_rows` holds whole heads of `row` elements.
    """
    block = max(min(size, context.block), row)
    hashes = TensorSpec((block,), DType.INT32)
    return [TensorSpec((8,), DType.INT32), hashes, hashes, TensorSpec((block,), dtype)]


class Dropout(NamedTuple):
    """The mask of a dropout: every element is kept with probability 1 - p, by a hash of its number, seed and stream."""

    seed: Tensor
    p: float
    stream: int
    on_cpu: bool
    work: Sequence[Tensor]  # as by `mask_workspace`

    def mask(self, call: Emitter, x: Tensor, y: Tensor) -> None:
        """y <- x * mask / (1 - p) over the elements in row-major order; y may be x."""
        keys, hashes, *_ = self.work
        flat_x, flat_y, size = x.view(-1), y.view(-1), hashes.numel()
        counter = counting(size, x.device)
        emit_key(call, self.on_cpu, self.seed, self.stream, keys)
        for start in range(0, flat_x.numel(), size):
            part_x, part_y = flat_x[start : start + size], flat_y[start : start + size]
            key = _shifted(call, keys, start)
            call.emit(torch.add, counter[: part_x.numel()], key, out=hashes[: part_x.numel()])
            self._apply(call, part_x, part_y)

    def mask_rows(self, call: Emitter, x: Tensor, y: Tensor, at: Rows) -> None:
        """y <- x * mask / (1 - p) with the mask of the whole that x is a part of. Last in `work`: int32 [K]."""
        (keys, hashes, *_, columns), (count, rows, width) = self.work, x.shape
        together = min(max(hashes.numel() // (rows * at.time), 1), count)
        first = _first_of_rows(together, rows, at.time, x.device)
        row, counter = columns[:width], counting(columns.numel(), x.device)[:width]
        emit_key(call, self.on_cpu, self.seed, self.stream, keys)
        for start in range(0, count, together):
            part_x, part_y = x[start : start + together], y[start : start + together]
            key = _shifted(call, keys, (start * at.time + at.row) * at.time + at.column)
            call.emit(torch.add, counter, key, out=row)
            call.emit(torch.add, first[: part_x.shape[0]], row, out=shaped(hashes, part_x.shape))
            self._apply(call, part_x, part_y)

    def _apply(self, call: Emitter, x: Tensor, y: Tensor) -> None:
        """y <- x * mask / (1 - p), where the scratch for hashes holds numbers of elements with the key added."""
        hashes, temporary, mask = (shaped(part, x.shape) for part in self.work[1:4])
        emit_mix(call, hashes, temporary)
        call.emit(torch.bitwise_xor, hashes, constant_like(-_SIGN, hashes), out=hashes)
        # The hash has its top bit flipped, so a signed comparison orders it as unsigned.
        threshold = constant_like(signed(keep_threshold(self.p) ^ _SIGN), hashes)
        call.emit(torch.ge, hashes, threshold, out=hashes)
        call.emit(mask.copy_, hashes)
        call.emit(torch.addcmul, constant_like(0.0, x), x, mask, value=1 / (1 - self.p), out=y)


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


def _shifted(call: Emitter, keys: Tensor, start: int) -> Tensor:
    """The key of elements from number `start` on; numbers wrap at 2^32."""
    if not start:
        return keys[0]
    call.emit(torch.add, keys[0], constant_like(signed(start & 0xFFFFFFFF), keys), out=keys[1])
    return keys[1]


def emit_mix(call: Emitter, x: Tensor, temporary: Tensor) -> None:
    """x <- mix(x) in place. A shift is arithmetic, so its sign bits are cut off."""
    for shift, multiplier in zip(MIX_SHIFTS, (*MIX_MULTIPLIERS, None), strict=True):
        call.emit(torch.bitwise_right_shift, x, constant_like(shift, x), out=temporary)
        call.emit(torch.bitwise_and, temporary, constant_like((1 << 32 - shift) - 1, x), out=temporary)
        call.emit(torch.bitwise_xor, x, temporary, out=x)
        if multiplier is not None:
            call.emit(torch.mul, x, constant_like(signed(multiplier), x), out=x)


def emit_key(call: Emitter, on_cpu: bool, seed: Tensor, stream: int, keys: Tensor) -> None:
    """keys[0] <- stream_key(seed, stream)."""
    if on_cpu:
        first = keys[0]
        call.emit(lambda: first.fill_(signed(stream_key(int(seed), stream))))
        return
    halves = seed.view(1).view(torch.int32)
    key, temporary = keys[0:1], keys[2:3]
    call.emit(torch.bitwise_xor, halves[1:2], constant_like(signed(mix(stream & 0xFFFFFFFF)), keys), out=key)
    emit_mix(call, key, temporary)
    call.emit(torch.bitwise_xor, key, halves[0:1], out=key)
    emit_mix(call, key, temporary)


def dropout_of(call: Call, seed: Tensor, work: Sequence[Tensor]) -> Dropout:
    """Return the dropout that the attributes of a call ask for."""
    return Dropout(seed, call.attributes.get("p", 0.0), call.attributes.get("stream", 0), call.context.on_cpu, work)


def _dropout_workspace(call: Call) -> list[TensorSpec]:
    return mask_workspace(call.context, call.outs[0].size, call.outs[0].dtype)


@row("dropout", _dropout_workspace, overwrites=(0,))
def _dropout(call: Call) -> None:
    dropout_of(call, call.ins[1], call.work).mask(call, call.ins[0], call.outs[0])


@row("dropout_mask", _dropout_workspace)
def _dropout_mask(call: Call) -> None:
    mask = call.outs[0]
    call.emit(mask.fill_, 1)
    dropout_of(call, call.ins[0], call.work).mask(call, mask, mask)
