"""Dropout masks and random rounding: the hash of core/random_bits.py in int32 arithmetic, keyed by a tensor.

ttnn's own dropout takes its seed as a number, which a captured step would repeat for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ttrain.core.random_bits import MIX_MULTIPLIERS, MIX_SHIFTS, keep_threshold, stream_key
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, row
from ttrain.device.ttnn.tensors.device_tensor import DeviceTensor, IntegerInput, Key, Tensors
from ttrain.device.ttnn.tensors.layout import TileLayout, device_shape, dtype_name

_SIGN = 1 << 31


def signed(number: int) -> int:
    """The int32 that has the same bits as a 32-bit unsigned number."""
    return number - (1 << 32) if number >= _SIGN else number


def key_of(c: Context, seed: IntegerInput, stream: int, per_chip: bool = True) -> DeviceTensor:
    """The key of a stream of random bits, as an int32 tensor that follows the seed."""
    source = seed.source
    if stream not in source.keys:
        spec, key = TensorSpec((1, 1), DType.INT32), partial(_signed_key, stream)
        source.keys[stream] = Key(c.store, spec, source, key, per_chip)
        source.keys[stream].refresh()
    return source.keys[stream]


def _signed_key(stream: int, seed: int) -> int:
    return signed(stream_key(seed, stream))


@row("dropout_mask")
def _dropout_mask(c: Context, ins: Sequence[Any], outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (mask,), key = outs, key_of(c, ins[0], attributes["stream"])
    shape, tt = device_shape(mask.spec.shape), c.tt
    size, p = mask.spec.size, attributes["p"]
    index = c.constant("index", TileLayout(shape, "int32"), lambda: np.arange(size, dtype=np.int32).reshape(shape))
    least, dtype = signed(keep_threshold(p) ^ _SIGN), getattr(tt, dtype_name(mask.spec.dtype))

    def run() -> None:
        x = tt.add(index.t, key.t)
        mix_into(tt, x)
        # With the top bit flipped, the signed comparison orders the hash as unsigned.
        tt.bitwise_xor(x, -_SIGN, output_tensor=x)
        tt.multiply(tt.ge(x, least, dtype=dtype), 1 / (1 - p), output_tensor=mask.t)

    return run


def mix_into(tt: Any, x: Any) -> None:
    """x <- mix(x), int32."""
    for shift, factor in zip(MIX_SHIFTS, (*map(signed, MIX_MULTIPLIERS), None), strict=True):
        tt.bitwise_xor(x, tt.logical_right_shift(x, shift), output_tensor=x)
        if factor is not None:
            tt.multiply(x, factor, output_tensor=x)
