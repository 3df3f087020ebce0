"""Dropout: the hash of core/random_bits.py in int32 arithmetic that wraps, a cache-sized block at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from ttrain.core.random_bits import MIX_MULTIPLIERS, MIX_SHIFTS, keep_threshold, mix, stream_key
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Launch, chain
from ttrain.device.torch.kernels.common import (
    Attributes,
    Context,
    Specs,
    Tensor,
    Tensors,
    constant,
    copying,
    row,
    shaped,
)

_SIGN = 1 << 31


def signed(number: int) -> int:
    """The int32 that has the same bits as a 32-bit unsigned number."""
    return number - (1 << 32) if number >= _SIGN else number


@lru_cache(maxsize=4)
def counting(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, dtype=torch.int32, device=device)


def mask_workspace(context: Context, size: int, dtype: DType, row: int = 0) -> list[TensorSpec]:
    """Scratch of `masking` for `size` elements: key, hash, a temporary, and the mask in x's dtype.

    That of `masking_rows` holds whole heads of `row` elements.
    """
    block = max(min(size, context.block), row)
    hashes = TensorSpec((block,), DType.INT32)
    return [TensorSpec((8,), DType.INT32), hashes, hashes, TensorSpec((block,), dtype)]


def masking(
    context: Context, x: Tensor, y: Tensor, seed: Tensor, p: float, stream: int, work: Sequence[Tensor]
) -> Launch:
    """y <- x * mask / (1 - p) over the elements in row-major order; y may be x."""
    keys, hashes, *_ = work
    flat_x, flat_y, size = x.view(-1), y.view(-1), hashes.numel()
    counter = counting(size, x.device)
    launches = [keying(context, seed, stream, keys)]
    for start in range(0, flat_x.numel(), size):
        part_x, part_y = flat_x[start : start + size], flat_y[start : start + size]
        key, shifting = _shifted(keys, start)
        counted = partial(torch.add, counter[: part_x.numel()], key, out=hashes[: part_x.numel()])
        launches += [*shifting, counted, *_masking(part_x, part_y, p, work)]
    return chain(*launches)


class Rows(NamedTuple):
    """Rows from `row` on, and columns from `column` on, that x [N, R, K] holds of a whole [N, time, time]."""

    row: int
    column: int
    time: int


def masking_rows(
    context: Context, x: Tensor, y: Tensor, at: Rows, seed: Tensor, p: float, stream: int, work: Sequence[Tensor]
) -> Launch:
    """y <- x * mask / (1 - p) with the mask of the whole that x is a part of; y may be x. Last in `work`: int32 [K]."""
    (keys, hashes, *_, columns), (count, rows, width) = work, x.shape
    together = min(max(hashes.numel() // (rows * at.time), 1), count)
    first = _first_of_rows(together, rows, at.time, x.device)
    row, counter = columns[:width], counting(columns.numel(), x.device)[:width]
    launches = [keying(context, seed, stream, keys)]
    for start in range(0, count, together):
        part_x, part_y = x[start : start + together], y[start : start + together]
        key, shifting = _shifted(keys, (start * at.time + at.row) * at.time + at.column)
        counted = [
            partial(torch.add, counter, key, out=row),
            partial(torch.add, first[: part_x.shape[0]], row, out=shaped(hashes, part_x.shape)),
        ]
        launches += [*shifting, *counted, *_masking(part_x, part_y, p, work)]
    return chain(*launches)


@lru_cache(maxsize=8)
def _first_of_rows(count: int, rows: int, time: int, device: torch.device) -> Tensor:
    """int32 [count, rows, 1]: numbers of the first elements of rows in [count, time, time], which wrap at 2^32."""
    heads, numbers = torch.arange(count)[:, None, None], torch.arange(rows)[:, None]
    return ((heads * time + numbers) * time).to(torch.int32).to(device)


def _shifted(keys: Tensor, start: int) -> tuple[Tensor, list[Launch]]:
    """The key of elements from number `start` on, and what makes it; numbers wrap at 2^32."""
    if not start:
        return keys[0], []
    number = constant(signed(start & 0xFFFFFFFF), torch.int32, keys.device)
    return keys[1], [partial(torch.add, keys[0], number, out=keys[1])]


def _masking(x: Tensor, y: Tensor, p: float, work: Sequence[Tensor]) -> list[Launch]:
    """y <- x * mask / (1 - p), where the scratch for hashes holds the counters of the elements with the key added."""
    hashes, temporary, mask = (shaped(part, x.shape) for part in work[1:4])
    return [
        *mixing(hashes, temporary, flip=True),
        # The hash has its top bit flipped, so a signed comparison orders it as unsigned.
        partial(torch.ge, hashes, _int(signed(keep_threshold(p) ^ _SIGN), x), out=hashes),
        copying(mask, hashes),
        partial(torch.addcmul, constant(0.0, x.dtype, x.device), x, mask, value=1 / (1 - p), out=y),
    ]


def _int(number: int, x: Tensor) -> Tensor:
    return constant(number, torch.int32, x.device)


def mixing(x: Tensor, temporary: Tensor, flip: bool) -> list[Launch]:
    """x <- mix(x) in place, with the top bit flipped if asked. A shift is arithmetic, so its sign bits are cut off."""
    launches: list[Launch] = []
    for shift, multiplier in zip(MIX_SHIFTS, (*MIX_MULTIPLIERS, None), strict=True):
        launches += [
            partial(torch.bitwise_right_shift, x, _int(shift, x), out=temporary),
            partial(torch.bitwise_and, temporary, _int((1 << 32 - shift) - 1, x), out=temporary),
            partial(torch.bitwise_xor, x, temporary, out=x),
        ]
        if multiplier is not None:
            launches.append(partial(torch.mul, x, _int(signed(multiplier), x), out=x))
    return [*launches, partial(torch.bitwise_xor, x, _int(-_SIGN, x), out=x)] if flip else launches


def keying(context: Context, seed: Tensor, stream: int, keys: Tensor) -> Launch:
    """keys[0] <- stream_key(seed, stream)."""
    if context.on_cpu:
        key = keys[0]
        return lambda: key.fill_(signed(stream_key(int(seed), stream)))
    low, high = seed.view(1).view(torch.int32)[0:1], seed.view(1).view(torch.int32)[1:2]
    key, temporary = keys[0:1], keys[2:3]
    return chain(
        partial(torch.bitwise_xor, high, _int(signed(mix(stream & 0xFFFFFFFF)), seed), out=key),
        *mixing(key, temporary, flip=False),
        partial(torch.bitwise_xor, key, low, out=key),
        *mixing(key, temporary, flip=False),
    )


def _dropout_workspace(context: Context, ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    return mask_workspace(context, outs[0].size, outs[0].dtype)


@row("dropout", _dropout_workspace, overwrites=(0,))
def _dropout(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    return masking(context, ins[0], outs[0], ins[1], attributes["p"], attributes["stream"], work)


def _dropout_mask_workspace(context: Context, ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    return mask_workspace(context, outs[0].size, outs[0].dtype)


@row("dropout_mask", _dropout_mask_workspace)
def _dropout_mask(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (mask,), p, stream = outs, attributes["p"], attributes["stream"]
    return chain(partial(mask.fill_, 1), masking(context, mask, mask, ins[0], p, stream, work))
