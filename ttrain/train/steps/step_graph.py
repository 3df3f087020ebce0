"""A model and an optimizer become the steps of a run: functions that record onto a graph, and the state they share.

Names of the state: a parameter's path; `<path>/compute` for its copy in the compute dtype; `<path>/gradient`;
`<path>/<slot>` for the optimizer's tensors, such as `<path>/first_moment`; a buffer's path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from ttrain import ops
from ttrain.autodiff import backward
from ttrain.core.errors import ConfigError
from ttrain.core.spec import DType, TensorSpec
from ttrain.engine.base import Trace
from ttrain.engine.state import StateTensor
from ttrain.graph import Graph, Kind, Stage, Value
from ttrain.models.base import LOSS_WEIGHT, SCALAR, SEED, LanguageModel, Model, ModelWithMetrics
from ttrain.nn.module import Parameter, use
from ttrain.ops.update import Rule
from ttrain.optim.averages import SWAP, ema_rule
from ttrain.optim.base import AVERAGE, ROUNDING_SEED, STEP, STREAMS, Optimizer
from ttrain.optim.groups import ParameterRun, parameter_runs
from ttrain.parallel.ranks import Ranks
from ttrain.train.steps.noise import NOISE_NORM
from ttrain.train.steps.repeats import joins, repeats
from ttrain.train.steps.resident import Resident
from ttrain.train.steps.sharded_run import ShardedRun, average_spec, directions, norms_of, part_of, summed_over_ranks

GRADIENT = "/gradient"  # after the path of a parameter
GRAD_NORM = "grad_norm"
CLIPPED_NORM = "clipped_norm"
ACTIVATION_NORM = "activation_norm"
FREED = 2**23  # bytes of gradients at least that an update of their own frees: it takes a launch more


@dataclass
class StepGraph:
    """Records the steps of one run.

    Inputs are declared whether a step reads them or not, so that a run hands over the same record whatever the model:
        trace_train       batch fields or what picks them on the device, loss_weight, seed, lr inputs, step
                                                                             -> loss, grad_norm
        trace_accumulate  batch fields, loss_weight, seed                    -> loss
        trace_update      lr inputs, step                                    -> grad_norm
        trace_norm        nothing                                            -> grad_norm
        trace_keep, trace_merge, trace_swap  nothing
        trace_evaluate    batch fields, loss_weight                          -> loss
        trace_logits      tokens [1, context], position                      -> logits [1, vocabulary]
    Steps with the output loss also have the metrics that the model names, and the weight inputs of its terms.
    Where activations are watched, trace_train and trace_accumulate also have the output activation_norm.
    `loss` is loss_weight * the sum over the batch; `grad_norm` is the global norm before clipping. Where the step is
    guarded, trace_update takes grad_norm as an input instead. Where only some gradients are clipped, their norm is an
    output beside grad_norm, clipped_norm, and the input of a guarded update. Where an update rounds stochastically,
    trace_train and trace_update have the input rounding_seed. Frozen parameters have no gradient nor optimizer state.
    """

    model: Model
    optimizer: Optimizer
    rows: int  # of one micro-batch
    gradient_accumulation: int = 1  # micro-batches that a step of this rank's slices has at most
    eval_rows: int | None = None  # None takes rows
    guarded: bool = False  # the update is a step of its own, which runs only where the gradients are finite
    chips: int = 1  # that share a batch: each works on `rows` of its own, and gradients are summed over all of them
    watched: bool = False  # also output the norm of the activations that the loss reads
    resident: Resident | None = None  # training data that lies on the device, in place of inputs
    noise: bool = False  # also output the norm of the first micro-batch's gradients
    ema: float | None = None  # decay of the averages of the weights; None keeps none
    micro_batches: int | None = None  # that it has now; None: as many
    shorter: Model | None = None  # records training in its place, on shorter sequences, over the same parameters
    writer: Model | None = None  # records the scores of a sample in its place, on shorter texts
    ranks: Ranks = Ranks()  # that divide a batch of several slices: each works on slices of `rows` * `accumulation`
    low_bits: bool = False  # fp32 weights are kept as what their bf16 copies lack, where only updates read them
    frees: bool = False  # no gradient is kept where several updates follow theirs in backward and none waits for all
    runs: list[ParameterRun] = field(init=False)
    sharded: list[ShardedRun] = field(init=False)  # the runs, as ranks divide them
    updates: list[tuple[int, ShardedRun]] = field(init=False)  # what one op updates, with the number of its run

    def __post_init__(self) -> None:
        self.low_bits &= self.ema is None  # averages are of fp32 weights
        self.runs = parameter_runs(self.model.parameters(), self.optimizer, self.model.compute)
        self.sharded = [ShardedRun(run, self.ranks) for run in self.runs]
        parts = [run.cut(lambda p: self._gradient_spec(p).nbytes, FREED) for run in self.sharded]
        waits = self.optimizer.config.clip_norm is not None or self.guarded or self.gradient_accumulation > 1
        self.frees &= not waits and self.ranks.single and sum(map(len, parts)) > len(parts)
        parts = parts if self.frees else [[run] for run in self.sharded]
        self.updates = [(number, part) for number, of_run in enumerate(parts) for part in of_run]

    @property
    def parameters(self) -> list[Parameter]:
        """All trained parameters in the order in which the state lays them out."""
        return [parameter for run in self.runs for parameter in run.parameters]

    @property
    def frozen(self) -> list[Parameter]:
        """Parameters that stay as they are."""
        trained = {id(parameter) for parameter in self.parameters}
        return [parameter for parameter in self.model.parameters().values() if id(parameter) not in trained]

    def train_steps(self) -> dict[str, Trace]:
        """The steps that one optimizer step is made of, by name."""
        steps: dict[str, Trace] = {
            "accumulate_first": partial(self.trace_accumulate, first=True),
            "accumulate_next": partial(self.trace_accumulate, first=False),
            "train": self.trace_train,
            "norm": self.trace_norm,
            "update": self.trace_update,
        }
        for level in range(self.ranks.levels):
            steps[f"keep{level}"] = partial(self.trace_keep, level=level)
            steps[f"merge{level}"] = partial(self.trace_merge, level=level)
        return {
            name: steps[name]
            for name in self._repeats(self._parts if self.rebuilt_to_grow else self.gradient_accumulation)
        }

    @property
    def rebuilt_to_grow(self) -> bool:
        """Return whether another number of micro-batches takes other steps: `train` may do the first of a slice."""
        return self.ranks.count > 1

    @property
    def repeats(self) -> dict[str, int]:
        """Return how often each of `train_steps` runs in one optimizer step of this rank."""
        return self._repeats(self._parts)

    @property
    def _parts(self) -> int:
        """Micro-batches of a slice now."""
        return self.micro_batches or self.gradient_accumulation

    def _repeats(self, micro_batches: int) -> dict[str, int]:
        joined = joins(self.ranks, self.gradient_accumulation, self.guarded)
        return repeats(self.ranks, micro_batches, joined, self.guarded)

    def further_steps(self) -> dict[str, Trace]:
        """`evaluate`; `logits` where the model has them, `swap` where weights are averaged."""
        steps: dict[str, Trace] = {"evaluate": self.trace_evaluate}
        if hasattr(self.model, "logits"):
            steps["logits"] = self.trace_logits
        return {**steps, "swap": self.trace_swap} if self.averages else steps

    def trace_train(self, graph: Graph) -> None:
        """Forward, backward and update of a batch, or of the last of several micro-batches. Guarded, not the update."""
        store = ops.assign if self._parts == 1 else ops.accumulate
        stored = self._backward(graph) if self.frees else self._stored(graph, store)
        with graph.stage(Stage.UPDATE), graph.scope("gradients"):
            for level in range(self.ranks.levels):
                kept = (self._kept(graph, parameter, level) for parameter in self.parameters)
                stored = list(map(ops.accumulate, stored, kept))
        if self.guarded:
            self._norm(graph, self._summed(graph, stored))
        else:
            self._update(graph, stored)

    def trace_accumulate(self, graph: Graph, first: bool) -> None:
        """Forward and backward of one micro-batch. The first overwrites the gradients, later ones add to them."""
        stored = self._stored(graph, ops.assign if first else ops.accumulate)
        if first and self.noise:
            with graph.stage(Stage.UPDATE), graph.scope("gradients"):
                graph.output(NOISE_NORM, ops.global_norm(stored))

    def trace_keep(self, graph: Graph, level: int) -> None:
        """Sets the sum over some slices aside, until as many more are summed."""
        self._with_kept(graph, level, ops.assign, keep=True)

    def trace_merge(self, graph: Graph, level: int) -> None:
        """Adds to the sum over some slices that over as many before them."""
        self._with_kept(graph, level, ops.accumulate, keep=False)

    def _with_kept(self, graph: Graph, level: int, write: Callable[[Value, Value], Value], keep: bool) -> None:
        with graph.stage(Stage.UPDATE), graph.scope("gradients"):
            for p in self.parameters:
                kept, gradient = self._kept(graph, p, level), self._gradient(graph, p)
                write(*((kept, gradient) if keep else (gradient, kept)))

    def trace_update(self, graph: Graph) -> None:
        """Clipping and optimizer on accumulated gradients."""
        norm = graph.input(CLIPPED_NORM if self._scoped else GRAD_NORM, SCALAR) if self.guarded else None
        self._update(graph, [self._gradient(graph, parameter) for parameter in self.parameters], norm)

    def trace_norm(self, graph: Graph) -> None:
        """The global norm of the accumulated gradients; changes nothing but to sum them over chips."""
        self._norm(graph, self._summed(graph, [self._gradient(graph, parameter) for parameter in self.parameters]))

    @property
    def averages(self) -> bool:
        """Return whether there are averages of the weights, which evaluations read in their place."""
        return self.ema is not None or any(AVERAGE in run.rule.slots for run in self.runs)

    def trace_swap(self, graph: Graph) -> None:
        """Weights and averages take each other's place, bit for bit."""
        with graph.stage(Stage.UPDATE), graph.scope("averages"):
            none = ops.full(graph, SCALAR, 0.0)  # the rule reads neither rate nor step
            for run in self.sharded:
                averages = run.values(graph, f"/{AVERAGE}", average_spec, Kind.OPTIMIZER)
                written = self._apply(graph, run, SWAP, [averages, averages], none, none)  # it reads no gradient
                run.gather(graph, written, self.model.compute)

    def trace_evaluate(self, graph: Graph) -> None:
        """The loss without dropout; changes nothing."""
        self._output_loss(graph, self._loss(graph, self.eval_rows or self.rows, training=False))

    def trace_logits(self, graph: Graph) -> None:
        """Scores of the next token after a text. Raises ConfigError for a model without a vocabulary."""
        model = self.writer or self.model
        if not hasattr(model, "logits"):
            raise ConfigError(f"model.name={model.config.name}: has no logits, so there is nothing to sample.")
        graph.output("logits", cast(LanguageModel, model).logits(graph, rows=1))

    def state_tensors(self, training: bool = True) -> list[StateTensor]:
        """List the tensors that an engine's State has to place; without `training`, no gradients and no optimizer
        tensors.

        Runs of an update op come out side by side and in the same order in every kind.
        """
        members = [(run.name, parameter) for run in self.runs for parameter in run.parameters]
        compute = self.model.compute
        placed = [*members, *(("frozen", parameter) for parameter in self.frozen)]
        held = {} if self.resident is None else self.resident.specs

        sharded = self.sharded if training and self.ranks.sharding else []
        owned = {p: run.parts(at) for run in sharded for at, p in enumerate(run.run.parameters)}

        def tensor(
            name: str, spec: TensorSpec, kind: Kind, run: str, parameter: Parameter, everywhere: bool = True
        ) -> StateTensor:
            padded = spec.shape[:1] == parameter.spec.shape[:1]  # not so where a slot has one row
            parts = tuple(part_of(parameter, part, spec) for part in owned.get(parameter, ()))
            everywhere = everywhere or parameter not in owned
            return StateTensor(name, spec, kind, run, parameter.padding * padded, None, parts, everywhere)

        tensors = [StateTensor(name, spec, Kind.CACHE) for name, spec in held.items()]
        specs = {p: run.weight_spec(p, self.low_bits) for run in self.sharded for p in run.run.parameters}
        tensors += [tensor(p.path, specs.get(p, p.spec), p.kind, run, p, not p.has_copy(compute)) for run, p in placed]
        copied = [(run, p) for run, p in placed if p.has_copy(compute)]
        tensors += [tensor(p.copy_name, p.read_spec(compute), Kind.COPY, run, p) for run, p in copied]
        if training:
            kept = [tensor(p.path + GRADIENT, self._gradient_spec(p), Kind.GRADIENT, run, p) for run, p in members]
            tensors += [replace(gradient, everywhere=False) for gradient in kept] if self.frees else kept
            tensors += [
                StateTensor(kept_name(p, level), self._gradient_spec(p), Kind.GRADIENT, run, p.padding)
                for level in range(self.ranks.levels)
                for run, p in members
            ]
            for run in self.runs:
                tensors += [
                    tensor(f"{p.path}/{slot}", self._slot_spec(p, run.rule, slot), Kind.OPTIMIZER, run.name, p, False)
                    for slot in run.rule.slots
                    for p in run.parameters
                ]
            averaged = [(run, p) for run, p in members if self.ema is not None]
            tensors += [
                tensor(f"{p.path}/{AVERAGE}", average_spec(p), Kind.OPTIMIZER, run, p, False) for run, p in averaged
            ]
        return [*tensors, *(buffer.state_tensor for buffer in self.model.buffers().values())]

    def _loss(self, graph: Graph, rows: int, training: bool) -> Value:
        model = self.shorter if training and self.shorter is not None else self.model
        if self.resident is not None and training:
            graph.given = self.resident.values(graph, model.batch_specs(rows))
        for name, spec in model.batch_specs(rows).items():
            graph.input(name, spec)
        graph.input(LOSS_WEIGHT, SCALAR)
        if training:
            graph.input("seed", SEED)
        if not hasattr(model, "loss_and_metrics"):
            return model.loss(graph, rows, training)
        loss, metrics = cast(ModelWithMetrics, model).loss_and_metrics(graph, rows, training)
        for name, value in metrics.items():
            graph.output(name, self._over_all_chips(value))
        return loss

    def _backward(self, graph: Graph) -> list[Value]:
        """Gradients of the loss in the order of `parameters`."""
        loss = self._loss(graph, self.rows, training=True)
        self._output_loss(graph, loss)
        if self.watched and loss.producer is not None:
            with graph.scope("guard"):
                norm = ops.global_norm(loss.producer.values[:1])
                graph.output(ACTIVATION_NORM, ops.all_reduce(norm) if self.chips > 1 else norm)
        return backward(loss, [use(graph, parameter, self.model.compute) for parameter in self.parameters])

    def _stored(self, graph: Graph, store: Callable[[Value, Value], Value]) -> list[Value]:
        """Forward, and backward into the gradients."""
        gradients = self._backward(graph)
        with graph.stage(Stage.UPDATE), graph.scope("gradients"):
            return [store(self._gradient(graph, p), g) for p, g in zip(self.parameters, gradients, strict=True)]

    def _output_loss(self, graph: Graph, loss: Value) -> None:
        graph.output("loss", self._over_all_chips(loss))

    def _over_all_chips(self, value: Value) -> Value:
        """A sum over the batch of one chip -> over that of all."""
        return ops.all_reduce(value) if self.chips > 1 else value

    def _summed(self, graph: Graph, gradients: Sequence[Value]) -> list[list[Value]]:
        """Return by run the gradients of what this rank updates, summed over all chips or ranks."""
        with graph.stage(Stage.UPDATE), graph.scope("clip"):
            left = iter(ops.all_reduce_state(gradients) if self.chips > 1 else gradients)
            found = [[next(left) for _ in part.run.parameters] for _, part in self.updates]
            if self.ranks.count == 1:
                return found
            owned = [self._gradients(graph, run) for run in self.sharded] if self.ranks.sharding else None
            return summed_over_ranks(self.sharded, found, owned)

    def _gradients(self, graph: Graph, run: ShardedRun) -> list[Value]:
        """Return the gradients that this rank updates of a run, as they are in the state."""
        return run.values(graph, GRADIENT, self._gradient_spec, Kind.GRADIENT)

    def _gradient(self, graph: Graph, parameter: Parameter) -> Value:
        return graph.state_value(parameter.path + GRADIENT, self._gradient_spec(parameter), Kind.GRADIENT)

    def _kept(self, graph: Graph, parameter: Parameter, level: int) -> Value:
        return graph.state_value(kept_name(parameter, level), self._gradient_spec(parameter), Kind.GRADIENT)

    def _gradient_spec(self, parameter: Parameter) -> TensorSpec:
        """fp32 where micro-batches or slices are summed, so that no rounding adds up; else as backward makes it."""
        summed = self.gradient_accumulation > 1 or not self.ranks.single
        return parameter.spec if summed else parameter.read_spec(self.model.compute)

    def _slot_spec(self, parameter: Parameter, rule: Rule, slot: str) -> TensorSpec:
        """Return the spec of a slot: in the weights' dtype, unless the config names one or the rule keeps fp32."""
        name = self.optimizer.config.state_dtype
        return rule.slot_spec(slot, parameter.spec if name is None else parameter.spec.with_dtype(DType.parse(name)))

    @property
    def _scoped(self) -> bool:
        """Return whether some gradients are left out of the norm that is clipped."""
        return not all(run.clipped for run in self.runs)

    def _norm(self, graph: Graph, gradients: Sequence[Sequence[Value]]) -> Value:
        """The norm to be clipped; outputs it, and that of all gradients where it is another."""
        with graph.stage(Stage.UPDATE), graph.scope("clip"):
            norms = norms_of(graph, [part for _, part in self.updates], gradients, self.ranks, self.frees)
        graph.output(GRAD_NORM, norms.whole)
        if self._scoped:
            graph.output(CLIPPED_NORM, norms.clipped)
        return norms.clipped

    def _update(self, graph: Graph, gradients: Sequence[Value], norm: Value | None = None) -> None:
        """Clip, update every run, and round the new parameters into their copies. A `norm` given is that of before."""
        if norm is None:
            given = self._summed(graph, gradients)
            norm = self._norm(graph, given)
        else:
            given = [self._gradients(graph, run) for run in self.sharded]
        with graph.stage(Stage.UPDATE):
            with graph.scope("clip"):
                limit = self.optimizer.config.clip_norm
                factor = None if limit is None else ops.clip_factor(norm, limit)
            step = graph.input(STEP, SCALAR, 1)
            for (number, run), own in zip(self.updates, given, strict=True):
                with graph.scope(run.run.name):
                    self._update_run(graph, number, run, own, step, factor if run.run.clipped else None)

    def _update_run(
        self, graph: Graph, number: int, sharded: ShardedRun, gradients: list[Value], step: Value, factor: Value | None
    ) -> None:
        run, rule = sharded.run, sharded.run.rule
        lr, stochastic, parted = graph.input(run.lr, SCALAR), self._stochastic(run), self.frees or self.ranks.sharding
        seed = graph.input(ROUNDING_SEED, SEED) if stochastic else None
        lists = [gradients, *(self._slot(graph, sharded, slot) for slot in rule.slots)]
        if rule.whole:
            lists = [directions(run, [self._weights(graph, sharded), *lists], lr, step, factor, self.frees)]
            factor = None
        written = self._apply(
            graph, sharded, rule.apply or rule, lists, lr, step, factor, seed, stochastic=stochastic,
            stream=STREAMS * number if stochastic else 0,
            numbers=tuple(x.number for x in sharded.owned) if stochastic and parted else (),
        )  # fmt: skip
        if self.ema is not None and written:
            averages = sharded.values(graph, f"/{AVERAGE}", average_spec, Kind.OPTIMIZER)
            ops.update(ema_rule(self.ema), [averages, written], lr, step)
        sharded.gather(graph, written, self.model.compute)

    def _apply(
        self, graph: Graph, sharded: ShardedRun, rule: Rule, lists: Sequence[Sequence[Value]], *scalars: Value | None,
        **attributes: Any,
    ) -> Sequence[Value]:  # fmt: skip
        """A rule on the weights of a run and all copies; `lists` are gradients and slots. Returns the new weights."""
        if not sharded.owned:
            return []
        given, compute = [self._weights(graph, sharded), *lists], self.model.compute
        copies = sharded.run.parameters[0].has_copy(compute)  # one run has one read dtype
        if copies:
            given.append(sharded.values(graph, "/compute", lambda p: p.read_spec(compute), Kind.COPY))
        return ops.update(rule, given, *scalars, copies=copies, **attributes)  # type: ignore[arg-type]

    def _weights(self, graph: Graph, sharded: ShardedRun) -> list[Value]:
        return sharded.values(graph, "", lambda p: sharded.weight_spec(p, self.low_bits), Kind.PARAMETER)

    def _slot(self, graph: Graph, sharded: ShardedRun, slot: str) -> list[Value]:
        return sharded.values(graph, f"/{slot}", lambda p: self._slot_spec(p, sharded.run.rule, slot), Kind.OPTIMIZER)

    def _stochastic(self, run: ParameterRun) -> tuple[int, ...]:
        """Return which tensor lists of an update are rounded stochastically: 0 the parameters, from 1 on the slots."""
        config, parameter = self.optimizer.config, run.parameters[0]
        asked = (config.stochastic_rounding or config.state_dtype is not None) and not run.rule.whole
        specs = [self._slot_spec(parameter, run.rule, slot) for slot in run.rule.slots]
        slots = [number for number, spec in enumerate(specs, 1) if asked and spec.dtype is DType.BF16]
        masters = config.stochastic_rounding and parameter.master is DType.BF16
        return (*((0,) if masters else ()), *slots)


def kept_name(parameter: Parameter, level: int) -> str:
    """Name of the sum of a parameter's gradients over 2^level slices that waits for as many more."""
    return f"{parameter.path}/kept{level}"
