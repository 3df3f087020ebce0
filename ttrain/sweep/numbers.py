"""The main numbers of a job, by its task: what training, a plan or a benchmark has left behind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ttrain.config.schema import Config, SweepConfig
from ttrain.core.files import read_json
from ttrain.core.names import did_you_mean
from ttrain.train.logging.meter import loop_speed
from ttrain.train.logging.metrics import METRICS, read_metrics

TRAINING = ("step", "train/loss", "val/loss", "val/bits_per_byte", "best_val_loss", "tokens_per_s")
_OUTPUT = {"bench": "bench.out", "plan": "plan.json", "verify": "verify.json"}  # key that says where results go
_OBJECTIVE = {"bench": "times_as_fast", "plan": "step_ms"}  # where none of the job's numbers is called sweep.objective

Numbers = dict[str, Any]


def output_override(config: Config, folder: Path, attempt: int) -> tuple[str | None, Path | None]:
    """Return the key that brings the results of a job to `folder`, None where none does, and where they are.

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
    """Return the problem with sweep.objective where a job is done and has no such number.

    The checks of the config know the numbers of training.
    """
    known = [name for name, value in numbers.items() if as_number(value) is not None]
    if task == "train" or not known or objective_key(task, numbers, wanted) in known:
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
