"""task=plan: what a config will cost, without touching the device."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ttrain.config import build
from ttrain.config.schema import Config

if TYPE_CHECKING:
    from ttrain.models.base import Model
    from ttrain.train.plan_report import PlanReport, Table
    from ttrain.train.session import Session


def run(config: Config) -> None:
    """Prints the plan, and with plan.show the nodes or the buffers behind it; writes plan.json=<file> if asked."""
    from ttrain.train.plan_report import plan_report

    model = _model(config)
    with closing(build.planned_device(config.device)) as device, closing(_session(config, model, device)) as session:
        steps = session.build_training()
        report = plan_report(session.graph, session.state, steps)
        _print(_title(config, model, device.name), report)
        if config.plan.show is not None:
            _show(config.plan.show, session, steps)
        if config.plan.json is not None:
            _write_json(config, device.name, report)


def _model(config: Config) -> Model:
    """The model; the data is only opened where its tokenizer decides the vocabulary."""
    needs_data = getattr(config.model, "vocabulary", 0) is None
    return build.build_model(config, build.build_dataset(config).vocabulary if needs_data else None)


def _session(config: Config, model: Model, device: Any) -> Session:
    """A session on the planned device. What the dynamic engine would run is planned as static does."""
    from ttrain.tasks.train import open_session

    engine = config.engine
    if engine.name == "dynamic":
        engine = dataclasses.replace(engine, name="static")
    return open_session(dataclasses.replace(config, engine=engine), model, device, training=True)


def _title(config: Config, model: Model, device: str) -> str:
    name = config.source.choices.get("model", config.model.name)
    parts = [f"Plan of {name} on {device}, engine {config.engine.name}, {config.precision.name}"]
    rows, count = config.train.batch_size, config.train.accumulation
    parts.append(f"{rows} examples per optimizer step" + (f" in {count} micro-batches" if count > 1 else ""))
    if config.engine.name == "dynamic":
        parts.append("engine dynamic plans nothing: this is what engine static would take")
    return "; ".join(parts) + "."


def _print(title: str, report: PlanReport) -> None:
    from rich.console import Console

    console = Console()
    print(title + "\n")
    if not console.is_terminal:
        print(report.text())
        return
    for table in report.tables():
        console.print(_rich(table))
        for note in table.notes:
            console.print(note, markup=False, highlight=False, style="dim")
        console.print()


def _rich(table: Table) -> Any:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(title=table.title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for index, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown


def _show(what: str, session: Session, steps: Any) -> None:
    """The nodes of every training step: as traced, with gradients and update, or as planned."""
    from ttrain.graph import Graph, Stage
    from ttrain.graph.show import show
    from ttrain.plan.report import show_plan

    for name, trace in session.graph.train_steps().items():
        if what == "plan":
            text = show_plan(steps[name].plan)
        else:
            graph = Graph()
            trace(graph)
            stages = [Stage.FORWARD] if what == "graph" else list(Stage)
            text = show(graph, stages)
        print(f"step {name}\n{text}\n")


def _write_json(config: Config, device: str, report: PlanReport) -> None:
    from pathlib import Path

    from ttrain.core.errors import UserError
    from ttrain.train.files import replace_file, to_json

    path = Path(str(config.plan.json))
    names = {"model": config.model.name, "device": device, "engine": config.engine.name}
    sizes = {"batch_size": config.train.batch_size, "accumulation": config.train.accumulation}
    head = {**names, "precision": config.precision.name, **sizes}
    try:
        replace_file(path, to_json({**head, **report.to_dict()}))
    except OSError as error:
        raise UserError(f"plan.json={path}: can't be written: {error.strerror or error}. Give another file.") from None
