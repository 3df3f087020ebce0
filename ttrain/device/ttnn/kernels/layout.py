"""Rows that move elements, and lookup of rows with its gradient.

A head of whole tiles moves in one launch; others go through unpadded shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.core.spec import DType
from ttrain.device.base import Delivery, Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, in_parts, is_bf16, row
from ttrain.device.ttnn.tensors.device_tensor import IntegerInput, Tensors
from ttrain.device.ttnn.tensors.store import ROWS, TILE, TileLayout, device_shape, dtype_name

ONE_HOT_UP_TO = 2048  # ids: a product with one-hot rows sums in fp32, where embedding_bw sums in bf16


@row("copy_reshape", Delivery.RETURNS)
def _copy_reshape(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (x,), (y,) = ins, outs
    shape = device_shape(y.spec.shape)
    return lambda: [c.tt.reshape(x.t, shape)]


@row("expand")
def _expand(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (x,), (y,) = ins, outs

    def run() -> None:
        c.tt.fill(y.t, 0.0, output_tensor=y.t)
        c.tt.add(y.t, x.t, output_tensor=y.t)

    return run


@row("transpose", Delivery.RETURNS)
def _transpose(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (x,) = ins
    rank = x.spec.rank
    order = (*range(rank - 2), rank - 1, rank - 2)
    return lambda: [c.tt.permute(x.t, order)]


def moves_whole(c: Context, time: int, head_width: int) -> bool:
    """True if ttnn's head moves take these sizes; those of a runtime on a core subset take all."""
    return c.core_subset or (time % TILE == 0 and head_width % TILE == 0)


@row("split_heads", Delivery.RETURNS)
def _split_heads(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """[B, T, parts*H*D] -> parts x [B, H, T, D]."""
    (x,), parts, heads = ins, attributes["parts"], attributes["heads"]
    batch, _, time, width = outs[0].spec.shape
    if parts == 3 and moves_whole(c, time, width):
        split = c.tt.transformer.split_query_key_value_and_split_heads
        return lambda: list(split(x.t, num_heads=heads, transpose_key=False))
    if parts == 1 and moves_whole(c, time, width):
        flat, one_part = (batch, 1, time, heads * width), c.tt.experimental.nlp_create_qkv_heads
        return lambda: [one_part(c.tt.reshape(x.t, flat), num_heads=heads, num_kv_heads=0)[0]]
    features = heads * width

    def one(part: int) -> Any:
        bounds = [0, 0, part * features], [batch, time, (part + 1) * features]
        piece = x.t if parts == 1 else c.tt.slice(x.t, *bounds)
        return c.tt.permute(c.tt.reshape(piece, (batch, time, heads, width)), (0, 2, 1, 3))

    return lambda: [one(part) for part in range(parts)]


@row("merge_heads", Delivery.RETURNS)
def _merge_heads(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """Several [B, H, T, D] -> [B, T, parts*H*D]."""
    batch, heads, time, width = ins[0].spec.shape

    def whole() -> list[Any]:
        joined = ins[0].t if len(ins) == 1 else c.tt.concat([part.t for part in ins], dim=1)
        return [c.tt.transformer.concatenate_heads(joined)]

    def apart() -> list[Any]:
        rows = [c.tt.reshape(c.tt.permute(part.t, (0, 2, 1, 3)), (batch, time, heads * width)) for part in ins]
        return [rows[0] if len(rows) == 1 else c.tt.concat(rows, dim=2)]

    return whole if moves_whole(c, time, width) else apart


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
