"""Contenders of a benchmark: each can be built and then does one optimizer step after the other.

All have to do the same work. Losses, and how far weights moved, are compared over the first steps. The engines of
ttrain are contenders; their times on hardware that is not here come from the model of its family.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ttrain.bench.results import COST_MODEL, CaseResult, Row
from ttrain.bench.workload import Case
from ttrain.config import build
from ttrain.config.schema import Config
from ttrain.core.errors import UserError
from ttrain.device.base import Device
from ttrain.device.info import MOCK, info_of
from ttrain.device.settings import DeviceConfig
from ttrain.device.timing import Estimate, Work
from ttrain.engine.base import Engine, Step
from ttrain.engine.settings import EngineConfig
from ttrain.engine.state import State
from ttrain.graph import Kind
from ttrain.parallel.ranks import Ranks
from ttrain.parallel.settings import ParallelConfig
from ttrain.train.forecast.step_time import KernelTimes, Rates, host_time, keep_rate, measured_rates, timing
from ttrain.train.settings import TrainConfig
from ttrain.train.steps.resident import Resident
from ttrain.train.steps.session import Session
from ttrain.train.steps.step import Stepper, reads_ahead

STEPS = 5  # optimizer steps from the first weights that are compared

# Largest deviation from PyTorch eager at the same precision: of a loss, relative; of the weights, as the norm of the
# difference relative to the norm of the way from the first weights. Adam divides by the root of the second moment, so
# the rounding of a gradient near zero can turn a whole step of that element around: the weights need a wider bound than
# the losses. Where weights are kept in bf16, an update rounds to none or to a whole last bit.
BOUNDS = {"fp32": (5e-5, 2e-3), "bf16": (2e-3, 0.2), "bf16_true": (1e-2, 0.5), "bf8": (2e-2, 0.5)}


class Contender(ABC):
    """One way to do a case. `build` is everything before the first step except what a first step does lazily."""

    description: str  # what exactly runs, for the result file
    device: Device  # opened by `build`; it also sets the number of threads

    def __init__(self, case: Case, device: DeviceConfig) -> None:
        self.case, self._device_config = case, device
        self._done = 0  # steps

    @abstractmethod
    def build(self) -> None:
        """Prepare the first step."""

    @abstractmethod
    def step(self, number: int) -> Any:
        """Do one optimizer step, numbered from 1. Return a handle of its loss, perhaps before the device is done."""

    @abstractmethod
    def weight(self, path: str) -> np.ndarray:
        """Return a copy of one parameter by our path, fp32."""

    def loss(self, handle: Any) -> float:
        """Return the loss behind a handle, waiting for it."""
        return float(handle)

    def synchronize(self) -> None:
        """Wait until all steps are done."""

    def rest(self) -> None:
        """Let go of what only steps need, at the end of a turn."""

    def planned_bytes(self) -> int | None:
        """Return the planned peak of memory; None if the engine has no plan."""
        return None

    def planned_ms(self, rates: Rates) -> float | None:
        """Return the planned time of a step, or None for who plans nothing."""
        return None

    def told(self, rates: Rates | None) -> dict[str, Any]:
        """Return what else it tells about itself, such as counters."""
        return {}

    def close(self) -> None:
        """Give back what it holds."""

    def start(self, steps: int = STEPS, seconds: float = math.inf) -> dict[str, Any]:
        """Build, do the first steps, and return their losses and times.

        It does `steps` steps, but at most two if those after the first take longer than `seconds` together.
        """
        began = time.perf_counter()
        timed: list[tuple[float, float]] = []  # loss of each step, and when it was known
        self.build()
        while len(timed) < min(steps, 2) or (len(timed) < steps and timed[-1][1] - timed[0][1] < seconds):
            timed.append((self.loss(self._next()), time.perf_counter()))
        self.synchronize()
        gc.freeze()  # what exists now lives to the end and need not be searched again
        later = [after - before for (_, before), (_, after) in pairwise(timed)][-3:] or [timed[0][1] - began]
        return {
            "description": self.description, "first_step_s": timed[0][1] - began, "losses": [loss for loss, _ in timed],
            "rss": psutil.Process().memory_info().rss, "later_s": later, "step_seconds": statistics.median(later),
        }  # fmt: skip

    def _next(self) -> Any:
        self._done += 1
        return self.step(self._done)

    def turn(self, settle: int, timed: int, each: bool) -> list[float]:
        """Do steps that warm caches up again.

        Then time steps, in s: each of them, or without `each` their mean, so that a device can run ahead.
        """
        gc.collect()
        handle = None
        for _ in range(settle):
            handle = self._next()
        if handle is not None:
            self.loss(handle)
        self.synchronize()
        marks = [time.perf_counter()]
        for _ in range(timed):
            self._next()
            if each:
                marks.append(time.perf_counter())
        if not each:
            self.synchronize()
            marks.append(time.perf_counter())
        self.rest()
        return [(after - before) / (1 if each else timed) for before, after in pairwise(marks)]

    def facts(self, planned: bool) -> dict[str, Any]:
        """Return the device and what the contender tells of itself, and if `planned` the expected time of a step."""
        rates = measured_rates(self.device.name, str(self.case.dtypes.compute), self._device_config.index)
        facts = {**self.told(rates), "peak_flops": None if rates is None else rates.flops}
        forecast = self.planned_ms(rates) if planned and rates is not None else None
        return {"device": self.device.describe(), "facts": facts, "planned_ms": forecast}

    def write_weights(self, file: str) -> None:
        """Write the trained weights one after the other, fp32. All ranks read them, and the first one writes."""
        with open(file if os.environ.get("RANK", "0") == "0" else os.devnull, "wb") as target:
            for path, _ in self.case.first_weights(trained=True):
                self.weight(path).astype(np.float32).tofile(target)

    def weight_difference(self, file: str) -> float:
        """Return how far the weights are from those in a file, relative to the way from the first weights."""
        difference = way = 0.0
        with open(file, "rb") as source:
            for path, start in self.case.first_weights(trained=True):
                theirs = np.fromfile(source, np.float32, start.size).reshape(start.shape)
                difference += _square(self.weight(path) - theirs)
                way += _square(theirs - start)
        return math.sqrt(difference / way) if way else math.inf


def loss_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference; infinite where a loss is not a finite number."""
    found = max(abs(ours - theirs) / max(abs(theirs), 1e-12) for ours, theirs in zip(losses, expected, strict=True))
    return found if all(map(math.isfinite, losses)) else math.inf


