"""Lookup of rows, and its gradient: a sum over equal ids in fp32 at least. Lookup of sequences in a stream."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Launch, chain
from ttrain.device.torch.kernels.common import Attributes, Context, Specs, Tensor, Tensors, copying, row, rows_of


@row("embedding")
def _embedding(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    ids, weight = ins
    return partial(torch.index_select, weight, 0, ids.view(-1), out=rows_of(outs[0]))


def _added_rows(ids: Tensor, dy: Tensor, dweight: Tensor, work: Sequence[Tensor]) -> Launch:
    """dweight <- 0, then the rows of dy added one by one, for bf16 in a fp32 table of the vocabulary."""
    if not work:
        return chain(dweight.zero_, partial(torch.index_add, dweight, 0, ids, dy, out=dweight))
    table, wide_dy = work
    return chain(
        copying(wide_dy, dy),
        table.zero_,
        partial(torch.index_add, table, 0, ids, wide_dy, out=table),
        copying(dweight, table),
    )


def _few_rows(ids: Tensor, dy: Tensor, dweight: Tensor, work: Sequence[Tensor]) -> Launch:
    """Sum N rows, then copy the sums to their ids: for a vocabulary whose fp32 table would be large."""
    positions_by_id, positions, place, wide_dy, sums, rounded = work
    index = torch.arange(ids.numel(), dtype=torch.int64, device=ids.device)
    return chain(
        copying(positions, index),
        # Equal ids agree on one of their positions, which stands for all of them.
        partial(torch.scatter, positions_by_id, 0, ids, positions, out=positions_by_id),
        partial(torch.index_select, positions_by_id, 0, ids, out=place),
        copying(wide_dy, dy),
        sums.zero_,
        partial(torch.index_add, sums, 0, place, wide_dy, out=sums),
        partial(torch.index_select, sums, 0, place, out=wide_dy),
        copying(rounded, wide_dy),
        dweight.zero_,
        partial(torch.index_copy, dweight, 0, ids, rounded, out=dweight),
    )


def _aten_grad(ids: Tensor, dy: Tensor, dweight: Tensor) -> Launch:
    function = torch.ops.aten.embedding_dense_backward.default
    return lambda: dweight.copy_(function(dy, ids, dweight.shape[0], -1, False))


def _embedding_grad_workspace(context: Context, ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    dweight, count = outs[0], ins[1].size
    vocabulary, width = dweight.shape
    if not context.on_cpu or dweight.dtype.accumulation is dweight.dtype:
        return []
    rows, ids = TensorSpec((count, width), dweight.dtype.accumulation), TensorSpec((count,), DType.INT64)
    if vocabulary <= 2 * count:
        return [TensorSpec((vocabulary, width), dweight.dtype.accumulation), rows]
    return [TensorSpec((vocabulary,), DType.INT64), ids, ids, rows, rows, rows.with_dtype(dweight.dtype)]


@row("embedding_grad", _embedding_grad_workspace)
def _embedding_grad(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    dy, ids, dweight = rows_of(ins[0]), ins[1].view(-1), outs[0]
    if not context.on_cpu:
        return _aten_grad(ids, dy, dweight)
    return (_added_rows if len(work) < 6 else _few_rows)(ids, dy, dweight, work)


def _one_hot_workspace(context: Context, ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    return [outs[0].with_dtype(DType.BOOL)]


@row("one_hot", _one_hot_workspace)
def _one_hot(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    numbers = torch.arange(attributes["count"], device=ins[0].device)
    equal = partial(torch.eq, ins[0].unsqueeze(-1), numbers, out=work[0])
    return chain(equal, copying(outs[0], work[0]))


def _windows_workspace(context: Context, ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    return [ins[1].with_shape(ins[0].size, attributes["length"] + 1)]


@row("token_windows", _windows_workspace)
def _token_windows(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """All windows are a view of the stream whose rows overlap, so that no index is computed."""
    starts, stream = ins
    windows, found = stream.unfold(0, attributes["length"] + 1, 1), work[0]
    picked = partial(torch.index_select, windows, 0, starts, out=found)
    return chain(picked, copying(outs[0], found[:, :-1]), copying(outs[1], found[:, 1:]))
