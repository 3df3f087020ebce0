"""Outcome of the jobs: reasons of failures, one table for the terminal and as CSV, a plot per swept key."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
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
    """One record a job: its number, swept values, state and results."""
    found = []
    for job in jobs:
        status = folder.status(job)
        task, numbers = job_numbers(folder, job, status)
        found.append(
            {
                "job": job.number,
                **job.axes,
                "state": status.get("state", "missing"),
                **columns(task, numbers),
                "objective": status.get("objective"),
                "seconds": status.get("seconds"),
                "exit_code": status.get("exit_code"),
                "reason": status.get("reason"),
                "folder": folder.job_folder(job).name,
            }
        )
    return found


def job_numbers(folder: SweepFolder, job: Job, status: Status) -> tuple[str, Numbers]:
    """Task and numbers of a job, by what its status says of where they are."""
    task, output = str(status.get("task", "train")), status.get("output")
    run = folder.path / str(status.get("run", job.name))
    return task, numbers_of(task, run, None if output is None else folder.path / str(output))


def write_table(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """The records as CSV."""
    text = io.StringIO()
    names = sorted(dict.fromkeys(key for record in records for key in record), key=lambda key: key in _LAST)
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    replace_file(path, text.getvalue())


def print_table(records: Sequence[dict[str, Any]], axes: Sequence[str], objective: str) -> None:
    """One line a job on the terminal."""
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


def draw_axes(folder: Path, records: Sequence[dict[str, Any]], axes: Sequence[str], objective: str) -> list[Path]:
    """One SVG per swept key: the objective of every finished job, and the mean of each value."""
    drawn = []
    for key in axes:
        judged = [r for r in records if r.get(key) and r["objective"] is not None and r["state"] != PRUNED]
        points = [(r[key], float(r["objective"])) for r in judged]
        chart = _axis_chart(key, points, objective)
        if chart:
            path = folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', key)}.svg"
            replace_file(path, chart + "\n")
            drawn.append(path)
    return drawn


def draw_evaluations(folder: SweepFolder, jobs: Sequence[Job], objective: str) -> None:
    """evaluations.svg: what each job's evaluations found, up to where it finished or was pruned."""
    runs = {job.number: folder.path / str(folder.status(job).get("run", job.name)) for job in jobs}
    series = [Series(str(number), list(enumerate(measured(run, objective), 1))) for number, run in runs.items()]
    chart = line_chart(series, f"{objective} of {len(jobs)} jobs", "evaluation", objective)
    if chart:
        replace_file(folder.path / "evaluations.svg", chart + "\n")


def _axis_chart(key: str, points: Sequence[tuple[str, float]], objective: str) -> str:
    numbers = [number for text, _ in points if (number := _number(text)) is not None]
    numeric = bool(points) and len(numbers) == len(points)
    xs: list[Any] = numbers if numeric else [text for text, _ in points]
    placed = [(x, y) for x, (_, y) in zip(xs, points, strict=True)]
    means = [(x, fmean(y for other, y in placed if other == x)) for x in (sorted(set(xs)) if numeric else set(xs))]
    log = numeric and min(numbers) > 0 and max(numbers) / min(numbers) > _WIDE
    series = [Series("jobs", placed, line=False), Series("mean", means, dashed=numeric, line=numeric)]
    return line_chart(series, f"{objective} over {key}", key, objective, log_x=log)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
