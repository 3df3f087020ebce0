"""Rows that move elements, each by one strided copy a tensor, and rows that look up and add rows by their ids.

The gradient of a lookup is a sum over equal ids in fp32 at least.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch

from ttrain.device.torch.kernels.common import Call, Tensor, accumulation, row, rows_of


def heads_view(x: Tensor, parts: int, heads: int) -> Tensor:
    """[B, T, parts*H*D] as [parts, B, H, T, D], without a copy."""
    batch, time, width = x.shape
    return x.view(batch, time, parts, heads, width // (parts * heads)).permute(2, 0, 3, 1, 4)


def _moved(view: Callable[[Tensor, torch.Size], Tensor], call: Call) -> None:
    """Emit a copy of the input as the output's shape shows it."""
    call.emit(call.outs[0].copy_, view(call.ins[0], call.outs[0].shape))


for _op, _view in {
    "cast": lambda x, shape: x,
    "reshape": lambda x, shape: x.view(shape),
    "copy_reshape": lambda x, shape: x.view(shape),
    "expand": lambda x, shape: x.expand(shape),
    "transpose": lambda x, shape: x.mT,
}.items():
    row(_op)(partial(_moved, _view))


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
    table, wide_dy = call.wide(dweight), call.wide(dy)
    call.copy(dy, wide_dy)
    call.emit(table.zero_)
    call.emit(torch.index_add, table, 0, ids, wide_dy, out=table)
    call.copy(table, dweight)


def _few_rows(call: Call, ids: Tensor, dy: Tensor, dweight: Tensor) -> None:
    """Sum N rows, then copy the sums to their ids: for a vocabulary whose fp32 table would be large."""
    positions_by_id = call.scratch(dweight.shape[:1], torch.int64)
    positions, place = (call.scratch(ids.shape, torch.int64) for _ in range(2))
    wide_dy, sums = (call.scratch(dy.shape, accumulation(dweight.dtype)) for _ in range(2))
    rounded = call.scratch(dy.shape, dweight.dtype)
    call.begin()
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


@row("embedding_grad")
def _embedding_grad(call: Call) -> None:
    dy, ids, dweight = rows_of(call.ins[0]), call.ins[1].view(-1), call.outs[0]
    if call.context.on_cpu:
        narrow = accumulation(dweight.dtype) is not dweight.dtype
        (_few_rows if narrow and len(dweight) > 2 * len(ids) else _added_rows)(call, ids, dy, dweight)
        return
    function = torch.ops.aten.embedding_dense_backward.default
    call.emit(lambda: dweight.copy_(function(dy, ids, dweight.shape[0], -1, False)))


@row("one_hot")
def _one_hot(call: Call) -> None:
    ids, equal = call.ins[0], call.scratch(call.outs[0].shape, torch.bool)
    call.begin()
    call.emit(torch.eq, ids.unsqueeze(-1), torch.arange(call.attributes["count"], device=ids.device), out=equal)
    call.emit(call.outs[0].copy_, equal)


@row("token_windows")
def _token_windows(call: Call) -> None:
    """All windows are a view of the stream whose rows overlap, so that no index is computed."""
    (starts, stream), length = call.ins, call.attributes["length"] + 1
    found = call.scratch((len(starts), length), stream.dtype)
    call.emit(torch.index_select, stream.unfold(0, length, 1), 0, starts, out=found)
    call.emit(call.outs[0].copy_, found[:, :-1])
    call.emit(call.outs[1].copy_, found[:, 1:])
