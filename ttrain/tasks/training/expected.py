"""The expected time of a step and of a run.

task=plan tells it. A long run repeats it at its start, with what takes less, and then tells the pace of three measured
steps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ttrain.config import build
from ttrain.config.schema import Config
from ttrain.config.validate import rule_problems
from ttrain.core.units import format_duration
from ttrain.data.batches import Dataset
from ttrain.device.info import SILICON, info_of
from ttrain.device.timing import Estimate, StepTime, Work
from ttrain.device.torch.info import GPUS
from ttrain.engine.base import Step
from ttrain.models.settings import TransformerConfig
from ttrain.optim.groups import check_groups, flat_parameters
from ttrain.tasks.training.run import Run
from ttrain.train.forecast import step_time
from ttrain.train.forecast.plan_report import PlanReport, plan_report
from ttrain.train.forecast.step_cost import collectives, exposed_seconds, link_seconds
from ttrain.train.forecast.step_time import KernelTimes, Rates, host_estimate, host_time, machine_name, timing
from ttrain.train.steps.phases import PhaseSchedule
from ttrain.train.steps.resident import choose_resident
from ttrain.train.steps.session import Session
from ttrain.train.steps.shard import FlatShard, divide, heaviest

MEASURED = 3  # steps after the first, which compiles, captures and fills caches
LESS = 0.8  # of the run's time: what takes more is not worth telling
PRESETS, SHOWN = 8, 2  # smaller presets that are planned and offered at most
SHORTEST = 32  # tokens of a context that is still offered

Steps = Mapping[str, "Step"]


@contextmanager
def planned_session(config: Config, dataset: Dataset | None) -> Iterator[Session]:
    """Open a session on a device that is planned only, of the rank that owns most. The data may be too short for it.

    engine=dynamic is planned as static. Without a `dataset` none of it lies on the device.
    """
    model = build.build_model(config, None if dataset is None else dataset.vocabulary)
    check_groups(model.parameters(), config.optimizer)
    if config.engine.name == "dynamic":
        config = replace(config, engine=replace(config.engine, name="static"))
    ranks = build.planned_ranks(config.parallel)
    if ranks.sharding:
        flats = flat_parameters(model.parameters(), build.made("optimizer", config.optimizer), model.compute)
        divide([*model.parameters().values()], flats, ranks)
        ranks = replace(ranks, rank=heaviest([FlatShard(flat, ranks) for flat in flats], ranks))
    rows = config.train.batch_size // config.train.gradient_accumulation
    with closing(build.planned_device(config.device)) as device:
        resident = choose_resident(config.data, rows, model, device, dataset)
        with closing(build.build_session(model, device, config, ranks=ranks, resident=resident)) as session:
            yield session


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return the config with other values; a group stands for its name."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        values = {name or "name": value}
        if key == "model.preset":  # it fills the fields that the one before filled
            values |= dict.fromkeys(config.model.filled)
        config = replace(config, **{section: replace(getattr(config, section), **values)})
    return config


def schedule_of(config: Config) -> PhaseSchedule:
    """Return the sizes of the batches of a run; the context is that of the config."""
    return PhaseSchedule.of(config.train, build.data_sizes(config.model).context)


def expected_time(
    config: Config,
    session: Session,
    steps: Steps,
    report: PlanReport,
    seconds: float = 0,
    compares: bool = False,
    dataset: Dataset | None = None,
) -> Estimate | str:
    """Return the expected time of one optimizer step, or why there is none.

    Kernels of this machine are timed for so many seconds; with 0 it goes by what was timed before, else by rates.
    With `compares` steps are planned for another engine too, with the data where it is known.
    """
    import torch

    device, context = session.engine.device, build.data_sizes(config.model).context
    work = Work.of(
        steps,
        report.per_step,
        tokens=config.train.batch_size * (context or 1),
        unit="tokens" if context else "examples",
        flops=session.graph.chips * sum(report.flops.values()),
    )
    found = info_of(config.device).estimate(config.device, work, config.engine.name)
    if found is not None:
        return found
    if device.name not in ("cpu", *GPUS):
        return f"device={device.name} computes nothing."
    if device.name in GPUS and not getattr(torch, device.name).is_available():
        return "There is no GPU here whose kernels could be timed."
    rates = step_time.measured_rates(device.name, str(config.precision.compute), config.device.index)
    assert rates is not None  # it is a CPU or a GPU
    machine = machine_name(device.name, getattr(device, "threads", None))
    named = replace(config.device, name=device.name)
    own, source = config.engine.name, f"the time of each kernel by itself on this {device.name}"
    if own not in ("static", "traced", "dynamic"):  # of a plugin
        source += f"; engine={own} is taken to launch them as static does"
    times: dict[str, StepTime] = {}
    for engine in ("traced", "static") if own == "traced" else ("static", "traced"):
        other = work
        if times and device.compiles:  # what a device captures are the launches of static
            if not compares:
                continue
            with planned_session(changed(config, {"engine": engine}), dataset) as planned:
                other = Work.of(planned.build_training(further=False), report.per_step)
        # The device is opened only where a kernel has not been timed yet, and there is time for it.
        timer = partial(timing, lambda: closing(build.build_device(named)), other.compiler)
        kernels = KernelTimes(timer, machine, rates, seconds, other.compiler)
        time = host_time(other, kernels.of(other), engine)
        seconds = kernels.seconds
        if not times or not kernels.note:
            source += kernels.note
            times[engine] = time
        else:
            source += f". engine={engine} is not compared{kernels.note}"
    times = {name: _communicating(config, work, replace(time, source=source), rates) for name, time in times.items()}
    return host_estimate(work, times, own, rates.flops)


def _communicating(config: Config, work: Work, time: StepTime, rates: Rates) -> StepTime:
    """Return the time of a step with its communication, which partly overlaps with computing."""
    ranks, gbps = build.planned_ranks(config.parallel), config.parallel.link_gbps
    sent = sum(each["nbytes"] for each in collectives(work, ranks).values())
    if not sent:
        return time
    exposed = exposed_seconds(work, ranks, gbps, time.total, rates.seconds)
    return replace(time, total=time.total + exposed, communication=link_seconds(sent, gbps))


@dataclass(frozen=True)
class Forecast:
    """Seconds that the rest of a run takes. `step` 0 is not known before some steps were measured."""

    step: float  # of one optimizer step
    steps: float  # that are left; of growing sequences in steps as long as the next one
    evaluation: float = 0.0  # of one evaluation
    evaluations: int = 0  # that are left

    @property
    def total(self) -> float:
        return self.step * self.steps + self.evaluation * self.evaluations

    def text(self) -> str:
        """Return its parts, for people."""
        parts = f"{self.steps:.0f} steps of {format_duration(self.step)}"
        if self.evaluation * self.evaluations >= 0.01 * self.total:
            several = "s" if self.evaluations > 1 else ""
            parts += f" and {self.evaluations} evaluation{several} of {format_duration(self.evaluation)}"
        return parts


@dataclass
class Pace:
    """Says how long a run takes where that is more than `limit` seconds, and what takes less."""

    expected: Forecast
    limit: float
    say: Callable[[str], None]
    others: Callable[[], Sequence[tuple[str, float]]]  # commands that take less, with their share of this run's time
    _done: int = 0
    _seconds: float = 0.0
    _told: bool = False

    def announce(self) -> None:
        """Say before the first step where the run is expected to take long."""
        if self.expected.total > self.limit:
            self._tell(self.expected, "is expected to take")

    def __call__(self, seconds: float) -> None:
        """Take in the seconds of a step, and say the pace once MEASURED were taken."""
        self._done += 1
        if 1 < self._done <= 1 + MEASURED:
            self._seconds += seconds
        if self._done != 1 + MEASURED:
            return
        was, step = self.expected, self._seconds / MEASURED
        evaluation = was.evaluation * step / was.step if was.step else 0.0
        found = replace(was, step=step, steps=max(was.steps - self._done, 0), evaluation=evaluation)
        if self._told:
            self.say(
                f"By its steps 2 to {self._done}, this run takes about {format_duration(found.total)} more: "
                f"{found.text()}; {format_duration(was.step)} a step was expected."
            )
        elif found.total > self.limit:
            self._tell(found, f"takes, by its steps 2 to {self._done},")

    def _tell(self, forecast: Forecast, how: str) -> None:
        self._told = True
        self.say(f"This run {how} about {format_duration(forecast.total)}: {forecast.text()}. It goes on.")
        others = self.others()
        if others:
            self.say("These take less, by the same reckoning:")
        for command, share in others:
            self.say(f"  {format_duration(share * forecast.total):>11}  {command}")


def pace_of(run: Run, session: Session, steps: Steps, step: int, say: Callable[[str], None]) -> Pace:
    """Return the pace of a run after `step`, with ways to take less where the run does not continue another."""
    config = run.config
    hours, count, schedule = config.train.long_hours, config.train.last, schedule_of(config)
    left = schedule.in_steps_of(schedule.at(step + 1), step, count)
    plain = Forecast(0.0, left, 0.0, evaluations_left(step, count, config.train.eval_every))
    if hours is None or config.train.minutes or step >= count:
        return Pace(plain, math.inf, say, list)
    runs, found = _Runs(config, run.dataset, plain), plain
    if info_of(config.device).mode(config.device) == SILICON:
        built = all(each.plan is not None for each in steps.values())
        found = runs.forecast(config, session, steps) if built else runs.planned(config)
    alone = run.origin.point is None and found.step
    others = partial(runs.others, found.total, session.engine.device.name) if alone else list
    return Pace(found, 3600 * hours, say, others)


def steps_seconds(run: Run) -> float:
    """Return how long the steps of a new run take by its plan, or its minutes; 0 where that is not known."""
    config, minutes = run.config, run.config.train.minutes or 0
    return 60 * minutes or _Runs(config, run.dataset, Forecast(0.0, config.train.last)).planned(config).total


def evaluations_left(step: int, steps: int, every: int | None) -> int:
    """Return how often a run evaluates after `step`: at every multiple, and at its end."""
    if step >= steps:
        return 0
    due = 0 if every is None else steps // every - step // every
    return due + (every is None or steps % every != 0)


def steps_within(config: Config, spent: float, done: int, parts: Sequence[float]) -> int:
    """Return the number of the last step that train.minutes allows, at least 1, after `spent` seconds on `done` steps.

    `parts` are the seconds of the next step, of an evaluation, of the part of a save that steps wait for, and of the
    last save with the evaluations at the end. The time of a step of another phase grows with its tokens.
    """
    train, schedule, (step, evaluation, copying, save) = config.train, schedule_of(config), parts

    def needed(steps: int) -> float:
        between = evaluations_left(done, steps, train.eval_every) * (evaluation + copying)
        between += (steps - done) // (train.save_every or steps + 1) * copying
        return step * schedule.in_steps_of(schedule.at(done + 1), done, steps) + between + save

    left = 60 * (train.minutes or 0) - spent
    return max(done + bisect_right(range(done + 1, done + 2 + int(max(left, 0) / step)), left, key=needed), 1)


@dataclass(frozen=True)
class _Runs:
    """Forecasts of a run and of changes to it, each by its plan."""

    config: Config
    dataset: Dataset
    plain: Forecast  # the steps and evaluations that are left, without times

    def forecast(self, config: Config, session: Session, steps: Steps) -> Forecast:
        """Forecast by the plans of built steps. A time that can't be known stays unknown until steps were measured."""
        report = plan_report(session.graph, session.state, steps)
        train = expected_time(config, session, steps, report)
        batch = expected_time(config, session, steps, replace(report, per_step={"evaluate": 1}))
        if isinstance(train, str) or isinstance(batch, str):
            return self.plain
        rows = config.train.batch_size // config.train.gradient_accumulation
        own, other = (build.data_sizes(each.model).context or 1 for each in (self.config, config))
        available = self.dataset.val_samples * own / other  # a whole split has more sequences where they are shorter
        batches = math.ceil(min(config.train.eval_sequences or available, available) / rows)
        return replace(self.plain, step=train.time.total, evaluation=batch.time.total * batches)

    def planned(self, config: Config) -> Forecast:
        """Forecast by plans made for this: of another config, or where the engine makes none."""
        with planned_session(config, self.dataset) as session:
            return self.forecast(config, session, session.build_training())

    def others(self, total: float, device: str) -> list[tuple[str, float]]:
        """Return commands that take less than a run of `total` seconds, with their share of its time."""
        found: list[tuple[str, float]] = []
        together: dict[str, Any] = {}
        for changes in single_changes(self.config, device):
            if (share := self._share(changes, total)) < LESS:
                found.append((command(self.config, changes), share))
                together |= changes
        if len(found) > 1 and (share := self._share(together, total)) < LESS:
            found.append((command(self.config, together), share))
        last = []
        for changes in smaller_presets(self.config):
            if (share := self._share(changes, total)) < LESS:
                last.append((command(self.config, changes), share))
            if share * total <= 3600 * (self.config.train.long_hours or 0):
                break
        return found + last[-SHOWN:]

    def _share(self, changes: Mapping[str, Any], total: float) -> float:
        """Return the share of the run's time with these changes; inf where they don't go together with the rest."""
        config = changed(self.config, changes)
        return math.inf if rule_problems(config) else self.planned(config).total / total


