"""Sums and maxima over axes, and the norm over all gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ttrain.core.spec import TensorSpec
from ttrain.device.torch.kernels.common import Call, Tensor, row, runs


@row("reduce_sum")
def _reduce_sum(call: Call) -> None:
    x, y, axes = call.ins[0], call.outs[0], call.attributes["axes"]
    if axes:
        call.emit(torch.sum, x, axes, out=y)
    else:
        call.emit(y.copy_, x)


@row("reduce_max")
def _reduce_max(call: Call) -> None:
    call.emit(torch.amax, call.ins[0], call.attributes["axes"], out=call.outs[0])


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


def _global_norm_workspace(call: Call) -> list[TensorSpec]:
    dtype, context, sizes = call.outs[0].dtype, call.context, [spec.size for spec in call.ins]
    specs = [TensorSpec((sum(-(-size // context.norm_row) + 1 for size in sizes) or 1,), dtype)]
    if any(spec.dtype is not dtype for spec in call.ins):
        specs.append(TensorSpec((min(sum(sizes), max(context.block, context.norm_row)),), dtype))
    return specs


@row("global_norm", _global_norm_workspace)
def _global_norm(call: Call) -> None:
    y, start = call.outs[0], 0
    pieces = _pieces(call.ins, call.context.block, call.context.norm_row)
    if len(pieces) == 1 and pieces[0].shape[0] == 1 and pieces[0].dtype is y.dtype:
        call.emit(torch.linalg.vector_norm, pieces[0], 2, out=y)
        return
    partials = call.work[0]
    for piece in pieces:
        if piece.dtype is not y.dtype:
            widened = call.work[1][: piece.numel()].view(piece.shape)
            call.emit(widened.copy_, piece)
            piece = widened
        end = start + piece.shape[0]
        call.emit(torch.linalg.vector_norm, piece, 2, 1, out=partials[start:end])
        start = end
    call.emit(torch.linalg.vector_norm, partials[:start], 2, out=y)
