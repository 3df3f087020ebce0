"""The part of a model that one rank updates: whole parameters, or with ZeRO-1 the parts of them that it owns."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise

from ttrain import ops
from ttrain.core.spec import DType, Part, TensorSpec, part_name, part_spec, run_offsets
from ttrain.graph import Graph, Kind, Value
from ttrain.nn.module import Parameter, use
from ttrain.ops.collective import Bounds
from ttrain.optim.clip import Norms, global_norms
from ttrain.optim.groups import ParameterRun
from ttrain.parallel.ranks import BLOCK, Ranks, Sharding, sharding_of


@dataclass(frozen=True)
class OwnedPart:
    """A parameter, or a part of one, that this rank updates."""

    parameter: Parameter
    part: Part | None
    number: int  # of its first element within the run
    blocks: int  # of the run before its first one

    def of(self, graph: Graph, name: str, spec: TensorSpec, kind: Kind) -> Value:
        """Return this part of a tensor of the state that goes with the parameter."""
        if self.part is None:
            return graph.state_value(name, spec, kind)
        part = part_of(self.parameter, self.part, spec)
        return graph.state_value(part_name(name, part), part_spec(spec, part), kind)


def part_of(parameter: Parameter, part: Part, spec: TensorSpec) -> Part:
    """The part of a tensor that belongs to one of a parameter: of another shape it has only its whole."""
    return (0, spec.size) if part == (0, parameter.spec.size) else part


class ShardedRun:
    """A run of parameters as the ranks divide it."""

    def __init__(self, run: ParameterRun, ranks: Ranks) -> None:
        self.run, self._ranks = run, ranks
        self._sizes = [parameter.spec.size for parameter in run.parameters]

    @cached_property
    def sharding(self) -> Sharding:
        """Return the owner of each part."""
        return sharding_of(self._sizes, self._ranks.count, self.run.rule.whole, self._ranks.bucket)

    @property
    def bounds(self) -> Bounds:
        return self.sharding.bounds

    @property
    def blocks(self) -> int:
        """Count the blocks of BLOCK elements or less, of all parameters."""
        return sum(-(-size // BLOCK) for size in self._sizes)

    def tensors_of(self, bucket: Sequence[int]) -> tuple[slice, int]:
        """The tensors that a bucket has elements of, and where the first of them begins in the run."""
        offsets, _ = run_offsets(self._sizes)
        first, end = bisect_right(offsets, bucket[0]) - 1, bisect_left(offsets, bucket[-1])
        return slice(first, end), offsets[first]

    def parts(self, position: int) -> tuple[Part, ...]:
        """Return the parts of a parameter that this rank owns; none where it owns all."""
        return self.sharding.parts[position][self._ranks.rank] if self._ranks.sharding else ()

    @cached_property
    def owned(self) -> list[OwnedPart]:
        return list(self._owned())

    def values(self, graph: Graph, slot: str, spec_of: Callable[[Parameter], TensorSpec], kind: Kind) -> list[Value]:
        """Return what this rank updates of the tensors `<parameter path><slot>`."""
        named = [(part, part.parameter) for part in self.owned]
        return [part.of(graph, parameter.path + slot, spec_of(parameter), kind) for part, parameter in named]

    def cut(self, nbytes: Callable[[Parameter], int], least: int) -> list[ShardedRun]:
        """The run in parts of neighbours with `least` bytes or more each, where it has so many. Elements keep their
        numbers.
        """
        ends, size = [0], 0
        for end, parameter in enumerate(self.run.parameters, 1):
            size += nbytes(parameter)
            if size >= least:
                ends, size = [*ends, end], 0
        return [self._part(*pair) for pair in pairwise([*(ends[:-1] or ends), len(self.run.parameters)])]

    def _part(self, first: int, end: int) -> ShardedRun:
        part = ShardedRun(replace(self.run, parameters=self.run.parameters[first:end]), self._ranks)
        part.owned = self.owned[first:end]
        return part

    def gather(self, graph: Graph, written: Sequence[Value], compute: DType) -> None:
        """Let every rank have what each wrote of it."""
        parameters = self.run.parameters
        if not self._ranks.sharding:
            return
        if written and parameters[0].has_copy(compute) and written[0].producer is not None:
            written = written[0].producer.outputs[-len(written) :]  # an update's copies come last
        ops.all_gather_state([use(graph, p, compute) for p in parameters], written, self.bounds)

    def weight_spec(self, parameter: Parameter, low_bits: bool) -> TensorSpec:
        """Return the spec of a parameter's master values.

        With `low_bits` it is what the values have beyond a copy that layers read, unless the rule works on whole
        tensors.
        """
        kept = low_bits and parameter.has_copy(self.run.dtype) and not self.run.rule.whole
        return parameter.spec.with_dtype(DType.INT16) if kept else parameter.spec

    def _owned(self) -> Iterator[OwnedPart]:
        offsets, _ = run_offsets(self._sizes)
        blocks = 0
        for position, (parameter, offset) in enumerate(zip(self.run.parameters, offsets, strict=True)):
            if self._ranks.sharding:
                for part in self.parts(position):
                    yield OwnedPart(parameter, part, offset + part[0], blocks + part[0] // BLOCK)
            else:
                yield OwnedPart(parameter, None, offset, blocks)
            blocks += -(-self._sizes[position] // BLOCK)


def summed_over_ranks(
    runs: Sequence[ShardedRun], gradients: Sequence[Sequence[Value]], owned: Sequence[Sequence[Value]] | None = None
) -> list[list[Value]]:
    """By run, the gradients summed over ranks: of what this rank owns of them where that is given, else all.

    Each bucket is an exchange of its own. Those of a run are started from its end, where backward begins.
    """
    buffers: list[Value] = []
    summed = [list(given) for given in gradients]
    for run, given in zip(runs, summed, strict=True):
        for bucket in reversed(run.bounds):
            inside, base = run.tensors_of(bucket)
            bounds = tuple(bound - base for bound in bucket)
            *given[inside], received = ops.reduce_start(given[inside], (bounds,), scatters=owned is not None)
            buffers.append(received)
    lists = [*summed, *(owned or ())]
    left = iter(ops.collectives_done([value for values in lists for value in values], buffers))
    done = [list(islice(left, len(values))) for values in lists]
    return done[-len(runs) :]


def heaviest(runs: Sequence[ShardedRun], ranks: Ranks) -> int:
    """The rank that owns most elements, the first of equals."""
    parts = [of_tensor for run in runs for of_tensor in run.sharding.parts]
    owned = [sum(stop - start for each in parts for start, stop in each[rank]) for rank in range(ranks.count)]
    return owned.index(max(owned))


def norms_of(
    graph: Graph, runs: Sequence[ShardedRun], gradients: Sequence[Sequence[Value]], ranks: Ranks, frees: bool = False
) -> Norms:
    """The norm of the gradients of some runs, and of those that are clipped. Where the step `frees` gradients, those
    of no run wait for the others.
    """
    pairs = list(zip(runs, gradients, strict=True))
    if ranks.single:
        lists = [(run.run.clipped, [ops.global_norm(given)] if frees else given) for run, given in pairs]
        every = [(gradient, clipped) for clipped, given in lists for gradient in given]
        return global_norms([gradient for gradient, _ in every], [clipped for _, clipped in every])
    sides = ([pair for pair in pairs if pair[0].run.clipped is clipped] for clipped in (True, False))
    found = [_block_norm(graph, side, ranks) for side in sides if side]
    return Norms(ops.global_norm(found) if len(found) > 1 else found[0], found[0])


def _block_norm(graph: Graph, runs: Sequence[tuple[ShardedRun, Sequence[Value]]], ranks: Ranks) -> Value:
    """The L2 norm of the gradients of some runs, whose bits do not depend on who holds which part of them.

    It is that of the norms of fixed blocks, each of which one rank has; the others have a zero there.
    """
    tensors: list[Value] = []
    places: list[int] = []
    before = 0
    for run, given in runs:
        tensors += given
        places += [before + part.blocks for part in run.owned]
        before += run.blocks
    if tensors:
        norms = ops.block_norms(tensors, tuple(places), before, BLOCK)
    else:
        norms = ops.full(graph, TensorSpec((before,)), 0.0)
    return ops.global_norm([ops.all_reduce(norms) if ranks.sharding else norms])


def average_spec(parameter: Parameter) -> TensorSpec:
    """Return the spec of a parameter's average over steps."""
    return parameter.spec.with_dtype(DType.FP32)


def directions(
    run: ParameterRun, lists: Sequence[Sequence[Value]], lr: Value, step: Value, factor: Value | None, frees: bool
) -> list[Value]:
    """Return what a rule of whole tensors puts in the place of each gradient of `lists`. The slots are updated.

    A gradient is state, unless the step `frees` it.
    """
    found = []
    for parameter, gradient, *slots in zip(*lists, strict=True):
        wide = ops.cast(gradient, DType.FP32)
        scaled = ops.cast(wide if factor is None else wide * factor, run.dtype)
        states = [ops.cast(state, DType.FP32) for state in (parameter, *slots)]
        direction, *new = run.rule.body(states[0], scaled, *states[1:], lr, step, **dict(run.rule.settings))
        for state, value in zip(slots, new, strict=True):
            ops.assign(state, ops.cast(value, state.spec.dtype))
        direction = ops.cast(direction, gradient.spec.dtype)
        found.append(direction if frees else ops.assign(gradient, direction))
    return found
