"""Searches: Optuna proposes the values of the next job. The jobs' own status files are the memory, nothing else.

`optimizer.lr=tag(log,interval(1e-4,1e-2))`, `model.width=range(64,257,64)`, `engine=static,dynamic` are Hydra's
overrides for ranges of numbers and for choices.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from ttrain.config.schema import SweepConfig
from ttrain.core.errors import UserError
from ttrain.sweep.folder import DONE, FINISHED, PRUNED, Status, SweepFolder
from ttrain.sweep.jobs import Job, SweepOverrides
from ttrain.sweep.numbers import METRICS, measured


class Search:
    """Gives jobs until `settings.trials` are finished or failed. Earlier jobs of the folder teach it first."""

    def __init__(
        self,
        overrides: SweepOverrides,
        settings: SweepConfig,
        folder: SweepFolder,
        seed: int,
        compose: Callable[[Job], Job],
        evaluations: int = 1,
    ) -> None:
        """`evaluations` are those of a whole job. Raises UserError where Optuna is missing."""
        self._optuna = _import_optuna()
        self._overrides, self._settings, self._folder, self._compose = overrides, settings, folder, compose
        self._space = {override.key_or_group: self._distribution(override) for override in overrides.swept}
        self._study = self._optuna.create_study(
            study_name="ttrain",  # by which hyperband sorts trials into brackets
            direction=settings.direction, sampler=self._sampler(seed), pruner=self._pruner(evaluations),
        )  # fmt: skip
        self._trials: dict[str, Any] = {}
        self._reported: dict[str, tuple[int, int]] = {}  # by job: evaluations that were told, bytes that were read
        self.jobs: list[Job] = []
        self._again: list[Job] = []
        for entry in folder.content["jobs"]:
            self._learn(Job(entry["number"], tuple(entry["overrides"]), dict(entry["axes"])))

    def next(self) -> Job | None:
        if self._again:
            job = self._compose(self._again.pop(0))
            self._trials[job.key] = self._known_trial(job)
            return job
        if len(self.jobs) >= self._settings.trials:
            return None
        trial = self._study.ask(self._space)
        axes = {key: _text(value) for key, value in trial.params.items()}
        job = Job(-1, (*self._overrides.fixed, *(f"{key}={value}" for key, value in axes.items())), axes)
        if any(job.key == other.key for other in self.jobs):  # proposed before: its result is known
            self._tell_again(trial, job)
            return self.next() if len(self._study.trials) < 20 * self._settings.trials else None
        self._folder.adopt([job])
        self.jobs.append(job)
        self._trials[job.key] = trial
        return self._compose(job)

    def tell(self, job: Job, status: Status) -> None:
        self._end(self._trials.pop(job.key), status)

    def _end(self, trial: Any, status: Status) -> None:
        value, states = _value(status), self._optuna.trial.TrialState
        if status.get("state") == PRUNED:
            self._study.tell(trial, state=states.PRUNED)  # its value is the last that was reported
        else:
            self._study.tell(trial, value, state=states.FAIL if value is None else None)

    def hopeless(self, job: Job, run: Path) -> bool:
        trial = self._trials.get(job.key)
        return self._settings.prune is not None and trial is not None and self._report(trial, job, run)

    def _report(self, trial: Any, job: Job, run: Path) -> bool:
        """Tells the study of the evaluations that are new; whether it would prune after one of them."""
        try:
            size = os.stat(run / METRICS).st_size
        except OSError:  # it has not begun yet
            return False
        known, read = self._reported.get(job.key, (0, 0))
        if size == read:
            return False
        found, hopeless = measured(run, self._settings.objective), False
        self._reported[job.key] = len(found), size
        for number, value in enumerate(found[known:], known + 1):
            trial.report(value, number)
            hopeless |= trial.should_prune()
        return hopeless

    def _known_trial(self, job: Job) -> Any:
        self._study.enqueue_trial(self._parameters(job))
        return self._study.ask(self._space)

    def _learn(self, job: Job) -> None:
        """A job of an earlier start: what it came to is told to the study, anything else is run again."""
        self.jobs.append(job)
        status = self._folder.status(job)
        if status.get("state") not in DONE:
            self._again.append(job)
        elif status["state"] == PRUNED or _value(status) is not None:
            trial = self._known_trial(job)
            if self._settings.prune is not None:
                self._report(trial, job, self._folder.path / str(status.get("run", job.name)))
            self._end(trial, status)

    def _tell_again(self, trial: Any, job: Job) -> None:
        known = next(other for other in self.jobs if other.key == job.key)
        value = _value(self._folder.status(known))
        self._study.tell(trial, value, state=self._optuna.trial.TrialState.FAIL if value is None else None)

    def _parameters(self, job: Job) -> dict[str, Any]:
        parameters: dict[str, Any] = {}
        for key, distribution in self._space.items():
            text = job.axes[key]
            if hasattr(distribution, "choices"):
                parameters[key] = text
            else:
                parameters[key] = int(text) if isinstance(distribution.low, int) else float(text)
        return parameters

    def _distribution(self, override: Override) -> Any:
        kinds = self._optuna.distributions
        sweep = override.value()
        if isinstance(sweep, IntervalSweep):
            assert sweep.start is not None and sweep.end is not None
            log = "log" in sweep.tags
            if isinstance(sweep.start, int) and isinstance(sweep.end, int):
                return kinds.IntDistribution(sweep.start, sweep.end, log=log)
            return kinds.FloatDistribution(float(sweep.start), float(sweep.end), log=log)
        if isinstance(sweep, RangeSweep) and isinstance(sweep.start, int) and isinstance(sweep.step, int):
            assert isinstance(sweep.stop, int)
            last = sweep.start + (sweep.stop - 1 - sweep.start) // sweep.step * sweep.step
            return kinds.IntDistribution(sweep.start, last, step=sweep.step)
        return kinds.CategoricalDistribution([str(value) for value in override.sweep_string_iterator()])

    def _pruner(self, evaluations: int) -> Any:
        settings, pruners = self._settings, self._optuna.pruners
        after, factor = settings.prune_after, settings.prune_factor
        if settings.prune == "asha":
            return pruners.SuccessiveHalvingPruner(min_resource=after, reduction_factor=factor)
        if settings.prune == "hyperband":
            most = max(evaluations, after)
            return pruners.HyperbandPruner(min_resource=after, max_resource=most, reduction_factor=factor)
        if settings.prune == "median":
            return pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=after - 1)
        return pruners.NopPruner()

    def _sampler(self, seed: int) -> Any:
        samplers = self._optuna.samplers
        named = {
            "tpe": samplers.TPESampler,
            "random": samplers.RandomSampler,
            "cmaes": samplers.CmaEsSampler,
            "gp": samplers.GPSampler,
            "qmc": samplers.QMCSampler,
        }
        return named[str(self._settings.search)](seed=seed)


def example(overrides: SweepOverrides) -> Job:
    """A job with the first value of every swept key, to check the overrides that all jobs share."""
    axes = {}
    for override in overrides.swept:
        sweep = override.value()
        first = sweep.start if isinstance(sweep, IntervalSweep) else next(iter(override.sweep_string_iterator()))
        axes[override.key_or_group] = str(first)
    return Job(0, (*overrides.fixed, *(f"{key}={value}" for key, value in axes.items())), axes)


def _value(status: Status) -> float | None:
    value = status.get("objective")
    return float(value) if status.get("state") == FINISHED and value is not None else None


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError("sweep.search needs the package optuna: pip install 'ttrain[search]'.") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
