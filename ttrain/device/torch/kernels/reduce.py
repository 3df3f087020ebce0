"""Sums and maxima over axes, and the norm over all gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ttrain.core.spec import TensorSpec
from ttrain.device.base import Launch, chain
from ttrain.device.torch.kernels.common import Attributes, Context, Specs, Tensor, Tensors, copying, row, runs


@row("reduce_sum")
def _reduce_sum(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    x, y, axes = ins[0], outs[0], attributes["axes"]
    return partial(torch.sum, x, axes, out=y) if axes else copying(y, x)


@row("reduce_max")
def _reduce_max(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    return partial(torch.amax, ins[0], attributes["axes"], out=outs[0])


def _pieces(tensors: Sequence[Tensor], block: int, row: int) -> list[Tensor]:
    """Matrices of rows to take norms of; in bf16 no larger than a block, since they are widened first."""
    pieces: list[Tensor] = []
    for run in runs(tensors):
        limit = max(block // row, 1) * row if run.dtype is torch.bfloat16 else run.numel()
        for part in run.split(max(limit, 1)):
            whole = part.numel() // row * row
            if whole:
                pieces.append(part[:whole].view(-1, row))
            if whole < part.numel():
                pieces.append(part[whole:].view(1, -1))
    return pieces


def _global_norm_workspace(context: Context, ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    dtype = outs[0].dtype
    specs = [TensorSpec((sum(-(-spec.size // context.norm_row) + 1 for spec in ins) or 1,), dtype)]
    if any(spec.dtype is not dtype for spec in ins):
        largest = max(spec.size for spec in ins)
        total = sum(spec.size for spec in ins)
        specs.append(TensorSpec((min(max(largest, total), max(context.block, context.norm_row)),), dtype))
    return specs


@row("global_norm", _global_norm_workspace)
def _global_norm(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (y,) = outs
    pieces, launches, start = _pieces(ins, context.block, context.norm_row), [], 0
    if len(pieces) == 1 and pieces[0].shape[0] == 1 and pieces[0].dtype is y.dtype:
        return partial(torch.linalg.vector_norm, pieces[0], 2, out=y)
    partials = work[0]
    for piece in pieces:
        if piece.dtype is not y.dtype:
            widened = work[1][: piece.numel()].view(piece.shape)
            launches.append(copying(widened, piece))
            piece = widened
        end = start + piece.shape[0]
        launches.append(partial(torch.linalg.vector_norm, piece, 2, 1, out=partials[start:end]))
        start = end
    return chain(*launches, partial(torch.linalg.vector_norm, partials[:start], 2, out=y))
