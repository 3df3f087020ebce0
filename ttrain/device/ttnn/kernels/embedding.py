"""Lookup of rows, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ttrain.core.spec import DType
from ttrain.device.base import Delivery, Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, is_bf16, row
from ttrain.device.ttnn.tensors.device_tensor import IntegerInput, Tensors
from ttrain.device.ttnn.tensors.layout import ROWS, TILE, TileLayout, device_shape, dtype_name

ONE_HOT_UP_TO = 2048  # ids: a product with one-hot rows sums in fp32, where embedding_bw sums in bf16


def one_hot(c: Context, ids: IntegerInput, count: int, dtype: DType, start: int = 0, stop: int | None = None) -> Launch:
    """A launch that returns rows `start` to `stop` of [N, count]: 1 where a column's number is the row's id, else 0."""
    rows = ids.spec.size
    column = ids.in_layout(TileLayout((rows, 1), "int32"))
    numbers = c.constant("numbers", TileLayout((1, count), "int32"), lambda: np.arange(count, dtype=np.int32)[None])
    kind = getattr(c.tt, dtype_name(dtype))
    if start == 0 and stop in (None, rows):
        return lambda: c.tt.eq(column(), numbers.t, dtype=kind)
    return lambda: c.tt.eq(c.tt.slice(column(), [start, 0], [stop, 1]), numbers.t, dtype=kind)


@row("embedding", Delivery.RETURNS)
def _embedding(c: Context, ins: Sequence[Any], outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """ttnn looks up in bf16 only; an fp32 weight goes in three bf16 parts, which together hold its 24 bits.

    On a part of the chip, a product with one-hot rows picks them.
    """
    ids, weight = ins
    tt, shape = c.tt, device_shape(outs[0].spec.shape)
    rows = ids.in_layout(TileLayout(device_shape(ids.spec.shape), "uint32", ROWS))
    aligned = device_shape(ids.spec.shape)[-1] % TILE == 0

    picked = one_hot(c, ids, weight.spec.shape[0], DType.BF16) if c.core_subset else None

    def look_up(table: Any) -> Any:
        if picked is not None:
            return tt.pick(picked(), table)
        if aligned:
            return tt.embedding(rows(), table, layout=tt.TILE_LAYOUT)
        table = tt.to_layout(table, tt.ROW_MAJOR_LAYOUT)
        return tt.to_layout(tt.embedding(rows(), table, layout=tt.ROW_MAJOR_LAYOUT), tt.TILE_LAYOUT)

    def narrow() -> list[Any]:
        return [tt.reshape(look_up(weight.t), shape)]

    def wide() -> list[Any]:
        rest, total = weight.t, None
        for last in (False, False, True):
            part = tt.typecast(rest, tt.bfloat16)
            found = tt.typecast(look_up(part), tt.float32)
            total = found if total is None else tt.add(total, found)
            rest = rest if last else tt.subtract(rest, part)
        return [tt.reshape(total, shape)]

    return narrow if is_bf16(weight) else wide


@row("embedding_grad", Delivery.RETURNS)
def _embedding_grad(c: Context, ins: Sequence[Any], outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (dy, ids), vocabulary, tt = ins, attributes["vocabulary"], c.tt
    count, width = ids.spec.size, dy.spec.shape[-1]
    shape = device_shape(ids.spec.shape)
    if vocabulary > ONE_HOT_UP_TO and not c.core_subset and is_bf16(dy) and shape[-1] % TILE == 0:
        rows = ids.in_layout(TileLayout(shape, "uint32", ROWS))
        weight = c.constant("table", TileLayout((vocabulary, width), "bfloat16"), lambda: np.zeros((vocabulary, width)))

        def summed() -> list[Any]:
            flat = tt.reshape(dy.t, (1, 1, count, width))
            return [tt.reshape(tt.embedding_bw(rows(), weight.t, flat), (vocabulary, width))]

        return summed
    hot = one_hot(c, ids, vocabulary, dy.spec.dtype)

    def product() -> list[Any]:
        options = {} if outs[0].adopts else {"optional_output_tensor": outs[0].t}
        result = tt.matmul(hot(), tt.reshape(dy.t, (count, width)), transpose_a=True, **options, **c.product)
        return [None if options else result]

    return product


@row("one_hot", Delivery.RETURNS)
def _one_hot(c: Context, ins: Sequence[Any], outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (ids,), shape = ins, device_shape(outs[0].spec.shape)
    hot = one_hot(c, ids, attributes["count"], attributes["dtype"])
    return lambda: [c.tt.reshape(hot(), shape)]
