"""The steps that train.minutes allows, from timed steps, evaluations and saves. The state stays as it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ttrain.config.validate import rule_problems
from ttrain.core.errors import ConfigError
from ttrain.core.units import counted, format_duration
from ttrain.engine.base import Step
from ttrain.tasks.training.expected import changed, steps_within
from ttrain.tasks.training.run import Run
from ttrain.train.checkpoint.checkpoint import UNFINISHED, Progress, read_manifest, step_name
from ttrain.train.checkpoint.save import host_copy, save_checkpoint
from ttrain.train.loop.evaluation import Evaluation
from ttrain.train.settings import END
from ttrain.train.steps.session import Session

LONGEST = 10  # seconds of timed steps, where a twentieth of the minutes is more


def with_steps(
    run: Run, session: Session, progress: Progress, checkpoints: Path, steps: Mapping[str, Step], evaluation: Evaluation
) -> tuple[Run, str, dict[str, Any]]:
    """Return the run with as many steps as the rest of train.minutes allows, a sentence about it, and its facts.

    A save into the folder `checkpoints`, an evaluation and some steps are timed. The leading rank's times count for
    all. Raises ConfigError where other keys ask for more steps.
    """
    start, minutes, phased = time.perf_counter(), run.config.train.minutes or 0, len(run.phases.phases) > 1

    def seconds(work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return run.world.broadcast(max(time.perf_counter() - began, 1e-9))

    def measure_files(due: str, stopped: Callable[[], bool]) -> dict[str, float]:
        run.world.once(lambda: str(run.evals.measure(due, stopped, lambda *told, **facts: None)))
        return {}

    with TemporaryDirectory(prefix=UNFINISHED, dir=checkpoints) as scratch:
        copying = seconds(lambda: host_copy(session.state))
        save = seconds(lambda: save_checkpoint(Path(scratch), session.state, run.content(progress, None)))
        evaluation = replace(evaluation, measure=measure_files)
        replace(evaluation, limit=evaluation.rows)()  # what compiles is not timed
        evaluated, ended = seconds(evaluation), seconds(partial(measure_files, END, bool))
        timed = replace(run, config=changed(run.config, {"train.steps": 1}))
        # Where there are phases, one batch is read, as the next phase takes other steps.
        step, first, by = timed.stepper(session, steps, 0 if phased else 2**62), progress.step + 1, not phased
        seconds(partial(step, first))
        one = seconds(partial(step, first + by))
        times = 1 + int(min(60 * minutes / 20, LONGEST) / one)
        one = seconds(lambda: [step(first + by * number) for number in range(times)]) / times
        read_manifest(Path(scratch, step_name(progress.step))).load(session.state)
    beside = run.config.train.async_save and session.engine.device.name != "cpu"  # whose cores a save takes from steps
    parts = one, evaluated, copying if beside else save, save + ended
    last = steps_within(run.config, progress.spent, progress.step, parts)
    config = changed(run.config, {"train.steps": last})
    told = f"train.minutes={minutes:g} allows {counted(last, 'step')}"
    if problems := rule_problems(config):
        raise ConfigError(f"{told}. {' '.join(problems)}")
    shown = map(format_duration, (one, evaluated, save, time.perf_counter() - start))
    told += " of {}, with evaluations of {} and saves of {}. Not counted: {} of measuring.".format(*shown)
    stored = {**run.stored, "train": {**run.stored["train"], "steps": last}}
    return replace(run, config=config, stored=stored), told, {"last": last, "seconds": parts}
