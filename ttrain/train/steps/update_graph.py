"""Record what follows backward over the state that a rank owns: gradients, their sums and norms, and the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.engine.state import StateTensor
from ttrain.graph import Graph, Kind, Stage, Value
from ttrain.models.base import SCALAR, SEED, Model
from ttrain.nn.module import Parameter
from ttrain.ops.update import Rule
from ttrain.optim.averages import SWAP, ema_rule
from ttrain.optim.base import AVERAGE, ROUNDING_SEED, STEP, STREAMS, Optimizer
from ttrain.optim.groups import FlatParameter, flat_parameters
from ttrain.parallel.ranks import Ranks
from ttrain.train.steps.shard import (
    FlatShard,
    SpecOf,
    average_spec,
    directions,
    divide,
    norms_of,
    summed_into_parts,
    summed_over_ranks,
)
from ttrain.train.steps.step import CLIPPED_NORM, GRAD_NORM, LOSS_SCALE

COPY = "/compute"  # ends the name of a copy in the compute dtype, after the path of a parameter
GRADIENT = "/gradient"  # ends the name of a gradient
FREED = 2**23  # bytes of gradients at least that an update of their own frees: it takes a launch more


@dataclass
class UpdateGraph:
    """Records the update of a model from gradients. See StepGraph, whose steps end with it."""

    model: Model
    optimizer: Optimizer
    rows: int  # of one micro-batch
    gradient_accumulation: int = 1  # micro-batches that a step of this rank's slices has at most
    guarded: bool = False  # the update is a step of its own, which runs only where the gradients are finite
    chips: int = 1  # that share a batch: each works on `rows` of its own, and gradients are summed over all of them
    ema: float | None = None  # decay of the averages of the weights; None keeps none
    ranks: Ranks = Ranks()  # that divide a batch of several slices, each of `rows` * `gradient_accumulation` rows
    low_bits: bool = False  # fp32 weights are kept as what their bf16 copies lack, where only updates read them
    frees: bool = False  # no gradient is kept where several updates follow theirs in backward and none waits for all
    shards: list[FlatShard] = field(init=False)
    updates: list[tuple[int, FlatShard]] = field(init=False)  # what one op updates, with the number of its shard

    def __post_init__(self) -> None:
        self.low_bits &= self.ema is None  # averages are of fp32 weights
        self.guarded |= self.scaled
        flats = flat_parameters(self.model.parameters(), self.optimizer, self.model.compute)
        divide([*self.model.parameters().values()], flats, self.ranks)
        self.shards = [FlatShard(flat, self.ranks) for flat in flats]
        parts = [shard.cut(lambda p: self._gradient_spec(p).nbytes, FREED) for shard in self.shards]
        waits = self.optimizer.config.clip_norm is not None or self.guarded or self.gradient_accumulation > 1
        self.frees &= not waits and self.ranks.single and sum(map(len, parts)) > len(parts)
        parts = parts if self.frees else [[shard] for shard in self.shards]
        self.updates = [(number, part) for number, of_shard in enumerate(parts) for part in of_shard]

    @property
    def passes_on(self) -> bool:
        """Return whether whole gradients are summed into parts as backward makes them, and kept nowhere.

        The sum over micro-batches or slices comes before that over ranks, and needs them whole.
        """
        return self.ranks.dividing and self.gradient_accumulation == len(self.ranks.own) == 1

    @property
    def scaled(self) -> bool:
        """Return whether gradients are those of a scaled loss, since fp16 can't hold small ones."""
        return self.model.compute is DType.FP16

    @property
    def parameters(self) -> list[Parameter]:
        """All trained parameters in the order in which the state lays them out."""
        return [parameter for shard in self.shards for parameter in shard.flat.parameters]

    def trace_kept(self, graph: Graph, level: int, keep: bool) -> None:
        """Set the sum over some slices aside, or add to such a sum the one that was set aside."""
        with graph.stage(Stage.UPDATE), graph.scope("gradients"):
            for p in self.parameters:
                kept, gradient = self._gradient(graph, p, kept_slot(level)), self._gradient(graph, p)
                _ = ops.assign(kept, gradient) if keep else ops.accumulate(gradient, kept)

    def trace_update(self, graph: Graph) -> None:
        """Clipping and optimizer on accumulated gradients."""
        if self.guarded:
            norm = graph.input(CLIPPED_NORM if self._scoped else GRAD_NORM, SCALAR)
            self._update(graph, [self._owned_gradients(graph, shard) for shard in self.shards], norm)
        else:
            self._update(graph, *self._reduced(graph, self._gradients(graph)))

    def trace_norm(self, graph: Graph) -> None:
        """The global norm of the accumulated gradients; changes nothing but to sum them over chips."""
        self._reduced(graph, self._gradients(graph))

    @property
    def averages(self) -> bool:
        """Return whether there are averages of the weights, which evaluations read in their place."""
        return self.ema is not None or any(AVERAGE in shard.flat.rule.slots for shard in self.shards)

    def trace_swap(self, graph: Graph) -> None:
        """Weights and averages take each other's place, bit for bit."""
        with graph.stage(Stage.UPDATE), graph.scope("averages"):
            none = ops.full(graph, SCALAR, 0.0)  # the rule reads neither rate nor step
            for shard in self.shards:
                averages = shard.values(graph, f"/{AVERAGE}", average_spec, Kind.OPTIMIZER)
                written = self._apply(graph, shard, SWAP, [averages, averages], none, none)  # it reads no gradient
                shard.gather(graph, written, self.model.compute)

    def _training_tensors(self) -> list[StateTensor]:
        """Return gradients, sums of them that wait, and the optimizer's tensors."""
        found: list[StateTensor] = []
        for shard in self.shards:
            found += shard.tensors(GRADIENT, self._gradient_spec, Kind.GRADIENT, everywhere=not self.passes_on)
            found = [replace(each, everywhere=False) for each in found] if self.frees else found
        for level in range(self.ranks.levels):
            for shard in self.shards:
                kept = shard.tensors(kept_slot(level), self._gradient_spec, Kind.GRADIENT, everywhere=True)
                found += [replace(each, parts=()) for each in kept]
        for shard in self.shards:
            for slot in shard.flat.rule.slots:
                found += shard.tensors(f"/{slot}", self._slot_spec(shard.flat.rule, slot), Kind.OPTIMIZER)
        for shard in self.shards if self.ema is not None else ():
            found += shard.tensors(f"/{AVERAGE}", average_spec, Kind.OPTIMIZER)
        return found

    def _over_all_chips(self, value: Value) -> Value:
        """A sum over the batch of one chip -> over that of all."""
        return ops.collective.all_reduce(value) if self.chips > 1 else value

    def _gradients(self, graph: Graph) -> list[Value]:
        """Return the gradients in the state, in the order of `parameters`."""
        return [self._gradient(graph, parameter) for parameter in self.parameters]

    def _gradient(self, graph: Graph, parameter: Parameter, slot: str = GRADIENT) -> Value:
        return graph.state_value(parameter.path + slot, self._gradient_spec(parameter), Kind.GRADIENT)

    def _owned_gradients(self, graph: Graph, shard: FlatShard) -> list[Value]:
        """Return the gradients that this rank updates of a shard, as they are in the state."""
        return shard.values(graph, GRADIENT, self._gradient_spec, Kind.GRADIENT)

    def _gradient_spec(self, parameter: Parameter) -> TensorSpec:
        """fp32 where micro-batches or slices are summed, so that no rounding adds up; else as backward makes it.

        fp32 too where the directions that take the gradients' place are too small for fp16.
        """
        summed = self.gradient_accumulation > 1 or not self.ranks.single
        small = self.scaled and any(shard.flat.rule.whole for shard in self.shards)
        return parameter.spec if summed or small else parameter.read_spec(self.model.compute)

    def _slot_spec(self, rule: Rule, slot: str) -> SpecOf:
        """Return the spec of a slot: in the weights' dtype, unless the config names one or the rule keeps fp32."""
        name = self.optimizer.config.state_dtype
        given = None if name is None else DType.parse(name)
        return lambda p: rule.slot_spec(slot, p.spec if given is None else p.spec.with_dtype(given))

    @property
    def _scoped(self) -> bool:
        """Return whether some gradients are left out of the norm that is clipped."""
        return not all(shard.flat.clipped for shard in self.shards)

    def _reduced(self, graph: Graph, gradients: Sequence[Value]) -> tuple[list[list[Value]], Value]:
        """Return by update the gradients of what this rank updates, summed over all chips or ranks; and their norm.

        It is the norm to be clipped. It is an output, and so is that of all gradients where it is another.
        """
        with graph.stage(Stage.UPDATE), graph.scope("clip"):
            left = iter(ops.collective.all_reduce_state(gradients) if self.chips > 1 else gradients)
            found = [[next(left) for _ in part.flat.parameters] for _, part in self.updates]
            if self.ranks.dividing:
                given = {p: ops.cast(g, self._gradient_spec(p).dtype) for p, g in zip(self.parameters, gradients)}
                found = summed_into_parts(given, self.shards, partial(self._owned_gradients, graph))
            elif self.ranks.count > 1:
                sharding = self.ranks.sharding
                owned = [self._owned_gradients(graph, shard) for shard in self.shards] if sharding else None
                found = summed_over_ranks(self.shards, found, owned)
            whole, clipped = norms_of(graph, [part for _, part in self.updates], found, self.ranks, self.frees)
        graph.output(GRAD_NORM, whole)
        if self._scoped:
            graph.output(CLIPPED_NORM, clipped)
        return found, clipped

    def _update(self, graph: Graph, gradients: Sequence[list[Value]], norm: Value) -> None:
        """Clip, update every shard, and round the new parameters into their copies."""
        with graph.stage(Stage.UPDATE):
            with graph.scope("clip"):
                limit = self.optimizer.config.clip_norm
                unscaled = 1.0 / graph.input(LOSS_SCALE, SCALAR, 1) if self.scaled else None
                factor = None if limit is None else ops.clip_factor(norm, limit)
                if unscaled is not None:
                    factor = unscaled if factor is None else factor * unscaled
            step = graph.input(STEP, SCALAR, 1)
            for (number, shard), own in zip(self.updates, gradients, strict=True):
                with graph.scope(shard.flat.name):
                    self._update_shard(graph, number, shard, own, step, factor if shard.flat.clipped else unscaled)

    def _update_shard(
        self, graph: Graph, number: int, shard: FlatShard, gradients: list[Value], step: Value, factor: Value | None
    ) -> None:
        flat, rule = shard.flat, shard.flat.rule
        lr, stochastic, parted = graph.input(flat.lr, SCALAR), self._stochastic(flat), self.frees or self.ranks.sharding
        seed = graph.input(ROUNDING_SEED, SEED) if stochastic else None
        slots = [(f"/{slot}", self._slot_spec(rule, slot)) for slot in rule.slots]
        lists = [gradients, *(shard.values(graph, slot, spec, Kind.OPTIMIZER) for slot, spec in slots)]
        if rule.whole:
            lists = [directions(flat, [self._weights(graph, shard), *lists], lr, step, factor, self.frees)]
            factor = None
        written = self._apply(
            graph, shard, rule.apply or rule, lists, lr, step, factor, seed, stochastic=stochastic,
            stream=STREAMS * number if stochastic else 0,
            numbers=tuple(x.number for x in shard.owned) if stochastic and parted else (),
        )  # fmt: skip
        if self.ema is not None and written:
            averages = shard.values(graph, f"/{AVERAGE}", average_spec, Kind.OPTIMIZER)
            ops.update(ema_rule(self.ema), [averages, written], lr, step)
        shard.gather(graph, written, self.model.compute)

    def _apply(
        self, graph: Graph, shard: FlatShard, rule: Rule, lists: Sequence[Sequence[Value]], *scalars: Value | None,
        **attributes: Any,
    ) -> Sequence[Value]:  # fmt: skip
        """Apply a rule to weights and all copies; `lists` are gradients and slots. Return the new weights."""
        if not shard.owned:
            return []
        given, compute = [self._weights(graph, shard), *lists], self.model.compute
        copies = shard.flat.parameters[0].has_copy(compute)  # all are read in one dtype
        if copies:
            given.append(shard.values(graph, COPY, lambda p: p.read_spec(compute), Kind.COPY))
        return ops.update(rule, given, *scalars, copies=copies, **attributes)  # type: ignore[arg-type]

    def _weights(self, graph: Graph, shard: FlatShard) -> list[Value]:
        return shard.values(graph, "", partial(shard.weight_spec, low_bits=self.low_bits), Kind.PARAMETER)

    def _stochastic(self, flat: FlatParameter) -> tuple[int, ...]:
        """Return which tensor lists of an update are rounded stochastically: 0 the parameters, from 1 on the slots."""
        config, parameter = self.optimizer.config, flat.parameters[0]
        asked = (config.stochastic_rounding or config.state_dtype is not None) and not flat.rule.whole
        specs = [self._slot_spec(flat.rule, slot)(parameter) for slot in flat.rule.slots]
        slots = [number for number, spec in enumerate(specs, 1) if asked and spec.dtype is DType.BF16]
        masters = config.stochastic_rounding and parameter.master is DType.BF16
        return (*((0,) if masters else ()), *slots)


def kept_slot(level: int) -> str:
    """Return what ends the name of a sum of gradients over 2^level slices that waits for as many more."""
    return f"/kept{level}"