def single_changes(config: Config, device: str) -> Iterator[dict[str, Any]]:
    """Yield changes of one thing each: device, precision, batch, context."""
    import torch

    if device == "cpu" and torch.cuda.device_count():
        yield {"device": "cuda"}
    if config.precision.name == "fp32":
        yield {"precision": "bf16"}
    size, parts = config.train.batch_size, config.train.gradient_accumulation
    if parts >= 4:
        yield {"train.batch_size": size // parts * (parts // 4), "train.gradient_accumulation": parts // 4}
    elif size // parts >= 4:
        yield {"train.batch_size": size // parts // 4 * parts}
    context = build.data_sizes(config.model).context
    if context is not None and context >= 4 * SHORTEST and not config.train.length_schedule:
        yield {"model.context": context // 4}


def smaller_presets(config: Config) -> Iterator[dict[str, Any]]:
    """Yield the next smaller presets, the largest first, where the sizes of the model are those of a preset."""
    model = config.model
    if not isinstance(model, TransformerConfig) or model.preset is None or config.train.length_schedule:
        return
    if {*model.size_names()} - model.filled - {"context"}:
        return
    sizes = {name: preset["layers"] * preset["width"] ** 2 for name, preset in model.presets.items()}
    smaller = [name for name in sorted(sizes, key=lambda name: -sizes[name]) if sizes[name] < sizes[model.preset]]
    yield from ({"model.preset": name} for name in smaller[:PRESETS])


def command(config: Config, changes: Mapping[str, Any]) -> str:
    """Return the user's command with changes, in a run directory of its own."""
    return config.source.command(changes, without=["run.dir", "resume"])
