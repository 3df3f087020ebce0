"""Jobs of a sweep: made from the overrides of `-m`, each with its checked config, and kept in the folder of the sweep.

outputs/sweeps/<date>/<time>/
    sweep.json                 the overrides and the jobs
    sweep.csv  <axis>.svg      the table, and the objective over every swept key
    search.journal             the state of a search, as Optuna keeps it
    000_lr=0.1/                the job, and its run directory unless run.dir names another
        status.json  log.txt   state, exit code, reason; all that the job printed, tracebacks included
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from hydra.core.override_parser.types import IntervalSweep, Override

from ttrain.config.compose import Composed, Composer
from ttrain.config.schema import Config
from ttrain.core.errors import ConfigError, UserError, raised_as
from ttrain.core.files import lock_file, read_json, replace_file, to_json
from ttrain.core.folders import dated_folder

_LONGEST_NAME = 80
SWEEP = "sweep.json"
STATUS = "status.json"
LOG = "log.txt"
ROOT = Path("outputs/sweeps")
FINISHED = "finished"
PRUNED = "pruned"  # ended early, because others do better
DONE = (FINISHED, PRUNED)  # states of jobs that are not run again
_SEARCHED = 200  # newest sweeps that are looked at for one to continue

Status = dict[str, Any]


@dataclass
class Job:
    """One combination. `problem` says why it can't run; then it has no config."""

    number: int
    overrides: tuple[str, ...]  # as the command line of the job has them
    axes: dict[str, str] = field(default_factory=dict)  # swept key -> value as written
    name: str = ""  # its folder in the sweep's
    config: Config | None = None
    problem: str | None = None

    @property
    def key(self) -> str:
        """Text that makes it the same job when the sweep is run again."""
        return json.dumps(sorted(each for each in self.overrides if not each.startswith(("hydra.", "run.dir="))))

    @property
    def numbered(self) -> list[str]:
        """Overrides that give ${hydra:job.num} its value."""
        return [f"hydra.job.num={self.number}", f"hydra.job.id='{self.number}'"]

    @property
    def default_name(self) -> str:
        """The job's number and its swept values."""
        label = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.axes.items())
        label = re.sub(r"[^\w.,=+-]+", "_", label)[:_LONGEST_NAME].strip("._,")
        return f"{self.number:03d}_{label}" if label else f"{self.number:03d}"

    @property
    def task(self) -> str:
        return "train" if self.config is None else self.config.task.name

    @property
    def run_dir(self) -> str | None:
        """The run directory that a training job was given, None where it has that of the sweep."""
        return None if self.config is None or self.task != "train" else self.config.run.dir


Compose = Callable[[Job], Job]


@dataclass(frozen=True)
class SweepOverrides:
    """The parsed overrides of a sweep, and as they are written those that are the same for all jobs."""

    overrides: list[Override]
    fixed: list[str]  # without those of the sweep itself
    own: list[str]  # of the sweep itself and of Hydra; jobs are checked with them and run without

    @classmethod
    def read(cls, composer: Composer, master: Composed) -> SweepOverrides:
        """Read overrides of the command line, after those of `hydra.sweeper.params` in a config file."""
        params = master.root.hydra.sweeper.get("params") or {}
        parsed, problems = composer.parsed([f"{key}={value}" for key, value in params.items()], sweep=True)
        if problems:
            raise ConfigError(problems)
        ours = [*parsed, *(override for override in master.overrides if not override.is_hydra_override())]
        last = {override.key_or_group: override for override in ours}
        hydra = [str(override.input_line) for override in master.overrides if override.is_hydra_override()]
        single = [override for override in last.values() if not override.is_sweep_override()]
        own = [str(each.input_line) for each in single if each.key_or_group.startswith("sweep.")]
        fixed = [str(each.input_line) for each in single if not each.key_or_group.startswith("sweep.")]
        return cls(list(last.values()), fixed, [*own, *hydra])

    @property
    def swept(self) -> list[Override]:
        return [override for override in self.overrides if override.is_sweep_override()]

    def setting(self, key: str, master: Composed) -> Any:
        """A key of the section `sweep`: from the overrides where they give it, else as composed."""
        given = [override.value() for override in self.overrides if override.key_or_group == f"sweep.{key}"]
        return given[0] if given else master.job.sweep.get(key)

    def combinations(self) -> list[Job]:
        """Return every combination in the order of the overrides, the last axis fastest; not composed yet."""
        for override in self.swept:
            if not override.is_discrete_sweep():
                raise ConfigError(
                    f"{override.input_line}: an interval has no list of values. Give sweep.search=tpe to let a search "
                    f"choose, or values such as {override.key_or_group}=1,2."
                )
            if override.key_or_group.startswith("sweep."):
                raise ConfigError(f"{override.input_line}: keys of the sweep itself can't be swept.")
        keys = [override.key_or_group for override in self.swept]
        values = itertools.product(*(override.sweep_string_iterator() for override in self.swept))
        return [self.job_of(dict(zip(keys, each, strict=True)), number) for number, each in enumerate(values)]

    def example(self) -> Job:
        """Return a job with the first value of every swept key, to check the overrides that all jobs share."""
        if not self.swept:
            raise ConfigError("sweep.search: nothing to search. Give ranges, such as optimizer.lr=interval(1e-4,1e-2).")
        axes = {}
        for override in self.swept:
            sweep = override.value()
            first = sweep.start if isinstance(sweep, IntervalSweep) else next(iter(override.sweep_string_iterator()))
            axes[override.key_or_group] = str(first)
        return self.job_of(axes)

    def job_of(self, axes: dict[str, str], number: int = -1) -> Job:
        """Return the job of these values; one that a search chose has no number yet."""
        return Job(number, (*self.fixed, *(f"{key}={value}" for key, value in axes.items())), axes)


def compose_job(composer: Composer, job: Job, own: Sequence[str] = ()) -> Job:
    """Give the job its checked config, or the problem that it has. `own` are the overrides of the sweep itself."""
    try:
        job.config = composer.typed([*job.overrides, *own, *job.numbered])
    except ConfigError as error:
        job.problem = str(error)
    return job


def check_directories(jobs: Sequence[Job]) -> None:
    """Raises ConfigError where two jobs were given one run directory."""
    given = Counter(job.run_dir for job in jobs if job.run_dir is not None)
    twice = [folder for folder, count in given.items() if count > 1]
    if twice:
        told = f"run.dir={twice[0]}: two jobs of the sweep would write there"
        raise ConfigError(f"{told}. Leave run.dir out, or give run.dir='{twice[0]}/${{hydra:job.num}}'.")


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
        with raised_as(UserError, f"The sweep can't write {wanted or root}", "Give another sweep.dir=<folder>."):
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
                lock = _locked(dated_folder(root, ""))
            if lock is None:
                raise UserError(f"{wanted}: another process runs this sweep. Wait for it, or give another sweep.dir.")
            path = Path(lock.name).parent
            content = {**started, **read_sweep(path), "identity": identity, "overrides": list(overrides)}
            folder = cls(path, lock, content)
            folder.finish(False)
            return folder

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
        """Return the status of a job; empty where it never started."""
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
