"""Speed of the steps since the last recorded one, and how it compares with the device's peak; how long a run takes.

The time of the loop is that of steps and of what comes with them, such as batches and lines of metrics; evaluations,
saves and samples are apart. A long run is told before its first step, and again once some steps were timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ttrain.core.units import format_duration
from ttrain.train.logging.metrics import Metrics

WARM = 1  # steps that are not timed: the first compiles, captures and fills caches
TIMED = 2  # steps at least that the correction is taken from,
ENOUGH = 1.0  # and seconds of them,
MANY = 50  # or steps where so many take less
CLOSE = 1.2  # times as long or as short as was said: no reason to speak of the others again


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
        """Forgets the steps so far; those that follow take another number of operations."""
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        self._flops = flops_per_step if self._flops else None

    def start(self) -> None:
        self._started = self._clock()

    def stop(self, tokens: int) -> float:
        """Ends the timing of one step; its seconds."""
        self._stopped = self._clock()
        seconds = self._stopped - self._started
        self._steps, self._tokens, self._seconds = self._steps + 1, self._tokens + tokens, self._seconds + seconds
        self._timed(seconds)
        return seconds

    def rest(self) -> float:
        """Ends what comes with a step after it, such as a line of metrics; its seconds, which count for the next."""
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


@dataclass(frozen=True)
class Forecast:
    """Seconds that the rest of a run takes. `step` 0 is not known before some steps were timed."""

    step: float  # of one optimizer step
    steps: float  # that are left; of growing sequences in steps as long as the next one
    evaluation: float = 0.0  # of one evaluation
    evaluations: int = 0  # that are left

    @property
    def total(self) -> float:
        return self.step * self.steps + self.evaluation * self.evaluations

    def corrected(self, step: float, done: int) -> Forecast:
        """Correct the forecast after `done` steps of `step` seconds each; evaluations change by the same factor."""
        evaluation = self.evaluation * step / self.step if self.step else 0.0
        return replace(self, step=step, steps=max(self.steps - done, 0), evaluation=evaluation)

    def text(self) -> str:
        """Its parts, for people."""
        parts = f"{self.steps:.0f} steps of {format_duration(self.step)}"
        if self.evaluation * self.evaluations >= 0.01 * self.total:
            several = "s" if self.evaluations > 1 else ""
            parts += f" and {self.evaluations} evaluation{several} of {format_duration(self.evaluation)}"
        return parts


@dataclass(frozen=True)
class Alternative:
    """Another way to run it, as a command, and the seconds that it takes."""

    command: str
    seconds: float


class Pace:
    """Says how long a run takes where that is more than `limit` seconds, and what takes less."""

    def __init__(
        self, forecast: Forecast, limit: float, say: Callable[[str], None], others: Callable[[], Sequence[Alternative]]
    ) -> None:
        """`others` finds the other ways; it is only asked where the run is long."""
        self._expected, self._limit, self._say, self._find = forecast, limit, say, others
        self._others: Sequence[Alternative] | None = None  # as they were said
        self._done, self._timed, self._seconds = 0, 0, 0.0

    def announce(self) -> None:
        """Say before the first step where the run is expected to take long."""
        if self._expected.total > self._limit:
            self._tell(self._expected, "is expected to take", 1.0)

    def __call__(self, seconds: float) -> None:
        """One step was done and took so long. Speaks once, when enough steps were timed."""
        if self._limit < 0:
            return
        self._done += 1
        if self._done <= WARM:
            return
        self._timed, self._seconds = self._timed + 1, self._seconds + seconds
        if self._timed < TIMED or (self._seconds < ENOUGH and self._timed < MANY):
            return
        found = self._expected.corrected(self._seconds / self._timed, self._done)
        ratio = found.step / self._expected.step if self._expected.step else 1.0
        if self._others is None and found.total > self._limit:
            self._tell(found, f"takes, by its first {self._done} steps,", ratio)
        elif self._others is not None:
            far = not 1 / CLOSE <= ratio <= CLOSE
            note = f" The other ways above take {ratio:.2g} times what was said." if far and self._others else ""
            was = format_duration(self._expected.step)
            self._say(
                f"By its first {self._done} steps, this run takes about {format_duration(found.total)} more: "
                f"{found.text()}; {was} a step was expected.{note}"
            )
        self._limit = -1  # nothing more to say

    def _tell(self, forecast: Forecast, how: str, ratio: float) -> None:
        self._say(f"This run {how} about {format_duration(forecast.total)}: {forecast.text()}. It goes on.")
        self._others = self._find()
        if self._others:
            self._say("These take less, by the same reckoning:")
        for other in self._others:
            self._say(f"  {format_duration(ratio * other.seconds):>11}  {other.command}")


def evaluations_left(step: int, steps: int, every: int | None) -> int:
    """Return how often a run evaluates after `step`: at every multiple, and at its end."""
    if step >= steps:
        return 0
    due = 0 if every is None else steps // every - step // every
    return due + (every is None or steps % every != 0)
