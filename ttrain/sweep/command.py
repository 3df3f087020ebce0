"""`ttrain -m ...` from its overrides to its exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from shutil import which

from ttrain.config.compose import Composed, Composer
from ttrain.config.schema import Source, SweepConfig
from ttrain.core.errors import ConfigError
from ttrain.sweep import outcome
from ttrain.sweep.folder import DONE, FINISHED, SweepFolder
from ttrain.sweep.jobs import Job, SweepOverrides, check_directories, compose_job
from ttrain.sweep.run import Runner
from ttrain.sweep.sources import Grid, Search
from ttrain.train.supervise.child import say


def run(composer: Composer, overrides: Sequence[str]) -> int:
    """Run the sweep and return its exit code.

    Raises ConfigError, and leaves no folder behind, where no job can be composed.
    """
    master = composer.compose(overrides, sweep=True)
    if master.problems:
        raise ConfigError(master.problems)
    sweep = SweepOverrides.read(composer, master)
    searches = sweep.setting("search", master) is not None
    compose = partial(compose_job, composer, own=sweep.own)
    jobs = [sweep.example()] if searches else sweep.combinations()
    first = next((job.config for job in list(map(compose, jobs)) if job.config is not None), None)
    if first is None:
        raise ConfigError([_labelled(job) for job in jobs])
    settings = first.sweep
    if settings.srun is not None and which("srun") is None:
        raise ConfigError("sweep.srun: there is no srun here. Start the sweep where SLURM is, or leave it out.")
    check_directories(jobs)
    parts = [job.key for job in jobs]
    if searches:
        ranges = [str(override.input_line) for override in sweep.swept]
        parts = [*sweep.fixed, *ranges, str(settings.search), settings.direction, settings.objective]
    identity = json.dumps(sorted([*composer.files.flags, *parts]))
    folder = SweepFolder.open(_directory(settings, master), identity, overrides, same=searches)
    try:
        source = Search(sweep, first, folder, compose) if searches else Grid(folder, jobs, compose)
        say(f"sweep {folder.path}: {source.title}")
        runner = Runner(folder, settings, composer.job_flags(master), say)
        runner.run(source)
        return _finish(folder, source.jobs, settings, runner)
    finally:
        folder.close()


def _labelled(job: Job) -> str:
    label = " ".join(f"{key}={value}" for key, value in job.axes.items())
    return f"[{label}] {job.problem}" if label else str(job.problem)


def _directory(settings: SweepConfig, master: Composed) -> str | None:
    """Return sweep.dir, or Hydra's own name for it where the command line gives that."""
    if settings.dir is None and any(override.key_or_group == "hydra.sweep.dir" for override in master.overrides):
        return str(master.root.hydra.sweep.dir)
    return settings.dir


def _finish(folder: SweepFolder, jobs: Sequence[Job], settings: SweepConfig, runner: Runner) -> int:
    """Write the table, the CSV and the plots, whatever happened, and return the exit code."""
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
    say(f"sweep {folder.path}: {finished} of {len(records)} jobs finished{early}; table in {folder.path / 'sweep.csv'}")
    judged = [(record["objective"], job) for record, job in zip(records, jobs, strict=True)
              if record["state"] == FINISHED and record["objective"] is not None and job.axes]  # fmt: skip
    if judged:
        choose = max if (settings.direction == "maximize" or objective == "times_as_fast") else min
        value, best = choose(judged, key=lambda pair: pair[0])
        alone = Source(overrides=best.overrides, flags=runner.flags).command(without=["hydra", "run.dir", "sweep"])
        say(f"best: job {best.name}, {objective} {value:.6g}: {alone}")
    if not done:
        say("the same command again runs the jobs that are missing or failed")
    return runner.exit_code


def _objective(folder: SweepFolder, jobs: Sequence[Job], settings: SweepConfig) -> str:
    """Return the key that jobs were judged by; say so where none of them has it."""
    key, known = settings.objective, set[str]()
    for status, job in ((folder.status(job), job) for job in jobs):
        if status.get("state") == FINISHED:
            task, numbers = outcome.job_numbers(folder, job, status)
            key = outcome.objective_key(task, numbers, settings.objective)
            if outcome.as_number(numbers.get(key)) is not None:
                return key
            known |= {name for name, value in numbers.items() if outcome.as_number(value) is not None}
    if known and settings.objective != SweepConfig().objective:
        say(f"sweep.objective={settings.objective}: no job has such a number. There are: {', '.join(sorted(known))}.")
    return key
