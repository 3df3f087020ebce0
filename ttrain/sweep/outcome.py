"""Outcome of the jobs: reasons of failures, one table for the terminal and as CSV, a plot per swept key."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from ttrain.core.files import replace_file
from ttrain.core.tables import fitted, window
from ttrain.core.units import format_bytes, format_count, format_duration
from ttrain.sweep.folder import PRUNED, Status, SweepFolder
from ttrain.sweep.jobs import Job
from ttrain.sweep.numbers import TRAINING, Numbers, columns, measured, numbers_of
from ttrain.train.logging.chart import Series, line_chart

_LOG_BYTES = 1 << 18
_WIDE = 10.0  # an axis that spans more than this factor is drawn on a logarithmic scale
_SHOWN = 160  # characters of a reason; sweep.csv has all of them
_LAST = ("objective", "seconds", "exit_code", "reason", "folder")
_MANY = 100_000  # counts from here on are rounded


def failure_text(log: Path, start: int) -> tuple[str, str | None]:
    """Return a job's last words on its failure, and its traceback if any; the log is read from `start` on."""
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
    """Return one record a job: its number, swept values, state and results."""
    found = []
    for job, status in ((job, folder.status(job)) for job in jobs):
        first = {"job": job.number, **job.axes, "state": status.get("state", "missing")}
        last = {key: status.get(key) for key in _LAST} | {"folder": job.name}
        found.append({**first, **columns(*job_numbers(folder, job, status)), **last})
    return found


def job_numbers(folder: SweepFolder, job: Job, status: Status) -> tuple[str, Numbers]:
    """Return the task and the numbers of a job, by what its status says of where they are."""
    task, output = str(status.get("task", "train")), status.get("output")
    run = folder.path / str(status.get("run", job.name))
    return task, numbers_of(task, run, None if output is None else folder.path / str(output))


def write_table(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write the records as CSV."""
    text = io.StringIO()
    names = sorted(dict.fromkeys(key for record in records for key in record), key=lambda key: key in _LAST)
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    replace_file(path, text.getvalue())


def print_table(records: Sequence[dict[str, Any]], axes: Sequence[str], objective: str) -> None:
    """Print one line a job."""
    shown = {"step": "step", "train/loss": "train/loss", "objective": objective, "tokens_per_s": "tokens/s"}
    training = any(record.get("step") is not None for record in records)
    if any(record.get("val/bits_per_byte") is not None for record in records):
        shown["val/bits_per_byte"] = "bits/byte"
    hidden = {"job", "state", *axes, *_LAST, *(TRAINING if training else ())}
    numbers = [key for record in records for key, value in record.items() if key not in hidden and value is not None]
    shown = {**(shown if training or not numbers else {}), **{key: key for key in numbers}}
    lines = [["job", *axes, "state", *shown.values(), "time", "reason"]]
    for record in records:
        reason = str(record["reason"] or "").splitlines()
        cells = [
            str(record["job"]), *(str(record[key]) for key in axes), record["state"],
            *(_cell(key, record.get(key)) for key in shown),
            format_duration(record["seconds"]) if record["seconds"] else "", reason[0][:_SHOWN] if reason else "",
        ]  # fmt: skip
        lines.append(cells)
    for _, line in fitted(lines, window(), range(len(lines[0]))):
        print(line)


def _cell(key: str, value: Any) -> str:
    if value is None or value == "":
        return ""
    if key.endswith("_bytes"):
        return format_bytes(int(value))
    if key == "tokens_per_s" or (isinstance(value, int) and value >= _MANY):
        return format_count(value)
    return f"{value:.4g}" if key.endswith("_ms") else f"{value:.4f}" if isinstance(value, float) else str(value)


def draw_axes(folder: Path, records: Sequence[dict[str, Any]], axes: Sequence[str], objective: str) -> None:
    """Draw one SVG per swept key: the objective of every finished job, and the mean of each value."""
    for key in axes:
        judged = [r for r in records if r.get(key) and r["objective"] is not None and r["state"] != PRUNED]
        points: list[tuple[Any, float]] = [(r[key], float(r["objective"])) for r in judged]
        with suppress(ValueError):  # values that are words stay words
            points = [(float(text), value) for text, value in points]
        xs = dict.fromkeys(x for x, _ in points)
        numeric = bool(xs) and not any(isinstance(x, str) for x in xs)
        log = numeric and min(xs) > 0 and max(xs) / min(xs) > _WIDE
        means = [(x, fmean(y for other, y in points if other == x)) for x in (sorted(xs) if numeric else xs)]
        series = [Series("jobs", points, line=False), Series("mean", means, dashed=numeric, line=numeric)]
        chart = line_chart(series, f"{objective} over {key}", key, objective, log_x=log)
        if chart:
            replace_file(folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', key)}.svg", chart + "\n")


def draw_evaluations(folder: SweepFolder, jobs: Sequence[Job], objective: str) -> None:
    """Draw evaluations.svg: what each job's evaluations found, up to where it finished or was pruned."""
    series = [Series(str(job.number), list(enumerate(measured(folder.run_of(job), objective), 1))) for job in jobs]
    chart = line_chart(series, f"{objective} of {len(jobs)} jobs", "evaluation", objective)
    if chart:
        replace_file(folder.path / "evaluations.svg", chart + "\n")
