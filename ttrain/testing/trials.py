"""Every op of the registry in all its cases: forward, and each gradient, by an engine on a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ttrain.autodiff import backward
from ttrain.core.errors import TtrainError
from ttrain.core.spec import DType
from ttrain.device.base import Device
from ttrain.graph import Case, Op
from ttrain.graph.graph import Graph, Value
from ttrain.graph.kinds import Kind, Stage
from ttrain.testing import cases
from ttrain.testing.compare import Comparison, compare
from ttrain.testing.run import MakeEngine, run_once
from ttrain.testing.tolerances import EXACT, GRADIENT, tolerance

TOGETHER = 100  # trials in one step: planning takes the square of their number


@dataclass(frozen=True)
class Reach:
    """Numbers of the outputs of an op that can be seen on a device, none where it can't run.

    `alone` is True where the op can be given inputs of its own.
    """

    outputs: tuple[int, ...]
    alone: bool = True


def reach(op: Op, device: Device) -> Reach:
    """Find what a kernel shows of an op, or its decomposition, which may leave out what only a fused backward reads.

    Where a kernel holds an output in a layout of its own, such as the statistics of layer norm on a card, the numbers
    in it are its own business, and an op that reads them is verified through the backward of the one that makes them.
    """
    graph, _, outputs = cases.record(op, cases.cases_of(op)[0], DType.FP32)
    node, alone, values = graph.nodes[0], True, list(outputs)
    if op.view or op.name in device.kernels:
        alone = device.arenas or not {"mean", "rstd"} <= set(op.inputs)
    else:
        try:
            values = list(op.decompose(node, node.inputs) or ())
        except TtrainError:
            values = []
    shown = [index for index, value in enumerate(values) if device.arenas or not _special(value, device)]
    return Reach(tuple(shown), alone)


def _special(value: Value, device: Device) -> bool:
    """True if the device holds a value otherwise than its spec says."""
    node = value.producer
    kernel = None if node is None else device.kernels.get(node.op.name)
    if node is None or kernel is None or kernel.layouts is None:
        return False
    return kernel.layouts(*node.specs, node.attributes)[value.index] is not None


@dataclass
class Trial:
    """One case of one op in one dtype.

    `chosen` are the outputs that a loss is formed from; None runs forward only, and compares the outputs `seen`.
    """

    op: Op
    number: int
    case: Case
    dtype: DType
    chosen: tuple[int, ...] | None
    seen: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        outputs = "" if self.chosen is None else f" from {list(self.chosen)}"
        return f"{self.op.name}-{self.number}{outputs}"

    @cached_property
    def arrays(self) -> cases.Arrays:
        return cases.draw(self.op, self.case, self.dtype)

    def record(self, graph: Graph, feeds: dict[str, Any]) -> tuple[dict[str, Value], Value | None]:
        """Record the op on inputs of its own, whose numbers join `feeds`; what it overwrites is state.

        Returns what is compared, outputs by number or inputs that get a gradient, and the loss of these.
        """
        ordered = cases.input_names(self.op, self.case)
        probe, _, _ = cases.record(self.op, self.case, self.dtype)
        aliases = {} if self.op.view else self.op.aliases(probe.nodes[0])
        written = {ordered[index] for index in aliases.values()}
        values: dict[str, Value] = {}
        for name, spec in cases.input_specs(self.op, self.case, self.dtype).items():
            if spec is not None:
                key = f"{self.label}: {name}"
                feeds[key] = self.arrays[name]
                given = graph.state_value(key, spec, Kind.PARAMETER) if name in written else graph.input(key, spec)
                values[name] = given
        recorded = self.op.record(*(values.get(name) for name in ordered), graph=graph, **self.case.attributes)
        outputs = recorded if isinstance(recorded, tuple) else (recorded,)
        if self.chosen is None:
            return {str(index): outputs[index] for index in self.seen if index < len(outputs)}, None
        kept = [outputs[index] for index in self.chosen]
        loss = cases.weighted_loss(kept, feeds, self.op.name, f"{self.label}: ")
        return cases.leaves_of(self.op, values), loss

    def trace(self, graph: Graph, feeds: dict[str, Any]) -> None:
        """Record it with its gradients, and make outputs of the step of what is compared."""
        made, loss = self.record(graph, feeds)
        if loss is not None:
            made = dict(zip(made, backward(loss, list(made.values())), strict=True))
        for name, value in made.items():
            graph.output(f"{self.label}: {name}", value)

    def compared(
        self, outputs: Mapping[str, Any], engine: str, factor: float = 1.0, uniform: bool = False
    ) -> Iterator[Comparison]:
        """Yield what the engine delivered against PyTorch in fp64; `uniform` is the device's `uniform_compute`."""
        labels: dict[str, Any] = {"subject": self.op.name, "case": self.label, "engine": engine, "dtype": self.dtype}
        if isinstance(error := outputs.get(self.label), Exception):
            yield compare(error, np.zeros(()), self.dtype, EXACT, quantity="-", **labels)
            return
        graph, feeds = Graph(), dict[str, Any]()
        made, loss = self.record(graph, feeds)
        if loss is not None:
            _, expected = cases.reference_gradients(graph, feeds, loss, made)
        else:
            known = cases.by_reference(graph, feeds)
            expected = {name: known[value].double().numpy() for name, value in made.items() if value in known}
        for name, wanted in expected.items():
            quantity, unit, allowed = f"d{name}", self.dtype, GRADIENT[self.dtype]
            if loss is None:
                quantity = cases.output_name(self.op, int(name))
                unit, allowed = tolerance(self.op.name, quantity, made[name].spec.dtype, self.dtype, uniform)
            got = outputs[f"{self.label}: {name}"]
            got = np.reshape(got, wanted.shape) if np.size(got) == wanted.size else got
            yield compare(got, wanted, unit, allowed * factor, quantity=quantity, **labels)


def trials(op: Op, dtype: DType, reached: Reach) -> list[Trial]:
    """Forward of every case of an op, and every gradient where backward may pass through."""
    found = []
    for number, case in enumerate(cases.cases_of(op)):
        if reached.outputs and reached.alone:
            found.append(Trial(op, number, case, dtype, None, reached.outputs))
        if reached.outputs and op.differentiable:
            found += [Trial(op, number, case, dtype, tuple(c)) for c in cases.output_choices(op, case, dtype)]
    return found


def run_trials(device: Device, make: MakeEngine, chosen: Sequence[Trial], together: int = TOGETHER) -> dict[str, Any]:
    """Return the outputs of all trials, so many by one step; where that step fails, of each by a step of its own.

    A trial that fails by itself too has its error among the outputs, under its label.
    """
    found: dict[str, Any] = {}
    for start in range(0, len(chosen), together):
        part, feeds = chosen[start : start + together], dict[str, Any]()

        def trace(graph: Graph, part: Sequence[Trial] = part, feeds: dict[str, Any] = feeds) -> None:
            for trial in part:
                with graph.stage(Stage.FORWARD):
                    trial.trace(graph, feeds)

        try:
            found |= run_once(device, make, trace, feeds)
        except Exception as error:  # whatever a kernel raises: the report has to name the op
            found |= {part[0].label: error} if len(part) == 1 else run_trials(device, make, part, together=1)
    return found
