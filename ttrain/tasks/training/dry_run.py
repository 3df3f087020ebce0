"""A run on a mocked board: the cost of its steps with each engine, or the scarce resource and keys that help."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from typing import Any

from ttrain.core.errors import TtrainError
from ttrain.core.units import format_bytes
from ttrain.device.base import Device
from ttrain.device.info import Failed, OutOfResources, info_of
from ttrain.engine.base import Step
from ttrain.tasks.training.expected import changed
from ttrain.tasks.training.run import Run
from ttrain.train.checkpoint.retention import is_dry_run
from ttrain.train.forecast.limits import plan_needs
from ttrain.train.forecast.step_cost import state_bytes
from ttrain.train.settings import without_phases

COMPARED = ("static", "dynamic")  # engines whose dispatch is measured beside that of the configured one
_STEPS = 6  # the first one builds programs; the fastest of the others is what a step costs the host


def dry_run(run: Run, device: Device, say: Callable[[str], None]) -> None:
    """Run the largest step on a device that computes no values. Raises OutOfResources where the board does not take it.

    A device that tells what steps cost leaves a record, never a checkpoint. On another one each step is built, and one
    is launched; nothing stays.
    """
    if run.config.train.steps is None:
        say("train.minutes: a run measures how many steps that makes before its first one; a dry run does not.")
    config = replace(run.config, train=without_phases(run.config.train, steps=run.config.train.steps or 1))
    run = replace(run, config=config)
    if device.step_facts():
        _costed(run, device, say)
        return
    with closing(run.open(device)) as session:
        run.stepper(session, session.build_training())(1)
        done = "Every step was built and one was launched; nothing was trained or saved."
        say(f"Dry run: device {device.name} computes no values. {done}")


def _costed(run: Run, device: Device, say: Callable[[str], None]) -> None:
    """Run some steps, and record what they cost or why the board does not take them."""
    held = run.origin.held
    with ExitStack() as stack:
        mine = held if held is not None and is_dry_run(held.path) else None
        folder = mine or stack.enter_context(closing(run.claim(device)))
        warning = f"DRY RUN on {device.name}: values are not computed, nothing is trained or saved."
        say(warning)
        steps: dict[str, Step] = {}
        try:
            with closing(run.open(device)) as session:
                steps.update(session.build_training())
                run.record(folder, session, steps, {"dry_run": warning})
                trained = {name: steps[name] for name in session.graph.train_steps()}
                record = _measured(device, run.stepper(session, steps), trained)
                counters = asdict(session.engine.counters)
        except Exception as error:
            failure = _failure(run, device, steps, error)
            if isinstance(failure, TtrainError):
                reason: dict[str, Any] = {"computes": False, "accepted": False, "reason": str(failure)}
                if isinstance(failure, OutOfResources):
                    reason |= {"out_of": failure.cause, "keys": failure.keys}
                folder.write(folder.summary, reason)
            raise failure from error
        del session, trained  # the board holds one engine at a time
        steps.clear()
        engines = {run.config.engine.name: record["host_dispatch_ms"], **_others(run, device, say)}
        record["host_dispatch_ms_by_engine"] = engines
        folder.write(folder.summary, {"accepted": True, **record, "engine": counters})
        for line in _lines(record):
            say(line)
        say(f"{warning} Run: {folder.path}")


def _measured(device: Device, run: Callable[[int], Any], steps: Mapping[str, Step]) -> dict[str, Any]:
    """Return what optimizer steps cost, as JSON values: `run(step)` is one, `steps` are the built steps that it calls.

    What is counted after the second step, programs and allocations, should be 0.
    """
    times, facts = [], [_facts(device)]
    for step in range(1, _STEPS + 1):
        times.append(_milliseconds(run, step))
        facts.append(_facts(device))
    last = facts[-1]
    memory = {"dram_bytes": last.get("dram_bytes", 0), "dram_total_bytes": device.memory().get("total", 0)}
    if "host_bytes" in last:
        memory["host_bytes"] = last["host_bytes"]
    for name, built in steps.items():
        launches = built.launches()  # none by an engine that records every step anew: its peaks are not known
        for key, size in device.step_peaks(launches).items() if launches else ():
            memory[f"{name}_{key}"] = size
    return {
        "computes": False,
        "note": "values are not computed: nothing was trained, no loss means anything, no checkpoint was written",
        "first_step_ms": round(times[0], 3),
        "host_dispatch_ms": round(min(times[1:]), 3),
        "device_ops": last.get("device_ops", 0) - facts[-2].get("device_ops", 0),
        "programs": last.get("programs", 0),
        "after_second_step": {key: last.get(key, 0) - facts[2].get(key, 0) for key in ("programs", "allocations")},
        **memory,
    }


def _lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield a record of costs as lines for people."""
    for key, value in record.items():
        shown = format_bytes(value) if key.endswith("_bytes") else value
        if isinstance(value, dict):
            shown = ", ".join(f"{name} {number}" for name, number in value.items())
        if key not in ("computes", "note"):
            yield f"{key.replace('_', ' '):28} {shown}"


def _milliseconds(run: Callable[[int], Any], step: int) -> float:
    start = time.perf_counter()
    run(step)
    return 1e3 * (time.perf_counter() - start)


def _facts(device: Device) -> dict[str, int]:
    return {**device.step_facts(), "allocations": device.counters.allocations}


def _others(run: Run, device: Device, say: Callable[[str], None]) -> dict[str, float]:
    """Milliseconds of host dispatch per step by the engines that were not measured yet, where they fit."""
    found: dict[str, float] = {}
    for name in COMPARED:
        if name == run.config.engine.name:
            continue
        gc.collect()  # the tensors of the engine before
        try:
            other = replace(run, config=changed(run.config, {"engine": name}))
            with closing(other.open(device)) as session:
                stepper = run.stepper(session, session.build_training(further=False))
                found[name] = round(min([_milliseconds(stepper, step) for step in range(1, _STEPS + 1)][1:]), 3)
        except RuntimeError as error:
            why = _failure(run, device, {}, error)
            say(f"engine={name} does not fit, so its dispatch was not measured: {why}")
    return found


def _failure(run: Run, device: Device, steps: Mapping[str, Step], error: Exception) -> Exception:
    """Return an error that says which resource is short, with the plan's needs; else the error itself."""
    if isinstance(error, TtrainError):
        return error
    config = run.config
    plans = [step.plan for step in steps.values() if step.plan is not None]
    failed = Failed(
        config.precision.name,
        config.engine.name,
        rows=config.train.batch_size // config.train.gradient_accumulation,
        smaller=run.shrinking_keys(),
        vocabulary=hasattr(run.model.config, "vocabulary"),
        state=max((sum(state_bytes(plan).values()) for plan in plans), default=0),
        memory=device.memory().get("total", 0),
    )
    found = info_of(config.device).diagnose(config.device, error, failed)
    if found is None:
        return error
    needs = plan_needs(steps) if found.cause == "DRAM" else ""
    return OutOfResources(f"{found} {needs}".strip(), found.cause, found.keys)
