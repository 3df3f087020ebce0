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
            except ValueError:
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
    return isinstance(value, dict) and isinstance(value.get("step"), int)
