"""Rows that move elements, each by one strided copy a tensor, and rows that look up and add rows by their ids.

The gradient of a lookup is a sum over equal ids in fp32 at least.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.torch.kernels.common import Call, Tensor, row, rows_of


def heads_view(x: Tensor, parts: int, heads: int) -> Tensor:
    """[B, T, parts*H*D] as [parts, B, H, T, D], without a copy."""
    batch, time, width = x.shape
    return x.view(batch, time, parts, heads, width // (parts * heads)).permute(2, 0, 3, 1, 4)


@row("reshape")
@row("copy_reshape")
def _reshape(call: Call) -> None:
    call.emit(call.outs[0].copy_, call.ins[0].view(call.outs[0].shape))


@row("expand")
def _expand(call: Call) -> None:
    call.emit(call.outs[0].copy_, call.ins[0].expand(call.outs[0].shape))


@row("transpose")
def _transpose(call: Call) -> None:
    call.emit(call.outs[0].copy_, call.ins[0].mT)


@row("split_heads")
def _split_heads(call: Call) -> None:
    parts = heads_view(call.ins[0], call.attributes["parts"], call.attributes["heads"])
    for out, part in zip(call.outs, parts, strict=True):
        call.emit(out.copy_, part)


@row("merge_heads")
def _merge_heads(call: Call) -> None:
    parts = heads_view(call.outs[0], len(call.ins), call.ins[0].shape[1])
    for part, given in zip(parts, call.ins, strict=True):
        call.emit(part.copy_, given)


@row("index_select")
def _index_select(call: Call) -> None:
    x = call.ins[0]
    call.emit(torch.index_select, x, 1, _index(call.attributes["indices"], x.device), out=call.outs[0])


@row("index_put")
def _index_put(call: Call) -> None:
    y = call.outs[0]
    call.emit(y.zero_)
    call.emit(y.index_copy_, 1, _index(call.attributes["indices"], y.device), call.ins[0])


@lru_cache(maxsize=16)
def _index(rows: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)


@row("embedding")
def _embedding(call: Call) -> None:
    ids, weight = call.ins
    call.emit(torch.index_select, weight, 0, ids.view(-1), out=rows_of(call.outs[0]))


def _added_rows(call: Call, ids: Tensor, dy: Tensor, dweight: Tensor) -> None:
    """dweight <- 0, then the rows of dy added one by one, for bf16 in a fp32 table of the vocabulary."""
    table = dweight
    if call.work:
        table, wide_dy = call.work
        call.emit(wide_dy.copy_, dy)
        dy = wide_dy
    call.emit(table.zero_)
    call.emit(torch.index_add, table, 0, ids, dy, out=table)
    if table is not dweight:
        call.emit(dweight.copy_, table)


def _few_rows(call: Call, ids: Tensor, dy: Tensor, dweight: Tensor) -> None:
    """Sum N rows, then copy the sums to their ids: for a vocabulary whose fp32 table would be large."""
    positions_by_id, positions, place, wide_dy, sums, rounded = call.work
    call.emit(positions.copy_, torch.arange(ids.numel(), dtype=torch.int64, device=ids.device))
    # Equal ids agree on one of their positions, which stands for all of them.
    call.emit(torch.scatter, positions_by_id, 0, ids, positions, out=positions_by_id)
    call.emit(torch.index_select, positions_by_id, 0, ids, out=place)
    call.emit(wide_dy.copy_, dy)
    call.emit(sums.zero_)
    call.emit(torch.index_add, sums, 0, place, wide_dy, out=sums)
    call.emit(torch.index_select, sums, 0, place, out=wide_dy)
    call.emit(rounded.copy_, wide_dy)
    call.emit(dweight.zero_)
    call.emit(torch.index_copy, dweight, 0, ids, rounded, out=dweight)


def _embedding_grad_workspace(call: Call) -> list[TensorSpec]:
    dweight, count = call.outs[0], call.ins[1].size
    vocabulary, width = dweight.shape
    if not call.context.on_cpu or dweight.dtype.accumulation is dweight.dtype:
        return []
    rows, ids = TensorSpec((count, width), dweight.dtype.accumulation), TensorSpec((count,), DType.INT64)
    if vocabulary <= 2 * count:
        return [TensorSpec((vocabulary, width), dweight.dtype.accumulation), rows]
    return [TensorSpec((vocabulary,), DType.INT64), ids, ids, rows, rows, rows.with_dtype(dweight.dtype)]


@row("embedding_grad", _embedding_grad_workspace)
def _embedding_grad(call: Call) -> None:
    dy, ids, dweight = rows_of(call.ins[0]), call.ins[1].view(-1), call.outs[0]
    if call.context.on_cpu:
        (_added_rows if len(call.work) < 6 else _few_rows)(call, ids, dy, dweight)
        return
    function = torch.ops.aten.embedding_dense_backward.default
    call.emit(lambda: dweight.copy_(function(dy, ids, dweight.shape[0], -1, False)))


@row("one_hot", lambda call: [call.outs[0].with_dtype(DType.BOOL)])
def _one_hot(call: Call) -> None:
    ids, (equal,) = call.ins[0], call.work
    call.emit(torch.eq, ids.unsqueeze(-1), torch.arange(call.attributes["count"], device=ids.device), out=equal)
    call.emit(call.outs[0].copy_, equal)


@row("token_windows", lambda call: [call.ins[1].with_shape(call.ins[0].size, call.attributes["length"] + 1)])
def _token_windows(call: Call) -> None:
    """All windows are a view of the stream whose rows overlap, so that no index is computed."""
    (starts, stream), (found,) = call.ins, call.work
    call.emit(torch.index_select, stream.unfold(0, call.attributes["length"] + 1, 1), 0, starts, out=found)
    call.emit(call.outs[0].copy_, found[:, :-1])
    call.emit(call.outs[1].copy_, found[:, 1:])
