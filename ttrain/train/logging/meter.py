"""Speed of the steps since the last recorded one, and how it compares with the device's peak.

The time of the loop is that of steps and of what comes with them, such as batches and lines of metrics; evaluations,
saves and samples are apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ttrain.train.logging.metrics import Metrics


def loop_speed(tokens: float | None, seconds: float | None) -> float | None:
    """Tokens per second over the time of the loop; None where either is not known yet."""
    return round(tokens / seconds, 1) if tokens and seconds else None


class Meter:
    """Times the loop from the start of a step to its rest: evaluations and saves between them do not count."""

    def __init__(
        self,
        flops_per_step: float | None = None,
        peak_flops: float | None = None,
        memory: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        timed: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`flops_per_step` and `peak_flops` (FLOP/s) give mfu; `memory` tells the bytes in use on the device.

        `timed` is given the seconds of every step.
        """
        self._timed = timed
        self._flops, self._peak, self._memory, self._clock = flops_per_step, peak_flops, memory, clock
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        self._started = self._stopped = 0.0

    def restart(self, flops_per_step: float) -> None:
        """Forget the steps so far; those that follow take another number of operations."""
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        self._flops = flops_per_step if self._flops else None

    def start(self) -> None:
        self._started = self._clock()

    def stop(self, tokens: int) -> float:
        """End the timing of one step. Return its seconds."""
        self._stopped = self._clock()
        seconds = self._stopped - self._started
        self._steps, self._tokens, self._seconds = self._steps + 1, self._tokens + tokens, self._seconds + seconds
        self._timed(seconds)
        return seconds

    def rest(self) -> float:
        """End what follows a step, such as a line of metrics. Return its seconds, which count for the next."""
        seconds = self._clock() - self._stopped
        self._seconds += seconds
        return seconds

    def read(self) -> Metrics:
        """Means over the steps since the last call: tokens/s, ms per step, mfu; and bytes of memory now."""
        seconds, steps = max(self._seconds, 1e-9), max(self._steps, 1)
        metrics: Metrics = {
            "tokens_per_s": round(self._tokens / seconds, 1),
            "step_ms": round(1e3 * seconds / steps, 4),
        }
        if self._flops and self._peak:
            metrics["mfu"] = round(self._flops * self._steps / seconds / self._peak, 4)
        if self._memory is not None:
            metrics["memory_bytes"] = self._memory()
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        return metrics
