"""The jobs to run next: all jobs of a grid, or the values that Optuna proposes in a search.

`optimizer.lr=tag(log,interval(1e-4,1e-2))`, `model.width=range(64,257,64)`, `engine=static,dynamic` are Hydra's
overrides for ranges of numbers and for choices.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from ttrain.config.schema import Config
from ttrain.core.errors import UserError, raised_as
from ttrain.sweep.jobs import DONE, FINISHED, PRUNED, Compose, Job, Status, SweepFolder, SweepOverrides
from ttrain.sweep.outcome import measured
from ttrain.train.logging.metrics import METRICS

JOURNAL = "search.journal"
_KEY = "job"  # attribute of a trial: the key of its job
_PROPOSALS = 20  # for each job of a search: small spaces repeat themselves
_SAMPLERS = {
    "tpe": "TPESampler", "random": "RandomSampler", "cmaes": "CmaEsSampler", "gp": "GPSampler", "qmc": "QMCSampler",
}  # fmt: skip


class Grid:
    """Jobs in a fixed order, without those that finished before."""

    def __init__(self, folder: SweepFolder, jobs: list[Job], compose: Compose) -> None:
        self.jobs = jobs
        for job in folder.adopt(jobs):
            if job.config is not None:
                compose(job)  # ${hydra:job.num} is another one now
        self._left = [job for job in jobs if folder.status(job).get("state") != FINISHED]
        self.title = f"{len(jobs)} jobs, {len(jobs) - len(self._left)} done before"

    def next(self) -> Job | None:
        """Return a job to start now; None where there is none, now or ever."""
        return self._left.pop(0) if self._left else None

    def tell(self, job: Job, status: Status) -> None:
        """Take in how a job of `next` ended."""

    def hopeless(self, job: Job, run: Path) -> bool:
        """Return whether the job, which runs in that directory, is not worth finishing."""
        return False


class Search(Grid):
    """Gives jobs until `settings.trials` are finished or failed. Its state is a journal of Optuna in the folder."""

    def __init__(self, overrides: SweepOverrides, first: Config, folder: SweepFolder, compose: Compose) -> None:
        """`first` is the config of one of the jobs. Raises UserError where Optuna is missing."""
        with raised_as(UserError, "sweep.search needs optuna", "Run: pip install 'ttrain[search]'", ImportError):
            import optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        settings, train = first.sweep, first.train
        self._overrides, self._settings, self._folder, self._compose = overrides, settings, folder, compose
        self._space = {override.key_or_group: self._distribution(override) for override in overrides.swept}
        path = folder.path / JOURNAL
        _mend(path)
        with raised_as(UserError, f"{path} is damaged", "Give another sweep.dir.", (ValueError, KeyError)):
            journal = optuna.storages.journal.JournalFileBackend(str(path))
            self._study = optuna.create_study(
                study_name="ttrain",  # by which hyperband sorts trials into brackets
                storage=optuna.storages.JournalStorage(journal), load_if_exists=True, direction=settings.direction,
                pruner=self._pruner(train.last // (train.eval_every or train.last)),
            )  # fmt: skip
        known = self._study.trials
        sampler = getattr(optuna.samplers, _SAMPLERS[str(settings.search)])
        self._study.sampler = sampler(seed=first.run.seed + len(known))  # a seed would begin with the same draws again
        self.jobs = folder.jobs()
        statuses = {job.key: folder.status(job) for job in self.jobs}
        for trial in known:
            if not trial.state.is_finished():  # the search was killed while it ran, or before it was begun again
                waits = trial.state == optuna.trial.TrialState.WAITING
                number = self._study.ask().number if waits else trial.number
                self._end(number, statuses.get(trial.user_attrs.get(_KEY), {}))
        self._values = {trial.user_attrs.get(_KEY): trial.params for trial in known if trial.params}
        self._again = [job for job in self.jobs if statuses[job.key].get("state") not in DONE]
        if lost := [job.name for job in self.jobs if job.key not in self._values]:
            raise UserError(f"{path} has nothing of job {lost[0]}. Give another sweep.dir.")
        self._trials: dict[str, Any] = {}
        self._read: dict[str, tuple[int, int]] = {}  # by job: evaluations that were reported, bytes that were read
        self.title = f"search by {settings.search}, {len(self.jobs)} of {settings.trials} jobs known"

    def next(self) -> Job | None:
        if self._again:
            job = self._again.pop(0)
            self._study.enqueue_trial(self._values[job.key], {_KEY: job.key})
            self._trials[job.key] = self._study.ask(self._space)
            return self._compose(job)
        while len(self.jobs) < self._settings.trials and len(self._study.trials) < _PROPOSALS * self._settings.trials:
            trial = self._study.ask(self._space)
            axes = {key: repr(value) if isinstance(value, float) else str(value) for key, value in trial.params.items()}
            job = self._overrides.job_of(axes)
            trial.set_user_attr(_KEY, job.key)
            same = next((other for other in self.jobs if other.key == job.key), None)
            if same is None:
                self._folder.adopt([job])
                self.jobs.append(job)
                self._trials[job.key] = trial
                return self._compose(job)
            status = self._folder.status(same)  # its result is known, or will be
            self._end(trial.number, status if status.get("state") == FINISHED else {})
        return None

    def tell(self, job: Job, status: Status) -> None:
        self._end(self._trials.pop(job.key).number, status)

    def _end(self, number: int, status: Status) -> None:
        states, value = self._optuna.trial.TrialState, status.get("objective")
        if status.get("state") == PRUNED:
            self._study.tell(number, state=states.PRUNED)  # its value is the last that was reported
        elif status.get("state") == FINISHED and value is not None:
            self._study.tell(number, float(value))
        else:
            self._study.tell(number, state=states.FAIL)

    def hopeless(self, job: Job, run: Path) -> bool:
        """Report the evaluations that are new, and return whether the job would be pruned after one of them."""
        metrics, trial, hopeless = run / METRICS, self._trials[job.key], False
        if self._settings.prune is None or not metrics.exists():
            return False
        (known, read), size = self._read.get(job.key, (0, 0)), metrics.stat().st_size
        if size == read:
            return False
        found = measured(run, self._settings.objective)
        self._read[job.key] = len(found), size
        for number, value in enumerate(found[known:], known + 1):
            trial.report(value, number)
            hopeless |= trial.should_prune()
        return hopeless

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
            values = range(sweep.start, sweep.stop, sweep.step)
            low, high = sorted((values[0], values[-1]))
            return kinds.IntDistribution(low, high, step=abs(sweep.step))
        return kinds.CategoricalDistribution([str(value) for value in override.sweep_string_iterator()])

    def _pruner(self, evaluations: int) -> Any:
        """Return Optuna's pruner; `evaluations` are those of a whole job."""
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


def _mend(journal: Path) -> None:
    """Remove what a kill leaves of a journal: its lock, and a line without an end. The lock of the sweep is held."""
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    content = journal.read_bytes() if journal.exists() else b""
    if content and not content.endswith(b"\n"):
        os.truncate(journal, content.rfind(b"\n") + 1)
