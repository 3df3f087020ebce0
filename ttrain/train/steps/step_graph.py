"""Build the steps of a run from a model and an optimizer: functions that record onto a graph, over one state.

Names of the state: a parameter's path; `<path>/compute` for its copy in the compute dtype; `<path>/gradient`;
`<path>/<slot>` for the optimizer's tensors, such as `<path>/first_moment`; a buffer's path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from ttrain import ops
from ttrain.autodiff import backward
from ttrain.core.errors import ConfigError
from ttrain.core.spec import DType
from ttrain.engine.base import Trace
from ttrain.engine.state import StateTensor
from ttrain.graph import Graph, Kind, Stage, Value
from ttrain.models.base import LOSS_WEIGHT, SCALAR, SEED, LanguageModel, Model
from ttrain.nn.module import Parameter, use
from ttrain.objectives.base import Objective
from ttrain.objectives.settings import ObjectiveConfig
from ttrain.train.steps.resident import Resident
from ttrain.train.steps.shard import divide
from ttrain.train.steps.step import NOISE_NORM, PROBE, in_order
from ttrain.train.steps.update_graph import COPY, UpdateGraph, kept_slot

ACTIVATION_NORM = "activation_norm"


@dataclass
class StepGraph(UpdateGraph):
    """Records the steps of one run.

    Inputs are declared whether a step reads them or not, so that a run hands over the same record whatever the model:
        trace_train       batch fields or what picks them on the device, loss_weight, seed, lr inputs, step
                                                                             -> loss, grad_norm
        trace_accumulate  batch fields, loss_weight, seed                    -> loss
        trace_fields      batch fields                                       -> what the objective names, [rows, ...]
        trace_update      lr inputs, step                                    -> grad_norm
        trace_norm        nothing                                            -> grad_norm
        trace_kept, trace_swap  nothing
        trace_evaluate    batch fields, loss_weight                          -> loss
        trace_logits      tokens [1, context], position                      -> logits [1, vocabulary]
    Steps with the output loss also have the metrics that the objective names, and the inputs that it declares.
    Where activations are watched, trace_train and trace_accumulate also have the output activation_norm.
    `loss` is loss_weight * the sum over the batch; `grad_norm` is the global norm before clipping. Where the step is
    guarded, trace_update takes grad_norm as an input instead. Where only some gradients are clipped, their norm is an
    output beside grad_norm, clipped_norm, and the input of a guarded update. Where an update rounds stochastically,
    trace_train and trace_update have the input rounding_seed. In fp16 the step is guarded, and gradients and norms are
    those of a scaled loss; trace_update has the input loss_scale, and takes norms without it. Frozen parameters have no
    gradient nor optimizer state.
    """

    watched: bool = False  # also output the norm of the activations that the loss reads
    resident: Resident | None = None  # training data that lies on the device, in place of inputs
    noise: bool = False  # also output the norm of the first micro-batch's gradients
    micro_batches: int | None = None  # that it has now; None: as many
    shorter: Model | None = None  # records training in its place, on shorter sequences, over the same parameters
    writer: Model | None = None  # records the scores of a sample in its place, on shorter texts
    further: Mapping[str, Trace] = field(default_factory=dict)  # steps beside those that train, such as of evaluations
    objective: Objective = field(default_factory=lambda: Objective(ObjectiveConfig()))
    uniform_compute: bool = False  # layers read every parameter in the compute dtype, as the device asks

    def __post_init__(self) -> None:
        second = self.objective.frozen and self.objective.frozen.model
        if self.uniform_compute:
            for model in filter(None, (self.model, self.shorter, self.writer, second)):
                model.follow_compute()
        super().__post_init__()
        if second is not None:
            divide(self.objective.frozen.parameters, [], self.ranks)

    @property
    def frozen(self) -> list[Parameter]:
        """Parameters that stay as they are."""
        trained = {id(parameter) for parameter in self.parameters}
        return [parameter for parameter in self.model.parameters().values() if id(parameter) not in trained]

    def _traces(self) -> dict[str, Trace]:
        """Return all steps that an optimizer step may be made of, in the order in which they are built."""
        first, later = (partial(self.trace_accumulate, first=first) for first in (True, False))
        found: dict[str, Trace] = {"accumulate_first": first, "accumulate_next": later}
        for level in range(self.ranks.levels):
            found[f"keep{level}"] = partial(self.trace_kept, level=level, keep=True)
            found[f"merge{level}"] = partial(self.trace_kept, level=level, keep=False)
        found[PROBE] = partial(self.trace_fields, self.objective.probe)
        return {**found, "train": self.trace_train, "norm": self.trace_norm, "update": self.trace_update}

    def train_steps(self) -> dict[str, Trace]:
        """Return the steps that one optimizer step is made of, by name."""
        counts = self._repeats(self._parts if self.rebuilt_to_grow else self.gradient_accumulation)
        return {name: trace for name, trace in self._traces().items() if counts[name]}

    @property
    def rebuilt_to_grow(self) -> bool:
        """Return whether another number of micro-batches takes other steps: `train` may do the first of a slice."""
        return self.ranks.count > 1

    @property
    def repeats(self) -> dict[str, int]:
        """Return how often each of `train_steps` runs in one optimizer step of this rank."""
        counts = self._repeats(self._parts)
        return {name: counts[name] for name in self._traces() if counts[name]}

    @property
    def _parts(self) -> int:
        """Micro-batches of a slice now."""
        return self.micro_batches or self.gradient_accumulation

    def _repeats(self, micro_batches: int) -> Counter[str]:
        # `train` computes the last micro-batch and the rest; several ranks exchange gradients in its backward.
        joined = self.ranks.count > 1 or (self.gradient_accumulation == 1 and self.ranks.single and not self.guarded)
        names = Counter(name for name, _, _ in in_order(self.ranks, micro_batches, joined, self.guarded))
        probes = micro_batches * len(self.ranks.own) if self.objective.coupled is not None else 0
        return names + Counter({"update": int(self.guarded), PROBE: probes})  # these are no part of the order

    def further_steps(self) -> dict[str, Trace]:
        """Return `evaluate`, `logits` where the model has them, `swap` where weights are averaged, and `further`."""
        steps: dict[str, Trace] = {"evaluate": self.trace_evaluate, **self.further}
        if hasattr(self.model, "logits"):
            steps["logits"] = self.trace_logits
        return {**steps, "swap": self.trace_swap} if self.averages else steps

    def trace_fields(self, made: Callable[[Model, Graph, int], Mapping[str, Value]], graph: Graph) -> None:
        """Outputs that `made` gives the fields of a micro-batch, as Objective.probe does."""
        for name, spec in self.objective.fields(self.model, self.rows).items():
            graph.input(name, spec)
        for name, value in made(self.model, graph, self.rows).items():
            graph.output(name, value)

    def trace_train(self, graph: Graph) -> None:
        """Forward, backward and update of a batch, or of the last of several micro-batches. Guarded, not the update."""
        store = ops.assign if self._parts == 1 else ops.accumulate
        gradients = self._backward(graph) if self.frees or self.passes_on else self._stored(graph, store)
        with graph.stage(Stage.UPDATE), graph.scope("gradients"):
            for level in range(self.ranks.levels):
                kept = (self._gradient(graph, parameter, kept_slot(level)) for parameter in self.parameters)
                gradients = list(map(ops.accumulate, gradients, kept))
        reduced = self._reduced(graph, gradients)
        if not self.guarded:
            self._update(graph, *reduced)

    def trace_accumulate(self, graph: Graph, first: bool) -> None:
        """Forward and backward of one micro-batch. The first overwrites the gradients, later ones add to them."""
        stored = self._stored(graph, ops.assign if first else ops.accumulate)
        if first and self.noise:
            with graph.stage(Stage.UPDATE), graph.scope("gradients"):
                graph.output(NOISE_NORM, ops.global_norm(stored))

    def trace_evaluate(self, graph: Graph) -> None:
        """The loss without dropout; changes nothing."""
        graph.output("loss", self._over_all_chips(self._loss(graph, self.rows, training=False)))

    def trace_logits(self, graph: Graph) -> None:
        """Scores of the next token after a text. Raises ConfigError for a model without a vocabulary."""
        model = self.writer or self.model
        if not hasattr(model, "logits"):
            raise ConfigError(f"model.name={model.config.name}: has no logits, so there is nothing to sample.")
        graph.output("logits", cast(LanguageModel, model).logits(graph, rows=1))

    def state_tensors(self, training: bool = True) -> list[StateTensor]:
        """List the tensors that an engine's State has to place, without `training` neither gradients nor slots.

        Those of an update op come out side by side and in the same order in every kind.
        """
        compute, frozen, second = self.model.compute, self.frozen, self.objective.frozen
        frozen += [] if second is None else second.parameters
        held = {} if self.resident is None else self.resident.specs
        found = [StateTensor(name, spec, Kind.CACHE) for name, spec in held.items()]
        for shard in self.shards:
            copied = shard.flat.parameters[0].has_copy(compute)  # all are read in one dtype
            spec_of, whole = partial(shard.weight_spec, low_bits=self.low_bits), not (copied or self.ranks.dividing)
            found += shard.tensors("", spec_of, Kind.PARAMETER, whole)
        found += [tensor for p in frozen for tensor in _frozen_tensors(p, compute)]
        for shard in self.shards:
            if shard.flat.parameters[0].has_copy(compute):
                found += shard.tensors(COPY, lambda p: p.read_spec(compute), Kind.COPY, not self.ranks.dividing)
        if training:
            found += self._training_tensors()
        buffers = [*self.model.buffers().values(), *([] if second is None else second.buffers)]
        return [*found, *(StateTensor(b.path, b.spec, b.kind, first=b.first_values) for b in buffers)]

    def _loss(self, graph: Graph, rows: int, training: bool) -> Value:
        model = self.shorter if training and self.shorter is not None else self.model
        if self.resident is not None and training:
            graph.given = self.resident.values(graph, self.objective.fields(model, rows))
        for name, spec in self.objective.fields(model, rows).items():
            graph.input(name, spec)
        graph.input(LOSS_WEIGHT, SCALAR)
        if training:
            graph.input("seed", SEED)
        loss, metrics = self.objective.loss(model, graph, rows, training)
        for name, value in metrics.items():
            graph.output(name, self._over_all_chips(value))
        return loss

    def _backward(self, graph: Graph) -> list[Value]:
        """Return the gradients of the loss in the order of `parameters`."""
        loss = self._loss(graph, self.rows, training=True)
        graph.output("loss", self._over_all_chips(loss))
        if self.watched and loss.producer is not None:
            with graph.scope("guard"):
                graph.output(ACTIVATION_NORM, self._over_all_chips(ops.global_norm(loss.producer.values[:1])))
        return backward(loss, [use(graph, parameter, self.model.compute) for parameter in self.parameters])

    def _stored(self, graph: Graph, store: Callable[[Value, Value], Value]) -> list[Value]:
        """Forward, and backward into the gradients."""
        gradients = self._backward(graph)
        with graph.stage(Stage.UPDATE), graph.scope("gradients"):
            return [store(self._gradient(graph, p), g) for p, g in zip(self.parameters, gradients, strict=True)]


def _frozen_tensors(parameter: Parameter, compute: DType) -> Iterator[StateTensor]:
    """Yield what holds a parameter that stays as it is, and its copy: whole, or the parts that this rank has."""
    masters = [(name, spec, parameter.kind) for name, spec in parameter.pieces.items()]
    for tensors in (masters, parameter.read_from(compute)) if parameter.has_copy(compute) else (masters,):
        for (name, spec, kind), parts in zip(tensors, parameter.own_parts, strict=True):
            yield StateTensor(name, spec, kind, "frozen", parameter.padding, None, parts, parameter.divided is None)
