"""Speed of the steps since the last recorded one, and how it compares with the device's peak.

The time of the loop is that of steps and of what comes with them, such as batches and lines of metrics; evaluations,
saves and samples are apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ttrain.train.logging.metrics import Metrics


def loop_speed(tokens: float | None, seconds: float | None) -> float | None:
    """Tokens per second over the time of the loop; None where either is not known yet."""
    return round(tokens / seconds, 1) if tokens and seconds else None


@dataclass(eq=False)
class Meter:
    """Times the loop from the start of a step to its rest: evaluations and saves between them do not count."""

    flops_per_step: float | None = None
    peak_flops: float | None = None  # FLOP/s, which give mfu
    memory: Callable[[], int] | None = None  # tells the bytes in use on the device
    clock: Callable[[], float] = time.perf_counter
    timed: Callable[[float], None] = lambda seconds: None  # is given the seconds of every step

    def __post_init__(self) -> None:
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        self._started = self._stopped = 0.0

    def restart(self, flops_per_step: float) -> None:
        """Forget the steps so far; those that follow take another number of operations."""
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        self.flops_per_step = flops_per_step if self.flops_per_step else None

    def start(self) -> None:
        self._started = self.clock()

    def stop(self, tokens: int) -> float:
        """End the timing of one step. Return its seconds."""
        self._stopped = self.clock()
        seconds = self._stopped - self._started
        self._steps, self._tokens, self._seconds = self._steps + 1, self._tokens + tokens, self._seconds + seconds
        self.timed(seconds)
        return seconds

    def rest(self) -> float:
        """End what follows a step, such as a line of metrics. Return its seconds, which count for the next."""
        seconds = self.clock() - self._stopped
        self._seconds += seconds
        return seconds

    def read(self) -> Metrics:
        """Means over the steps since the last call: tokens/s, ms per step, mfu; and bytes of memory now."""
        seconds, steps = max(self._seconds, 1e-9), max(self._steps, 1)
        metrics: Metrics = {
            "tokens_per_s": round(self._tokens / seconds, 1),
            "step_ms": round(1e3 * seconds / steps, 4),
        }
        if self.flops_per_step and self.peak_flops:
            metrics["mfu"] = round(self.flops_per_step * self._steps / seconds / self.peak_flops, 4)
        if self.memory is not None:
            metrics["memory_bytes"] = self.memory()
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        return metrics
