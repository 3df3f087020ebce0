"""Sums and maxima over axes, norms, and sums over ranks in one order whoever computes.

Contributions to a shard are sent to its owner, who adds them up. The sum is that of `parallel.ranks.tree_sum` over
ranks, so no library's order of summing gets into the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from ttrain.core.spec import TensorSpec
from ttrain.device.base import Delivery, Group
from ttrain.device.torch.kernels.common import Call, Emitter, Tensor, row, runs

_SERIAL = 2**15  # elements that aten adds by itself: more threads would take cores from the kernels that run meanwhile


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
    for piece in pieces:
        partials = call.work[0][start : start + len(piece)]
        if piece.dtype is not y.dtype:
            wide = call.work[-1][: piece.numel()].view(piece.shape)
            call.emit(wide.copy_, piece)
            piece = wide
        call.emit(torch.linalg.vector_norm, piece, 2, 1, out=partials)
        start += len(piece)
    call.emit(torch.linalg.vector_norm, call.work[0][:start], 2, out=y)


def _block_norms_workspace(call: Call) -> list[TensorSpec]:
    y = call.outs[0]
    if all(spec.dtype is y.dtype for spec in call.ins):
        return []
    most = max(call.context.block, call.attributes["block"])
    return [y.with_shape(min(max(spec.size for spec in call.ins), most))]


@row("block_norms", _block_norms_workspace)
def _block_norms(call: Call) -> None:
    (y,), block = call.outs, call.attributes["block"]
    call.emit(y.zero_)
    for tensor, place in zip(call.ins, call.attributes["places"], strict=True):
        x = tensor.view(-1)
        at_once = x.numel() if x.dtype is y.dtype else max(call.work[0].numel() // block, 1) * block
        for part in x.split(max(at_once, 1)):
            if part.dtype is not y.dtype:
                wide = call.work[0][: part.numel()]
                call.emit(wide.copy_, part)
                part = wide
            whole = part.numel() // block
            for matrix in (part[: whole * block].view(-1, block), part[whole * block :].view(1, -1)):
                if matrix.numel():
                    call.emit(torch.linalg.vector_norm, matrix, 2, 1, out=y[place : place + len(matrix)])
                    place += len(matrix)


@row("all_reduce")
def _all_reduce(call: Call) -> None:
    call.emit(call.outs[0].copy_, call.ins[0])
    if call.context.group is not None:
        call.emit(call.context.group.sum(call.outs[0]))


@row("all_reduce_state", delivery=Delivery.INPLACE)
def _all_reduce_state(call: Call) -> None:
    """There are no chips."""


@row("all_reduce_start")
def _all_reduce_start(call: Call) -> None:
    _start(call, gathers=True)


@row("reduce_scatter_start")
def _reduce_scatter(call: Call) -> None:
    _start(call, gathers=False)


def _start(call: Call, gathers: bool) -> None:
    """Sum the shards of a bucket while the device goes on; with `gathers` every rank gets all of them then."""
    bounds, group = call.attributes.get("bounds", ()), call.context.group
    if group is None or not bounds:
        return
    exchanges, run, (bucket,) = Emitter(), _run(call.outs, bounds), bounds
    _reduce(exchanges, group, run, bucket, call.outs[-1], call.context.on_cpu)
    if gathers:
        _gather(exchanges, group, run, bucket)
    call.emit(group.start(exchanges.launches))


@row("collectives_done", delivery=Delivery.INPLACE)
def _collectives_done(call: Call) -> None:
    if call.context.group is not None:
        call.emit(call.context.group.finish)


@row("all_gather_state", delivery=Delivery.INPLACE)
def _all_gather(call: Call) -> None:
    bounds, group = call.attributes.get("bounds"), call.context.group
    if group is None or not bounds:
        return
    exchanges, run = Emitter(), _run(call.ins, bounds)
    for bucket in bounds:
        _gather(exchanges, group, run, bucket)
    call.emit(group.start(exchanges.launches))
    call.emit(group.finish)


def _run(tensors: Sequence[Tensor], bounds: tuple[tuple[int, ...], ...]) -> Tensor:
    """The run that begins with the first tensor, as one vector with its gaps; parts of it may follow in the list."""
    return tensors[0].as_strided((bounds[-1][-1],), (1,), tensors[0].storage_offset())


def _reduce(call: Emitter, group: Group, run: Tensor, bucket: tuple[int, ...], received: Tensor, on_cpu: bool) -> None:
    """Shard of this rank in a bucket <- its sum over ranks; `received` takes what the others send."""
    rank, shards = group.rank, [run[start:stop] for start, stop in pairwise(bucket)]
    own, others = shards[rank], [other for other in range(group.count) if other != rank]
    given: list[Tensor] = [own] * group.count
    for place, other in enumerate(others if own.numel() else ()):
        given[other] = received[place * own.numel() : (place + 1) * own.numel()]
    call.emit(group.exchange([(other, shards[other]) for other in others], [(other, given[other]) for other in others]))
    step = _SERIAL if on_cpu else own.numel()
    while len(given) > 1 and own.numel():
        for x, y in zip(given[::2], given[1::2], strict=True):
            parts = (tensor.split(step) for tensor in (x, y, y if y is own else x))
            for a, b, out in zip(*parts, strict=True):
                call.emit(torch.add, a, b, out=out)
        given = [y if y is own else x for x, y in zip(given[::2], given[1::2], strict=True)]


def _gather(call: Emitter, group: Group, run: Tensor, bucket: tuple[int, ...]) -> None:
    """Every shard of a bucket <- what its owner holds there."""
    shards = [run[start:stop] for start, stop in pairwise(bucket)]
    others = [other for other in range(group.count) if other != group.rank]
    sends = [(other, shards[group.rank]) for other in others]
    call.emit(group.exchange(sends, [(other, shards[other]) for other in others]))
