"""Contenders of a benchmark: each can be built and then does one optimizer step after the other.

All have to do the same work. Losses, and how far weights moved, are compared over the first steps.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import psutil

from ttrain.bench.workload import Case
from ttrain.device.base import Device
from ttrain.device.settings import DeviceConfig
from ttrain.train.forecast.peak import Rates, measured_rates

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
        """Return the planned peak of memory, or None for who plans nothing."""
        return None

    def planned_ms(self, rates: Rates) -> float | None:
        """Return the planned time of a step, or None for who plans nothing."""
        return None

    def told(self, rates: Rates | None) -> dict[str, Any]:
        """Return what else it tells about itself, such as counters."""
        return {}

    def close(self) -> None:
        """Give back what it holds."""

    def start(self) -> dict[str, Any]:
        """Build, do the first steps, and return their losses and times."""
        began = time.perf_counter()
        self.build()
        timed = [(loss, time.perf_counter()) for loss in self.losses()]
        self.synchronize()
        gc.freeze()  # what exists now lives to the end and need not be searched again
        later = [after - before for (_, before), (_, after) in pairwise(timed)][-3:]
        return {
            "description": self.description, "first_step_s": timed[0][1] - began, "losses": [loss for loss, _ in timed],
            "rss": psutil.Process().memory_info().rss, "step_seconds": statistics.median(later),
        }  # fmt: skip

    def losses(self) -> Iterator[float]:
        """Do STEPS steps and yield their losses."""
        for _ in range(STEPS):
            yield self.loss(self._next())

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
