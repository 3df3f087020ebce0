"""Every op of the registry in all its cases: forward, and each gradient, by an engine on a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ttrain.autodiff import backward
from ttrain.core.errors import ConfigError, TtrainError
from ttrain.core.names import did_you_mean
from ttrain.core.spec import DType
from ttrain.device.base import Device
from ttrain.graph import REGISTRY, Case, Op
from ttrain.graph.graph import Graph, Value
from ttrain.graph.kinds import Kind, Stage
from ttrain.verify import cases
from ttrain.verify.compare import Comparison, compare, failed
from ttrain.verify.run import MakeEngine, run_once
from ttrain.verify.tolerances import GRADIENT, tolerance


def chosen_ops(names: Sequence[str]) -> list[Op]:
    """Ops by name or family; all where none is named. Raises ConfigError with the nearest valid name."""
    families = {op.family for op in REGISTRY.values()}
    for name in names:
        if name not in REGISTRY and name not in families:
            raise ConfigError(f"verify.ops={name}: no such op or family. {did_you_mean(name, {*REGISTRY, *families})}")
    chosen = [op for op in REGISTRY.values() if not names or op.name in names or op.family in names]
    for op in chosen:
        if op.name in names and not cases.cases_of(op):
            raise ConfigError(f"verify.ops={op.name}: the op has no cases to run. Declare some: see docs/extending.md.")
    return chosen


TOGETHER = 100  # trials in one step: planning takes the square of their number


@dataclass(frozen=True)
class Reach:
    """What of an op can be seen on a device: `outputs` by number, none where it can't run; `alone` tells whether the
    op's own inputs can be given to it."""

    outputs: tuple[int, ...]
    alone: bool = True


def reach(op: Op, device: Device) -> Reach:
    """By a kernel or by the op's decomposition, which may leave out outputs that only a fused backward reads.

    Where a kernel holds an output in a layout of its own, such as the statistics of layer norm on a card, the numbers
    in it are its own business, and an op that reads them is verified through the backward of the one that makes them.
    """
    graph, _, outputs = cases.record(op, cases.cases_of(op)[0], DType.FP32)
    node = graph.nodes[0]
    if op.view or op.name in device.kernels:
        own = not device.arenas and {"mean", "rstd"} <= set(op.inputs)
        return Reach(_plain(outputs, device), alone=not own)
    try:
        parts = op.decompose(node, node.inputs)
    except TtrainError:
        return Reach(())
    return Reach(()) if parts is None else Reach(_plain(parts, device))


def _plain(values: Sequence[Value], device: Device) -> tuple[int, ...]:
    """Numbers of the values that the device holds as their specs say."""
    return tuple(index for index, value in enumerate(values) if device.arenas or not _special(value, device))


def _special(value: Value, device: Device) -> bool:
    node = value.producer
    layouts = None if node is None or node.op.name not in device.kernels else device.kernels[node.op.name].layouts
    if node is None or layouts is None:
        return False
    return layouts(*node.specs, node.attributes)[value.index] is not None


