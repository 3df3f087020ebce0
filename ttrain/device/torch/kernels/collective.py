"""Sums over ranks, in one order whoever computes: contributions to a shard are sent to its owner, who adds them up.

The sum is that of `parallel.ranks.tree_sum` over ranks, so no library's order of summing gets into the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

from ttrain.core.spec import TensorSpec
from ttrain.device.base import Delivery, Launch, chain
from ttrain.device.torch.kernels.common import Attributes, Context, Specs, Tensor, Tensors, copying, row

_SERIAL = 2**15  # elements that aten adds by itself: more threads would take cores from the kernels that run meanwhile
Further = Callable[[Tensor, tuple[int, ...]], list[Launch]]


@row("all_reduce")
def _all_reduce(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    copy = copying(outs[0], ins[0])
    return copy if context.group is None else chain(copy, context.group.sum(outs[0]))


@row("all_reduce_state", delivery=Delivery.INPLACE)
def _all_reduce_state(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    return chain()  # there are no chips


@row("all_reduce_start")
def _all_reduce_start(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    return _start(context, outs, attributes, lambda run, bucket: _gather(context, run, bucket))


@row("reduce_scatter_start")
def _reduce_scatter(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    return _start(context, outs, attributes, lambda run, bucket: [])


def _start(context: Context, outs: Tensors, attributes: Attributes, further: Further) -> Launch:
    """Sums the shards of a bucket while the device goes on, and then does what is `further` to be done."""
    bounds = attributes.get("bounds", ())
    if context.group is None or not bounds:
        return chain()
    run, (bucket,) = _run(outs, bounds), bounds
    return context.group.start([*_reduce(context, run, bucket, outs[-1]), *further(run, bucket)])


@row("collectives_done", delivery=Delivery.INPLACE)
def _collectives_done(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    return chain() if context.group is None else context.group.finish


@row("all_gather_state", delivery=Delivery.INPLACE)
def _all_gather(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    if context.group is None or not attributes.get("bounds"):
        return chain()
    run = _run(ins, attributes["bounds"])
    exchanges = [part for bucket in attributes["bounds"] for part in _gather(context, run, bucket)]
    return chain(context.group.start(exchanges), context.group.finish)


def _run(tensors: Tensors, bounds: tuple[tuple[int, ...], ...]) -> Tensor:
    """The run that begins with the first tensor, as one vector with its gaps; parts of it may follow in the list."""
    return tensors[0].as_strided((bounds[-1][-1],), (1,), tensors[0].storage_offset())


def _reduce(context: Context, run: Tensor, bucket: tuple[int, ...], received: Tensor) -> list[Launch]:
    """This rank's shard of a bucket <- its sum over ranks; `received` takes what the others send."""
    group = context.group
    assert group is not None
    rank, shards = group.rank, [run[start:stop] for start, stop in pairwise(bucket)]
    own, others = shards[rank], [other for other in range(group.count) if other != rank]
    given: list[Tensor] = [own] * group.count
    for place, other in enumerate(others if own.numel() else ()):
        given[other] = received[place * own.numel() : (place + 1) * own.numel()]
    launches = [
        group.exchange([(other, shards[other]) for other in others], [(other, given[other]) for other in others])
    ]
    step = _SERIAL if context.on_cpu else own.numel()
    while len(given) > 1 and own.numel():
        for x, y in zip(given[::2], given[1::2], strict=True):
            parts = (tensor.split(step) for tensor in (x, y, y if y is own else x))
            launches += [partial(torch.add, a, b, out=out) for a, b, out in zip(*parts, strict=True)]
        given = [y if y is own else x for x, y in zip(given[::2], given[1::2], strict=True)]
    return launches


def _gather(context: Context, run: Tensor, bucket: tuple[int, ...]) -> list[Launch]:
    """Every shard of a bucket <- what its owner holds there."""
    group = context.group
    assert group is not None
    shards = [run[start:stop] for start, stop in pairwise(bucket)]
    others = [other for other in range(group.count) if other != group.rank]
    sends = [(other, shards[group.rank]) for other in others]
    return [group.exchange(sends, [(other, shards[other]) for other in others])]


def _norms_workspace(context: Context, ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    if all(spec.dtype is outs[0].dtype for spec in ins):
        return []
    return [outs[0].with_shape(min(max(spec.size for spec in ins), max(context.block, attributes["block"])))]


@row("block_norms", _norms_workspace)
def _block_norms(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (y,), block = outs, attributes["block"]
    launches: list[Launch] = [y.zero_]
    for tensor, place in zip(ins, attributes["places"], strict=True):
        x = tensor.view(-1)
        at_once = x.numel() if x.dtype is y.dtype else max(work[0].numel() // block, 1) * block
        for part in x.split(max(at_once, 1)):
            if part.dtype is not y.dtype:
                wide = work[0][: part.numel()]
                launches.append(copying(wide, part))
                part = wide
            whole = part.numel() // block
            rows = [part[: whole * block].view(-1, block), part[whole * block :].view(1, -1)]
            for matrix in rows:
                if matrix.numel():
                    out = y[place : place + len(matrix)]
                    launches.append(partial(torch.linalg.vector_norm, matrix, 2, 1, out=out))
                    place += len(matrix)
    return chain(*launches)
