"""What became of the jobs: reasons of failures, one table for the terminal and as CSV, a plot per swept key."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ttrain.core.units import format_count, format_duration
from ttrain.sweep.folder import SweepFolder
from ttrain.sweep.jobs import Job
from ttrain.train.chart import Series, line_chart
from ttrain.train.files import replace_file
from ttrain.train.metrics import read_metrics

_LOG_BYTES = 1 << 18
_WIDE = 10.0  # an axis that spans more than this factor is drawn on a logarithmic scale
_SHOWN = 160  # characters of a reason; sweep.csv has all of them
_PLAIN_WIDTH = 240  # characters of a table that goes to a file
COLUMNS = ("step", "train/loss", "val/loss", "best_val_loss", "tokens_per_s")


def objective_of(run: Path, key: str) -> float | None:
    """A number of the run's summary.json; None where it has none."""
    value = read_summary(run).get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def read_summary(run: Path) -> dict[str, Any]:
    """The content of summary.json; empty without one."""
    try:
        summary = json.loads((run / "summary.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def failure_text(log: Path, start: int) -> tuple[str, str | None]:
    """What a job said last about its failure, and its traceback where there is one; the log is read from `start` on."""
    try:
        with open(log, "rb") as file:
            file.seek(max(start, log.stat().st_size - _LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return "", None
    said = re.search(r"^ttrain: (?!.*^ttrain: )(.*)", text, re.MULTILINE | re.DOTALL)
    if said:
        return said[1].strip(), None
    at = text.rfind("Traceback (most recent call last):")
    trace = text[at:].strip() if at >= 0 else None
    return (trace.splitlines()[-1].strip() if trace else ""), trace


def rows(folder: SweepFolder, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """One record a job: its number, swept values, state and results."""
    found = []
    for job in jobs:
        status = folder.status(job)
        run = folder.path / str(status.get("run", job.name))
        results = read_summary(run) or _newest(run)
        found.append(
            {
                "job": job.number,
                **job.axes,
                "state": status.get("state", "missing"),
                **{key: results.get(key) for key in COLUMNS},
                "objective": status.get("objective"),
                "seconds": status.get("seconds"),
                "exit_code": status.get("exit_code"),
                "reason": status.get("reason"),
                "folder": folder.job_folder(job).name,
            }
        )
    return found


def _newest(run: Path) -> dict[str, Any]:
    newest: dict[str, Any] = {}
    for line in read_metrics(run / "metrics.jsonl"):
        newest.update({key: value for key, value in line.items() if value is not None})
    return newest


def write_table(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """The records as CSV."""
    text = io.StringIO()
    names = list(dict.fromkeys(key for record in records for key in record))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    replace_file(path, text.getvalue())


def print_table(records: Sequence[dict[str, Any]], objective: str) -> None:
    """One line a job on the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    fixed = {"job", "state", *COLUMNS, "objective", "seconds", "exit_code", "reason", "folder"}
    axes = [key for key in records[0] if key not in fixed] if records else []
    for name in ("job", *axes, "state", "step", "train/loss", objective, "tokens/s", "time", "reason"):
        table.add_column(name, no_wrap=name != "reason")  # where there is no room, the reason gives way
    for record in records:
        reason = str(record["reason"] or "").splitlines()
        cells = [
            str(record["job"]), *(str(record[key]) for key in axes), record["state"], _cell(record["step"]),
            _cell(record["train/loss"]), _cell(record["objective"]),
            format_count(record["tokens_per_s"]) if record["tokens_per_s"] else "",
            format_duration(record["seconds"]) if record["seconds"] else "", reason[0][:_SHOWN] if reason else "",
        ]  # fmt: skip
        table.add_row(*map(Text, cells))
    Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH).print(table)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def draw_axes(folder: Path, records: Sequence[dict[str, Any]], axes: Sequence[str], objective: str) -> list[Path]:
    """One SVG per swept key: the objective of every finished job, and the mean of each value."""
    drawn = []
    for key in axes:
        points = [(r[key], float(r["objective"])) for r in records if r.get(key) and r["objective"] is not None]
        chart = _axis_chart(key, points, objective)
        if chart:
            path = folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', key)}.svg"
            replace_file(path, chart + "\n")
            drawn.append(path)
    return drawn


def _axis_chart(key: str, points: Sequence[tuple[str, float]], objective: str) -> str:
    numbers = [_number(text) for text, _ in points]
    if all(number is not None for number in numbers):
        placed = [(float(x), y) for x, (_, y) in zip(numbers, points, strict=True) if x is not None]
        values = [x for x, _ in placed]
        log = bool(values) and min(values) > 0 and max(values) / min(values) > _WIDE
        return line_chart(_cloud(placed), f"{objective} over {key}", key, objective, log_x=log)
    names = list(dict.fromkeys(text for text, _ in points))
    placed = [(float(names.index(text)), y) for text, y in points]
    return line_chart(_cloud(placed), f"{objective} over {key}", key, objective, categories=names)


def _cloud(points: Sequence[tuple[float, float]]) -> list[Series]:
    means = []
    for x in sorted({x for x, _ in points}):
        ys = [y for other, y in points if other == x]
        means.append((x, sum(ys) / len(ys)))
    return [Series("jobs", points, line=False), Series("mean", means, dashed=True)]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
