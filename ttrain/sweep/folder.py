"""The folder of a sweep: which jobs it has, and how each of them is doing.

outputs/sweeps/<date>/<time>/
    sweep.json                 the overrides and the jobs
    sweep.csv  <axis>.svg      the table, and the objective over every swept key
    search.journal             the state of a search, as Optuna keeps it
    000_lr=0.1/                the job, and its run directory unless run.dir names another
        status.json  log.txt   state, exit code, reason; all that the job printed, tracebacks included
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from ttrain.core.errors import UserError
from ttrain.core.files import lock_file, read_json, replace_file, to_json
from ttrain.core.folders import dated_folder
from ttrain.sweep.jobs import Job

SWEEP = "sweep.json"
STATUS = "status.json"
LOG = "log.txt"
ROOT = Path("outputs/sweeps")
FINISHED = "finished"
PRUNED = "pruned"  # ended early, because others do better
DONE = (FINISHED, PRUNED)  # what is not run again
_SEARCHED = 200  # newest sweeps that are looked at for one to continue

Status = dict[str, Any]


class SweepFolder:
    """A sweep that this process holds until `close`."""

    def __init__(self, path: Path, lock: IO[str], content: dict[str, Any]) -> None:
        self.path, self._lock = path, lock
        self.content = content

    @classmethod
    def open(
        cls, wanted: str | None, identity: str, overrides: Sequence[str], root: Path = ROOT, same: bool = False
    ) -> SweepFolder:
        """Hold the folder `wanted`, which may hold an earlier start, of the `same` identity where that is asked for.

        Without `wanted` it is the newest unfinished sweep of the same identity, else a new one. Raises UserError where
        it can't be written, holds another search, or is held by another process.
        """
        started: dict[str, Any] = {"created": now(), "jobs": []}
        try:
            if wanted is None:
                known = [(path, read_sweep(path)) for path in sorted(root.glob("*/*"), reverse=True)[:_SEARCHED]]
                paths = [path for path, sweep in known if sweep.get("identity") == identity and not sweep.get("done")]
            else:
                paths = [Path(wanted)]
                paths[0].mkdir(parents=True, exist_ok=True)
                if same and read_sweep(paths[0]).get("identity", identity) != identity:
                    again = "Give its overrides again, or another sweep.dir."
                    raise UserError(f"sweep.dir={wanted} holds another search. {again}")
            lock = next(filter(None, map(_locked, paths)), None)
            if lock is None and wanted is None:
                lock = _locked(dated_folder(root, "", datetime.now()))
            if lock is None:
                raise UserError(f"{wanted}: another process runs this sweep. Wait for it, or give another sweep.dir.")
            path = Path(lock.name).parent
            content = {**started, **read_sweep(path), "identity": identity, "overrides": list(overrides)}
            folder = cls(path, lock, content)
            folder.finish(False)
            return folder
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(
                f"The sweep can't write {wanted or root}: {reason}. Give sweep.dir=<a folder that can be written>."
            ) from None

    def adopt(self, jobs: Sequence[Job]) -> list[Job]:
        """Give jobs the numbers that they had before, and new ones to new jobs. Return those that got another one."""
        known = {entry["key"]: entry for entry in self.content["jobs"]}
        free, moved = max((entry["number"] for entry in known.values()), default=-1) + 1, list[Job]()
        for job in jobs:
            entry = known.get(job.key)
            number = free if entry is None else entry["number"]
            if job.number != number:
                job.number = number
                moved.append(job)
            if entry is None:
                free += 1
                entry = {"number": number, "name": job.default_name, "key": job.key}
                self.content["jobs"].append({**entry, "axes": job.axes, "overrides": list(job.overrides)})
            job.name = entry["name"]
        replace_file(self.path / SWEEP, to_json(self.content))
        return moved

    def jobs(self) -> list[Job]:
        """Return the jobs of earlier starts, not composed."""
        return [
            Job(entry["number"], tuple(entry["overrides"]), dict(entry["axes"]), entry["name"])
            for entry in self.content["jobs"]
        ]

    def job_folder(self, job: Job) -> Path:
        path = self.path / job.name
        path.mkdir(exist_ok=True)
        return path

    def status(self, job: Job) -> Status:
        """Return what is known of a job; empty where it never started."""
        return read_json(self.path / job.name / STATUS)

    def write_status(self, job: Job, status: Status) -> None:
        replace_file(self.job_folder(job) / STATUS, to_json(status))

    def finish(self, done: bool) -> None:
        """Write whether all jobs are done, so that the same command starts a new sweep."""
        self.content["done"] = done
        replace_file(self.path / SWEEP, to_json(self.content))

    def close(self) -> None:
        self._lock.close()


def read_sweep(path: Path) -> dict[str, Any]:
    """Return the content of sweep.json; empty where the folder is no sweep."""
    content = read_json(path / SWEEP)
    return content if isinstance(content.get("jobs"), list) else {}


def now() -> str:
    """Return the time as status files have it."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _locked(path: Path) -> IO[str] | None:
    """Return the lock file of a sweep, open for as long as it is held; None where another process holds it."""
    lock = open(path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 - held for as long as the sweep
    if lock_file(lock):
        return lock
    lock.close()
    return None
