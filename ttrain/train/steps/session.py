"""A model on a device: its state, an engine over it, and the built steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ttrain.device.base import Device
from ttrain.engine.base import Engine, Step
from ttrain.engine.state import State, StateTensor
from ttrain.graph import Graph
from ttrain.nn.initialize import initial_value
from ttrain.train.steps.flops import model_flops
from ttrain.train.steps.step_graph import StepGraph


@dataclass
class Session:
    """State, engine and steps of one run. Close it before the device."""

    graph: StepGraph
    state: State
    engine: Engine
    make_engine: Callable[[Device, State], Engine]

    @classmethod
    def open(
        cls,
        graph: StepGraph,
        device: Device,
        make_engine: Callable[[Device, State], Engine],
        training: bool = True,
        further: Sequence[StateTensor] = (),
    ) -> Session:
        """Places the state, and `further` tensors; without `training` neither gradients nor the optimizer's."""
        state = State(device, [*graph.state_tensors(training), *further])
        return cls(graph, state, make_engine(device, state), make_engine)

    def renew(self, graph: StepGraph) -> None:
        """Closes what was built and starts anew over the same state. The engine's counters go on."""
        counters, device = self.engine.counters, self.engine.device
        self.engine.close()
        self.graph, self.engine = graph, self.make_engine(device, self.state)
        self.engine.counters = counters

    def initialize(self, seed: int) -> None:
        """First values of the parameters, one in host memory at a time. The optimizer's tensors start at zero."""
        for path, parameter in self.graph.model.parameters().items():
            self.state.write(path, initial_value(parameter, seed))

    def build_training(self) -> dict[str, Step]:
        """All steps of a run by name, before the first one runs."""
        traces = {**self.graph.train_steps(), **self.graph.further_steps()}
        return {name: self.engine.build(name, trace) for name, trace in traces.items()}

    def close(self) -> None:
        self.engine.close()


@contextmanager
def averaged(steps: Mapping[str, Step]) -> Iterator[None]:
    """Where weights are averaged, the averages are in their place meanwhile: two passes over them, exact to the bit."""
    if "swap" not in steps:
        yield
        return
    steps["swap"]({})
    try:
        yield
    finally:
        steps["swap"]({})


def flops_per_step(graph: StepGraph) -> int:
    """Floating-point operations of one optimizer step of this rank, as its ops declare them.

    What a plan computes again to save memory is not counted, so that mfu rates the model and not the plan.
    """
    total, traces = 0, graph.train_steps()
    for name, times in graph.repeats.items():
        recorded = Graph()
        traces[name](recorded)
        total += times * sum(model_flops(recorded).values())
    return total
