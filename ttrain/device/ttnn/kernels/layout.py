"""Rows that move elements, and lookup of rows with its gradient.

A head of whole tiles moves in one launch; others go through unpadded shapes.
"""

from __future__ import annotations

from typing import Any

from ttrain.core.spec import DType
from ttrain.device.base import Delivery
from ttrain.device.ttnn.kernels.common import Context, Tensor, in_parts, is_bf16, product_into, row
from ttrain.device.ttnn.tensors.device_tensor import IntegerInput
from ttrain.device.ttnn.tensors.store import ROWS, TILE, TileLayout, device_shape, dtype_name

ONE_HOT_UP_TO = 2048  # ids: a product with one-hot rows sums in fp32, where embedding_bw sums in bf16


@row("copy_reshape", Delivery.RETURNS)
def _copy_reshape(c: Context, x: Tensor, y: Tensor, **_: Any) -> list[Any]:
    return [c.tt.reshape(x.t, device_shape(y.spec.shape))]


@row("expand")
def _expand(c: Context, x: Tensor, y: Tensor, **_: Any) -> None:
    c.tt.fill(y.t, 0.0, output_tensor=y.t)
    c.tt.add(y.t, x.t, output_tensor=y.t)


@row("transpose", Delivery.RETURNS)
def _transpose(c: Context, x: Tensor, y: Tensor) -> list[Any]:
    rank = x.spec.rank
    return [c.tt.permute(x.t, (*range(rank - 2), rank - 1, rank - 2))]


def moves_whole(c: Context, time: int, head_width: int) -> bool:
    """True if ttnn's head moves take these sizes; those of a runtime on a core subset take all."""
    return c.core_subset or (time % TILE == 0 and head_width % TILE == 0)


@row("split_heads", Delivery.RETURNS)
def _split_heads(c: Context, x: Tensor, *made: Tensor, parts: int, heads: int) -> list[Any]:
    """[B, T, parts*H*D] -> parts x [B, H, T, D]."""
    batch, _, time, width = made[0].spec.shape
    features, whole = heads * width, moves_whole(c, time, width)
    if parts == 3 and whole:
        split = c.tt.transformer.split_query_key_value_and_split_heads
        return list(split(x.t, num_heads=heads, transpose_key=False))
    if parts == 1 and whole:
        flat = c.tt.reshape(x.t, (batch, 1, time, features))
        return [c.tt.experimental.nlp_create_qkv_heads(flat, num_heads=heads, num_kv_heads=0)[0]]

    def one(part: int) -> Any:
        bounds = [0, 0, part * features], [batch, time, (part + 1) * features]
        piece = x.t if parts == 1 else c.tt.slice(x.t, *bounds)
        return c.tt.permute(c.tt.reshape(piece, (batch, time, heads, width)), (0, 2, 1, 3))

    return [one(part) for part in range(parts)]


@row("merge_heads", Delivery.RETURNS)
def _merge_heads(c: Context, *tensors: Tensor) -> list[Any]:
    """Several [B, H, T, D] -> [B, T, parts*H*D]."""
    *ins, _ = tensors
    batch, heads, time, width = ins[0].spec.shape
    if moves_whole(c, time, width):
        joined = ins[0].t if len(ins) == 1 else c.tt.concat([part.t for part in ins], dim=1)
        return [c.tt.transformer.concatenate_heads(joined)]
    rows = [c.tt.reshape(c.tt.permute(part.t, (0, 2, 1, 3)), (batch, time, heads * width)) for part in ins]
    return [rows[0] if len(rows) == 1 else c.tt.concat(rows, dim=2)]


def one_hot(c: Context, ids: IntegerInput, count: int, dtype: DType, start: int = 0, stop: int | None = None) -> Any:
    """Return rows `start` to `stop` of [N, count]: 1 where a column's number is the row's id, else 0."""
    rows = ids.spec.size
    part = ids.in_layout(TileLayout((rows, 1), "int32"))
    if (start, stop) not in ((0, None), (0, rows)):
        part = c.tt.slice(part, [start, 0], [stop, 1])
    return c.tt.eq(part, c.numbers(count).t, dtype=getattr(c.tt, dtype_name(dtype)))


def look_up(c: Context, table: Any, numbers: Any) -> Any:
    """Return the rows of a table that uint32 numbers in row-major order name.

    ttnn looks up in bf16 only; an fp32 table goes in three bf16 parts, which together hold its 24 bits.
    """
    tt = c.tt

    def rows(part: Any) -> Any:
        if numbers.shape[-1] % TILE == 0:
            return tt.embedding(numbers, part, layout=tt.TILE_LAYOUT)
        part = tt.to_layout(part, tt.ROW_MAJOR_LAYOUT)
        return tt.to_layout(tt.embedding(numbers, part, layout=tt.ROW_MAJOR_LAYOUT), tt.TILE_LAYOUT)

    return in_parts(tt, table, rows)


@row("embedding", Delivery.RETURNS)
def _embedding(c: Context, ids: IntegerInput, weight: Tensor, y: Tensor) -> list[Any]:
    """On a part of the chip, a product with one-hot rows picks them."""
    tt = c.tt
    if c.core_subset:
        hot = one_hot(c, ids, weight.spec.shape[0], DType.BF16)
        found = in_parts(tt, weight.t, lambda part: tt.pick(hot, part))
    else:
        found = look_up(c, weight.t, ids.in_layout(TileLayout(device_shape(ids.spec.shape), "uint32", ROWS)))
    return [tt.reshape(found, device_shape(y.spec.shape))]


@row("embedding_grad", Delivery.RETURNS)
def _embedding_grad(c: Context, dy: Tensor, ids: IntegerInput, dweight: Tensor, vocabulary: int) -> list[Any]:
    tt, count, width, shape = c.tt, ids.spec.size, dy.spec.shape[-1], device_shape(ids.spec.shape)
    if vocabulary > ONE_HOT_UP_TO and not c.core_subset and is_bf16(dy) and shape[-1] % TILE == 0:
        rows, table = ids.in_layout(TileLayout(shape, "uint32", ROWS)), c.full(0, (vocabulary, width), DType.BF16)
        summed = tt.embedding_bw(rows, table.t, tt.reshape(dy.t, (1, 1, count, width)))
        return [tt.reshape(summed, (vocabulary, width))]
    hot = one_hot(c, ids, vocabulary, dy.spec.dtype)
    return [product_into(c, dweight, hot, tt.reshape(dy.t, (count, width)), transpose_a=True)]


@row("one_hot", Delivery.RETURNS)
def _one_hot(c: Context, ids: IntegerInput, y: Tensor, count: int, dtype: DType) -> list[Any]:
    return [c.tt.reshape(one_hot(c, ids, count, dtype), device_shape(y.spec.shape))]
