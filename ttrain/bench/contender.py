"""Contenders of a benchmark: each can be built and then does one optimizer step after the other.

All have to do the same work. Losses, and how far weights moved, are compared over the first steps.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ttrain.bench.workload import Case

STEPS = 5  # optimizer steps from the first weights that are compared

# Largest deviation from PyTorch eager at the same precision: of a loss, relative; of the weights, as the norm of the
# difference relative to the norm of the way from the first weights. Adam divides by the root of the second moment, so
# the rounding of a gradient near zero can turn a whole step of that element around: the weights need a wider bound than
# the losses. Where weights are kept in bf16, an update rounds to none or to a whole last bit.
BOUNDS = {"fp32": (5e-5, 2e-3), "bf16": (2e-3, 0.2), "bf16_true": (1e-2, 0.5), "bf8": (2e-2, 0.5)}


class Contender(ABC):
    """One way to do a case. `build` is everything before the first step except what a first step does lazily."""

    description: str  # what exactly runs, for the result file
    case: Case

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

    def facts(self) -> dict[str, Any]:
        """Return what else it tells about itself, such as counters."""
        return {}

    def close(self) -> None:
        """Give back what it holds."""

    def first_losses(self, first: int = 1) -> Iterator[float]:
        """Do STEPS steps and yield their losses."""
        for number in range(first, first + STEPS):
            yield self.loss(self.step(number))

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
