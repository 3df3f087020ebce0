"""Sums over the chips or ranks that share a batch, and exchanges of shards. On one rank they do nothing.

Ranks exchange runs of state, whose tensors lie side by side: `bounds` tells for each bucket of a run where the ranks'
shards begin, and where it ends, in elements; see parallel.ranks.Sharding. Parts of a tensor lie in its own memory.

A sum over ranks is two ops, so that it overlaps with what is computed between them: a start for each bucket, which
returns at once, and one `collectives_done` that waits for all. Meanwhile the tensors belong to the exchange, as does
the receive buffer for what other ranks send, an output of the start that `collectives_done` reads. All ranks start in
one order.

Where each rank has only parts of the weights, `all_gather` makes whole tensors of them within a step, and
`reduce_scatter` sums whole gradients into parts; they may lie anywhere. With a `key` they return at once, and the
`exchange_done` of that key waits. `owners` tells by tensor and rank which parts of its elements a rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ttrain.core.spec import DType, Part, TensorSpec, part_spec
from ttrain.graph import Case, Value, cases, primitive, require

Bounds = tuple[tuple[int, ...], ...]
Owners = tuple[tuple[tuple[Part, ...], ...], ...]
_OVER_STATE: dict[str, Any] = {  # the first `count` tensors are written, or all; those behind them only belong to them
    "outputs": ("written*",),
    "accumulation": ("tensors",),
    "aliases": lambda node: {index: index for index in range(node.attributes.get("count", len(node.inputs)))},
    "reference": lambda *tensors, count=None, **attributes: list(tensors[:count]),
}


@primitive(reference=lambda x: x)
def all_reduce(x: Value) -> TensorSpec:
    """y = the sum of x over all chips or ranks."""
    require(x.spec.dtype.is_floating, "all_reduce", x.spec, "a floating-point tensor")
    return x.spec


@primitive(**_OVER_STATE)
def all_reduce_state(tensors: Sequence[Value]) -> list[TensorSpec]:
    """tensors <- their sums over all chips, as a group: a device may send them in one piece."""
    return [tensor.spec for tensor in tensors]


@primitive(**_OVER_STATE)
def all_reduce_start(tensors: Sequence[Value], bounds: Bounds = ()) -> list[TensorSpec]:
    """Starts to put the sums over all ranks into a bucket of the tensors. The last output is the receive buffer."""
    return _with_receive_buffer("all_reduce_start", tensors, bounds)


@primitive(**_OVER_STATE)
def reduce_scatter_start(tensors: Sequence[Value], bounds: Bounds = ()) -> list[TensorSpec]:
    """Start the sum of this rank's shard of the bucket alone. The rest of the bucket is undefined afterwards."""
    return _with_receive_buffer("reduce_scatter_start", tensors, bounds)


def _with_receive_buffer(name: str, tensors: Sequence[Value], bounds: Bounds) -> list[TensorSpec]:
    """Specs of the tensors, and of a buffer for the largest shard from every other rank."""
    require(len(bounds) < 2, name, f"{len(bounds)} buckets", "one bucket")
    shards = [stop - start for bucket in bounds for start, stop in pairwise(bucket)]
    buffer = [tensors[0].spec.with_shape((len(shards) - 1) * max(shards))] if shards else []
    return [*(tensor.spec for tensor in tensors), *buffer]


@primitive(**_OVER_STATE)
def collectives_done(tensors: Sequence[Value], count: int) -> list[TensorSpec]:
    """The first `count` tensors, as all collectives that were started leave them; the others are given back.

    Parts of tensors may follow those that they lie in. The others are the receive buffers of the starts.
    """
    return [tensor.spec for tensor in tensors[:count]]


@primitive(**_OVER_STATE)
def all_gather_state(tensors: Sequence[Value], count: int, bounds: Bounds = ()) -> list[TensorSpec]:
    """Every part of `count` tensors <- what the rank that owns it holds there.

    This rank's parts, which are as its updates left them, follow in the list.
    """
    return [tensor.spec for tensor in tensors[:count]]


def _whole_in_torch(*parts: Any, specs: Sequence[TensorSpec], **attributes: Any) -> Any:
    """The tensors that one rank alone gathers."""
    return [part.reshape(spec.shape) for part, spec in zip(parts, specs, strict=True)]


@primitive(outputs=("tensors*",), accumulation=("parts",), reference=_whole_in_torch, flops=lambda node: 0)
def all_gather(
    parts: Sequence[Value], specs: tuple[TensorSpec, ...], owners: Owners, rank: int, ahead: int = 0, key: str = ""
) -> list[TensorSpec]:
    """Tensors of `specs` <- their parts on all ranks. `parts` are those of this rank, tensor by tensor.

    The pass `gather_ahead` gathers them for each group of readers, and starts that `ahead` of them.
    """
    return list(specs)


@primitive(
    outputs=("parts*",), joint=True, accumulation=("tensors",), reference=lambda *tensors, **attributes: list(tensors)
)
def reduce_scatter(tensors: Sequence[Value], owners: Owners, rank: int, key: str = "") -> list[TensorSpec]:
    """Parts of tensors, those that this rank has, <- their sums over ranks. A receive buffer follows, if any."""
    pairs = zip(tensors, owners, strict=True)
    own = [part_spec(tensor.spec, part) for tensor, ranks in pairs for part in ranks[rank]]
    size = (len(owners[0]) - 1) * max(sum(spec.size for spec in own), 1)
    return [*own, tensors[0].spec.with_shape(size)] if size else own


@primitive(**_OVER_STATE, joint=True)
def exchange_done(tensors: Sequence[Value], count: int, key: str = "") -> list[TensorSpec]:
    """The first `count` tensors, as the exchange of that key leaves them; the others are given back."""
    return [tensor.spec for tensor in tensors[:count]]


def _norms_in_torch(*tensors: Any, places: Sequence[int], total: int, block: int) -> Any:
    y = tensors[0].new_zeros(total).double()
    for tensor, place in zip(tensors, places, strict=True):
        for number, part in enumerate(tensor.reshape(-1).split(block)):
            y[place + number] = part.double().norm()
    return y


@primitive(reference=_norms_in_torch, accumulation=("tensors",))
def block_norms(tensors: Sequence[Value], places: tuple[int, ...], total: int, block: int) -> TensorSpec:
    """y [total] fp32: from places[i] on the L2 norms of every `block` elements of tensor i, and zeros elsewhere."""
    require(len(places) == len(tensors), "block_norms", f"{places=}", f"{len(tensors)} places")
    return TensorSpec((total,), DType.FP32)


cases(all_gather_state, Case(((4, 8), (257,), (3,)), {"count": 2}))
cases(collectives_done, Case(((4, 8), (257,), (3,)), {"count": 2}))
cases(exchange_done, Case(((4, 8), (257,), (3,)), {"count": 2}))
_alone: dict[str, Any] = {"owners": ((((0, 32),),), (((0, 257),),)), "rank": 0}
cases(all_gather, Case(((4, 8), (257,)), {"specs": (TensorSpec((4, 8)), TensorSpec((257,))), **_alone}))
cases(reduce_scatter, Case(((4, 8), (257,)), _alone))
for _op in (all_reduce_state, all_reduce_start, reduce_scatter_start):
    cases(_op, Case(((4, 8), (257,))), Case(((3,),)))
cases(all_reduce, Case(((4, 8),)), Case(((),)))
cases(block_norms, Case(((4, 8), (257,)), {"places": (1, 2), "total": 12, "block": 32}))
