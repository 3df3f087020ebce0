"""Sums and maxima over axes, norms, and sums over ranks in a fixed order.

Contributions to a shard are sent to its owner, who adds them up. The sum is that of `parallel.ranks.tree_sum` over
ranks, so no library's order of summing gets into the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice, pairwise

import torch

from ttrain.core.spec import Part
from ttrain.device.base import Delivery, Group, Launch
from ttrain.device.torch.kernels.common import Call, Tensor, row, runs

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


def _pieces(tensors: Sequence[Tensor], block: int, row: int, dtype: torch.dtype) -> list[Tensor]:
    """Matrices of rows to take norms of in `dtype`; of another no larger than a block, since they are widened first."""
    pieces: list[Tensor] = []
    for run in runs(tensors):
        limit = run.numel() if run.dtype is dtype else max(block // row, 1) * row
        for part in run.split(max(limit, 1)):
            whole = part.numel() // row * row
            if whole:
                pieces.append(part[:whole].view(-1, row))
            if whole < part.numel():
                pieces.append(part[whole:].view(1, -1))
    return pieces


@row("global_norm")
def _global_norm(call: Call) -> None:
    y, sizes = call.outs[0], [x.numel() for x in call.ins]
    block, row = call.context.block, call.context.norm_row
    sums = call.scratch((sum(-(-size // row) + 1 for size in sizes) or 1,), y.dtype)
    narrow = any(x.dtype is not y.dtype for x in call.ins)
    scratch = call.scratch((min(sum(sizes), max(block, row)),), y.dtype) if narrow else sums
    pieces = [] if call.planning else _pieces(call.ins, block, row, y.dtype)
    if len(pieces) == 1 and pieces[0].shape[0] == 1 and pieces[0].dtype is y.dtype:
        call.emit(torch.linalg.vector_norm, pieces[0], 2, out=y)
        return
    end = _norms_of_rows(call, pieces, sums, 0, scratch)
    call.emit(torch.linalg.vector_norm, sums[:end], 2, out=y)


def _norms_of_rows(call: Call, pieces: Sequence[Tensor], norms: Tensor, place: int, scratch: Tensor) -> int:
    """norms [R], from `place` on, <- those of the rows of pieces [R, C]; returns where they end.

    Pieces are widened before where they are narrower.
    """
    for x in pieces:
        if x.dtype is not norms.dtype:
            wide = scratch[: x.numel()].view(x.shape)
            call.emit(wide.copy_, x)
            x = wide
        call.emit(torch.linalg.vector_norm, x, 2, 1, out=norms[place : place + len(x)])
        place += len(x)
    return place


@row("block_norms")
def _block_norms(call: Call) -> None:
    (y,), block = call.outs, call.attributes["block"]
    largest, narrow = max(x.numel() for x in call.ins), any(x.dtype is not y.dtype for x in call.ins)
    scratch = call.scratch((min(largest, max(call.context.block, block)),), y.dtype) if narrow else y
    call.emit(y.zero_)
    for tensor, place in zip(call.ins, call.attributes["places"], strict=True):
        _norms_of_rows(call, _pieces([tensor], call.context.block, block, y.dtype), y, place, scratch)


@row("all_reduce")
def _all_reduce(call: Call) -> None:
    call.emit(call.outs[0].copy_, call.ins[0])
    if call.context.group is not None:
        call.emit(call.context.group.sum(call.outs[0]))


@row("all_reduce_state", delivery=Delivery.INPLACE)
def _all_reduce_state(call: Call) -> None:
    """There are no chips."""


def _exchange(reduces: bool, gathers: bool, call: Call) -> None:
    """Begin to sum the shards of buckets, or to gather them on every rank, or both, while the device continues."""
    bounds, group = call.attributes.get("bounds"), call.context.group
    if group is None or not bounds or call.planning:
        return
    exchanges, first = Call(call.context, (), (), {}, ()), (call.outs if reduces else call.ins)[0]
    # The run that begins with the first tensor, as one vector with its gaps; parts of it may follow in the list.
    run = first.as_strided((bounds[-1][-1],), (1,), first.storage_offset())
    for bucket in bounds:
        shards = [[run[start:stop]] for start, stop in pairwise(bucket)]
        if reduces:
            _reduce(exchanges, group, shards, call.outs[-1], shards[group.rank])
        if gathers:
            exchanges.emit(_gathered(group, shards))
    call.emit(group.start(exchanges.launches))
    if not reduces:
        call.emit(group.finish)


@row("collectives_done", delivery=Delivery.INPLACE)
@row("exchange_done", delivery=Delivery.INPLACE)
def _exchange_done(call: Call) -> None:
    if call.context.group is not None:
        call.emit(call.context.group.finish, call.attributes.get("key"))


@row("all_gather")
def _all_gather(call: Call) -> None:
    """Each tensor <- its parts on all ranks, those of this rank at once."""
    call.begin()
    pieces, rank, group = _pieces_of(call.outs, call.attributes["owners"]), call.attributes["rank"], call.context.group
    for piece, own in zip(pieces[rank], call.ins, strict=True):
        call.emit(piece.copy_, own.view(-1))
    if group is not None:
        _start(call, group, [_gathered(group, pieces)])


@row("reduce_scatter")
def _reduce_scatter(call: Call) -> None:
    """Parts of each tensor, those that this rank has, <- their sums over ranks."""
    call.begin()
    pieces, rank, group = _pieces_of(call.ins, call.attributes["owners"]), call.attributes["rank"], call.context.group
    if group is None:
        for part, piece in zip(call.outs, pieces[rank], strict=False):
            call.emit(part.view(-1).copy_, piece)
        return
    exchanges = Call(call.context, (), (), {}, ())
    _reduce(exchanges, group, pieces, call.outs[-1], call.outs[:-1])
    _start(call, group, exchanges.launches)


def _pieces_of(tensors: Sequence[Tensor], owners: Sequence[Sequence[Sequence[Part]]]) -> list[list[Tensor]]:
    """Return by rank the parts of tensors that it owns, as vectors."""
    parts = [[(x.view(-1), part) for x, ranks in zip(tensors, owners, strict=True) for part in ranks[rank]]
             for rank in range(len(owners[0]))]  # fmt: skip
    return [[x[start:stop] for x, (start, stop) in of_rank] for of_rank in parts]


def _start(call: Call, group: Group, launches: Sequence[Launch]) -> None:
    """Start an exchange, and wait for it where it has no key."""
    call.emit(group.start(launches, call.attributes["key"]))
    if not call.attributes["key"]:
        call.emit(group.finish)


row("all_reduce_start")(partial(_exchange, True, True))
row("reduce_scatter_start")(partial(_exchange, True, False))
row("all_gather_state", delivery=Delivery.INPLACE)(partial(_exchange, False, True))


def _gathered(group: Group, pieces: Sequence[Sequence[Tensor]]) -> Launch:
    """Return what brings the pieces, by rank, from their owners to this rank."""
    others = _others(group)
    sends = [(other, piece) for other in others for piece in pieces[group.rank]]
    return group.exchange(sends, [(other, piece) for other in others for piece in pieces[other]])


def _reduce(
    call: Call, group: Group, pieces: Sequence[Sequence[Tensor]], received: Tensor, targets: Sequence[Tensor]
) -> None:
    """Targets <- sums over ranks of this rank's pieces, given by rank; `received` takes what the others send."""
    own, others = pieces[group.rank], _others(group)
    sizes = [piece.numel() for piece in own] * len(others)
    buffers = iter(received[: sum(sizes)].split(sizes) if own else ())
    given = [own if rank == group.rank else [*islice(buffers, len(own))] for rank in range(group.count)]
    sends = [(other, piece) for other in others for piece in pieces[other]]
    call.emit(group.exchange(sends, [(other, piece) for other in others for piece in given[other]]))
    for target, *shares in zip(targets, *given, strict=True):
        _tree(call, shares, group.rank, target.view(-1))


def _others(group: Group) -> list[int]:
    return [other for other in range(group.count) if other != group.rank]


def _tree(call: Call, given: Sequence[Tensor], rank: int, target: Tensor) -> None:
    """The target <- the sum of what the ranks give, in the tree's order. What others gave is overwritten."""
    step = _SERIAL if call.context.on_cpu else target.numel()
    while len(given) > 1 and target.numel():
        rank //= 2
        sums = [target if pair == rank else x for pair, x in enumerate(given[::2])]
        for x, y, total in zip(given[::2], given[1::2], sums, strict=True):
            for a, b, out in zip(x.split(step), y.split(step), total.split(step), strict=True):
                call.emit(torch.add, a, b, out=out)
        given = sums
