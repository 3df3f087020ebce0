"""metrics.jsonl: one JSON object per recorded step, appended and never rewritten, except when a resume cuts it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
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
        """Adds a line. NaN and infinities are written as null, because JSON has none."""
        finite = {key: value if value is None or math.isfinite(value) else None for key, value in metrics.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Waits until all lines are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def cut(self, step: int, evaluated: bool) -> int:
        """Does what `cut_metrics` does and goes on appending."""
        self._file.close()
        removed = cut_metrics(self.path, step, evaluated) if self._keeps else 0
        self._open()
        return removed

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Every complete line. A last line that a kill cut off is passed over."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            metrics = _parse(line)
            if metrics is not None:
                yield metrics


def cut_metrics(path: Path, step: int, evaluated: bool = True) -> int:
    """Removes the lines that a resumed run writes anew, and returns how many there were.

    Those are of the steps after `step`, and its evaluation where that came too late for the checkpoint.
    """
    if not path.exists():
        return 0
    kept, removed = [], 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            metrics = _parse(line)
            newest = step if metrics is None or evaluated or "val/loss" not in metrics else step - 1
            if metrics is not None and metrics["step"] <= newest:
                kept.append(line)
            else:
                removed += 1
    if removed:
        replace_file(path, "".join(kept))
    return removed


def _parse(line: str) -> dict[str, Any] | None:
    if not line.endswith("\n"):
        return None
    try:
        metrics = json.loads(line)
    except ValueError:
        return None
    return metrics if isinstance(metrics, dict) and isinstance(metrics.get("step"), int) else None
