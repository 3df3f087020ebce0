"""The part of a model that one rank updates: whole parameters, or with ZeRO-1 the parts of them that it owns."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise

from ttrain import ops
from ttrain.core.spec import DType, Part, TensorSpec, flat_offsets, part_name, part_spec
from ttrain.engine.state import StateTensor
from ttrain.graph import Graph, Kind, Value
from ttrain.nn.module import Divided, Parameter, use
from ttrain.ops.collective import Owners
from ttrain.optim.groups import FlatParameter
from ttrain.parallel.ranks import BLOCK, Ranks, Sharding, sharding_of

SpecOf = Callable[[Parameter], TensorSpec]


@dataclass(frozen=True)
class OwnedPart:
    """A parameter, or a part of one, that this rank updates."""

    parameter: Parameter
    part: Part | None
    number: int  # of its first element within the flat parameter
    blocks: int  # of the flat parameter before its first one

    def of(self, graph: Graph, name: str, spec: TensorSpec, kind: Kind) -> Value:
        """Return this part of a tensor of the state that goes with the parameter."""
        if self.part is None:
            return graph.state_value(name, spec, kind)
        part = part_of(self.parameter, self.part, spec)
        return graph.state_value(part_name(name, part), part_spec(spec, part), kind)


def part_of(parameter: Parameter, part: Part, spec: TensorSpec) -> Part:
    """The part of a tensor that belongs to one of a parameter: of another shape it has only its whole."""
    return (0, spec.size) if part == (0, parameter.spec.size) else part


class FlatShard:
    """A flat parameter as the ranks divide it."""

    def __init__(self, flat: FlatParameter, ranks: Ranks) -> None:
        self.flat, self._ranks = flat, ranks
        self._sizes = [parameter.spec.size for parameter in flat.parameters]

    @cached_property
    def sharding(self) -> Sharding:
        """Return the owner of each part."""
        whole = [self.flat.rule.whole] * len(self._sizes)
        return sharding_of(self._sizes, self._ranks.count, whole, self._ranks.bucket)

    @property
    def owners(self) -> Sequence[tuple[tuple[Part, ...], ...]]:
        """Return the parts of each tensor's elements that a rank owns, by tensor and rank."""
        return _owners(self.flat.parameters) or self.sharding.parts

    @property
    def blocks(self) -> int:
        """Count the blocks of BLOCK elements or less, of all parameters."""
        return sum(-(-size // BLOCK) for size in self._sizes)

    def tensors_of(self, bucket: Sequence[int]) -> tuple[slice, int]:
        """Return the tensors that a bucket has elements of, and where the first of them begins."""
        offsets, _ = flat_offsets(self._sizes)
        first, end = bisect_right(offsets, bucket[0]) - 1, bisect_left(offsets, bucket[-1])
        return slice(first, end), offsets[first]

    def parts(self, position: int) -> tuple[Part, ...]:
        """Return the parts of a parameter that this rank owns; none where it owns all."""
        return self.owners[position][self._ranks.rank] if self._ranks.sharding else ()

    @cached_property
    def owned(self) -> list[OwnedPart]:
        offsets, _ = flat_offsets(self._sizes)
        found, blocks = list[OwnedPart](), 0
        for position, (parameter, offset) in enumerate(zip(self.flat.parameters, offsets, strict=True)):
            for part in self.parts(position) if self._ranks.sharding else (None,):
                first = 0 if part is None else part[0]
                found.append(OwnedPart(parameter, part, offset + first, blocks + first // BLOCK))
            blocks += -(-self._sizes[position] // BLOCK)
        return found

    def tensors(self, slot: str, spec_of: SpecOf, kind: Kind, everywhere: bool = False) -> list[StateTensor]:
        """Return the tensors `<parameter path><slot>` as a state places them: whole, or what this rank owns.

        With `everywhere` all ranks hold them whole.
        """
        found = []
        for at, parameter in enumerate(self.flat.parameters):
            spec = spec_of(parameter)
            padding = parameter.padding if spec.shape[:1] == parameter.spec.shape[:1] else 0  # a slot may have one row
            parts = tuple(part_of(parameter, part, spec) for part in self.parts(at))
            whole = everywhere or not self._ranks.sharding
            found.append(StateTensor(parameter.path + slot, spec, kind, self.flat.name, padding, None, parts, whole))
        return found

    def values(self, graph: Graph, slot: str, spec_of: SpecOf, kind: Kind) -> list[Value]:
        """Return what this rank updates of the tensors `<parameter path><slot>`."""
        return [part.of(graph, part.parameter.path + slot, spec_of(part.parameter), kind) for part in self.owned]

    def cut(self, nbytes: Callable[[Parameter], int], least: int) -> list[FlatShard]:
        """Cut it into neighbours of `least` bytes or more, where it has so many. Elements keep their numbers."""
        parameters, ends, size = self.flat.parameters, [0], 0
        for end, parameter in enumerate(parameters, 1):
            size += nbytes(parameter)
            if size >= least:
                ends, size = [*ends, end], 0
        parts = []
        for first, end in pairwise([*(ends[:-1] or ends), len(parameters)]):
            part = FlatShard(replace(self.flat, parameters=parameters[first:end]), self._ranks)
            part.owned = self.owned[first:end]
            parts.append(part)
        return parts

    def gather(self, graph: Graph, written: Sequence[Value], compute: DType) -> None:
        """Let every rank have what each wrote of it, if it is to have it all."""
        parameters = self.flat.parameters
        if not self._ranks.sharding or self._ranks.dividing:
            return
        if written and parameters[0].has_copy(compute) and written[0].producer is not None:
            written = written[0].producer.outputs[-len(written) :]  # an update's copies come last
        whole = [use(graph, p, compute) for p in parameters]
        ops.collective.all_gather_state([*whole, *written], len(whole), self.sharding.bounds)

    def weight_spec(self, parameter: Parameter, low_bits: bool) -> TensorSpec:
        """Return the spec of a parameter's master values.

        With `low_bits` it is what the values have beyond a copy that layers read, unless the rule works on whole
        tensors.
        """
        kept = low_bits and parameter.has_copy(self.flat.dtype) and not self.flat.rule.whole
        return parameter.spec.with_dtype(DType.INT16) if kept else parameter.spec


def summed_over_ranks(
    shards: Sequence[FlatShard], gradients: Sequence[Sequence[Value]], owned: Sequence[Sequence[Value]] | None = None
) -> list[list[Value]]:
    """Return by shard the gradients summed over ranks: of what this rank owns where that is given, else of all.

    Each bucket is an exchange of its own. Those of a shard are started from its end, where backward begins.
    """
    start = ops.collective.all_reduce_start if owned is None else ops.collective.reduce_scatter_start
    buffers: list[Value] = []
    summed = [list(given) for given in gradients]
    for shard, given in zip(shards, summed, strict=True):
        for bucket in reversed(shard.sharding.bounds):
            inside, base = shard.tensors_of(bucket)
            bounds = tuple(bound - base for bound in bucket)
            *given[inside], received = start(given[inside], (bounds,))
            buffers.append(received)
    lists = [*summed, *(owned or ())]
    every = [value for values in lists for value in values]
    left = iter(ops.collective.collectives_done([*every, *buffers], len(every)))
    done = [list(islice(left, len(values))) for values in lists]
    return done[-len(shards) :]


def divide(parameters: Sequence[Parameter], flats: Sequence[FlatParameter], ranks: Ranks) -> None:
    """Give each rank parts of the parameters, divided block by block, if ranks divide them; else all.

    A block is a member of a list of modules, such as `blocks.3`; what is in none counts by its first name.
    """
    whole = {parameter for flat in flats if flat.rule.whole for parameter in flat.parameters}
    blocks: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        parameter.divided = None
        found = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", parameter.path)
        blocks.setdefault(found[0] if found else parameter.path.partition(".")[0], []).append(parameter)
    for members in blocks.values() if ranks.dividing else ():
        pieces = [(spec.size, p in whole) for p in members for spec in p.pieces.values()]
        sharding = sharding_of([size for size, _ in pieces], ranks.count, [kept for _, kept in pieces])
        Divided(tuple(members), tuple(sharding.parts), ranks.rank, ranks.prefetch)


def _owners(parameters: Sequence[Parameter]) -> Owners:
    """Return the parts by parameter and rank of those that are divided; each is one piece."""
    return tuple(owners for p in parameters if p.divided is not None for owners in p.divided.owners_of(p))


def summed_into_parts(
    gradients: Mapping[Parameter, Value], shards: Sequence[FlatShard], state_of: Callable[[FlatShard], Sequence[Value]]
) -> list[list[Value]]:
    """Return by shard the sums over ranks of what this rank has of the gradients, stored in its state.

    Each block is an exchange of its own, from the end of the model, where backward begins. It is waited for once the
    next one is started.
    """
    started = []
    for block in reversed(dict.fromkeys(parameter.divided for parameter in gradients if parameter.divided)):
        members = [parameter for parameter in block.parameters if parameter in gradients]
        given = [gradients[parameter] for parameter in members]
        owners, key = _owners(members), f"gradients of {members[0].path}"
        started.append((members, given, key, ops.collective.reduce_scatter(given, owners, block.rank, key)))
    sums: dict[Parameter, list[Value]] = {}
    buffers = [summed[-1] for *_, summed in started]
    for number, (members, given, key, summed) in enumerate(started, 1):
        # The receive buffer of the next exchange tells that it has been started.
        *done, _ = ops.collective.exchange_done([*summed, *given, *buffers[number : number + 1]], len(summed), key)
        left = iter(done)
        sums |= {parameter: list(islice(left, len(parameter.own_parts[0]))) for parameter in members}
    return [
        list(map(ops.assign, state_of(shard), (value for p in shard.flat.parameters for value in sums[p])))
        for shard in shards
    ]


def heaviest(shards: Sequence[FlatShard], ranks: Ranks) -> int:
    """Return the rank that owns most elements, the first of equals."""
    parts = [of_tensor for shard in shards for of_tensor in shard.owners]
    owned = [sum(stop - start for each in parts for start, stop in each[rank]) for rank in range(ranks.count)]
    return owned.index(max(owned))


def norms_of(
    graph: Graph, shards: Sequence[FlatShard], gradients: Sequence[Sequence[Value]], ranks: Ranks, frees: bool = False
) -> tuple[Value, Value]:
    """Return the norm of the gradients of some shards, and of those that are clipped (Pascanu et al., 2013).

    Every gradient is read once. Where the step `frees` gradients, those of no shard wait for the others.
    """
    pairs = list(zip(shards, gradients, strict=True))
    sides = ([pair for pair in pairs if pair[0].flat.clipped is clipped] for clipped in (True, False))
    found = [_norm(graph, side, ranks, frees) for side in sides if side]
    return ops.global_norm(found) if len(found) > 1 else found[0], found[0]


def _norm(graph: Graph, shards: Sequence[tuple[FlatShard, Sequence[Value]]], ranks: Ranks, frees: bool) -> Value:
    """Return the L2 norm of the gradients of some shards, whose bits do not depend on who holds which part.

    Of several ranks it is that of the norms of fixed blocks, each of which one rank has; the others have a zero there.
    """
    if ranks.single:
        lists = [[ops.global_norm(given)] if frees else given for _, given in shards]
        return ops.global_norm([value for values in lists for value in values])
    tensors: list[Value] = []
    places: list[int] = []
    before = 0
    for shard, given in shards:
        tensors += given
        places += [before + part.blocks for part in shard.owned]
        before += shard.blocks
    if tensors:
        norms = ops.collective.block_norms(tensors, tuple(places), before, BLOCK)
    else:
        norms = ops.full(graph, TensorSpec((before,)), 0.0)
    return ops.global_norm([ops.collective.all_reduce(norms) if ranks.sharding else norms])


def average_spec(parameter: Parameter) -> TensorSpec:
    """Return the spec of a parameter's average over steps."""
    return parameter.spec.with_dtype(DType.FP32)


def directions(
    flat: FlatParameter, lists: Sequence[Sequence[Value]], lr: Value, step: Value, factor: Value | None, frees: bool
) -> list[Value]:
    """Return what a rule of whole tensors puts in the place of each gradient of `lists`. The slots are updated.

    A gradient is state, unless the step `frees` it. Rules get those of fp16 in fp32: without their loss scale they
    may underflow.
    """
    dtype = DType.FP32 if flat.dtype is DType.FP16 else flat.dtype
    found = []
    for parameter, gradient, *slots in zip(*lists, strict=True):
        wide = ops.cast(gradient, DType.FP32)
        scaled = ops.cast(wide if factor is None else wide * factor, dtype)
        states = [ops.cast(state, DType.FP32) for state in (parameter, *slots)]
        direction, *new = flat.rule.body(states[0], scaled, *states[1:], lr, step, **dict(flat.rule.settings))
        for state, value in zip(slots, new, strict=True):
            ops.assign(state, ops.cast(value, state.spec.dtype))
        direction = ops.cast(direction, gradient.spec.dtype)
        found.append(direction if frees else ops.assign(gradient, direction))
    return found
