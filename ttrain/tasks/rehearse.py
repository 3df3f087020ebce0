"""A run on a mocked board: what its steps would cost by each engine, or what does not fit and which keys help."""

from __future__ import annotations

import dataclasses
import gc
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ttrain.core.errors import TtrainError
from ttrain.device.family import Failed, Misfit, family_of

if TYPE_CHECKING:
    from ttrain.engine.base import Step
    from ttrain.tasks.job import Job
    from ttrain.train.runs.run_directory import RunDirectory
    from ttrain.train.steps.rehearsal import Rehearsal

COMPARED = ("static", "dynamic")  # engines whose dispatch is measured beside that of the configured one


def rehearse(job: Job, run: RunDirectory) -> None:
    """Some steps on a device that only tells what steps cost. Writes a record, never a checkpoint.

    Raises Misfit where the board does not take the step.
    """
    warning = f"REHEARSAL on {job.device.name}: values are not computed, nothing is trained or saved."
    job.console.say(warning)
    try:
        result, counters = _measured(job, run, warning)
    except Exception as error:
        failure = _failure(job, error)
        if isinstance(failure, TtrainError):
            reason = failure.to_dict() if hasattr(failure, "to_dict") else {"accepted": False, "reason": str(failure)}
            run.write_summary({"computes": False, **reason})
        raise failure from error
    result = dataclasses.replace(result, engines={job.config.engine.name: result.dispatch_ms, **_others(job)})
    run.write_summary({"accepted": True, **result.to_dict(), "engine": counters})
    for line in result.lines():
        job.console.say(line)
    job.console.say(f"{warning} Run: {run.path}")


def _measured(job: Job, run: RunDirectory, warning: str) -> tuple[Rehearsal, dict[str, int]]:
    """By the configured engine, recorded."""
    from ttrain.tasks.job import open_session
    from ttrain.train.steps.rehearsal import rehearse as measure

    with closing(open_session(job.config, job.model, job.device, training=True)) as session:
        steps = job.steps = session.build_training()
        job.record(session, run, {"rehearsal": warning}, steps)
        names = session.graph.train_steps()
        result = measure(job.device, _one(job, steps), {name: steps[name] for name in names})
        return result, session.engine.counters.as_dict()


def _others(job: Job) -> dict[str, float]:
    """Milliseconds of host dispatch per step by the engines that were not measured yet, where they fit."""
    from ttrain.tasks.job import open_session
    from ttrain.train.steps.rehearsal import dispatch_ms

    found: dict[str, float] = {}
    for name in COMPARED:
        if name == job.config.engine.name:
            continue
        job.steps = {}
        gc.collect()  # the tensors of the engine before
        config = dataclasses.replace(job.config, engine=dataclasses.replace(job.config.engine, name=name))
        try:
            with closing(open_session(config, job.model, job.device, training=True)) as session:
                traces = session.graph.train_steps()
                steps = {step: session.engine.build(step, trace) for step, trace in traces.items()}
                found[name] = dispatch_ms(_one(job, steps))
        except RuntimeError as error:
            job.console.say(f"engine={name} does not fit, so its dispatch was not measured: {_failure(job, error)}")
    return found


def _one(job: Job, steps: dict[str, Step]) -> Any:
    """One optimizer step, by its number."""
    config, rates, step = job.config, job.rates(), job.train_step(steps)
    rows = config.train.batch_size

    def run(number: int) -> None:
        step(job.dataset.batch("train", config.run.seed, number * rows, rows), rates(number), number)

    return run


def _failure(job: Job, error: Exception) -> Exception:
    """The misfit that an error tells of, with what the plan needs; else the error itself."""
    from ttrain.train.forecast.out_of_memory import plan_needs, shrinking_keys

    if isinstance(error, TtrainError):
        return error
    config, model = job.config, job.model.config
    precision, engine, train = config.precision.name, config.engine.name, config.train
    plans = [step.plan for step in job.steps.values() if step.plan is not None]
    failed = Failed(
        precision,
        engine,
        rows=train.batch_size // train.accumulation,
        smaller=shrinking_keys(train, model, precision, engine, config.optimizer),
        vocabulary=hasattr(model, "vocabulary"),
        state=max((sum(plan.state_bytes().values()) for plan in plans), default=0),
        memory=job.device.memory().get("total", 0),
    )
    found = family_of(config.device).diagnose(config.device, error, failed)
    if found is None:
        return error
    needs = plan_needs(job.steps) if found.cause == "DRAM" else ""
    return Misfit(f"{found} {needs}".strip(), found.cause, found.keys)
