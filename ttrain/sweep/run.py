"""Running a sweep: a fresh process for each job, and what became of it."""

from __future__ import annotations

import math
import os
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttrain.config.schema import SweepConfig
from ttrain.core.cores import default_threads
from ttrain.core.errors import EXIT_DEVICE_BUSY, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USER
from ttrain.core.units import format_duration
from ttrain.sweep import outcome
from ttrain.sweep.folder import DONE, FINISHED, LOG, PRUNED, Status, SweepFolder, now
from ttrain.sweep.jobs import Job
from ttrain.sweep.sources import Grid
from ttrain.train.logging.events import Events
from ttrain.train.runs.record import override
from ttrain.train.runs.run_directory import RECORD
from ttrain.train.supervise.child import PROGRAM, Child, PassOn, describe_exit

_POLL_SECONDS = 0.05
_ON_CPU = ("cpu", "null")


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
        self.folder, self.settings, self.flags, self._say = folder, settings, tuple(flags), say
        self._running: list[_Running] = []
        self._waiting: Job | None = None  # taken from the source, but there is no room on the card yet
        self.failed: list[int] = []  # exit codes
        self.interrupted = False
        self._unknown_objective = False

    def run(self, source: Grid) -> None:
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

    def _start_jobs(self, source: Grid) -> None:
        while len(self._running) < self.settings.parallel:
            job = self._waiting or source.next()
            self._waiting = None
            if job is None:
                return
            if job.problem is not None:
                self.failed.append(EXIT_USER)
                status = {**self._status(job, []), "state": "failed", "exit_code": EXIT_USER, "reason": job.problem}
                self.folder.write_status(job, status)
                self._say(f"job {job.name} failed: {job.problem}")
                source.tell(job, status)
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
        status = {**self._status(job, overrides), "state": "running"}
        if output is not None:
            status["output"] = os.path.relpath(output, self.folder.path)
        path = self.folder.job_folder(job)
        log = path / LOG
        size = log.stat().st_size if log.exists() else 0
        srun = [] if self.settings.srun is None else ["srun", "--ntasks=1", *shlex.split(self.settings.srun)]
        child = Child([*srun, *PROGRAM, *self.flags, *overrides, *job.numbered], self._environment(), log)
        self.folder.write_status(job, {**status, "pid": child.pid})
        self._running.append(_Running(job, child, status, size, time.monotonic(), on_card))
        self._say(f"job {job.name} started: {path}")

    def _overrides(self, job: Job) -> tuple[list[str], Path | None]:
        """Return the overrides of the job, and where its results go if it does not train.

        A training job gets a run directory, and continues the run that it has there; another one a place for results.
        """
        overrides = [each for each in job.overrides if not each.startswith("hydra.")]
        assert job.config is not None
        if job.config.task.name != "train":
            attempt = self.folder.status(job).get("attempts", 0) + 1
            key, output = outcome.output_override(job.config, self.folder.job_folder(job), attempt)
            return overrides if key is None else [*overrides, override(key, Path(str(output)))], output
        run = self._run_directory(job)
        overrides = [*(each for each in overrides if not each.startswith("run.dir=")), override("run.dir", run)]
        if (run / RECORD).exists():
            overrides = [*(each for each in overrides if not each.startswith("resume=")), "resume=auto"]
        return overrides, None

    def _run_directory(self, job: Job) -> Path:
        return self.folder.job_folder(job) if job.run_dir is None else Path(job.run_dir)

    def _status(self, job: Job, overrides: Sequence[str]) -> Status:
        return {
            "job": job.number,
            "task": "train" if job.config is None else job.config.task.name,
            "axes": job.axes,
            "overrides": list(overrides) or list(job.overrides),
            "run": os.path.relpath(self._run_directory(job), self.folder.path),  # so that the sweep can be moved
            "attempts": self.folder.status(job).get("attempts", 0) + 1,
            "started": now(),
        }

    def _environment(self) -> dict[str, str]:
        """CPU jobs that run at once share the threads; runs of one sweep are one group of W&B."""
        environment = {"PYTHONUNBUFFERED": "1"}  # so that a log has lines in the order in which they were printed
        environment |= {"WANDB_RUN_GROUP": os.environ.get("WANDB_RUN_GROUP", self.folder.path.name)}
        if self.settings.parallel > 1 and self.settings.srun is None:
            environment["OMP_NUM_THREADS"] = str(max(1, default_threads() // self.settings.parallel))
        return environment

    def _collect(self, source: Grid) -> None:
        for running in list(self._running):
            code = running.child.poll()
            if code is not None:
                self._running.remove(running)
                status = self._ended(running, code)
                self.folder.write_status(running.job, status)
                source.tell(running.job, status)

    def _prune(self, source: Grid) -> None:
        """End the jobs that are not worth to be finished, as Ctrl-C does: what they have is saved."""
        for running in self._running:
            if not running.pruned and source.hopeless(running.job, self._run_directory(running.job)):
                running.pruned = True
                running.child.send(signal.SIGTERM)

    def _ended(self, running: _Running, code: int) -> Status:
        """Return the last status of a job, and tell the user."""
        job, wanted = running.job, self.settings.objective
        seconds = time.monotonic() - running.started
        status = {**running.status, "exit_code": code, "ended": now(), "seconds": round(seconds, 3)}
        task, numbers = outcome.job_numbers(self.folder, job, status)
        key = outcome.objective_key(task, numbers, wanted)
        objective = outcome.as_number(numbers.get(key))
        reason: str | None = None
        trace: str | None = None
        problem = outcome.objective_problem(task, numbers, wanted) if code == 0 else None
        if code == 0 and problem is None:
            state, told = FINISHED, f"finished in {format_duration(seconds)}"
            dry_run = "dry run: values are not computed" if numbers.get("computes") is False else None
            reason = dry_run or numbers.get("caution")
        elif running.pruned and code in (EXIT_INTERRUPTED, -signal.SIGTERM):
            found = outcome.measured(self._run_directory(job), wanted)
            best = min if self.settings.direction == "minimize" else max
            objective = best(filter(math.isfinite, found), default=None)
            reason = f"pruned after {len(found)} evaluation(s)"
            Events(self._run_directory(job)).add("pruned", f"Was {reason} by {self.folder.path}: others do better.")
            state, told = PRUNED, f"was {reason}"
        elif code == EXIT_INTERRUPTED:
            state, told, reason = "interrupted", "was interrupted; its state is saved", "interrupted"
        else:
            if problem is None:
                problem, trace = outcome.failure_text(self.folder.job_folder(job) / LOG, running.log_start)
                problem = ": ".join(filter(None, [describe_exit(code) if code < 0 or not problem else "", problem]))
            else:
                self._unknown_objective, code = True, EXIT_USER
            self.failed.append(code)
            state, told, reason = "failed", f"failed: {problem.splitlines()[0]}", problem
        reached = f", {key} {objective:.6g}" if state in DONE and objective is not None else ""
        self._say(f"job {job.name} {told}{reached}")
        return {**status, "objective": objective, "state": state, "reason": reason, "traceback": trace}

    @property
    def exit_code(self) -> int:
        """0 where every job is done; else that of the first failure, as a shell can tell it."""
        if self.interrupted:
            return EXIT_INTERRUPTED
        if not self.failed:
            return 0
        return self.failed[0] if self.failed[0] in (EXIT_USER, EXIT_DEVICE_BUSY) else EXIT_FAILURE


def _on_card(job: Job) -> bool:
    """Return whether the job holds a device that takes one process at a time."""
    name = "cpu" if job.config is None else job.config.device.name
    return name not in _ON_CPU and (name != "auto" or Path("/dev/nvidiactl").exists())
