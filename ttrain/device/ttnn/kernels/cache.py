"""Rows that write caches of keys and values, and the bias of attention over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ttrain.core.attention_mask import HIDDEN, alibi_slopes
from ttrain.device.base import Delivery, Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, row
from ttrain.device.ttnn.kernels.embedding import one_hot
from ttrain.device.ttnn.tensors.device_tensor import IntegerInput, Tensors
from ttrain.device.ttnn.tensors.layout import TileLayout, dtype_name


@row("cache_write", Delivery.INPLACE)
def _cache_write(c: Context, ins: Sequence[Any], outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """cache <- cache (1 - written) + rows spread over their places by a product with one-hot columns."""
    (cache, rows, positions), tt = ins, c.tt
    batch, heads, context, _ = cache.spec.shape
    count, dtype = rows.spec.shape[2], cache.spec.dtype
    hot = one_hot(c, positions, context, dtype)
    lead = (batch, heads, 1, 1)
    spread = c.constant("ones", TileLayout(lead, dtype_name(dtype)), lambda: np.ones(lead, np.float32))

    def run() -> None:
        places = hot()  # [N, C]
        written: Any = tt.sum(places, dim=0, keepdim=True, **c.exact)
        kept = tt.reshape(tt.transpose(tt.rsub(written, 1.0), -2, -1), (1, 1, context, 1))
        whole = tt.multiply(tt.reshape(places, (1, 1, count, context)), spread.t)
        tt.multiply(cache.t, kept, output_tensor=cache.t)
        tt.add(cache.t, tt.matmul(whole, rows.t, transpose_a=True, **c.product), output_tensor=cache.t)

    return run


@row("cache_bias")
def _cache_bias(c: Context, ins: Sequence[IntegerInput], outs: Tensors, attributes: Attributes, work: Any) -> Launch:
    (positions, visible), (bias,), tt = ins, outs, c.tt
    context, mask = attributes["context"], attributes["mask"]
    dtype = getattr(tt, dtype_name(bias.spec.dtype))
    column = TileLayout((positions.spec.size, 1), "int32")
    limits = visible.in_layout(column)
    numbers_layout = TileLayout((1, context), "int32")
    numbers = c.constant("numbers", numbers_layout, lambda: np.arange(context, dtype=np.int32)[None])
    shape = (1, 1, positions.spec.size, context)

    places = None if mask.is_full else positions.in_layout(column)
    reach = np.arange(context, dtype=np.int32)[None] + (mask.window or 0)
    far = c.constant(("numbers", mask.window), numbers_layout, lambda: reach) if mask.window else None

    def hidden() -> Any:
        found = tt.multiply(tt.ge(numbers.t, limits(), dtype=dtype), HIDDEN)
        if far is None or places is None:
            return found
        return tt.minimum(found, tt.multiply(tt.le(far.t, places(), dtype=dtype), HIDDEN))

    def plain() -> None:
        tt.copy(tt.reshape(hidden(), shape), bias.t)

    if not mask.biased or places is None:
        return plain
    keys = c.constant("keys", TileLayout((1, context)), lambda: np.arange(context, dtype=np.float32)[None])
    slopes = -np.asarray(alibi_slopes(attributes["heads"]), np.float32).reshape(1, -1, 1, 1)
    rates = c.constant("alibi", TileLayout(slopes.shape), lambda: slopes)

    def sloped() -> None:
        distance = tt.subtract(keys.t, tt.typecast(places(), tt.float32))
        distance = tt.reshape(tt.relu(distance) if mask.position_bias == "future" else tt.abs(distance), shape)
        tt.add(tt.multiply(distance, rates.t), tt.reshape(hidden(), shape), output_tensor=bias.t)

    return sloped
