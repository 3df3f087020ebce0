"""Searches: Optuna proposes the values of the next job. The jobs' own status files are the memory, nothing else.

`optimizer.lr=tag(log,interval(1e-4,1e-2))`, `model.width=range(64,257,64)`, `engine=static,dynamic` are Hydra's
overrides for ranges of numbers and for choices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from ttrain.config.schema import SweepConfig
from ttrain.core.errors import UserError
from ttrain.sweep.folder import FINISHED, Status, SweepFolder
from ttrain.sweep.jobs import Job, SweepOverrides


class Search:
    """Gives jobs until `settings.trials` are finished or failed. Earlier jobs of the folder teach it first."""

    def __init__(
        self,
        overrides: SweepOverrides,
        settings: SweepConfig,
        folder: SweepFolder,
        seed: int,
        compose: Callable[[Job], Job],
    ) -> None:
        """Raises UserError where Optuna is missing."""
        self._optuna = _import_optuna()
        self._overrides, self._settings, self._folder, self._compose = overrides, settings, folder, compose
        self._space = {override.key_or_group: self._distribution(override) for override in overrides.swept}
        self._study = self._optuna.create_study(direction=settings.direction, sampler=self._sampler(seed))
        self._trials: dict[str, Any] = {}
        self.jobs: list[Job] = []
        self._again: list[Job] = []
        for entry in folder.content["jobs"]:
            self._learn(Job(entry["number"], tuple(entry["overrides"]), dict(entry["axes"])))

    def next(self) -> Job | None:
        if self._again:
            job = self._compose(self._again.pop(0))
            self._study.enqueue_trial(self._parameters(job))
            self._trials[job.key] = self._study.ask(self._space)
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
        trial, value = self._trials.pop(job.key), _value(status)
        failed = self._optuna.trial.TrialState.FAIL
        self._study.tell(trial, value, state=failed if value is None else None)

    def _learn(self, job: Job) -> None:
        """A job of an earlier start: a result is told to the study, anything else is run again."""
        self.jobs.append(job)
        status = self._folder.status(job)
        value = _value(status)
        if status.get("state") != FINISHED:
            self._again.append(job)
        elif value is not None:
            create = self._optuna.trial.create_trial
            self._study.add_trial(create(params=self._parameters(job), distributions=self._space, value=value))

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
