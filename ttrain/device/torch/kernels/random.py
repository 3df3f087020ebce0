"""Dropout: the hash of core/random_bits.py in int32 arithmetic that wraps, a cache-sized block at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import torch

from ttrain.core.random_bits import MIX_MULTIPLIERS, MIX_SHIFTS, keep_threshold, mix, stream_key
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Launch, chain
from ttrain.device.torch.kernels.common import Attributes, Context, Specs, Tensor, Tensors, constant, copying, row

_SIGN = 1 << 31


def signed(number: int) -> int:
    """The int32 that has the same bits as a 32-bit unsigned number."""
    return number - (1 << 32) if number >= _SIGN else number


@lru_cache(maxsize=4)
def counting(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, dtype=torch.int32, device=device)


def mask_workspace(context: Context, size: int, dtype: DType) -> list[TensorSpec]:
    """Scratch of `masking` for `size` elements: key, hash, a temporary, and the mask in x's dtype."""
    block = min(size, context.block)
    hashes = TensorSpec((block,), DType.INT32)
    return [TensorSpec((8,), DType.INT32), hashes, hashes, TensorSpec((block,), dtype)]


def masking(
    context: Context, x: Tensor, y: Tensor, seed: Tensor, p: float, stream: int, work: Sequence[Tensor]
) -> Launch:
    """y <- x * mask / (1 - p) over the elements in row-major order; y may be x."""
    keys, hashes, temporary, mask = work
    launches = [keying(context, seed, stream, keys)]
    flat_x, flat_y = x.view(-1), y.view(-1)
    counter = counting(hashes.numel(), x.device)
    zero = constant(0.0, x.dtype, x.device)
    for start in range(0, flat_x.numel(), hashes.numel()):
        part_x, part_y = flat_x[start : start + hashes.numel()], flat_y[start : start + hashes.numel()]
        n = part_x.numel()
        if start:
            launches.append(partial(torch.add, keys[0], constant(start, torch.int32, x.device), out=keys[1]))
        launches += _hashing(counter[:n], keys[1 if start else 0], hashes[:n], temporary[:n])
        launches += [
            # The hash has its top bit flipped, so a signed comparison orders it as unsigned.
            partial(torch.ge, hashes[:n], _int(signed(keep_threshold(p) ^ _SIGN), x), out=hashes[:n]),
            copying(mask[:n], hashes[:n]),
            partial(torch.addcmul, zero, part_x, mask[:n], value=1 / (1 - p), out=part_y),
        ]
    return chain(*launches)


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


def _hashing(counter: Tensor, key: Tensor, hashes: Tensor, temporary: Tensor) -> list[Launch]:
    return [partial(torch.add, counter, key, out=hashes), *mixing(hashes, temporary, flip=True)]


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