def problem(precision: str, loss: float, weights: float, reference: str) -> str | None:
    """Return which difference passes its bound, as a sentence, or None."""
    loss_bound, weight_bound = BOUNDS[precision]
    if not loss <= loss_bound:
        return f"losses differ from {reference}'s by up to {loss:.2g} (bound {loss_bound:g})"
    if not weights <= weight_bound:
        return f"weight updates differ from {reference}'s by {weights:.2g} of their size (bound {weight_bound:g})"
    return None


def _square(x: np.ndarray) -> float:
    return float(np.square(x, dtype=np.float64).sum())


def session_of(case: Case, device: Device, engine: EngineConfig, ranks: Ranks | None = None) -> Session:
    """Return the session of a case as `task=train` builds it; the values of its state are still unset."""
    work, ranks = case.work, ranks or Ranks()
    specs = case.model.batch_specs(work.rows // ranks.slices)
    resident = Resident(specs, indexed=False) if case.resident else None
    config = Config(train=TrainConfig(batch_size=work.rows), optimizer=work.optimizer, engine=engine)
    return build.build_session(case.model, device, config, ranks=ranks, resident=resident)


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

    def facts(self, planned: bool) -> dict[str, Any]:
        """Time the largest compiled product first, because it may be the fastest product of this machine."""
        compiler, plan = getattr(self.engine, "compiler", None), self.built.plan
        if compiler is not None and plan is not None:
            products = "linear", "matmul"
            largest = max(plan.launched, key=lambda node: node.op.flops(node) * (node.op.name in products))
            with timing(lambda: nullcontext(self.device), compiler, [largest]) as seconds:
                keep_rate(largest.op.flops(largest) / seconds(largest), self.device.name, str(self.case.dtypes.compute))
        return super().facts(planned)

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


def expected(device: DeviceConfig, work: Work, engine: str) -> Estimate:
    """Return the time of work on a device that is not here. Raises UserError where there is no model of its times."""
    told = info_of(device).estimate(device, work, engine)
    if not isinstance(told, Estimate):
        raise UserError(f"device={device.name}: it is not here. {told or 'There is no model of its times.'}")
    return told


def enter_times(case: Case, found: CaseResult, row: Row, device: DeviceConfig, engine: str) -> None:
    """Enter the time of a contender into its row."""
    device = info_of(device).held(device, case.precision)
    told = expected(device, _planned(case, device), engine)
    found.basis, found.device = COST_MODEL, {"name": device.name, "mode": COST_MODEL, "model": told.time.source}
    row.status, row.description, row.round_ms = "ok", f"cost model of engine={engine}", [1e3 * told.time.total]
    row.facts = {"bound_by": told.time.bottleneck.replace("_", " "), "peak_flops": told.peak}


def _planned(case: Case, device: DeviceConfig) -> Work:
    """Return what the engine static would launch on the device, planned without one."""
    with (
        closing(build.planned_device(device)) as planned,
        closing(session_of(case, planned, EngineConfig(name="static"))) as session,
    ):
        return Work.of(session.build_training(further=False), {"train": 1})
