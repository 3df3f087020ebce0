"""`ttrain -m ...` from its overrides to its exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from typing import Any

from ttrain.config.compose import Composed, Composer
from ttrain.config.schema import Source, SweepConfig
from ttrain.core.errors import ConfigError, UserError
from ttrain.sweep import outcome
from ttrain.sweep.folder import DONE, FINISHED, SweepFolder, read_sweep
from ttrain.sweep.jobs import Job, SweepOverrides, check_directories, compose_job
from ttrain.sweep.numbers import as_number, objective_key
from ttrain.sweep.run import Queue, Runner


def run(composer: Composer, overrides: Sequence[str]) -> int:
    """Run the sweep and return its exit code.

    Raises ConfigError, and leaves no folder behind, where no job can be composed.
    """
    master = composer.compose(overrides, sweep=True)
    if master.problems:
        raise ConfigError(master.problems)
    sweep = SweepOverrides.read(composer, master)
    if sweep.setting("search", master) is not None:
        return _search(composer, master, sweep, overrides)
    jobs = [compose_job(composer, job, sweep.own) for job in sweep.combinations()]
    settings = _settings(jobs)
    check_directories(jobs)
    folder = SweepFolder.open(
        _directory(settings, master), _identity([*composer.files.flags, *(job.key for job in jobs)]), overrides
    )
    try:
        before = [job.number for job in jobs]
        folder.adopt(jobs)
        for job, number in zip(jobs, before, strict=True):
            if job.number != number and job.config is not None:
                compose_job(composer, job, sweep.own)  # ${hydra:job.num} is another one now
        remaining = [job for job in jobs if folder.status(job).get("state") != FINISHED]
        _say(f"sweep {folder.path}: {len(jobs)} jobs, {len(jobs) - len(remaining)} done before")
        for job in remaining:
            if job.problem is not None:
                _say(f"job {job.name} can't run: {job.problem}")
        runner = Runner(folder, settings, composer.job_flags(master), _say)
        runner.run(Queue(remaining))
        return _finish(folder, jobs, settings, runner, composer.job_flags(master))
    finally:
        folder.close()


def _search(composer: Composer, master: Composed, sweep: SweepOverrides, overrides: Sequence[str]) -> int:
    from ttrain.sweep.search import Search, example

    if not sweep.swept:
        raise ConfigError("sweep.search: nothing to search. Give ranges, such as optimizer.lr=interval(1e-4,1e-2).")
    first = compose_job(composer, example(sweep), sweep.own)
    settings = _settings([first])
    assert first.config is not None
    ranges = [str(override.input_line) for override in sweep.swept]
    identity = _identity([*composer.files.flags, *sweep.fixed, *ranges, str(settings.search)])
    directory = _directory(settings, master)
    earlier = read_sweep(Path(directory)) if directory else None
    if earlier and earlier.get("identity") != identity:
        raise UserError(f"sweep.dir={directory} holds another search. Give its overrides again, or another sweep.dir.")
    folder = SweepFolder.open(directory, identity, overrides)
    try:
        seed, train = first.config.run.seed, first.config.train
        evaluations = train.steps // (train.eval_every or train.steps)

        def compose(job: Job) -> Job:
            return compose_job(composer, job, sweep.own)

        search = Search(sweep, settings, folder, seed, compose, evaluations)
        _say(f"sweep {folder.path}: search by {settings.search}, {len(search.jobs)} of {settings.trials} jobs known")
        runner = Runner(folder, settings, composer.job_flags(master), _say)
        runner.run(search)
        return _finish(folder, search.jobs, settings, runner, composer.job_flags(master))
    finally:
        folder.close()


def _settings(jobs: Sequence[Job]) -> SweepConfig:
    """The section `sweep`, which all jobs share. Raises ConfigError where every job has a problem."""
    for job in jobs:
        if job.config is not None:
            settings = job.config.sweep
            if settings.srun is not None and which("srun") is None:
                raise ConfigError("sweep.srun: there is no srun here. Start the sweep where SLURM is, or leave it out.")
            return settings
    problems = []
    for job in jobs:
        label = " ".join(f"{key}={value}" for key, value in job.axes.items())
        problems.append(f"[{label}] {job.problem}" if label else str(job.problem))
    raise ConfigError(problems)


def _directory(settings: SweepConfig, master: Composed) -> str | None:
    """sweep.dir, or Hydra's own name for it where the command line gives that."""
    if settings.dir is None and any(override.key_or_group == "hydra.sweep.dir" for override in master.overrides):
        return str(master.root.hydra.sweep.dir)
    return settings.dir


def _identity(parts: Sequence[str]) -> str:
    return json.dumps(sorted(parts))


def _finish(
    folder: SweepFolder, jobs: Sequence[Job], settings: SweepConfig, runner: Runner, flags: tuple[str, ...]
) -> int:
    """Write the table, the CSV and the plots, whatever happened; `flags` begin the command of one job."""
    records = outcome.rows(folder, jobs)
    outcome.write_table(folder.path / "sweep.csv", records)
    axes = list(dict.fromkeys(key for job in jobs for key in job.axes))
    objective = _objective(folder, jobs, settings)
    outcome.draw_axes(folder.path, records, axes, objective)
    if settings.prune is not None:
        outcome.draw_evaluations(folder, jobs, objective)
    if records:
        outcome.print_table(records, axes, objective)
    finished, pruned = (sum(record["state"] == state for record in records) for state in DONE)
    done = finished + pruned == len(records) and not runner.interrupted
    folder.finish(done)
    early = f", {pruned} pruned" if pruned else ""
    _say(
        f"sweep {folder.path}: {finished} of {len(records)} jobs finished{early}; table in {folder.path / 'sweep.csv'}"
    )
    _tell_best(jobs, records, objective, settings, flags)
    if not done:
        _say("the same command again runs the jobs that are missing or failed")
    return runner.exit_code


def _tell_best(
    jobs: Sequence[Job],
    records: Sequence[dict[str, Any]],
    objective: str,
    settings: SweepConfig,
    flags: tuple[str, ...],
) -> None:
    """Name the job with the best objective of those that finished, with the command that does it alone."""
    found = [(r["objective"], job) for r, job in zip(records, jobs, strict=True) if r["state"] == FINISHED and job.axes]
    found = [(value, job) for value, job in found if value is not None]
    if not found:
        return
    choose = max if (settings.direction == "maximize" or objective == "times_as_fast") else min
    value, best = choose(found, key=lambda pair: pair[0])
    alone = Source(overrides=best.overrides, flags=flags).command(without=["hydra", "run.dir", "sweep"])
    _say(f"best: job {best.name}, {objective} {value:.6g}: {alone}")


def _objective(folder: SweepFolder, jobs: Sequence[Job], settings: SweepConfig) -> str:
    """The key that jobs were judged by; says so where none of them has it."""
    key, known = settings.objective, set[str]()
    for job in jobs:
        status = folder.status(job)
        if status.get("state") == FINISHED:
            task, numbers = outcome.job_numbers(folder, job, status)
            key = objective_key(task, numbers, settings.objective)
            if as_number(numbers.get(key)) is not None:
                return key
            known |= {name for name, value in numbers.items() if as_number(value) is not None}
    if known and settings.objective != SweepConfig().objective:
        _say(f"sweep.objective={settings.objective}: no job has such a number. There are: {', '.join(sorted(known))}.")
    return key


def _say(text: str) -> None:
    print(f"ttrain: {text}", file=sys.stderr, flush=True)
