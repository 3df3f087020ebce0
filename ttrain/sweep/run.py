"""Running a sweep: which jobs are left, a fresh process for each, and what became of it."""

from __future__ import annotations

import math
import os
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from ttrain.config.schema import SweepConfig
from ttrain.core.cores import default_threads
from ttrain.core.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USER
from ttrain.core.units import format_duration
from ttrain.sweep.folder import FINISHED, LOG, PRUNED, Status, SweepFolder, relative
from ttrain.sweep.jobs import Job
from ttrain.sweep.numbers import as_number, measured, objective_key, objective_problem, output_override
from ttrain.sweep.outcome import failure_text, job_numbers
from ttrain.train.logging.events import Events
from ttrain.train.runs.record import override
from ttrain.train.runs.run_directory import RECORD
from ttrain.train.supervise.child import PROGRAM, Child, PassOn, describe_exit

_POLL_SECONDS = 0.05
_ON_CPU = ("cpu", "null")


class Source(Protocol):
    """Source of the next job."""

    def next(self) -> Job | None:
        """A job to start now; None where there is none, now or ever."""
        ...

    def tell(self, job: Job, status: Status) -> None:
        """A job that `next` gave has ended."""
        ...

    def hopeless(self, job: Job, run: Path) -> bool:
        """Return whether the job, which runs in that directory, is not worth finishing."""
        ...


