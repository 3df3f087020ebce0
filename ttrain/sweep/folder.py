"""The folder of a sweep: which jobs it has, and how each of them is doing.

outputs/sweeps/<date>/<time>/
    sweep.json                 the overrides and the jobs
    sweep.csv  <axis>.svg      the table, and the objective over every swept key
    000_lr=0.1/                the job, and its run directory unless run.dir names another
        status.json  log.txt   state, exit code, reason; all that the job printed, tracebacks included
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from ttrain.core.errors import UserError
from ttrain.core.files import lock_file, read_json, replace_file, to_json
from ttrain.sweep.jobs import Job

SWEEP = "sweep.json"
STATUS = "status.json"
LOG = "log.txt"
ROOT = Path("outputs/sweeps")
FINISHED = "finished"
PRUNED = "pruned"  # ended early, because others do better
DONE = (FINISHED, PRUNED)  # what is not run again
_MAX_CLAIMS = 10_000
_SEARCHED = 200  # newest sweeps that are looked at for one to continue

Status = dict[str, Any]


class SweepFolder:
    """A sweep that this process holds until `close`."""

    def __init__(self, path: Path, lock: IO[str], content: dict[str, Any]) -> None:
        self.path, self._lock = path, lock
        self.content = content

    @classmethod
    def open(cls, wanted: str | None, identity: str, overrides: Sequence[str], root: Path = ROOT) -> SweepFolder:
        """The folder `wanted`, which may hold an earlier start; without it the newest unfinished sweep of the same
        identity, else a new one. Raises UserError where it can't be written or another process holds it.
        """
        try:
            if wanted is not None:
                Path(wanted).mkdir(parents=True, exist_ok=True)
                return cls._required(Path(wanted), identity, overrides)
            for path in sorted(root.glob("*/*"), reverse=True)[:_SEARCHED]:
                content = read_sweep(path)
                if content and content.get("identity") == identity and not content.get("done"):
                    held = cls._hold(path, identity, overrides)
                    if held is not None:
                        return held
            return cls._required(_claim(root), identity, overrides)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(
                f"The sweep can't write {wanted or root}: {reason}. Give sweep.dir=<a folder that can be written>."
            ) from None

    @classmethod
    def _required(cls, path: Path, identity: str, overrides: Sequence[str]) -> SweepFolder:
        folder = cls._hold(path, identity, overrides)
        if folder is None:
            raise UserError(f"{path}: another process runs this sweep. Wait for it, or give another sweep.dir.")
        return folder

    @classmethod
    def _hold(cls, path: Path, identity: str, overrides: Sequence[str]) -> SweepFolder | None:
        lock = open(path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 - held for as long as the sweep
        if not lock_file(lock):
            lock.close()
            return None
        content = read_sweep(path) or {"created": _now(), "jobs": []}
        folder = cls(path, lock, {**content, "identity": identity, "overrides": list(overrides), "done": False})
        folder.save()
        return folder

    def save(self) -> None:
        replace_file(self.path / SWEEP, to_json(self.content))

    def adopt(self, jobs: Sequence[Job]) -> list[Job]:
        """Gives the jobs the numbers that they had before, and new numbers to those that are new."""
        known = {entry["key"]: entry["number"] for entry in self.content["jobs"]}
        free = max(known.values(), default=-1) + 1
        for job in jobs:
            if job.key in known:
                job.number = known[job.key]
            else:
                job.number, free = free, free + 1
                entry = {"number": job.number, "name": job.name, "key": job.key}
                self.content["jobs"].append({**entry, "axes": job.axes, "overrides": list(job.overrides)})
        self.save()
        return list(jobs)

    def job_folder(self, job: Job) -> Path:
        names = {entry["number"]: entry["name"] for entry in self.content["jobs"]}
        path = self.path / str(names.get(job.number, job.name))
        path.mkdir(exist_ok=True)
        return path

    def status(self, job: Job) -> Status:
        """Return what is known of a job; empty where it never started."""
        return read_status(self.job_folder(job))

    def write_status(self, job: Job, status: Status) -> None:
        replace_file(self.job_folder(job) / STATUS, to_json(status))

    def finish(self, done: bool) -> None:
        """Marks whether all jobs are done, so that the same command starts a new sweep."""
        self.content["done"] = done
        self.save()

    def close(self) -> None:
        self._lock.close()


def read_sweep(path: Path) -> dict[str, Any] | None:
    """The content of sweep.json; None where the folder is no sweep."""
    content = read_json(path / SWEEP)
    return content if isinstance(content.get("jobs"), list) else None


def read_status(job: Path) -> Status:
    """The content of a job's status.json; empty without one."""
    return read_json(job / STATUS)


def _claim(root: Path) -> Path:
    """A new folder named by date and time; of many processes in one second each gets its own."""
    now = datetime.now()
    parent = root / now.strftime("%Y-%m-%d")
    parent.mkdir(parents=True, exist_ok=True)
    name = now.strftime("%H-%M-%S")
    for number in range(1, _MAX_CLAIMS):
        path = parent / (name if number == 1 else f"{name}_{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise UserError(f"{parent} has {_MAX_CLAIMS} sweeps named {name}. Give sweep.dir=<a new folder>.")


def _now() -> str:
    return datetime.fromtimestamp(time.time()).astimezone().isoformat(timespec="seconds")


def relative(path: Path, start: Path) -> str:
    """A path as status files keep it: relative to the sweep, so that it can be moved."""
    return os.path.relpath(path, start)
