"""Lookup of rows, and its gradient: a sum over equal ids in fp32 at least."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Kernel, Launch
from ttrain.device.torch.kernels.common import (
    Attributes,
    Context,
    Specs,
    Tensor,
    chain,
    constant,
    copying,
    into,
    rows_of,
)


def _embedding(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
    ids, weight = ins
    return partial(torch.index_select, weight, 0, ids.view(-1), out=rows_of(outs[0]))


def _one_hot_grad(ids: Tensor, dy: Tensor, dweight: Tensor, work: Sequence[Tensor]) -> Launch:
    """dweight <- onehot^T dy. One-hot rows are exact in bf16 and the product adds in fp32."""
    one_hot = work[0]
    one = constant(1.0, dy.dtype, dy.device).expand(ids.numel(), 1)
    return chain(
        one_hot.zero_,
        partial(torch.scatter, one_hot, 1, ids[:, None], one, out=one_hot),
        partial(torch.mm, one_hot.t(), dy, out=dweight),
    )


def _indexed_grad(ids: Tensor, dy: Tensor, dweight: Tensor, work: Sequence[Tensor]) -> Launch:
    """dweight <- 0, then rows added one by one; in bf16 they are added in a fp32 buffer of N rows first."""
    if not work:
        return chain(dweight.zero_, partial(torch.index_add, dweight, 0, ids, dy, out=dweight))
    table, positions, place, wide_dy, sums, rounded = work
    index = torch.arange(ids.numel(), dtype=torch.int64, device=ids.device)
    return chain(
        copying(positions, index),
        # Equal ids agree on one of their positions, which stands for all of them.
        partial(torch.scatter, table, 0, ids, positions, out=table),
        partial(torch.index_select, table, 0, ids, out=place),
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


def _embedding_grad(context: Context) -> Kernel:
    def bind(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        dy, ids, dweight = rows_of(ins[0]), ins[1].view(-1), outs[0]
        if not context.on_cpu:
            return _aten_grad(ids, dy, dweight)
        one_hot = ids.numel() * dweight.shape[0] <= context.one_hot_up_to
        return (_one_hot_grad if one_hot else _indexed_grad)(ids, dy, dweight, work)

    def workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        dy, vocabulary = outs[0], outs[0].shape[0]
        count, width = ins[1].size, outs[0].shape[1]
        if not context.on_cpu:
            return []
        if count * vocabulary <= context.one_hot_up_to:
            return [dy.with_shape(count, vocabulary)]
        if dy.dtype.wide is dy.dtype:
            return []
        rows, ids = TensorSpec((count, width), dy.dtype.wide), TensorSpec((count,), DType.INT64)
        return [TensorSpec((vocabulary,), DType.INT64), ids, ids, rows, rows, rows.with_dtype(dy.dtype)]

    return into(bind, workspace)


def table(context: Context) -> dict[str, Kernel]:
    return {"embedding": into(_embedding), "embedding_grad": _embedding_grad(context)}
