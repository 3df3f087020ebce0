"""Rows that move elements. A head of whole tiles moves in one launch; others go through unpadded shapes."""

from __future__ import annotations

from typing import Any

from ttrain.device.base import Delivery, Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, row
from ttrain.device.ttnn.tensors.device_tensor import Tensors
from ttrain.device.ttnn.tensors.store import TILE, device_shape


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
