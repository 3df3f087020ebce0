"""Outcome of the jobs: reasons of failures, main numbers by task, one table for the terminal and as CSV, and plots."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from ttrain.config.schema import Config, SweepConfig
from ttrain.core.files import read_json, replace_file
from ttrain.core.names import did_you_mean
from ttrain.core.tables import fitted, window
from ttrain.core.units import format_bytes, format_count, format_duration
from ttrain.sweep.jobs import PRUNED, Job, SweepFolder
from ttrain.train.logging.chart import Series, line_chart
from ttrain.train.logging.metrics import METRICS, loop_speed, read_metrics

_LOG_BYTES = 1 << 18
_WIDE = 10.0  # an axis that spans more than this factor is drawn on a logarithmic scale
_SHOWN = 160  # characters of a reason; sweep.csv has all of them
_LAST = ("objective", "seconds", "exit_code", "reason", "folder")
_MANY = 100_000  # counts from here on are rounded
TRAINING = ("step", "train/loss", "val/loss", "val/bits_per_byte", "best_val_loss", "tokens_per_s")
_OUTPUT = {"bench": "bench.out", "plan": "plan.json", "verify": "verify.json"}  # key that says where results go
_OBJECTIVE = {"bench": "times_as_fast", "plan": "step_ms"}  # where none of the job's numbers is called sweep.objective

Numbers = dict[str, Any]


def failure_text(log: Path, start: int) -> tuple[str, str | None]:
    """Return the last message of a job that failed, and its traceback if any; the log is read from `start` on."""
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
        found.append({**first, **status.get("numbers", columns(job.task, {})), **last})
    return found


def write_table(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write the records as CSV."""
    text = io.StringIO()
    names = sorted(dict.fromkeys(key for record in records for key in record), key=lambda key: key in _LAST)
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    replace_file(path, text.getvalue())


def print_table(records: Sequence[dict[str, Any]], axes: Sequence[str], objective: str) -> None:
    """Print one line a job, with every number that some job has."""
    hidden = {"job", "state", *axes, *_LAST, objective}
    numbers = [key for record in records for key, value in record.items() if key not in hidden and value is not None]
    judged = any(record["objective"] is not None for record in records)
    shown = {**{key: key for key in numbers}, **({"objective": objective} if judged else {})}
    lines = [["job", *axes, "state", *shown.values(), "time", "reason"]]
    for record in records:
        reason = str(record["reason"] or "").splitlines()
        cells = [
            str(record["job"]), *(str(record[key]) for key in axes), record["state"],
            *(cell(key, record.get(key)) for key in shown),
            format_duration(record["seconds"]) if record["seconds"] else "", reason[0][:_SHOWN] if reason else "",
        ]  # fmt: skip
        lines.append(cells)
    print(*fitted(lines, window(), range(len(lines[0]))), sep="\n")


def cell(key: str, value: Any) -> str:
    """Return a number of a run by its name as tables show it."""
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
    """Draw evaluations.svg: the objective at every evaluation of each job, up to where it finished or was pruned."""
    runs = [folder.path / str(folder.status(job).get("run", job.name)) for job in jobs]
    series = [
        Series(str(job.number), list(enumerate(measured(run, objective), 1)))
        for job, run in zip(jobs, runs, strict=True)
    ]
    chart = line_chart(series, f"{objective} of {len(jobs)} jobs", "evaluation", objective)
    if chart:
        replace_file(folder.path / "evaluations.svg", chart + "\n")


def output_override(config: Config, folder: Path, attempt: int) -> tuple[str | None, Path | None]:
    """Return the key that puts the results of a job into `folder`, None where none does, and their place.

    A benchmark refuses a folder that holds results, so each attempt has one of its own.
    """
    key = _OUTPUT.get(config.task.name)
    if key is None:
        return None, None
    section, _, name = key.partition(".")
    given = getattr(getattr(config, section), name)
    if given is not None:
        return None, Path(given)
    return key, folder / (f"bench_{attempt}" if section == "bench" else name.replace("json", f"{section}.json"))


def numbers_of(task: str, run: Path, output: Path | None) -> Numbers:
    """Return numbers by name, for the columns of a table; those of training are always there, None where not known."""
    if task == "plan" and output is not None:
        return _plan(read_json(output))
    if task == "bench" and output is not None:
        return dict(read_json(output / "results.json").get("numbers") or {})
    if task != "train":
        return {}
    results = read_json(run / "summary.json")
    for line in read_metrics(run / METRICS) if not results else ():  # the newest of each
        results.update({key: value for key, value in line.items() if value is not None})
    results["tokens_per_s"] = loop_speed(results.get("tokens"), results.get("seconds")) or results.get("tokens_per_s")
    return {**results, **{key: results.get(key) for key in TRAINING}}


def columns(task: str, numbers: Numbers) -> Numbers:
    """Return the numbers that a table has room for."""
    return {key: numbers.get(key) for key in TRAINING} if task == "train" else numbers


def objective_key(task: str, numbers: Numbers, wanted: str) -> str:
    """Return the number that judges a job: the one wanted, or where none was asked for the usual one of its task."""
    return _OBJECTIVE.get(task, wanted) if wanted == SweepConfig().objective and wanted not in numbers else wanted


def objective_problem(task: str, numbers: Numbers, wanted: str) -> str | None:
    """Return the problem with sweep.objective where a job is done, has numbers, and none of that name."""
    known = [name for name, value in numbers.items() if as_number(value) is not None]
    if wanted == SweepConfig().objective or not known or wanted in known:
        return None
    return f"sweep.objective={wanted}: task={task} has no such number. {did_you_mean(wanted, known)}"


def measured(run: Path, objective: str) -> list[float]:
    """Return a run's values of an objective, oldest first, with NaN for a number that is not finite."""
    key = "val/loss" if objective == "best_val_loss" else objective
    found = [line[key] for line in read_metrics(run / METRICS) if key in line]
    return [math.nan if value is None else float(value) for value in found]


def as_number(value: Any) -> float | None:
    """Return a float where it is a number, else None."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _plan(plan: dict[str, Any]) -> Numbers:
    expected = plan.get("expected") or {}
    totals = {"parameters": "parameters", "flops_per_step": "flops_per_step", "memory": "memory_bytes"}
    found: Numbers = {name: plan.get(key, {}).get("total") for key, name in totals.items()}
    found |= {key: expected.get(key) for key in ("step_ms", "tokens_per_s")}
    largest = (plan.get("largest") or {}).items()
    found |= {f"largest_{key}": value.get("value") for key, value in largest if isinstance(value, dict)}
    return {key: value for key, value in found.items() if value is not None}
