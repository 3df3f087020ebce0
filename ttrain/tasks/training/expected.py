"""Expect the time of a step, of a run and of alternatives to it, by the source of numbers that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ttrain.config import build
from ttrain.config.schema import Config
from ttrain.config.validate import rule_problems
from ttrain.device.info import SILICON, info_of
from ttrain.device.timing import Work
from ttrain.models.settings import TransformerConfig
from ttrain.optim.groups import flat_parameters
from ttrain.train.logging.meter import Alternative, Forecast, Pace, evaluations_left
from ttrain.train.steps.phases import PhaseSchedule
from ttrain.train.steps.shard import FlatShard, heaviest

if TYPE_CHECKING:
    from ttrain.data.batches import Dataset
    from ttrain.device.base import Device
    from ttrain.device.timing import Estimate
    from ttrain.engine.base import Step
    from ttrain.models.base import Model
    from ttrain.train.forecast.peak import Rates
    from ttrain.train.forecast.plan_report import PlanReport
    from ttrain.train.steps.session import Session


LESS = 0.8  # of the run's time: what takes more is not worth telling
PRESETS, SHOWN = 8, 2  # smaller presets that are planned and shown at most
SHORTEST = 32  # tokens of a context that is still offered


def session_to_plan(config: Config, model: Model, device: Device, dataset: Dataset | None) -> Session:
    """A session on a device that is planned only, of the rank that owns most. What the dynamic engine would run is
    planned as static does. Without a `dataset` none of it lies on the device.
    """
    from ttrain.train.steps.resident import choose_resident

    engine = replace(config.engine, name="static") if config.engine.name == "dynamic" else config.engine
    ranks = build.planned_ranks(config.parallel)
    if ranks.sharding:
        flats = flat_parameters(model.parameters(), build.build_optimizer(config.optimizer), model.compute)
        ranks = replace(ranks, rank=heaviest([FlatShard(flat, ranks) for flat in flats], ranks))
    rows = config.train.batch_size // config.train.gradient_accumulation
    resident = choose_resident(config.data, rows, model, device, dataset)
    return build.build_session(
        model, device, *replace(config, engine=engine).step_parts, ranks=ranks, resident=resident
    )


def micro_batches(config: Config) -> int:
    """Into how many equal parts a batch is divided."""
    return config.train.gradient_accumulation * build.planned_ranks(config.parallel).slices


@contextmanager
def planned_session(config: Config, dataset: Dataset | None) -> Iterator[Session]:
    """Such a session of another config. The data may be too short for it."""
    model = build.build_model(*config.model_parts, None if dataset is None else dataset.vocabulary)
    with (
        closing(build.planned_device(config.device)) as device,
        closing(session_to_plan(config, model, device, dataset)) as opened,
    ):
        yield opened


Planner = Callable[[Config], Mapping[str, "Step"]]  # builds the training steps of another config


def expected_time(
    config: Config,
    steps: Mapping[str, Step],
    report: PlanReport,
    device: Device,
    chips: int,
    seconds: float,
    planner: Planner | None = None,
) -> tuple[Estimate | None, str]:
    """The expected time of one optimizer step, or why there is none.

    Kernels of this machine are timed for so many seconds; with 0 it goes by what was timed before, else by rates.
    A `planner` is for what other engines take, and for timing long kernels on fewer rows.
    """
    plans = _Plans(config, steps, report.per_step, planner)
    context = build.data_sizes(config.model).context
    tokens, unit = config.train.batch_size * (context or 1), "tokens" if context else "examples"
    flops = chips * sum(report.flops.values())
    found = info_of(config.device).estimate(config.device, plans.own, config.engine.name, tokens, unit, flops)
    if found is not None:
        return (None, found) if isinstance(found, str) else (found, "")
    if device.name not in ("cpu", "cuda"):
        return None, f"device={device.name} computes nothing."
    return _on_this_machine(config, plans, device, tokens, unit, flops, seconds)


class _Plans:
    """The work of a step as it is planned, and as it would be with another engine or on fewer rows."""

    def __init__(
        self, config: Config, steps: Mapping[str, Step], per_step: Mapping[str, int], planner: Planner | None
    ) -> None:
        self.config, self.per_step, self.planner = config, per_step, planner
        self.own = Work.of(steps, per_step)

    def engine(self, name: str) -> Work | None:
        """Return the work under an engine; None where it is another one and nobody plans it."""
        config = changed(self.config, {"engine": name})
        return None if self.planner is None else Work.of(self.planner(config), self.per_step)

    def on_fewer_rows(self, engine: str, work: Work, rates: Rates) -> Work | None:
        """Return the work on rows that make the longest kernel short, or one; None where it is short already."""
        from ttrain.train.forecast.kernel_times import LONG

        longest = max((rates.seconds(node) for _, nodes in work.nodes for node in nodes), default=0.0)
        size, parts = self.config.train.batch_size, micro_batches(self.config)
        rows = max(1, int(size // parts * LONG / longest)) if longest > LONG else size // parts
        if self.planner is None or rows == size // parts:
            return None
        changes = {"engine": engine, "train.batch_size": rows * parts}
        return Work.of(self.planner(changed(self.config, changes)), self.per_step)


def _on_this_machine(
    config: Config, plans: _Plans, device: Device, tokens: int, unit: str, flops: int, seconds: float
) -> tuple[Estimate | None, str]:
    """Opens the device only where a kernel has not been timed yet, and there is time for it."""
    import torch

    from ttrain.train.forecast.communication import collectives, exposed_seconds, link_seconds
    from ttrain.train.forecast.estimate import host_estimate, host_time
    from ttrain.train.forecast.kernel_times import KernelTimes, machine_name
    from ttrain.train.forecast.peak import measured_rates

    if device.name == "cuda" and not torch.cuda.is_available():
        return None, "There is no GPU here whose kernels could be timed."
    named = replace(config.device, name=device.name)
    rates = measured_rates(device.name, str(config.precision.compute), config.device.index)
    assert rates is not None  # it is a CPU or a GPU
    machine = machine_name(device.name, getattr(device, "threads", None))
    compiles = device.compiles
    own = "traced" if config.engine.name == "traced" else "static"
    times, left, source = {}, seconds, f"the time of each kernel by itself on this {device.name}"
    for engine in (own, "traced" if own == "static" else "static"):
        # What a device captures are the launches of static.
        work = plans.own if engine == own or not compiles else plans.engine(engine)
        if work is None:
            continue
        by = KernelTimes(
            lambda: build.build_device(named), machine, bar=True, seconds=left, rates=rates,
            compiler=work.compiler,
        )  # fmt: skip
        with closing(by):
            time = host_time(work, by, plans.on_fewer_rows(engine, work, rates), engine, "")
        left, more = by.left, "; plan.seconds=<more> times more" if by.note and seconds and not by.refused else ""
        if engine == own or not by.note:
            times[engine] = time
            source += by.note + more
        else:
            source += f". engine={engine} is not compared{by.note}{more}"
    if config.engine.name not in ("static", "traced", "dynamic"):  # of a plugin
        source += f"; engine={config.engine.name} is taken to launch them as static does"
    times[own] = replace(times[own], source=source)
    ranks = build.planned_ranks(config.parallel)
    sent = sum(each.nbytes for each in collectives(plans.own, ranks))
    if sent:
        gbps = config.parallel.link_gbps

        def exposed(seconds: float) -> float:
            return exposed_seconds(plans.own, ranks, gbps, seconds, rates.seconds)

        times = {
            name: time.communicating(link_seconds(sent, gbps), exposed(time.total)) for name, time in times.items()
        }
    return host_estimate(times, config.engine.name, tokens, unit, flops, rates.flops), ""


def pace_of(
    config: Config,
    dataset: Dataset,
    session: Session,
    steps: Mapping[str, Step],
    step: int,
    say: Callable[[str], None],
    continues: bool,
) -> Pace:
    """Return the pace of a run after `step`, with ways to take less where the run does not `continue` another."""
    hours, count = config.train.long_hours, config.train.steps
    plain = Forecast(0.0, _left(config, step), 0.0, evaluations_left(step, count, config.train.eval_every))
    if hours is None or step >= count:
        return Pace(plain, float("inf"), say, list)
    alternatives, found, device = _Alternatives(config, dataset, plain, continues), plain, session.engine.device.name
    if info_of(config.device).mode(config.device) == SILICON:
        built = all(each.plan is not None for each in steps.values())
        found = alternatives.forecast(config, session, steps) if built else alternatives.planned(config)
    return Pace(found, 3600 * hours, say, lambda: alternatives.others(found, device))


def schedule_of(config: Config) -> PhaseSchedule:
    """Return what the steps of a run read; the context is that of the config."""
    return PhaseSchedule.of(config.train, build.data_sizes(config.model).context)


def _left(config: Config, step: int) -> float:
    """Steps that are left, in steps as large as the next one."""
    schedule = schedule_of(config)
    return schedule.in_steps_of(schedule.at(step + 1), step, config.train.steps)


class _Alternatives:
    """Expected times of a run and of alternatives to it, each by its plan."""

    def __init__(self, config: Config, dataset: Dataset, plain: Forecast, continues: bool) -> None:
        """`plain` knows what is left, and no time of a step. A run that `continues` has to stay what it is."""
        self._config, self._dataset, self._plain, self._continues = config, dataset, plain, continues

    def forecast(self, config: Config, session: Session, steps: Mapping[str, Step]) -> Forecast:
        """Forecast by the plans of built steps. A time that can't be known stays unknown until steps were timed."""
        from ttrain.train.forecast.plan_report import plan_report

        report = plan_report(session.graph, session.state, steps)
        evaluation = replace(report, per_step={"evaluate": 1})
        device, chips = session.engine.device, session.graph.chips
        train, batch = (expected_time(config, steps, each, device, chips, 0)[0] for each in (report, evaluation))
        if train is None or batch is None:
            return self._plain
        return replace(self._plain, step=train.time.total, evaluation=batch.time.total * self._batches(config))

    def planned(self, config: Config) -> Forecast:
        """Forecast by plans made for this: of another config, or where the engine makes none."""
        with planned_session(config, self._dataset) as session:
            return self.forecast(config, session, session.build_training())

    def _batches(self, config: Config) -> int:
        """Return the number of batches of an evaluation; a whole split has more sequences where they are shorter."""
        rows = config.train.batch_size // config.train.gradient_accumulation
        own, other = (build.data_sizes(each.model).context or 1 for each in (self._config, config))
        available = self._dataset.val_samples * own / other
        return math.ceil(min(config.train.eval_sequences or available, available) / rows)

    def others(self, found: Forecast, device: str) -> list[Alternative]:
        """Ways that take less, each planned."""
        config = self._config
        if self._continues or not found.step:
            return []
        others: list[Alternative] = []
        together: dict[str, Any] = {}
        for changes in _single(config, device):
            seconds = self._seconds(changes)
            if seconds is not None and seconds < LESS * found.total:
                others.append(Alternative(command(config, changes), seconds))
                together |= changes
        if len(others) > 1 and (seconds := self._seconds(together)) is not None:
            others.append(Alternative(command(config, together), seconds))
        return others + self._smaller(found)

    def _smaller(self, found: Forecast) -> list[Alternative]:
        """The smaller presets down to one that is not long itself; of many the last."""
        config, model = self._config, self._config.model
        if not isinstance(model, TransformerConfig) or model.preset is None:
            return []
        given = {*model.size_names()} - model.filled - {"context"}
        if given or config.train.length_schedule:
            return []
        own = _width_and_depth(model.presets[model.preset])
        names = [name for name, sizes in model.presets.items() if _width_and_depth(sizes) < own]
        last: list[Alternative] = []
        for name in sorted(names, key=lambda name: _width_and_depth(model.presets[name]), reverse=True)[-PRESETS:]:
            seconds = self._seconds({"model.preset": name})
            if seconds is not None and seconds < LESS * found.total:
                last.append(Alternative(command(config, {"model.preset": name}), seconds))
                if seconds <= 3600 * (config.train.long_hours or 0):
                    break
        return last[-SHOWN:]

    def _seconds(self, changes: Mapping[str, Any]) -> float | None:
        """Return the seconds of the run with these changes; None where they don't go together with the rest."""
        config = changed(self._config, changes)
        return None if rule_problems(config) else self.planned(config).total


def _single(config: Config, device: str) -> Iterator[dict[str, Any]]:
    """Changes of one thing each: precision, batch, context, device."""
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


def _width_and_depth(sizes: Mapping[str, int]) -> int:
    """Return the number that the parameters of blocks grow with."""
    return sizes["layers"] * sizes["width"] ** 2


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with other values; a group stands for its name."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        values = {name or "name": value}
        if key == "model.preset":  # it fills the fields that the one before filled
            values |= dict.fromkeys(config.model.filled)
        config = replace(config, **{section: replace(getattr(config, section), **values)})
    return config


def command(config: Config, changes: Mapping[str, Any]) -> str:
    """Return the user's command with changes, in a run directory of its own."""
    return config.source.command(changes, without=["run.dir", "resume"])
