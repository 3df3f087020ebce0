"""The run directory: claimed by one process, self-contained, and with relative paths only, so that it can be moved.

config.yaml     the resolved config of the newest attempt
run.json        one environment record per attempt (an attempt is one start or resume of the run)
metrics.jsonl   one line per recorded step: the truth that loggers are views of
checkpoints/    see checkpoint.py
plan.txt  summary.json  loss.png

What is known of a run is read from there without loading a model.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from errno import EACCES
from pathlib import Path
from typing import IO, Any

from ttrain.core.errors import CheckpointError, UserError, raised_as
from ttrain.core.files import lock_file, read_json, read_object, replace_file, to_json
from ttrain.core.folders import dated_folder
from ttrain.parallel.world import World
from ttrain.train.checkpoint.checkpoint import UNFINISHED
from ttrain.train.checkpoint.retention import list_checkpoints, put_back_replaced
from ttrain.train.logging.metrics import METRICS, Event, loop_speed, read_events, read_metrics

RECORD = "run.json"
LOCK = ".lock"
_RUNS = Path("outputs")  # folder of runs whose directory nobody names
_STARTING = ".starting"  # marks a folder that is about to become a run
_LOOKS, _LOOK_SECONDS = 5, 0.05  # at a lock: who lists runs holds each for a moment


class RunDirectory:
    """A directory that this process holds until `close`. Without a lock another rank leads the run: it is only read."""

    def __init__(self, path: Path, lock: IO[str] | None = None) -> None:
        self.path, self._lock = path, lock
        self.leads = lock is not None  # whether this process writes the run's files
        self.events = path if self.leads else None  # log in which this process notes events
        self.checkpoints, self.metrics, self.config = path / "checkpoints", path / METRICS, path / "config.yaml"
        self.summary, self.loss_curve, self.plan = path / "summary.json", path / "loss.png", path / "plan.txt"
        self.note: str | None = None  # what the user should know of how it was claimed
        self._made = False  # by this process, and nothing worth keeping is in it yet

    @classmethod
    def claim(
        cls, wanted: str | None, label: str, fill: Callable[[RunDirectory], None] = lambda run: None
    ) -> RunDirectory:
        """Makes and holds a new run directory. Raises UserError where that can't be done.

        `fill` writes what a resume of the run needs: only then comes the record, without which it is no run.

        `wanted` is the directory that the user asked for; it may exist if it holds no run, or one that ended before it
        had anything to lose. Without it the directory is `outputs/<date>/<time>_<label>`, with a number appended where
        another run took that name first.
        """
        made = wanted is None or not Path(wanted).exists()
        with _writing(_RUNS):
            path = dated_folder(_RUNS, label) if wanted is None else Path(wanted)
        run = cls._hold(path)
        run._made = made
        try:
            with _writing(path):
                run._require_unused()
                run._start(fill)
        except BaseException:
            run.close()
            raise
        return run

    def _require_unused(self) -> None:
        files = (self.config, self.metrics, self.summary, self.plan, self.loss_curve)
        if (self.path / RECORD).exists():
            if not self._has_nothing_to_lose():
                again = "continue it" if any(_entries(self.checkpoints)) else "start it again (it has no checkpoint)"
                told = f"run.dir={self.path} already holds a run. Give resume=auto to {again}, or another run.dir."
                raise UserError(told)
            self.note = f"{self.path} held a run that ended before it had done anything; this one takes its place."
        elif (self.path / _STARTING).exists():  # killed before it was a run
            shutil.rmtree(self.checkpoints, ignore_errors=True)
        elif theirs := [*_entries(self.checkpoints)[:1], *(file for file in files if file.exists())]:
            told = f"run.dir={self.path} holds {theirs[0].name} but no {RECORD}, so it is not a run"
            raise UserError(f"{told}, and a run would write over it. Give run.dir=<a new folder>.")

    def _has_nothing_to_lose(self) -> bool:
        """True if the run that is there has neither checkpoint nor summary nor a recorded step with a finite loss."""
        saved = [path for path in _entries(self.checkpoints) if not path.name.startswith(UNFINISHED)]
        trained = any(line.get("train/loss") is not None for line in read_metrics(self.metrics))
        return not (saved or trained or self.summary.exists() or self.loss_curve.exists())

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Holds the directory of an existing run, to continue it. Raises CheckpointError where there is none."""
        if not path.is_dir() or not (path / RECORD).exists():
            raise CheckpointError(f"{path} is not a run of ttrain: it has no {RECORD}. Give the folder of a run.")
        run = cls._hold(path)
        for part in (path, run.checkpoints, run.metrics, path / RECORD):
            if part.exists() and not os.access(part, os.W_OK):
                run.close()
                with _writing(path):
                    raise PermissionError(EACCES, f"no permission to write {part.name or part}")
        put_back_replaced(run.checkpoints)
        return run

    @classmethod
    def _hold(cls, path: Path) -> RunDirectory:
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = open(path / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - held for as long as the run
        if not _locked(lock):
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise UserError(f"{path} is in use by process {holder}. Wait for it, or give another run.dir.")
        lock.truncate(0)
        lock.write(f"{os.getpid()} on {socket.gethostname()}")
        lock.flush()
        return cls(path, lock)

    @classmethod
    def led(cls, world: World, make: Callable[[], RunDirectory | None]) -> RunDirectory | None:
        """Return what the leading rank makes; to the others it is a directory that they only read."""
        made: list[RunDirectory | None] = []

        def lead() -> str:
            made.append(make())
            return "" if made[0] is None else str(made[0].path)

        path = world.once(lead)
        return made[0] if made else cls(Path(path)) if path else None

    def _start(self, fill: Callable[[RunDirectory], None]) -> None:
        try:
            (self.path / _STARTING).touch()
            (self.path / RECORD).unlink(missing_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            fill(self)
            replace_file(self.path / RECORD, to_json({"attempts": []}))
            (self.path / _STARTING).unlink()
        except BaseException:
            self.discard()
            raise

    def write_config(self, config: dict[str, Any]) -> None:
        """Writes the resolved config."""
        import yaml

        plain = "\x85" not in json.dumps(config, ensure_ascii=False)  # YAML reads U+0085 as a line break
        self.write(self.config, yaml.safe_dump(config, sort_keys=False, allow_unicode=plain, width=120))

    def record(self, config: dict[str, Any], attempt: dict[str, Any]) -> None:
        """Writes the resolved config, and adds the environment record of this attempt."""
        self.write_config(config)
        if self.leads:
            self.write(self.path / RECORD, {"attempts": [*self.attempts(), attempt]})

    def attempts(self) -> list[dict[str, Any]]:
        """The environment record of every attempt so far."""
        told, advice = f"{self.path / RECORD} is damaged", 'Put {"attempts": []} there.'
        with raised_as(CheckpointError, told, advice, (CheckpointError, LookupError, TypeError)):
            return list(read_object(self.path / RECORD)["attempts"])

    def write(self, file: Path, content: str | dict[str, Any]) -> None:
        """Replace one of the run's files with a text or a JSON object, where this process leads the run."""
        if self.leads:
            replace_file(file, content if isinstance(content, str) else to_json(content))

    def keep(self) -> None:
        """Mark the directory as worth keeping from now on."""
        self._made = False

    def discard(self) -> bool:
        """Removes the directory if this process made it and there is nothing to keep; whether it did."""
        if not self._made:
            return False
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)
        return True

    def close(self) -> None:
        """Lets go of the directory; calling it twice does nothing."""
        if self._lock is not None:
            self._lock.close()  # releases the lock
            self._lock = None


def _locked(lock: IO[str]) -> bool:
    for _ in range(_LOOKS - 1):
        if lock_file(lock):
            return True
        time.sleep(_LOOK_SECONDS)
    return lock_file(lock)


def read_attempts(run: Path) -> list[dict[str, Any]]:
    """Read the attempts that run.json tells of; it may hold anything."""
    attempts = read_json(run / RECORD).get("attempts")
    return [each for each in attempts if isinstance(each, dict)] if isinstance(attempts, list) else []


def newest_attempt(run: Path | None) -> dict[str, Any]:
    """Read the newest attempt from run.json; empty where it does not tell."""
    return next(reversed([] if run is None else read_attempts(run)), {})


def part_of(record: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the record that a stored record has under a key; empty where that is missing or none."""
    found = record.get(key)
    return found if isinstance(found, dict) else {}


def chosen_model(run: Path | None) -> str | None:
    """Return the model's name in the newest attempt of a run, such as nano-gpt; None where it does not tell."""
    name = newest_attempt(run).get("model")
    return name if isinstance(name, str) else None


def read_config(run: Path) -> dict[str, Any]:
    """The resolved config of a run, in the keys of now. Raises CheckpointError where it is missing or damaged."""
    import yaml

    try:
        config = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{run} is not a run of ttrain: it has no config.yaml. Give a run's folder.") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(f"{run / 'config.yaml'} can't be read: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{run / 'config.yaml'} holds {type(config).__name__}, expected keys and values.")
    return config


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _writing(path: Path) -> AbstractContextManager[None]:
    return raised_as(UserError, f"The run directory {path} can't be written", "Give run.dir=<another>.")


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
        return str(chosen or self.summary.get("model") or part_of(self.config, "model").get("name", ""))

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
    summary = summary if isinstance(summary.get("step", 0), int) else {}
    found, _ = list_checkpoints(path / "checkpoints")
    checkpoint = found[-1].step if found else None
    step = max([line["step"] for line in metrics] + [checkpoint or 0])
    steps = part_of(config, "train").get("steps")
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
    with suppress(OSError), open(path / LOCK, "a", encoding="utf-8") as file:
        return not lock_file(file)
    return False  # not ours to write: nobody can tell
