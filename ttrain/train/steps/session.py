"""A model on a device: its state, an engine over it, and the built steps."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ttrain.core.spec import TensorSpec
from ttrain.core.waiting import Waiting, waited_for
from ttrain.device.base import filled
from ttrain.engine.base import Engine, Step
from ttrain.engine.state import State
from ttrain.graph import Graph, Node, Stage
from ttrain.graph.passes import remove_dead_code
from ttrain.models.base import Batch
from ttrain.nn.initialize import initial_value
from ttrain.parallel.world import World
from ttrain.train.protocols import Inputs
from ttrain.train.steps.step import Ahead, LossScale, NoiseScale, TrainStep
from ttrain.train.steps.step_graph import StepGraph

_AT_ONCE = 4  # initial values that are drawn together, of about equal sizes


@dataclass
class Session:
    """State, engine and steps of one run. Close it before the device."""

    graph: StepGraph
    state: State
    engine: Engine

    def initialize(self, seed: int, but: Container[str] = ()) -> None:
        """Initial values of the parameters `but` some, a few in host memory at a time.

        The optimizer's tensors start at zero.
        """
        drawn = (item for item in self.graph.model.parameters().items() if item[0] not in but)
        parameters = sorted(drawn, key=lambda item: -item[1].count)
        with Waiting("Drawing initial values") as waiting, ThreadPoolExecutor(_AT_ONCE) as pool:
            for first in range(0, len(parameters), _AT_ONCE):
                paths, some = zip(*parameters[first : first + _AT_ONCE], strict=True)
                waiting.at(first, len(parameters), paths[0])
                for path, value in zip(paths, pool.map(partial(initial_value, seed=seed), some), strict=True):
                    self.state.write(path, value)

    def prepare(self, batch: Batch) -> tuple[dict[str, Any], dict[str, int]]:
        """See models.base.Prepare: for training steps as they are recorded now."""
        graph = self.graph
        if graph.resident is not None:
            return graph.resident.prepare(batch)
        return graph.objective.prepare(graph.shorter or graph.model)(batch)

    def train_step(
        self, steps: Mapping[str, Step], seed: int, world: World | None = None, ahead: Ahead = lambda step: None,
        scale: LossScale | None = None,
    ) -> TrainStep:  # fmt: skip
        """Return the host's side of an optimizer step over the built `steps`; `seed` is run.seed."""
        graph, device = self.graph, self.engine.device
        rows = graph.rows * graph.chips
        wait, noise = device.turn if device.overlaps else None, NoiseScale(rows) if graph.noise else None
        told = rows, seed, self.prepare, wait, world or World(), noise, ahead, scale or LossScale()
        return TrainStep(steps, *told, coupled=graph.objective.coupled or dict)

    def build_training(self, further: bool = True) -> dict[str, Step]:
        """Return all steps of a run by name, before the first one runs; without `further` those that train."""
        traces = {**self.graph.train_steps(), **(self.graph.further_steps() if further else {})}
        named = waited_for(traces.items(), "Planning steps", lambda item: item[0])
        return {name: self.engine.build(name, trace) for name, trace in named}

    def close(self) -> None:
        self.engine.close()


class LedSteps(UserDict[str, Any]):
    """Steps that the leading rank runs alone, within `World.once`, while others follow: all have parts of the weights.

    What the others compute is of no use; they have the same weights to gather.
    """

    def __init__(self, steps: dict[str, Any], world: World) -> None:
        self.data, self._world = steps, world
        world.follow = self._follow

    def __getitem__(self, name: str) -> LedStep:
        return LedStep(name, self.data[name], self._world)

    def _follow(self, name: str) -> None:
        step = self.data[name]
        step({key: filled(spec, 0) for key, spec in step.inputs.items()})


class LedStep(NamedTuple):
    """One of LedSteps."""

    name: str
    step: Step
    world: World

    def __call__(self, inputs: Inputs) -> dict[str, Any]:
        self.world.broadcast(self.name)
        return self.step(inputs)

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        return self.step.inputs


@contextmanager
def averaged(steps: Mapping[str, Step]) -> Iterator[None]:
    """Put the averages, if any, in the place of the weights meanwhile: two passes over them, exact to the bit."""
    swap: Callable[[Inputs], object] = steps.get("swap", lambda _: None)
    swap({})
    try:
        yield
    finally:
        swap({})


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


def model_flops(recorded: Graph) -> dict[str, int]:
    """Operations that a recorded step needs, by stage: without copies that save memory and without unread values."""
    needed = remove_dead_code(recorded).nodes
    return by_stage((node, node.op.flops(node)) for node in needed if not node.copy)


def by_stage(counted: Iterator[tuple[Node, int]]) -> dict[str, int]:
    """Sums of what is counted of nodes, by stage."""
    totals = {stage.value: 0 for stage in Stage}
    for node, count in counted:
        totals[node.stage.value] += count
    return totals
