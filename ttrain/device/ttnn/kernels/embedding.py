"""Lookup of rows, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.core.spec import DType
from ttrain.device.base import Delivery, Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, in_parts, is_bf16, row
from ttrain.device.ttnn.tensors.device_tensor import IntegerInput, Tensors
from ttrain.device.ttnn.tensors.store import ROWS, TILE, TileLayout, device_shape, dtype_name

ONE_HOT_UP_TO = 2048  # ids: a product with one-hot rows sums in fp32, where embedding_bw sums in bf16


def one_hot(c: Context, ids: IntegerInput, count: int, dtype: DType, start: int = 0, stop: int | None = None) -> Launch:
    """A launch that returns rows `start` to `stop` of [N, count]: 1 where a column's number is the row's id, else 0."""
    rows = ids.spec.size
    column = ids.in_layout(TileLayout((rows, 1), "int32"))
    numbers, kind, whole = c.numbers(count), getattr(c.tt, dtype_name(dtype)), start == 0 and stop in (None, rows)

    def run() -> Any:
        part = column() if whole else c.tt.slice(column(), [start, 0], [stop, 1])
        return c.tt.eq(part, numbers.t, dtype=kind)

    return run


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

    return lambda: [tt.reshape(in_parts(tt, weight.t, look_up), shape)]


@row("embedding_grad", Delivery.RETURNS)
def _embedding_grad(c: Context, ins: Sequence[Any], outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (dy, ids), vocabulary, tt = ins, attributes["vocabulary"], c.tt
    count, width = ids.spec.size, dy.spec.shape[-1]
    shape = device_shape(ids.spec.shape)
    if vocabulary > ONE_HOT_UP_TO and not c.core_subset and is_bf16(dy) and shape[-1] % TILE == 0:
        rows = ids.in_layout(TileLayout(shape, "uint32", ROWS))
        table = c.full(0, (vocabulary, width), DType.BF16)

        def summed() -> list[Any]:
            flat = tt.reshape(dy.t, (1, 1, count, width))
            return [tt.reshape(tt.embedding_bw(rows(), table.t, flat), (vocabulary, width))]

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
