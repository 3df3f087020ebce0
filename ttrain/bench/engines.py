"""The engines of ttrain as contenders."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ttrain.bench.contender import Contender
from ttrain.bench.workload import Case
from ttrain.config import build, registry
from ttrain.device.settings import DeviceConfig
from ttrain.engine.settings import EngineConfig
from ttrain.graph.kinds import Kind
from ttrain.parallel.ranks import Ranks
from ttrain.parallel.settings import ParallelConfig

if TYPE_CHECKING:
    from ttrain.device.base import Device
    from ttrain.engine.base import Step
    from ttrain.train.steps.session import Session
    from ttrain.train.steps.step import Stepper
    from ttrain.train.steps.step_graph import StepGraph


def step_graph(case: Case, device: Device | None = None, ranks: Ranks | None = None, engine: str = "") -> StepGraph:
    """The steps that an engine builds for a case, on a device that may want norms' weights in the compute dtype."""
    from ttrain.train.steps.resident import Resident
    from ttrain.train.steps.step_graph import StepGraph

    ranks = ranks or Ranks()
    if device is not None and device.uniform_compute:
        case.model.follow_compute()
    optimizer = build.build_optimizer(case.training.optimizer)
    rows = case.training.rows // ranks.slices
    resident = Resident(case.model.batch_specs(rows), indexed=False) if case.resident else None
    remainders = device is not None and build.keeps_remainders(device, engine)
    return StepGraph(case.model, optimizer, rows, resident=resident, ranks=ranks, remainders=remainders)


def device_of(order: Mapping[str, Any]) -> DeviceConfig:
    """The small config of the device."""
    values = order["device"]
    return registry.component("device", values["name"]).config(**values)


class EngineContender(Contender):
    """A training step as `task=train` builds it: batch, learning rate, step number and seed are uploaded every step,
    but for a batch that is to stay on the device."""

    side = "ttrain"
    device: Device
    session: Session
    built: Step
    _run: Stepper

    def __init__(
        self,
        name: str,
        case: Case,
        device: DeviceConfig,
        engine: EngineConfig,
        parallel: ParallelConfig | None = None,
    ) -> None:
        """`parallel` is for one of several ranks, each of which does this."""
        self.name, self._case, self._parallel = name, case, parallel or ParallelConfig()
        self._device_config, self._engine_config = device, replace(engine, name=name)
        self.description = f"engine={name}, rematerialize={str(engine.rematerialize).lower()}"

    def build(self) -> None:
        from ttrain.engine.state import State
        from ttrain.train.steps.session import Session
        from ttrain.train.steps.step import Stepper

        case = self._case
        self._world = build.build_world(self._parallel, self._device_config)
        self.device = build.build_device(self._device_config, case.dtypes, self._world)
        graph = step_graph(case, self.device, self._world.ranks, self.name)
        state = State(self.device, graph.state_tensors())
        self.session = Session(graph, state, build.build_engine(self._engine_config, self.device, state))
        for path, values in case.first_weights():
            self.session.state.write(path, values)
        steps = {name: self.session.engine.build(name, trace) for name, trace in graph.train_steps().items()}
        self.built = next(iter(steps.values()))
        if graph.resident is not None:
            graph.resident.write(self.session.state, lambda *_: case.batches[0])
        batches, lr = case.batches, case.training.optimizer.lr
        train_step = self.session.train_step(steps, case.seed, self._world)
        self._run = Stepper(
            train_step, lambda number: batches[number % len(batches)], lambda _: {"lr": lr}, sys.maxsize
        )

    def step(self, number: int) -> float:
        loss = self._run(number).loss
        assert loss is not None, "every batch of a benchmark has targets"
        return loss

    def loss(self, handle: float) -> float:
        return handle

    def weight(self, path: str) -> np.ndarray:
        return self.session.state.read(path)

    def synchronize(self) -> None:
        self.device.synchronize()

    def rest(self) -> None:
        self.device.release_threads()

    def planned_bytes(self) -> int | None:
        plan, state = self.built.plan, self.session.state
        if plan is None:
            return None
        return sum(state.nbytes(kind) for kind in Kind if kind.is_state) + plan.arena_bytes + plan.outside_bytes

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"counters": asdict(self.session.engine.counters)}
        if self.built.plan is not None:
            facts["kernels"] = len(self.built.plan.launched)
            facts["arena_bytes"] = self.built.plan.arena_bytes
        return facts

    def close(self) -> None:
        self.session.close()
        self.device.close()
        self._world.close()
