"""Read from a run directory what is known of its run, without loading a model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ttrain.core.errors import CheckpointError
from ttrain.core.files import lock_file, read_json
from ttrain.train.checkpoint.retention import list_checkpoints
from ttrain.train.logging.metrics import METRICS, Event, loop_speed, read_events, read_metrics
from ttrain.train.runs.run_directory import LOCK, RECORD, part_of, read_attempts, read_config

_NO_RUNS_IN = {"checkpoints", "wandb", ".hydra"}


@dataclass
class RunInfo:
    """One run.

    `state` is running (a process holds it), finished, resumable (stopped, with a checkpoint), interrupted (stopped
    before it had one), failed (it ended with an error; where it has a checkpoint it can be resumed too), dry_run (its
    device computed no values), or new (nothing was trained yet).
    """

    path: Path
    state: str
    step: int
    steps: int | None
    checkpoint: int | None  # step of the newest one, by its manifest
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    def newest(self, key: str) -> float | None:
        """The last recorded value of a metric."""
        return next((line[key] for line in reversed(self.metrics) if line.get(key) is not None), None)

    def shown(self, key: str) -> str:
        """The last recorded value of a metric as text, empty where there is none."""
        value = self.newest(key)
        return "" if value is None else f"{value:.4f}"

    @property
    def tokens_per_s(self) -> float | None:
        """Over the time of the loop so far, all attempts."""
        done = self.summary if self.summary.get("step", -1) >= self.step else {}
        tokens, seconds = ((done.get(key) or self.newest(key)) for key in ("tokens", "seconds"))
        return loop_speed(tokens, seconds)

    @property
    def model(self) -> str:
        """Return the name that the user chose, such as nano-gpt; without one, the name in the model's config."""
        chosen = self.attempts[-1].get("model") if self.attempts else None
        return str(chosen or self.summary.get("model") or self.config.get("model", {}).get("name", ""))

    @property
    def caution(self) -> str:
        """Warning about numbers that some attempt got from no real device; empty where there is none."""
        devices = [part_of(attempt, "device") for attempt in self.attempts]
        simulated = [device for device in devices if device.get("mode") == "simulator"]
        return f"SIMULATED on {simulated[-1].get('name')}: {simulated[-1].get('note')}" if simulated else ""

    @property
    def reason(self) -> str:
        """Reason of a failure, or the last event."""
        if self.state == "dry_run":
            return str(self.summary.get("reason") or self.summary.get("note", ""))
        if self.state not in ("failed", "resumable", "interrupted"):
            return ""
        wanted = ("failed", "gave_up", "interrupted", "pruned")
        return next((str(e.get("message", "")) for e in reversed(self.events) if e["kind"] in wanted), "")

    @property
    def updated(self) -> datetime | None:
        """Time of the last record."""
        files = [self.path / name for name in (METRICS, "events.jsonl", RECORD)]
        times = [file.stat().st_mtime for file in files if file.exists()]
        return datetime.fromtimestamp(max(times)) if times else None


def read_run(path: Path) -> RunInfo:
    """Raises CheckpointError where the folder is not a run."""
    if not (path / RECORD).is_file():
        raise CheckpointError(f"{path} is not a run of ttrain: it has no {RECORD}. Give the folder of a run.")
    try:
        config = read_config(path)
    except CheckpointError:  # a run that was stopped before its first step
        config = {}
    metrics, events = list(read_metrics(path / METRICS)), list(read_events(path))
    summary = read_json(path / "summary.json")
    found, _ = list_checkpoints(path / "checkpoints")
    checkpoint = found[-1].step if found else None
    step = max([line["step"] for line in metrics] + [checkpoint or 0])
    steps = config.get("train", {}).get("steps")
    finished = bool(summary) and summary.get("step", -1) >= step and summary.get("steps") == steps
    state = _state(path, finished, events, checkpoint, step)
    if state == "new" and summary.get("computes") is False:
        state = "dry_run"
    return RunInfo(path, state, step, steps, checkpoint, config, metrics, events, read_attempts(path), summary)


def find_runs(root: Path) -> Iterator[Path]:
    """Run directories below a folder, sorted by path."""
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _NO_RUNS_IN)
        if RECORD in files:
            yield Path(folder)


def _state(path: Path, finished: bool, events: list[Event], checkpoint: int | None, step: int) -> str:
    ends = [event["kind"] for event in events if event["kind"] in ("started", "interrupted", "failed", "gave_up")]
    last = ends[-1] if ends else "started"
    if _held(path):
        return "running"
    if finished:
        return "finished"
    if last in ("failed", "gave_up"):
        return "failed"
    if checkpoint is not None:
        return "resumable"
    return last if last == "interrupted" else "failed" if step else "new"


def _held(path: Path) -> bool:
    """True if a process holds the run now."""
    try:
        with open(path / LOCK, "a", encoding="utf-8") as file:
            return not lock_file(file)
    except OSError:  # not ours to write: nobody can tell
        return False