@dataclass
class Trial:
    """One case of one op in one dtype. `chosen` are the outputs that a loss is formed from; None runs forward only."""

    op: Op
    number: int
    case: Case
    dtype: DType
    chosen: tuple[int, ...] | None
    seen: tuple[int, ...] | None = None  # outputs that are compared; None takes all
    arrays: cases.Arrays = field(init=False)
    weights: list[np.ndarray] = field(default_factory=list)  # of the outputs in the loss
    names: list[str] = field(default_factory=list)  # of the inputs that get a gradient

    def __post_init__(self) -> None:
        self.arrays = cases.draw(self.op, self.case, self.dtype)
        if self.chosen is None:
            return
        _, values, outputs = cases.record(self.op, self.case, self.dtype)
        self.weights = cases.loss_weights([outputs[index] for index in self.chosen], self.op.name)
        self.arrays.update({f"weight of output {number}": weight for number, weight in enumerate(self.weights)})
        self.names = cases.leaf_names(self.op, values)

    @property
    def label(self) -> str:
        outputs = "" if self.chosen is None else f" from {list(self.chosen)}"
        return f"{self.op.name}-{self.number}{outputs}"

    def record(self, graph: Graph) -> None:
        """The op on inputs of its own, what it overwrites on state; outputs or gradients become outputs of the step."""
        specs = cases.input_specs(self.op, self.case, self.dtype)
        ordered = cases.input_names(self.op, self.case)
        probe, _, _ = cases.record(self.op, self.case, self.dtype)
        aliases = {} if self.op.view else self.op.aliases(probe.nodes[0])
        written = {ordered[index] for index in aliases.values()}
        values: dict[str, Value] = {}
        for name, spec in specs.items():
            if spec is not None:
                key = f"{self.label}: {name}"
                given = graph.state_value(key, spec, Kind.PARAMETER) if name in written else graph.input(key, spec)
                values[name] = given
        recorded = self.op.record(*(values.get(name) for name in ordered), graph=graph, **self.case.attributes)
        outputs = recorded if isinstance(recorded, tuple) else (recorded,)
        if self.chosen is None:
            for index, output in enumerate(outputs):
                if self.seen is None or index in self.seen:
                    graph.output(f"{self.label}: {index}", output)
        else:
            self._record_gradients(graph, values, [outputs[index] for index in self.chosen])

    def _record_gradients(self, graph: Graph, values: dict[str, Value], kept: Sequence[Value]) -> None:
        loss = cases.weighted_loss(graph, kept, {}, self.weights, f"{self.label}: ")
        gradients = backward(loss, [values[name] for name in self.names])
        for name, gradient in zip(self.names, gradients, strict=True):
            graph.output(f"{self.label}: {name}", gradient)

    def feeds(self) -> dict[str, np.ndarray]:
        return {f"{self.label}: {name}": array for name, array in self.arrays.items() if array is not None}

    def compared(
        self, outputs: dict[str, Any], engine: str, factor: float = 1.0, uniform: bool = False
    ) -> Iterator[Comparison]:
        """What the engine delivered against PyTorch in fp64."""
        error = outputs.get(self.label)
        if isinstance(error, Exception):
            yield failed(self.op.name, self.label, engine, self.dtype, f"{type(error).__name__}: {error}")
            return
        if self.chosen is None:
            expected = cases.reference(self.op, self.case, [cases.as_torch(array) for array in self._inputs().values()])
            _, _, values = cases.record(self.op, self.case, self.dtype)
            for index, (value, wanted) in enumerate(zip(values, expected, strict=False)):
                name = cases.output_name(self.op, index)
                unit, allowed = tolerance(self.op.name, name, value.spec.dtype, self.dtype, uniform)
                got = outputs.get(f"{self.label}: {index}")
                if got is not None:
                    yield self._comparison(got, wanted.double().numpy(), unit, allowed * factor, name, engine)
            return
        inputs = self._inputs()
        gradients = cases.reference_gradients(self.op, self.case, inputs, self.names, self.weights, self.chosen)
        for name in self.names:
            got = outputs[f"{self.label}: {name}"]
            yield self._comparison(got, gradients[name], self.dtype, GRADIENT[self.dtype] * factor, f"d{name}", engine)

    def _inputs(self) -> cases.Arrays:
        return {name: self.arrays[name] for name in cases.input_names(self.op, self.case)}

    def _comparison(self, got: Any, wanted: Any, unit: DType, allowed: Any, quantity: str, engine: str) -> Comparison:
        got = np.asarray(got).reshape(wanted.shape) if np.size(got) == np.size(wanted) else np.asarray(got)
        labels: dict[str, Any] = {"subject": self.op.name, "quantity": quantity, "case": self.label, "engine": engine}
        return compare(got, wanted, unit, allowed, dtype=self.dtype, **labels)


def trials(op: Op, dtype: DType, reached: Reach) -> list[Trial]:
    """Forward of every case of an op, and every gradient where backward may pass through."""
    found = []
    for number, case in enumerate(cases.cases_of(op)):
        if reached.outputs and reached.alone:
            found.append(Trial(op, number, case, dtype, None, reached.outputs))
        if reached.outputs and cases.trainable(op, case):
            found += [Trial(op, number, case, dtype, tuple(c)) for c in cases.output_choices(op, case, dtype)]
    return found


def run_trials(device: Device, make: MakeEngine, chosen: Sequence[Trial], together: int = TOGETHER) -> dict[str, Any]:
    """Outputs of all trials, so many by one step; where that step fails, of each by a step of its own.

    A trial that fails by itself too has its error among the outputs, under its label.
    """
    found: dict[str, Any] = {}
    for start in range(0, len(chosen), together):
        part = chosen[start : start + together]
        try:
            found |= _run_together(device, make, part)
        except Exception as error:  # whatever a kernel raises: the report has to name the op
            found |= {part[0].label: error} if len(part) == 1 else run_trials(device, make, part, together=1)
    return found


def _run_together(device: Device, make: MakeEngine, chosen: Sequence[Trial]) -> dict[str, Any]:
    def trace(graph: Graph) -> None:
        for trial in chosen:
            with graph.stage(Stage.FORWARD):
                trial.record(graph)

    feeds = {name: array for trial in chosen for name, array in trial.feeds().items()}
    return run_once(device, make, trace, feeds)
