"""task=plan: what a config will cost, before anything is trained."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import yaml

from ttrain.config import build
from ttrain.config.schema import Config
from ttrain.core.spec import TensorSpec
from ttrain.core.units import format_bytes, format_count, format_duration
from ttrain.core.waiting import Waiting
from ttrain.device.info import info_of
from ttrain.graph.graph import Graph, Node, Value
from ttrain.graph.kinds import Kind
from ttrain.nn.module import ADAPTER
from ttrain.nn.settings import LoraConfig
from ttrain.tasks.training.expected import micro_batches, planned_session, schedule_of, session_to_plan

if TYPE_CHECKING:
    from ttrain.core.tables import Table
    from ttrain.data.batches import Dataset
    from ttrain.device.base import Device
    from ttrain.engine.base import Step
    from ttrain.models.base import Model
    from ttrain.train.forecast.plan_report import PlanReport
    from ttrain.train.steps.session import Session


def run(config: Config) -> None:
    """Prints the plan, and with plan.show the nodes or the buffers behind it; writes plan.json=<file> if asked."""
    from ttrain.optim.groups import check_groups
    from ttrain.train.forecast.plan_report import plan_report
    from ttrain.train.forecast.show import product_ways, show_ways
    from ttrain.train.steps.resident import resident_by_default

    if config.plan.calibrate:
        _calibrate(config)
    config = dataclasses.replace(config, lora=build.with_adapters(config.lora, config.source.explicit))
    dataset = _dataset(config)
    model = build.build_model(*config.model_parts, None if dataset is None else dataset.vocabulary)
    check_groups(model.parameters(), config.optimizer)
    with (
        closing(build.planned_device(config.device)) as device,
        closing(session_to_plan(config, model, device, dataset)) as session,
    ):
        with Waiting("Planning"):
            steps = session.build_training()
            report = plan_report(session.graph, session.state, steps)
        extra = _Extra(config, session, steps, report, device, dataset)
        products = product_ways(session.engine)
        multiplied = f" {show_ways(products)}" if products and config.engine.name == "traced" else ""
        unread = dataset is None and resident_by_default(config.data, model, device)
        print(_title(config, model, device.name, unread) + multiplied + extra.verdict + "\n")
        _print([*report.tables(), *extra.tables])  # what takes no time is there at once
        for table in extra.slow_tables(session, steps):
            _print([table])
        if config.plan.show is not None:
            _show(config.plan.show, session, steps)
        if config.plan.json is not None:
            _write_json(config, device.name, {**report.to_dict(), "products": products, **extra.values})
        if config.plan.picture is not None:
            _draw(config.plan.picture, report, steps)


def _calibrate(config: Config) -> None:
    """Opens the device and measures. Raises UserError where it has no cost model."""
    with Waiting("Measuring the device"):
        measured = info_of(config.device).calibrate(config.device, _recorded)
    print(measured + "\n")


def _recorded(op: str, *specs: TensorSpec) -> Node:
    """A node of an op on inputs of these specs."""
    from ttrain import ops

    graph = Graph()
    value: Value = getattr(ops, op)(*(graph.input(f"x{number}", spec) for number, spec in enumerate(specs)))
    assert value.producer is not None
    return value.producer


def _dataset(config: Config) -> Dataset | None:
    """The data where its tokenizer decides the vocabulary, where it is no file, or where it is to lie on the device."""
    if getattr(config.model, "vocabulary", None) is not None and config.data.resident != "device":
        return None
    return build.build_dataset(config.data, config.model, config.train.length_schedule)


def _title(config: Config, model: Model, device: str, unread: bool) -> str:
    name = config.source.choices.get("model", config.model.name)
    parts = [f"Plan of {name} on {device}, engine {config.engine.name}, {config.precision.name}"]
    rows, count = config.train.batch_size, config.train.gradient_accumulation
    examples = "example" if rows == 1 else "examples"
    ranks = build.planned_ranks(config.parallel)
    divided = [f"{ranks.slices} slices"] * (ranks.slices > 1) + [f"{count} micro-batches"] * (count > 1)
    parts.append(f"{rows} {examples} per optimizer step" + (f" in {' of '.join(divided)}" if divided else ""))
    if ranks.count > 1:
        parts.append(f"the shard of one of {ranks.count} ranks, parallel={config.parallel.name}")
    vocabulary = getattr(model.config, "vocabulary", None)
    if vocabulary is not None:
        given = "" if getattr(config.model, "vocabulary", None) is not None else ", that of the data"
        parts.append(f"vocabulary {vocabulary}{given}")
    if unread:
        parts.append("no data is read, so none is counted on the device; data.resident=device counts it")
    schedule = schedule_of(config)
    if len(schedule.phases) > 1:
        parts.append(f"{schedule.text()}; this is the plan of the largest")
    if config.engine.name == "dynamic":
        parts.append("engine dynamic plans nothing: this is what engine static would take")
    return "; ".join(parts) + "."


def _print(tables: Sequence[Table]) -> None:
    from ttrain.core.tables import plain_table

    print("\n".join(map(plain_table, tables)), flush=True)


def _show(what: str, session: Session, steps: Any) -> None:
    """The nodes of every training step: as traced, with gradients and update, as planned, or summed up by op."""
    from ttrain.core.tables import plain_table
    from ttrain.graph import Graph, Stage
    from ttrain.train.forecast.plan_report import op_table
    from ttrain.train.forecast.show import show, show_plan

    for name, trace in session.graph.train_steps().items():
        if what == "ops":
            print(plain_table(op_table(name, steps[name].plan.launched)))
            continue
        if what == "plan":
            text = show_plan(steps[name].plan, session.engine.kernels)
        else:
            graph = Graph()
            trace(graph)
            stages = [Stage.FORWARD] if what == "graph" else list(Stage)
            text = show(graph, stages)
        print(f"step {name}\n{text}\n")


class _Extra:
    """Parts of task=plan beyond the plan itself: expected time, limits, padding."""

    def __init__(
        self,
        config: Config,
        session: Session,
        steps: Mapping[str, Step],
        report: PlanReport,
        device: Device,
        dataset: Dataset | None,
    ) -> None:
        self.config, self.report, self.device, self.dataset = config, report, device, dataset
        self.vocabulary = getattr(session.graph.model.config, "vocabulary", None)
        self.tables: list[Table] = []
        self.values: dict[str, Any] = {}
        self._padding(session, steps)
        if config.lora.rank:
            self._adapters(session)
        if session.graph.ranks.count > 1:
            self._communication(session, steps)
        self.verdict = self._fits(session.graph.model.config)

    def slow_tables(self, session: Session, steps: Mapping[str, Step]) -> Iterator[Table]:
        """Yield the tables that are timed or searched for, each as soon as it is known."""
        if not self.values.get("fits", {"fits": True})["fits"]:
            with Waiting("Planning what takes less"):
                smaller = self._smaller()
            yield smaller
        if self.config.plan.time:
            yield from self._time(steps, session.graph.chips)
        if self.config.plan.limits:
            with Waiting("Searching the largest micro-batch and context that fit"):
                limits = self._limits()
            yield limits

    def _available(self) -> tuple[int, str] | None:
        """Bytes to fit into, and where the number is from; None if it can't be told."""
        from ttrain.train.forecast.limits import device_memory

        given, device = self.config.plan.memory_gb, self.config.device
        if given is not None:
            return int(given * 2**30), "plan.memory_gb"
        return info_of(device).memory(device) or device_memory(self.device.name)

    def _fits(self, model: Any) -> str:
        """A line that tells whether the plan fits; empty where that can't be told."""
        from ttrain.train.forecast.limits import fit_text
        from ttrain.train.forecast.out_of_memory import shrinking_keys

        known = self._available()
        if known is None:
            return ""
        config, needed = self.config, self.report.memory
        if padding := self.values.get("tile_padding"):  # an arena holds whole tiles already
            needed += padding["state_padded_bytes"] - padding["state_bytes"]
        self.values["fits"] = {"fits": needed <= known[0], "available_bytes": known[0], "source": known[1]}
        parts = (config.train, model, config.precision.name, config.engine.name, config.optimizer)
        keys = shrinking_keys(*parts, chips=self.device.chips)
        keys[-1:-1] = info_of(config.device).smaller_keys(config.device, self.vocabulary is not None)
        self.smaller = [key.partition(" ")[0] for key in keys if "=" in key]
        return "\n" + fit_text(needed, *known, keys)

    def _smaller(self) -> Table:
        """Return a table of the planned memory with each key that takes less, with all, and with the model frozen."""
        from ttrain.core.tables import Table

        available = self.values["fits"]["available_bytes"]
        ways = {key: [key] for key in self.smaller} | {"all of these": self.smaller}
        if not self.config.lora.rank:
            ways |= {"lora.rank=8": ["lora.rank=8"], "lora.rank=8 and all of these": ["lora.rank=8", *self.smaller]}
        needed = {label: self._planned(functools.reduce(_overridden, way, self.config)) for label, way in ways.items()}
        self.values["smaller"] = {" ".join(ways[label]): size for label, size in needed.items()}
        rows = [(label, format_bytes(size), "yes" if size <= available else "no") for label, size in needed.items()]
        note = "With lora.rank the model is frozen, and adapters are trained beside it."
        return Table("What takes less", ("", "planned memory", "fits"), rows, (note,) * (not self.config.lora.rank))

    def _padding(self, session: Session, steps: Mapping[str, Step]) -> None:
        from ttrain.train.forecast.padding import padding_table, padding_values

        if not self.device.arenas:
            values = padding_values(session.state, steps, self.device)
            self.values["tile_padding"] = values
            self.tables.append(padding_table(values))

    def _adapters(self, session: Session) -> None:
        """Add a table of what training takes with the model frozen, and without."""
        from ttrain.core.tables import Table
        from ttrain.optim.groups import frozen_count

        parameters, memory = session.graph.model.parameters(), self._planned(self.config)
        whole = self._planned(dataclasses.replace(self.config, lora=LoraConfig()))
        numbers = session.graph.model.parameter_count
        trained = numbers - frozen_count(parameters, self.config.optimizer)
        added = sum(parameter.count for path, parameter in parameters.items() if ADAPTER in path)
        self.values["lora"] = {"trained": trained, "memory": memory, "memory_without": whole}
        rows = [
            ("trained parameters", format_count(trained), format_count(numbers - added)),
            ("planned memory", format_bytes(memory), format_bytes(whole)),
        ]
        self.tables.append(Table("Adapters", ("", "with", "without"), rows))

    def _communication(self, session: Session, steps: Mapping[str, Step]) -> None:
        from ttrain.device.timing import Work
        from ttrain.train.forecast.communication import collectives, communication_table

        ranks, gbps = session.graph.ranks, self.config.parallel.link_gbps
        found = collectives(Work.of(steps, self.report.per_step), ranks)
        self.values["communication"] = {each.name: vars(each) for each in found}
        self.tables.append(communication_table(found, ranks, gbps))

    def _time(self, steps: Mapping[str, Step], chips: int) -> list[Table]:
        from ttrain.core.tables import Table
        from ttrain.tasks.training.expected import expected_time

        seconds = self.config.plan.seconds
        estimate, why_not = expected_time(
            self.config, steps, self.report, self.device, chips, seconds, self._planned_steps
        )
        if estimate is None:
            return [Table("Expected time of one optimizer step", ("", ""), [], (why_not,))]
        count, schedule = self.config.train.steps, schedule_of(self.config)
        run = schedule.in_steps_of(schedule.phases[-1], 0, count) * estimate.time.total
        self.values["expected"] = {**estimate.to_dict(), "run_s": run}
        step, *others = estimate.tables()
        row = (f"{count} steps of the run", format_duration(run))
        return [dataclasses.replace(step, rows=[*step.rows[:1], row, *step.rows[1:]]), *others]

    def _limits(self) -> Table:
        from ttrain.core.tables import Table
        from ttrain.train.forecast.limits import largest, limit_text

        known = self._available()
        if known is None:
            note = f"The memory of {self.device.name} can't be told without it; give plan.memory_gb."
            return Table("Largest that fits", ("", ""), [], (note,))
        available, source = known
        each = self.config.train.batch_size // micro_batches(self.config)
        rows = largest(self._with_rows, each, available, step=self.device.chips)
        found = {"micro_batch": vars(rows)}
        lines = [("micro-batch, at this context", limit_text(rows, "micro-batch"))]
        context = build.data_sizes(self.config.model).context
        if context is not None:
            length = largest(self._with_context, context, available, step=32)
            found["context"] = vars(length)
            lines.append(("context, at this micro-batch", limit_text(length, "context")))
        self.values["largest"] = {"available_bytes": available, "source": source, **found}
        note = f"Of {format_bytes(available)}, {source}; what the runtime itself takes comes on top."
        return Table("Largest that fits", ("", "value (planned memory)"), lines, (note,))

    def _with_rows(self, rows: int) -> int:
        batch_size = rows * micro_batches(self.config)
        return self._planned(
            dataclasses.replace(self.config, train=dataclasses.replace(self.config.train, batch_size=batch_size))
        )

    def _with_context(self, context: int) -> int:
        return self._planned(
            dataclasses.replace(self.config, model=dataclasses.replace(self.config.model, context=context))
        )

    def _planned_steps(self, config: Config) -> dict[str, Step]:
        """The training steps of another config, built but never bound."""
        with planned_session(config, self.dataset) as session:
            return {name: session.engine.build(name, trace) for name, trace in session.graph.train_steps().items()}

    def _planned(self, config: Config) -> int:
        """Planned bytes of the training steps of another config."""
        with planned_session(config, self.dataset) as session:
            steps = [session.engine.build(name, trace) for name, trace in session.graph.train_steps().items()]
            plans = [step.plan for step in steps if step.plan is not None]
            state = sum(session.state.nbytes(kind, on_host=False) for kind in Kind if kind.is_state)
            return state + max(plan.arena_bytes + plan.outside_bytes for plan in plans)


def _overridden(config: Config, override: str) -> Config:
    """The config with one key set, such as model.recompute=block, or one option of a group."""
    key, _, value = override.partition("=")
    section, _, name = key.partition(".")
    changed = dataclasses.replace(getattr(config, section), **{name or "name": yaml.safe_load(value)})
    return dataclasses.replace(config, **{section: changed})


def _draw(file: str, report: PlanReport, steps: Mapping[str, Step]) -> None:
    from pathlib import Path

    from ttrain.train.forecast.memory_picture import save_picture

    plans = {name: step.plan for name, step in steps.items() if name in report.per_step and step.plan is not None}
    save_picture(plans, report.placed, Path(file))
    print(f"Memory over time: {file}")


def _write_json(config: Config, device: str, values: dict[str, Any]) -> None:
    from pathlib import Path

    from ttrain.core.files import to_json, write_chosen

    path = Path(str(config.plan.json))
    names = {"model": config.model.name, "device": device, "engine": config.engine.name}
    sizes = {"batch_size": config.train.batch_size, "gradient_accumulation": config.train.gradient_accumulation}
    head = {**names, "precision": config.precision.name, **sizes}
    write_chosen("plan.json", path, to_json({**head, **values}))
