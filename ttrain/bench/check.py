"""Whether contenders do the same work: their losses, and how far their weights moved, over the first steps."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ttrain.bench.contender import Contender
from ttrain.bench.workload import Case

STEPS = 5  # optimizer steps from the first weights that are compared

# Largest deviation from PyTorch eager at the same precision: of a loss, relative; of the weights, as the norm of the
# difference relative to the norm of the way from the first weights. Adam divides by the root of the second moment, so
# the rounding of a gradient near zero can turn a whole step of that element around: the weights need a wider bound than
# the losses. Where weights are kept in bf16, an update rounds to none or to a whole last bit.
BOUNDS = {"fp32": (5e-5, 2e-3), "bf16": (2e-3, 0.2), "bf16_pure": (1e-2, 0.5), "bf8": (2e-2, 0.5)}


@dataclass(frozen=True)
class Agreement:
    """How far one contender is from the reference."""

    loss: float  # largest relative difference
    weights: float  # see BOUNDS

    def problem(self, precision: str, reference: str) -> str | None:
        """What disagrees, as a sentence; None where all is within the bounds."""
        loss_bound, weight_bound = BOUNDS[precision]
        if not self.loss <= loss_bound:
            return f"losses differ from {reference}'s by up to {self.loss:.2g} (bound {loss_bound:g})"
        if not self.weights <= weight_bound:
            return f"the weights' way differs from {reference}'s by {self.weights:.2g} of it (bound {weight_bound:g})"
        return None


@dataclass(frozen=True)
class FirstSteps:
    """Losses of the first STEPS steps, and about how long a step takes, in s."""

    losses: list[float]
    step_seconds: float


def first_steps(contender: Contender, done: Sequence[float] = ()) -> FirstSteps:
    """Run a contender up to STEPS; `done` are the losses of the steps that it has done already."""
    losses, seconds = list(done), []
    for number in range(len(losses) + 1, STEPS + 1):
        start = time.perf_counter()
        losses.append(contender.loss(contender.step(number)))
        seconds.append(time.perf_counter() - start)
    return FirstSteps(losses, statistics.median(seconds[-3:]))  # a first step compiles, a second may again


def agreement(
    case: Case, contender: Contender, losses: Sequence[float], reference: Contender, expected: Sequence[float]
) -> Agreement:
    """Compares two contenders that have both done STEPS steps."""
    pairs = zip(losses, expected, strict=True)
    loss = max(abs(mine - theirs) / max(abs(theirs), 1e-12) for mine, theirs in pairs)
    difference = way = 0.0
    for path, start in case.first_weights():
        if not case.trains(path):
            continue
        theirs = reference.weight(path)
        difference += _square(contender.weight(path) - theirs)
        way += _square(theirs - start)
    return Agreement(loss if math.isfinite(loss) else math.inf, math.sqrt(difference / way) if way else math.inf)


def _square(x: np.ndarray) -> float:
    return float(np.square(x, dtype=np.float64).sum())
