"""Run `ttrain -m ...`: a process for each job, its status, and the exit code of the sweep."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import which

from ttrain.config.compose import Composer
from ttrain.config.schema import Given, SweepConfig
from ttrain.core.cores import default_threads
from ttrain.core.errors import EXIT_DEVICE_BUSY, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USER, ConfigError
from ttrain.core.units import format_duration
from ttrain.core.waiting import Waiting
from ttrain.sweep import jobs, outcome
from ttrain.sweep.forks import ForkServer
from ttrain.sweep.jobs import DONE, FINISHED, PRUNED, Job, Status, SweepFolder
from ttrain.sweep.search import Grid, Search
from ttrain.train.logging.metrics import Events
from ttrain.train.runs.record import override
from ttrain.train.runs.run_directory import RECORD
from ttrain.train.supervise.child import PROGRAM, Child, PassOn, describe_exit, say

_POLL_SECONDS = 0.05
_ON_CPU = ("cpu", "null")


def run_sweep(composer: Composer, overrides: Sequence[str]) -> int:
    """Run the sweep and return its exit code.

    Raises ConfigError, and leaves no folder behind, where no job can be composed.
    """
    master = composer.compose(overrides, sweep=True)
    if master.problems:
        raise ConfigError(master.problems)
    sweep = jobs.SweepOverrides.read(composer, master)
    searches = sweep.setting("search", master) is not None
    compose = partial(jobs.compose_job, composer, own=sweep.own)
    made = [sweep.example()] if searches else sweep.combinations()
    first = next((job.config for job in list(map(compose, made)) if job.config is not None), None)
    if first is None:
        raise ConfigError([_labelled(job) for job in made])
    settings = first.sweep
    if settings.srun is not None and which("srun") is None:
        raise ConfigError("sweep.srun: there is no srun here. Start the sweep where SLURM is, or leave it out.")
    jobs.check_directories(made)
    parts = [job.key for job in made]
    if searches:
        ranges = [str(override.input_line) for override in sweep.swept]
        parts = [*sweep.fixed, *ranges, str(settings.search), settings.direction, settings.objective]
    identity = json.dumps(sorted([*composer.files.flags, *parts]))
    folder = SweepFolder.open(settings.dir, identity, overrides, same=searches)
    try:
        queue = Search(sweep, first, folder, compose) if searches else Grid(folder, made, compose)
        say(f"sweep {folder.path}: {queue.title}")
        runner = Runner(folder, settings, composer.job_flags(master), queue)
        runner.run()
        runner.finish()
        return runner.exit_code
    finally:
        folder.close()


def _labelled(job: Job) -> str:
    label = " ".join(f"{key}={value}" for key, value in job.axes.items())
    return f"[{label}] {job.problem}" if label else str(job.problem)


@dataclass
class _Running:
    job: Job
    child: Child
    status: Status
    log_start: int  # bytes of the log before this start
    started: float
    pruned: bool = False  # was asked to stop, because others do better


class Runner:
    """Starts jobs, at most `settings.parallel` at once and one on a card, and records how they end."""

    def __init__(self, folder: SweepFolder, settings: SweepConfig, flags: Sequence[str], queue: Grid) -> None:
        """`flags` come before the overrides of every job, such as --config-dir. `queue` gives the jobs."""
        self.folder, self.settings, self.flags, self.queue = folder, settings, tuple(flags), queue
        self._running: list[_Running] = []
        self._waiting: Job | None = None  # taken from the queue, but there is no room on the card yet
        self.failed: list[int] = []  # exit codes
        self.interrupted = False
        self._unknown_objective = False
        self._fork_server = ForkServer(self._environment())
        self._signals = PassOn(lambda: [running.child for running in self._running])

    def run(self) -> None:
        """Runs until the queue has no more, a job fails under fail_fast or lacks the objective, or a signal comes."""
        with closing(self._fork_server), self._signals as signals, Waiting("Running jobs", say):
            while True:
                stopping = signals.received > 0 or self._gives_up
                if not stopping:
                    self._start_jobs()
                if not self._running:
                    break
                time.sleep(_POLL_SECONDS)
                self._collect()
                if not stopping:
                    self._prune()
                if self._gives_up and not signals.received:
                    signals.received = 1
                    for running in self._running:
                        running.child.send(signal.SIGTERM)
            self.interrupted |= signals.number is not None

    @property
    def _gives_up(self) -> bool:
        return self._unknown_objective or (self.settings.fail_fast and bool(self.failed))

    def _start_jobs(self) -> None:
        while len(self._running) < self.settings.parallel and not self._signals.received:
            job = self._waiting or self.queue.next()
            self._waiting = None
            if job is None:
                return
            if job.problem is not None:
                self.failed.append(EXIT_USER)
                status = {**self._status(job, []), "state": "failed", "exit_code": EXIT_USER, "reason": job.problem}
                say(f"job {job.name} failed: {job.problem}")
                self._tell(job, status)
                if self.settings.fail_fast:
                    return
                continue
            here = self.settings.srun is None
            if here and _on_card(job) and any(_on_card(running.job) for running in self._running):
                self._waiting = job
                return
            if here and forkable(job):
                self._fork_server.open()
            if self._signals.received:  # while the server of the forks imported: the job would get it too early
                return
            self._start(job)

    def _start(self, job: Job) -> None:
        overrides, output = self._overrides(job)
        status = {**self._status(job, overrides), "state": "running"}
        if output is not None:
            status["output"] = os.path.relpath(output, self.folder.path)
        log = self.folder.job_folder(job) / jobs.LOG
        size = log.stat().st_size if log.exists() else 0
        srun = [] if self.settings.srun is None else ["srun", "--ntasks=1", *shlex.split(self.settings.srun)]
        before, arguments = self._signals.received, [*self.flags, *overrides, *job.numbered]
        fork = None if srun or not forkable(job) else self._fork_server.start(arguments, log)
        child = fork or Child([*srun, *PROGRAM, *arguments], self._environment(), log)
        if self._signals.received > before:  # while it started
            child.send(self._signals.number or signal.SIGTERM)
        self.folder.write_status(job, {**status, "pid": child.pid})
        self._running.append(_Running(job, child, status, size, time.monotonic()))
        say(f"job {job.name} started; its output is in {log}")

    def _overrides(self, job: Job) -> tuple[list[str], Path | None]:
        """Return the overrides of the job, and where its results go if it does not train.

        A training job gets a run directory, and continues the run that it has there; another one a place for results.
        """
        overrides = [each for each in job.overrides if not each.startswith("hydra.")]
        assert job.config is not None
        if job.task != "train":
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
            "overrides": list(overrides) or list(job.overrides),
            "run": os.path.relpath(self._run_directory(job), self.folder.path),  # so that the sweep can be moved
            "attempts": self.folder.status(job).get("attempts", 0) + 1,
            "started": jobs.now(),
        }

    def _environment(self) -> dict[str, str]:
        """CPU jobs that run at once share the threads; runs of one sweep are one group of W&B."""
        environment = {"PYTHONUNBUFFERED": "1"}  # so that a log has lines in the order in which they were printed
        environment |= {"WANDB_RUN_GROUP": os.environ.get("WANDB_RUN_GROUP", self.folder.path.name)}
        if self.settings.parallel > 1 and self.settings.srun is None:
            environment["OMP_NUM_THREADS"] = str(max(1, default_threads() // self.settings.parallel))
        return environment

    def _tell(self, job: Job, status: Status) -> None:
        """Write down how a job ended, and tell the queue."""
        self.folder.write_status(job, status)
        self.queue.tell(job, status)

    def _collect(self) -> None:
        for running in list(self._running):
            code = running.child.poll()
            if code is not None:
                self._running.remove(running)
                self._tell(running.job, self._ended(running, code))

    def _prune(self) -> None:
        """End the jobs that are not worth finishing, as Ctrl-C does: their state is saved."""
        for running in self._running:
            if not running.pruned and self.queue.hopeless(running.job, self._run_directory(running.job)):
                running.pruned = True
                running.child.send(signal.SIGTERM)

    def _ended(self, running: _Running, code: int) -> Status:
        """Return the last status of a job, and tell the user."""
        job, wanted = running.job, self.settings.objective
        seconds = time.monotonic() - running.started
        status = {**running.status, "exit_code": code, "ended": jobs.now(), "seconds": round(seconds, 3)}
        output = None if "output" not in status else self.folder.path / str(status["output"])
        numbers = outcome.numbers_of(job.task, self._run_directory(job), output)
        key = outcome.objective_key(job.task, numbers, wanted)
        objective = outcome.as_number(numbers.get(key))
        reason: str | None = None
        trace: str | None = None
        problem = outcome.objective_problem(job.task, numbers, wanted) if code == 0 else None
        # The codes of jobs that a signal ended before they could save; a second one kills what runs.
        stopped = (EXIT_INTERRUPTED, -signal.SIGINT, -signal.SIGTERM, *[-signal.SIGKILL] * (self._signals.received > 1))
        if code == 0 and (problem is None or job.task == "train"):
            state, told = FINISHED, f"finished in {format_duration(seconds)}"
            dry_run = "dry run: values are not computed" if numbers.get("computes") is False else None
            reason = dry_run or numbers.get("caution") or problem
            status["objective_key"] = key if objective is not None else None
        elif running.pruned and code in (EXIT_INTERRUPTED, -signal.SIGTERM):
            values = outcome.measured(self._run_directory(job), wanted)
            best = min if self.settings.direction == "minimize" else max
            objective = best(filter(math.isfinite, values), default=None)
            reason = f"pruned after {len(values)} evaluation(s)"
            Events(self._run_directory(job)).add("pruned", f"Was {reason} by {self.folder.path}: others do better.")
            state, told = PRUNED, f"was {reason}"
        elif code in stopped:
            self.interrupted = True  # also where somebody sent the signal to the job alone
            saved = "; its state is saved" if code == EXIT_INTERRUPTED else ""
            state, told, reason = "interrupted", f"was interrupted{saved}", "interrupted"
        else:
            if problem is None:
                problem, trace = outcome.failure_text(self.folder.job_folder(job) / jobs.LOG, running.log_start)
                problem = ": ".join(filter(None, [describe_exit(code) if code < 0 or not problem else "", problem]))
            else:
                self._unknown_objective, code = True, EXIT_USER
            self.failed.append(code)
            state, told, reason = "failed", f"failed: {problem.splitlines()[0]}", problem
        reached = f", {key} {objective:.6g}" if state in DONE and objective is not None else ""
        say(f"job {job.name} {told}{reached}")
        found = {"objective": objective, "numbers": outcome.columns(job.task, numbers)}
        return {**status, **found, "state": state, "reason": reason, "traceback": trace}

    def finish(self) -> None:
        """Write the table, the CSV and the plots, whatever happened."""
        folder, listed, settings = self.folder, self.queue.jobs, self.settings
        records = outcome.rows(folder, listed)
        outcome.write_table(folder.path / "sweep.csv", records)
        axes = list(dict.fromkeys(key for job in listed for key in job.axes))
        keys = (folder.status(job).get("objective_key") for job in listed)
        objective = next(filter(None, keys), settings.objective)
        outcome.draw_axes(folder.path, records, axes, objective)
        if settings.prune is not None:
            outcome.draw_evaluations(folder, listed, objective)
        if records:
            outcome.print_table(records, axes, objective)
        finished, pruned = (sum(record["state"] == state for record in records) for state in DONE)
        done = finished + pruned == len(records) and not self.interrupted
        folder.finish(done)
        early = f", {pruned} pruned" if pruned else ""
        table = folder.path / "sweep.csv"
        say(f"sweep {folder.path}: {finished} of {len(records)} jobs finished{early}; table in {table}")
        judged = [(record["objective"], job) for record, job in zip(records, listed, strict=True)
                  if record["state"] == FINISHED and record["objective"] is not None and job.axes]  # fmt: skip
        if judged:
            choose = max if (settings.direction == "maximize" or objective == "times_as_fast") else min
            value, best = choose(judged, key=lambda pair: pair[0])
            alone = Given(overrides=best.overrides, flags=self.flags).command(without=["hydra", "run.dir", "sweep"])
            say(f"best: job {best.name}, {objective} {value:.6g}: {alone}")
        if not done:
            say("the same command again runs the jobs that are missing or failed")

    @property
    def exit_code(self) -> int:
        """0 where every job is done; else the exit code of the first failure, if it is one of ours."""
        if self.interrupted:
            return EXIT_INTERRUPTED
        if not self.failed:
            return 0
        return self.failed[0] if self.failed[0] in (EXIT_USER, EXIT_DEVICE_BUSY) else EXIT_FAILURE


def forkable(job: Job) -> bool:
    """Return True if the job can be a fork of a process that has imported torch: on Linux, and on the CPU."""
    return sys.platform == "linux" and not _on_card(job)


def _on_card(job: Job) -> bool:
    """Return whether the job holds a device that takes one process at a time."""
    name = "cpu" if job.config is None else job.config.device.name
    return name not in _ON_CPU and (name != "auto" or Path("/dev/nvidiactl").exists())