class Queue:
    """Jobs in a fixed order."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = list(jobs)

    def next(self) -> Job | None:
        return self._jobs.pop(0) if self._jobs else None

    def tell(self, job: Job, status: Status) -> None:
        return

    def hopeless(self, job: Job, run: Path) -> bool:
        return False


@dataclass
class _Running:
    job: Job
    child: Child
    status: Status
    log_start: int  # bytes of the log before this start
    started: float
    on_card: bool
    pruned: bool = False  # was told to stop, because others do better


class Runner:
    """Starts jobs, at most `settings.parallel` at once and one on a card, and records how they end."""

    def __init__(
        self, folder: SweepFolder, settings: SweepConfig, flags: Sequence[str], say: Callable[[str], None]
    ) -> None:
        """`flags` come before the overrides of every job, such as --config-dir."""
        self.folder, self.settings, self._flags, self._say = folder, settings, list(flags), say
        self._running: list[_Running] = []
        self._waiting: Job | None = None  # taken from the source, but there is no room on the card yet
        self.failed: list[int] = []  # exit codes
        self.interrupted = False
        self._unknown_objective = False

    def run(self, source: Source) -> None:
        """Runs until the source has no more, a job fails under fail_fast or lacks the objective, or a signal comes."""
        with PassOn(lambda: [running.child for running in self._running]) as signals:
            while True:
                stopping = signals.received > 0 or self._gives_up
                if not stopping:
                    self._start_jobs(source)
                if not self._running:
                    break
                time.sleep(_POLL_SECONDS)
                self._collect(source)
                if not stopping:
                    self._prune(source)
                if self._gives_up and not signals.received:
                    signals.received = 1
                    for running in self._running:
                        running.child.send(signal.SIGTERM)
            self.interrupted = signals.number is not None

    @property
    def _gives_up(self) -> bool:
        return self._unknown_objective or (self.settings.fail_fast and bool(self.failed))

    def refuse(self, job: Job) -> None:
        """Records a job whose config is wrong."""
        self.failed.append(EXIT_USER)
        status = self._status(job, [])
        self.folder.write_status(job, {**status, "state": "failed", "exit_code": EXIT_USER, "reason": job.problem})
        self._say(f"job {job.name} failed: {job.problem}")

    def _start_jobs(self, source: Source) -> None:
        while len(self._running) < self.settings.parallel:
            job = self._waiting or source.next()
            self._waiting = None
            if job is None:
                return
            if job.problem is not None:
                self.refuse(job)
                source.tell(job, self.folder.status(job))
                if self.settings.fail_fast:
                    return
                continue
            on_card = self.settings.srun is None and _on_card(job)
            if on_card and any(running.on_card for running in self._running):
                self._waiting = job
                return
            self._start(job, on_card)

    def _start(self, job: Job, on_card: bool) -> None:
        overrides, output = self._overrides(job)
        status = {**self._status(job, overrides), "state": "running", "pid": None}
        if output is not None:
            status["output"] = relative(output, self.folder.path)
        path = self.folder.job_folder(job)
        log = path / LOG
        size = log.stat().st_size if log.exists() else 0
        srun = [] if self.settings.srun is None else ["srun", "--ntasks=1", *shlex.split(self.settings.srun)]
        command = [*srun, *PROGRAM, *self._flags, *overrides, *job.numbered]
        child = Child(command, self._environment(), log)
        self.folder.write_status(job, {**status, "pid": child.pid})
        self._running.append(_Running(job, child, status, size, time.monotonic(), on_card))
        self._say(f"job {job.name} started: {path}")

    def _overrides(self, job: Job) -> tuple[list[str], Path | None]:
        """The overrides of the job, and where its results go if it does not train.

        A training job gets a run directory, and continues the run that it has there; another one a place for results.
        """
        overrides = [each for each in job.overrides if not each.startswith("hydra.")]
        assert job.config is not None
        if job.config.task.name != "train":
            attempt = self.folder.status(job).get("attempts", 0) + 1
            key, output = output_override(job.config, self.folder.job_folder(job), attempt)
            return overrides if key is None else [*overrides, override(key, Path(str(output)))], output
        run = self._run_directory(job)
        overrides = [*(each for each in overrides if not each.startswith("run.dir=")), override("run.dir", run)]
        if (run / RECORD).exists():
            overrides = [*(each for each in overrides if not each.startswith("resume=")), "resume=auto"]
        return overrides, None

    def _run_directory(self, job: Job) -> Path:
        given = None if job.config is None or job.config.task.name != "train" else job.config.run.dir
        return self.folder.job_folder(job) if given is None else Path(given)

    def _status(self, job: Job, overrides: Sequence[str]) -> Status:
        before = self.folder.status(job)
        return {
            "job": job.number,
            "task": "train" if job.config is None else job.config.task.name,
            "axes": job.axes,
            "overrides": list(overrides) or list(job.overrides),
            "run": relative(self._run_directory(job), self.folder.path),
            "attempts": before.get("attempts", 0) + 1,
            "started": _now(),
        }

    def _environment(self) -> dict[str, str]:
        """CPU jobs that run at once share the threads; runs of one sweep are one group of W&B."""
        environment = {"PYTHONUNBUFFERED": "1"}  # so that a log has lines in the order in which they were printed
        environment |= {"WANDB_RUN_GROUP": os.environ.get("WANDB_RUN_GROUP", self.folder.path.name)}
        if self.settings.parallel > 1 and self.settings.srun is None:
            environment["OMP_NUM_THREADS"] = str(max(1, default_threads() // self.settings.parallel))
        return environment

    def _collect(self, source: Source) -> None:
        for running in list(self._running):
            code = running.child.poll()
            if code is None:
                continue
            self._running.remove(running)
            status = self._ended(running, code)
            self.folder.write_status(running.job, status)
            source.tell(running.job, status)

    def _prune(self, source: Source) -> None:
        """Ends the jobs that are not worth to be finished, as Ctrl-C does: what they have is saved."""
        for running in self._running:
            if not running.pruned and source.hopeless(running.job, self._run_directory(running.job)):
                running.pruned = True
                running.child.send(signal.SIGTERM)

    def _ended(self, running: _Running, code: int) -> Status:
        job, status = running.job, dict(running.status)
        seconds = time.monotonic() - running.started
        status |= {"exit_code": code, "ended": _now(), "seconds": round(seconds, 3)}
        task, numbers = job_numbers(self.folder, job, status)
        key = objective_key(task, numbers, self.settings.objective)
        status["objective"] = as_number(numbers.get(key))
        reached = "" if status["objective"] is None else f", {key} {status['objective']:.6g}"
        if code == 0 and (problem := objective_problem(task, numbers, self.settings.objective)):
            self._unknown_objective = True
            self.failed.append(EXIT_USER)
            self._say(f"job {job.name} failed: {problem}")
            return {**status, "state": "failed", "reason": problem}
        if code == 0:
            self._say(f"job {job.name} finished in {format_duration(seconds)}{reached}")
            dry_run = "dry run: values are not computed" if numbers.get("computes") is False else None
            reason = dry_run or numbers.get("caution")
            return {**status, "state": FINISHED, **({} if reason is None else {"reason": reason})}
        if running.pruned and code in (EXIT_INTERRUPTED, -signal.SIGTERM):
            found = measured(self._run_directory(job), self.settings.objective)
            best = min if self.settings.direction == "minimize" else max
            status["objective"] = best(filter(math.isfinite, found), default=None)
            reason = f"pruned after {len(found)} evaluation(s)"
            Events(self._run_directory(job)).add("pruned", f"Was {reason} by {self.folder.path}: others do better.")
            self._say(f"job {job.name} was {reason}{reached}")
            return {**status, "state": PRUNED, "reason": reason}
        if code == EXIT_INTERRUPTED:
            self._say(f"job {job.name} was interrupted; its state is saved")
            return {**status, "state": "interrupted", "reason": "interrupted"}
        reason, trace = failure_text(self.folder.job_folder(job) / LOG, running.log_start)
        reason = f"{describe_exit(code)}{': ' if reason else ''}{reason}" if code < 0 or not reason else reason
        self.failed.append(code)
        self._say(f"job {job.name} failed: {reason.splitlines()[0]}")
        return {**status, "state": "failed", "reason": reason, "traceback": trace}

    @property
    def exit_code(self) -> int:
        """0 where every job is done; else that of the first failure, as a shell can tell it."""
        if self.interrupted:
            return EXIT_INTERRUPTED
        if not self.failed:
            return 0
        return self.failed[0] if self.failed[0] in (EXIT_USER, 75) else EXIT_FAILURE


def _on_card(job: Job) -> bool:
    """Return whether the job holds a device that takes one process at a time."""
    if job.config is None:
        return False
    name = job.config.device.name
    return name not in _ON_CPU and (name != "auto" or Path("/dev/nvidiactl").exists())


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
