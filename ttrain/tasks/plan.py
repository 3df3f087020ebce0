"""task=plan: predict the cost of a config. Nothing is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ttrain import ops
from ttrain.config import build
from ttrain.config.schema import Config
from ttrain.core.files import to_json, write_chosen
from ttrain.core.spec import TensorSpec
from ttrain.core.tables import Table, plain_table
from ttrain.core.units import format_bytes, format_count, format_duration
from ttrain.core.waiting import Waiting
from ttrain.data.batches import Dataset
from ttrain.device.info import info_of
from ttrain.device.timing import Work
from ttrain.engine.base import Step
from ttrain.graph import Graph, Kind, Node, Stage, Value
from ttrain.nn.module import ADAPTER
from ttrain.optim.groups import frozen_count
from ttrain.tasks.training import expected
from ttrain.tasks.training.modes import memory_to_fit, with_mode
from ttrain.train.forecast.limits import fit_text, largest, limit_text, shrinking_keys
from ttrain.train.forecast.plan_report import PlanReport, op_table, padding, plan_report
from ttrain.train.forecast.show import product_ways, save_picture, show, show_plan, show_ways
from ttrain.train.forecast.step_cost import collectives, communication_table, experts_over_ranks
from ttrain.train.runs.summary import mixture_table
from ttrain.train.steps.resident import resident_by_default
from ttrain.train.steps.session import Session


def run(config: Config) -> dict[str, Any]:
    """Print the plan, and with plan.show the nodes or the buffers behind it; write plan.json=<file> if asked.

    Returns the numbers of that file.
    """
    chosen = config.plan
    if chosen.calibrate:
        with Waiting("Measuring the device"):
            measured = info_of(config.device).calibrate(config.device, _recorded)
        print(measured + "\n")
    config = dataclasses.replace(config, lora=build.with_adapters(config.lora, config.source.explicit))
    dataset = _dataset(config)
    config = build.learned_from(config, dataset)
    config, modes, tables = with_mode(config, dataset)
    for table in tables:
        _print([table])
    with expected.planned_session(config, dataset) as session:
        with Waiting("Planning"):
            steps = session.build_training()
            report = plan_report(session.graph, session.state, steps)
        extra = _Extra(config, dataset, session, steps, report)
        products = product_ways(session.engine)
        multiplied = f" {show_ways(products)}" if products and config.engine.name == "traced" else ""
        print(_title(config, session, dataset is None) + multiplied + extra.verdict + "\n")
        mixture = None if dataset is None or config.train.steps is None else mixture_table(dataset, config.train)
        _print([*filter(None, [mixture]), *report.tables(), *extra.tables])  # what takes no time is there at once
        for table in extra.slow_tables():
            _print([table])
        if chosen.show is not None:
            _show(chosen.show, session, steps)
        head = _head(config, session.engine.device.name)
        values = {**head, **report.to_dict(), "products": products, **modes, **extra.values}
        if chosen.json is not None:
            write_chosen("plan.json", Path(chosen.json), to_json(values))
        if chosen.picture is not None:
            plans = {name: step.plan for name, step in steps.items() if name in report.per_step and step.plan}
            save_picture(plans, report.placed, Path(chosen.picture))
            print(f"Memory over time: {chosen.picture}")
    return values


def _recorded(op: str, *specs: TensorSpec) -> Node:
    """Return a node of an op on inputs of these specs."""
    graph = Graph()
    value: Value = getattr(ops, op)(*(graph.input(f"x{number}", spec) for number, spec in enumerate(specs)))
    assert value.producer is not None
    return value.producer


def _dataset(config: Config) -> Dataset | None:
    """The data where its tokenizer decides the vocabulary, where it is no file, or where it is to lie on the device."""
    known = getattr(config.model, "vocabulary", None) is not None and not config.objective.reads_rows
    if known and config.data.resident != "device":
        return None
    return build.build_dataset(config)


def _title(config: Config, session: Session, unread: bool) -> str:
    device, model, ranks = session.engine.device, session.graph.model, session.graph.ranks
    name = config.source.choices.get("model", config.model.name)
    parts = [f"Plan of {name} on {device.name}, engine {config.chosen('engine')}, {config.chosen('precision')}"]
    rows, count = config.train.batch_size, config.train.gradient_accumulation
    examples = "example" if rows == 1 else "examples"
    divided = [f"{ranks.slices} slices"] * (ranks.slices > 1) + [f"{count} micro-batches"] * (count > 1)
    parts.append(f"{rows} {examples} per optimizer step" + (f" in {' of '.join(divided)}" if divided else ""))
    if ranks.count > 1:
        parts.append(f"one of {ranks.count} ranks, parallel={config.parallel.name}")
    vocabulary = getattr(model.config, "vocabulary", None)
    if vocabulary is not None:
        given = "" if getattr(config.model, "vocabulary", None) is not None else ", that of the data"
        parts.append(f"vocabulary {vocabulary}{given}")
    if unread and resident_by_default(config.data, model, device):
        parts.append("no data is read, so none is counted on the device; data.resident=device counts it")
    schedule = expected.schedule_of(config)
    if len(schedule.phases) > 1:
        parts.append(f"{schedule.text()}; this is the plan of the largest")
    if config.engine.name == "dynamic":
        parts.append("engine dynamic plans nothing: this is what engine static would take")
    return "; ".join(parts) + "."


def _print(tables: Sequence[Table]) -> None:
    print("\n".join(map(plain_table, tables)), flush=True)


def _show(what: str, session: Session, steps: Mapping[str, Any]) -> None:
    """Print the nodes of every training step: as traced, with gradients and update, as planned, or summed up by op."""
    for name, trace in session.graph.train_steps().items():
        if what == "ops":
            print(plain_table(op_table(name, steps[name].plan.launched)))
            continue
        if what == "plan":
            text = show_plan(steps[name].plan, session.engine.kernels)
        else:
            graph = Graph()
            trace(graph)
            text = show(graph, [Stage.FORWARD] if what == "graph" else list(Stage))
        print(f"step {name}\n{text}\n")


class _Extra:
    """Parts of task=plan beyond the plan itself: whether it fits, padding, expected time, limits."""

    def __init__(
        self, config: Config, dataset: Dataset | None, session: Session, steps: Mapping[str, Step], report: PlanReport
    ) -> None:
        self.config, self.session, self.steps, self.report = config, session, steps, report
        self.dataset, self.device = dataset, session.engine.device
        self.tables: list[Table] = []
        self.values: dict[str, Any] = {}
        self.smaller: list[str] = []  # overrides that take less, where it does not fit
        if not self.device.arenas:
            self.values["tile_padding"], table = padding(session.state, steps, self.device)
            self.tables.append(table)
        if config.lora.rank:
            self._adapters()
        if session.graph.ranks.count > 1:
            self._communication()
        self.verdict = self._fits()

    def slow_tables(self) -> Iterator[Table]:
        """Yield the tables that are timed or searched for, each as soon as it is known."""
        if self.smaller and not self.values["fits"]["fits"]:
            yield self._smaller()
        if self.config.plan.time:
            yield from self._time()
        if self.config.plan.limits:
            yield self._limits()

    def _fits(self) -> str:
        """Return a line that tells whether the plan fits; empty where that can't be told."""
        known = memory_to_fit(self.config, self.device.name)
        if known is None:
            return ""
        config, needed, model = self.config, self.report.memory, self.session.graph.model.config
        if padding := self.values.get("tile_padding"):  # an arena holds whole tiles already
            needed += padding["state_padded_bytes"] - padding["state_bytes"]
        self.values["fits"] = {"fits": needed <= known[0], "available_bytes": known[0], "source": known[1]}
        parts = (config.train, model, config.precision.name, config.engine.name, config.optimizer)
        keys = shrinking_keys(*parts, chips=self.device.chips * self.session.graph.ranks.slices)
        keys[-1:-1] = info_of(config.device).smaller_keys(config.device, hasattr(model, "vocabulary"))
        self.smaller = [key.partition(" ")[0] for key in keys if "=" in key]
        return "\n" + fit_text(needed, *known, keys)

    def _smaller(self) -> Table:
        """Return a table of the planned memory with each key that takes less, with all, and with the model frozen."""
        available = self.values["fits"]["available_bytes"]
        ways = {key: [key] for key in self.smaller} | {"all of these": self.smaller}
        if not self.config.lora.rank:
            ways |= {"lora.rank=8": ["lora.rank=8"], "lora.rank=8 and all of these": ["lora.rank=8", *self.smaller]}
        with Waiting("Planning what takes less"):
            needed = {label: self._memory(*way) for label, way in ways.items()}
        self.values["smaller"] = {" ".join(ways[label]): size for label, size in needed.items()}
        rows = [(label, format_bytes(size), "yes" if size <= available else "no") for label, size in needed.items()]
        note = "With lora.rank the model is frozen, and adapters are trained beside it."
        return Table("What takes less", ("", "planned memory", "fits"), rows, (note,) * (not self.config.lora.rank))

    def _adapters(self) -> None:
        """Add a table of what training takes with the model frozen, and without."""
        model = self.session.graph.model
        memory, whole = self._memory(), self._memory("lora.rank=0")
        trained = model.parameter_count - frozen_count(model.parameters(), self.config.optimizer)
        added = sum(parameter.count for path, parameter in model.parameters().items() if ADAPTER in path)
        self.values["lora"] = {"trained": trained, "memory": memory, "memory_without": whole}
        rows = [
            ("trained parameters", format_count(trained), format_count(model.parameter_count - added)),
            ("planned memory", format_bytes(memory), format_bytes(whole)),
        ]
        self.tables.append(Table("Adapters", ("", "with", "without"), rows))

    def _communication(self) -> None:
        ranks = self.session.graph.ranks
        work = Work.of(self.steps, self.report.per_step)
        found, experts = collectives(work, ranks), experts_over_ranks(work, ranks, self.session.state)
        self.values |= {"communication": found, **({"experts_over_ranks": experts} if experts else {})}
        self.tables.append(communication_table(found, experts, ranks, self.config.parallel.link_gbps))

    def _time(self) -> list[Table]:
        config = self.config
        built = self.session, self.steps, self.report
        found = expected.expected_time(config, *built, config.plan.seconds, compares=True, dataset=self.dataset)
        if isinstance(found, str):
            return [Table("Expected time of one optimizer step", ("", ""), [], (found,))]
        schedule = expected.schedule_of(config)
        first = found.time.total * schedule.in_steps_of(schedule.phases[-1], 0, 1)
        count = config.train.steps or expected.steps_within(config, 0, 0, (first, 0, 0, 0))
        run = schedule.in_steps_of(schedule.phases[-1], 0, count) * found.time.total
        self.values["expected"] = {**found.to_dict(), "run_s": run}
        step, ways = found.tables()
        row = (f"{count} steps of the run", format_duration(run))
        return [dataclasses.replace(step, rows=[*step.rows[:1], row, *step.rows[1:]]), ways]

    def _limits(self) -> Table:
        known = memory_to_fit(self.config, self.device.name)
        if known is None:
            note = f"The memory of {self.device.name} can't be told without it; give plan.memory_gb."
            return Table("Largest that fits", ("", ""), [], (note,))
        available, source = known
        train, context = self.config.train, build.data_sizes(self.config.model).context
        parts = train.gradient_accumulation * self.session.graph.ranks.slices  # of a batch
        rows, chips = train.batch_size // parts, self.device.chips
        with Waiting("Searching the largest micro-batch and context that fit"):
            size = largest(lambda rows: self._memory(f"train.batch_size={rows * parts}"), rows, available, chips)
            found = {"micro_batch": vars(size)}
            lines = [("micro-batch, at this context", limit_text(size, "micro-batch"))]
            if context is not None:
                size = largest(lambda length: self._memory(f"model.context={length}"), context, available, step=32)
                found["context"] = vars(size)
                lines.append(("context, at this micro-batch", limit_text(size, "context")))
        self.values["largest"] = {"available_bytes": available, "source": source, **found}
        note = f"Of {format_bytes(available)}, {source}; what the runtime itself takes comes on top."
        return Table("Largest that fits", ("", "value (planned memory)"), lines, (note,))

    def _memory(self, *overrides: str) -> int:
        """Return the planned bytes of the training steps with overrides such as model.recompute=block."""
        pairs = (override.partition("=") for override in overrides)
        changes = {key: yaml.safe_load(value) for key, _, value in pairs}
        with expected.planned_session(expected.changed(self.config, changes), self.dataset) as session:
            steps = session.build_training(further=False).values()
            plans = [step.plan for step in steps if step.plan is not None]
            state = sum(session.state.nbytes(kind, on_host=False) for kind in Kind if kind.is_state)
            return state + max(plan.arena_bytes + plan.outside_bytes for plan in plans)


def _head(config: Config, device: str) -> dict[str, Any]:
    names = {
        "model": config.source.choices.get("model", config.model.name),
        "device": device,
        "engine": config.engine.name,
    }
    sizes = {"batch_size": config.train.batch_size, "gradient_accumulation": config.train.gradient_accumulation}
    return {**names, "precision": config.precision.name, **sizes}
