"""The engines of ttrain as contenders, and their times on hardware that is not here, by the model of its family."""

from __future__ import annotations

import sys
import tempfile
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ttrain.bench.contender import Contender
from ttrain.bench.results import COST_MODEL, CaseResult, Row
from ttrain.bench.workload import Case
from ttrain.config import build
from ttrain.device.base import Device
from ttrain.device.info import MOCK, info_of
from ttrain.device.settings import DeviceConfig
from ttrain.device.timing import Work
from ttrain.engine.base import Engine, Step
from ttrain.engine.settings import EngineConfig
from ttrain.engine.state import State
from ttrain.graph import Kind
from ttrain.parallel.ranks import Ranks
from ttrain.parallel.settings import ParallelConfig
from ttrain.train.forecast.peak import Rates
from ttrain.train.forecast.step_time import KernelTimes, host_time, timing
from ttrain.train.settings import GuardConfig, TrainConfig
from ttrain.train.steps.resident import Resident
from ttrain.train.steps.session import Session
from ttrain.train.steps.step import Stepper, reads_ahead


def session_of(case: Case, device: Device, engine: EngineConfig, ranks: Ranks | None = None) -> Session:
    """Return the session of a case as `task=train` builds it; the values of its state are still unset."""
    work, ranks = case.work, ranks or Ranks()
    specs = case.model.batch_specs(work.rows // ranks.slices)
    resident = Resident(specs, indexed=False) if case.resident else None
    train = TrainConfig(batch_size=work.rows)
    return build.build_session(
        case.model, device, train, work.optimizer, GuardConfig(), engine, ranks=ranks, resident=resident
    )


class EngineContender(Contender):
    """A training step as `task=train` builds it.

    Batch, learning rate, step number and seed are uploaded every step, but for a batch that is to stay on the device.
    """

    state: State
    engine: Engine
    built: Step

    def __init__(self, case: Case, device: DeviceConfig, engine: EngineConfig, mode: str = "none") -> None:
        """`mode` is the way of `parallel` for one of several ranks, each of which does this."""
        super().__init__(case, device)
        self._engine_config, self._mode = engine, mode
        self.description = f"engine={engine.name}, rematerialize={str(engine.rematerialize).lower()}"

    def build(self) -> None:
        case, work = self.case, self.case.work
        self._world = build.build_world(ParallelConfig(name=self._mode), self._device_config)
        self.device = build.build_device(self._device_config, case.dtypes, self._world)
        session = session_of(case, self.device, self._engine_config, self._world.ranks)
        self.state, self.engine = session.state, session.engine
        for path, values in case.first_weights():
            self.state.write(path, values)
        steps = session.build_training()
        self.built = next(iter(steps.values()))
        if session.graph.resident is not None:
            session.graph.resident.write(self.state, lambda *_: case.batches[0])
        batches, lr = case.batches, work.optimizer.lr
        inputs = (lambda number: batches[number % len(batches)]), (lambda _: {"lr": lr})
        ahead = reads_ahead(*inputs, last=sys.maxsize)
        self._run = Stepper(session.train_step(steps, case.seed, self._world, ahead), *inputs)

    def step(self, number: int) -> Any:
        loss = self._run(number).loss
        assert loss is not None, "every batch of a benchmark has targets"
        return loss

    def weight(self, path: str) -> np.ndarray:
        return self.state.read(path)

    def synchronize(self) -> None:
        self.device.synchronize()

    def rest(self) -> None:
        self.device.release_threads()

    def planned_bytes(self) -> int | None:
        plan = self.built.plan
        if plan is None:
            return None
        return sum(self.state.nbytes(kind) for kind in Kind if kind.is_state) + plan.arena_bytes + plan.outside_bytes

    def planned_ms(self, rates: Rates) -> float | None:
        """Return the time of a step by that of each kernel of its plan, in ms.

        Kernels are timed now, whatever was measured before: what disturbs the machine then disturbs both.
        """
        if self.built.plan is None:
            return None
        work = Work.of({"train": self.built}, {"train": 1})
        timer = partial(timing, lambda: nullcontext(self.device), work.compiler)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernels.json"
            seconds = KernelTimes(timer, "this process", rates, compiler=work.compiler, path=path).of(work)
        return 1e3 * host_time(work, seconds, self._engine_config.name).total

    def told(self, rates: Rates | None) -> dict[str, Any]:
        """Return counters, and of a plan its kernels and the time that they take at the machine's measured rates."""
        told: dict[str, Any] = {"counters": asdict(self.engine.counters)}
        if self.built.plan is None:
            return told
        launched = self.built.plan.launched
        told |= {"kernels": len(launched), "arena_bytes": self.built.plan.arena_bytes}
        if rates is not None:
            told["roof_ms"] = 1e3 * sum(rates.roof(node.op.flops(node), node.op.nbytes(node)) for node in launched)
        return told

    def close(self) -> None:
        self.engine.close()
        self.device.close()
        self._world.close()


def modelled(device: DeviceConfig) -> bool:
    """Return True if times have to come from the model of a device, because it is not here."""
    info = info_of(device)
    return info.mode(device) != MOCK and not info.present(device)


def enter_times(case: Case, found: CaseResult, row: Row, device: DeviceConfig, engine: str) -> None:
    """Enter the time of a contender into its row."""
    device = info_of(device).held(device, case.precision)
    model = info_of(device).time_model(device)
    found.basis, found.device = COST_MODEL, model.describe()
    total, bound = model.step(_planned(case, device), engine)
    row.status, row.description, row.round_ms = "ok", f"cost model of engine={engine}", [total]
    row.facts = {"bound_by": bound, "peak_flops": model.peak_flops(engine)}


def _planned(case: Case, device: DeviceConfig) -> Work:
    """Return what the engine static would launch on the device, planned without one."""
    with (
        closing(build.planned_device(device)) as planned,
        closing(session_of(case, planned, EngineConfig(name="static"))) as session,
    ):
        return Work.of(session.build_training(further=False), {"train": 1})
