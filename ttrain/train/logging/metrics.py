"""The metrics and events of a run, one JSON object per line, and the speed of its steps.

metrics.jsonl has a line per recorded step; only a resume cuts it. events.jsonl tells what happened: every attempt,
restart, failed save, skipped step and rollback has a line with the time, the kind, a message for people, and the step
where there is one. The processes that watch a run append to the same file.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partialmethod
from pathlib import Path
from typing import IO, Any

from ttrain.core.files import replace_file

METRICS = "metrics.jsonl"

Metrics = dict[str, float | int | None]


class MetricsFile:
    """Appends lines; a line is handed to the system at once, so that a killed run loses none."""

    def __init__(self, path: Path, keeps: bool = True) -> None:
        """A file that is not kept takes in lines and drops them."""
        self.path, self._keeps = path, keeps
        self._open()

    def _open(self) -> None:
        place = self.path if self._keeps else os.devnull
        self._file: IO[str] = open(place, "a", encoding="utf-8")  # noqa: SIM115 - held for as long as the run

    def append(self, metrics: Metrics) -> None:
        """Add a line. NaN and infinities are written as null, because JSON has none."""
        finite = {key: value if value is None or math.isfinite(value) else None for key, value in metrics.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()

    def cut(self, step: int, evaluated: bool) -> int:
        """Do what `cut_metrics` does, and go on appending."""
        self._file.close()
        removed = cut_metrics(self.path, step, evaluated) if self._keeps else 0
        self._open()
        return removed

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every complete line. A last line that a kill cut off is passed over."""
    return (metrics for _, metrics in read_lines(path) if _is_metrics(metrics))


def read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield every line of a file with the JSON value in it, None for a line that a kill cut off or that has none."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                yield line, json.loads(line) if line.endswith("\n") else None
            except (ValueError, RecursionError):
                yield line, None


def cut_metrics(path: Path, step: int, evaluated: bool = True) -> int:
    """Remove the lines that a resumed run writes anew, and return how many there were.

    Those are of the steps after `step`, and its evaluation where that came too late for the checkpoint.
    """
    lines = list(read_lines(path))
    kept = [line for line, metrics in lines if _is_metrics(metrics) and _is_before(metrics, step, evaluated)]
    if len(kept) < len(lines):
        replace_file(path, "".join(kept))
    return len(lines) - len(kept)


def _is_before(metrics: Metrics, step: int, evaluated: bool) -> bool:
    return int(metrics["step"] or 0) <= (step if evaluated or "val/loss" not in metrics else step - 1)


def _is_metrics(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        return False
    return all(isinstance(number, int | float | None) for number in value.values())


EVAL = "eval/"  # begins what is measured of an entry of train.evals: eval/<name>/<what>
EVENTS = "events.jsonl"

Event = dict[str, Any]


class Events:
    """Appends to the events of a run. A line that can't be written is lost, never the run."""

    def __init__(self, run: Path | None, say: Callable[[str], None] = lambda message: None) -> None:
        """Append to the events of `run`, or nowhere where it is None. `say` shows a message to the user."""
        self._path, self._say = None if run is None else run / EVENTS, say
        self.on_event: Callable[[Event], None] = lambda event: None  # gets every event that is added

    def tell(self, kind: str, message: str, step: int | None = None, mark: str = "", **facts: Any) -> None:
        """Add a line, and show its message."""
        self.add(kind, message, step, **facts)
        self._say(mark + message)

    warn = partialmethod(tell, mark="WARNING: ")

    def add(self, kind: str, message: str, step: int | None = None, **facts: Any) -> None:
        """Add a line; `facts` are further JSON values."""
        event: Event = {"time": datetime.now().astimezone().isoformat(timespec="seconds"), "kind": kind}
        event |= ({} if step is None else {"step": step}) | {"message": message} | facts
        self.on_event(event)
        if self._path is not None:
            with suppress(OSError), open(self._path, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(json.dumps(event, ensure_ascii=False) + "\n")


def read_events(run: Path) -> Iterator[Event]:
    """Yield every complete line of a run's events."""
    events = (event for _, event in read_lines(run / EVENTS) if isinstance(event, dict))
    return (each for each in events if isinstance(each.get("kind"), str) and isinstance(each.get("step", 0), int))


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
