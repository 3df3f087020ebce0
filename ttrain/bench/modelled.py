"""Times on a Tenstorrent chip by the cost model, where there is no card: beside what others published for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from ttrain.bench.results import COST_MODEL, JobResult, Row
from ttrain.bench.studies import Study, Variant
from ttrain.bench.workload import GPT_WORK, Job, MLPWork, ProductWork, Work
from ttrain.config import build
from ttrain.cost.programs import BYTES, Product
from ttrain.cost.published import SOURCE, TABLES, Table
from ttrain.cost.reproduce import findings, predict
from ttrain.device.ttnn.settings import TenstorrentConfig
from ttrain.engine.settings import EngineConfig

if TYPE_CHECKING:
    from ttrain.train.forecast.estimate import Work as PlannedWork

Place = tuple[str, str]  # row and column of a published table


def jobs_of(study: Study) -> Iterator[tuple[Job, tuple[Variant, ...]]]:
    """The jobs with the variants that a chip runs, and after them those that were published."""
    yield from zip(study.jobs, study.variants, strict=True)
    for job in study.published_jobs:
        if job not in study.jobs:
            yield job, study.variants[0]


def modelled(study: Study, job: Job, variants: tuple[Variant, ...], device: TenstorrentConfig) -> JobResult:
    """One job by the model: a row per variant."""
    work = job.work
    found = JobResult.of(job)
    device = replace(device, weights="bf8") if job.precision == "bf8" else device
    found.basis, found.device = COST_MODEL, describe(device)
    planned = None if isinstance(work, ProductWork) else _planned(job, device)
    if isinstance(work, ProductWork):
        found.flops_per_step = work.flops
    else:
        from ttrain.bench.engines import step_graph
        from ttrain.train.steps.session import flops_per_step

        found.flops_per_step, found.parameters = flops_per_step(step_graph(job)), job.model.parameter_count
    for variant in variants:
        found.rows[variant.name] = row = _row(study, job, variant, device, planned)
        row.facts["of_peak"] = found.flops_per_step / (row.round_ms[0] / 1e3) / _chip(device, variant).peak_flops()
    return found


def describe(device: TenstorrentConfig) -> dict[str, object]:
    """What stands for the device's facts in a result."""
    return {"name": device.name, "mode": "cost model", "source": "ttrain/cost, docs/planning.md", "published": SOURCE}


def told(study: Study) -> str | None:
    """How the model does on the comparisons that the source makes."""
    found = [finding for finding in findings() if finding.table in study.published]
    if not found:
        return None
    judged = [finding for finding in found if finding.contradicted is None]
    right = sum(finding.right for finding in judged)
    text = f"Of the comparisons published for this (which is faster, or none by 3 %), {right} of {len(judged)} come out"
    contradicted = len(found) - len(judged)
    more = f"; {contradicted} more are left out, since the source contradicts itself there" if contradicted else ""
    return f"{text} the same in the model{more}."


def _row(study: Study, job: Job, variant: Variant, device: TenstorrentConfig, planned: PlannedWork | None) -> Row:
    total, bound = _time(job, variant, device, planned)
    row = Row(variant.name, "ttrain", f"cost model, {variant.engine}", "ok", round_ms=[total], fastest_ms=total)
    row.facts = {"bound_by": bound}
    if variant.part == "both":
        row.description += "; each half makes a product of its own in this time"
    place = _published(study, job, variant, device)
    if place is not None:
        table, (what, column) = place
        printed = next(row for row in table.rows if row.what == what)
        again = predict(table, printed, column)
        scale = _to_ms(table, job.work)
        row.published_ms = scale(float(printed.values[column]))
        row.reproduced_ms = None if again is None else scale(again)
        row.reason = printed.contradicted.get(column)
    return row


def _time(job: Job, variant: Variant, device: TenstorrentConfig, planned: PlannedWork | None) -> tuple[float, str]:
    """(milliseconds, what bounds it)."""
    from ttrain.train.forecast.estimate import host_input, wormhole_time

    work = job.work
    if isinstance(work, ProductWork):
        held = "bf8" if job.precision == "bf8" else str(job.dtypes.compute)
        product = Product(work.size, work.size, work.size, 1, BYTES[held])
        estimate = _chip(device, variant).blocking([product])
        bound = "call" if estimate.total > 2 * (estimate.compute + estimate.bandwidth) else estimate.bottleneck
        return estimate.total / 1e3, bound
    assert planned is not None
    if variant.part == "half":
        from ttrain.cost.lowering import node_programs

        programs = [program for _, nodes in planned.nodes for node in nodes for program in node_programs(node)]
        estimate = _chip(device, variant).stalling(programs)
        return estimate.total / 1e3 + 1e3 * host_input(planned), estimate.bottleneck
    time = wormhole_time(planned, replace(device, dispatch=variant.dispatch or device.dispatch), variant.engine)
    return 1e3 * time.total, time.bottleneck.replace("_", " ")


def _chip(device: TenstorrentConfig, variant: Variant):  # type: ignore[no-untyped-def]
    """The model of the chip as a variant uses it. The published products ran at ttnn's default fidelity, HiFi2."""
    from ttrain.cost.wormhole import Wormhole
    from ttrain.train.forecast.estimate import chip_setting

    setting = chip_setting(replace(device, dispatch=variant.dispatch or device.dispatch), variant.engine)
    if variant.part != "full":
        rows, columns = setting.cores
        setting = replace(setting, grid=(rows, columns // 2))
    return Wormhole(setting)


def _planned(job: Job, device: TenstorrentConfig) -> PlannedWork:
    """What the engine static would launch on the card, planned without one."""
    from ttrain.bench.engines import step_graph
    from ttrain.train.forecast.estimate import Work as PlannedWork
    from ttrain.train.steps.session import Session

    with closing(build.planned_device(device)) as planned:
        graph = step_graph(job, planned)
        session = Session.open(
            graph, planned, lambda place, state: build.build_engine(EngineConfig(name="static"), place, state)
        )
        with closing(session):
            return PlannedWork.of({"train": session.engine.build("train", graph.trace_train)}, {"train": 1})


def _published(study: Study, job: Job, variant: Variant, device: TenstorrentConfig) -> tuple[Table, Place] | None:
    """Where the source has this job and variant, computed in bf16."""
    if job.precision not in ("bf16", "bf16_pure"):
        return None
    dispatch = variant.dispatch or ("worker" if device.dispatch == "auto" else device.dispatch)
    for table in TABLES:
        if table.name in study.published:
            place = _PLACES[table.name](job.work, variant, dispatch)
            if place is not None and any(row.what == place[0] and place[1] in row.values for row in table.rows):
                return table, place
    return None


def _is(work: Work, layers: int, width: int, rows: int) -> bool:
    return work == MLPWork(layers, width, rows)


def _shape(work: Work, variant: Variant, dispatch: str) -> Place | None:
    fits = isinstance(work, MLPWork) and work.layers == 2 and dispatch == "worker"
    return (f"{work.rows}x{work.width}", variant.engine) if isinstance(work, MLPWork) and fits else None


def _size(work: Work, column: str) -> Place | None:
    return (str(work.size), column) if isinstance(work, ProductWork) else None


_PARTS = {"full": "full", "half": "half", "both": "half_2q"}
_PLACES: dict[str, Callable[[Work, Variant, str], Place | None]] = {
    "mlp_engines": lambda w, v, d: (v.engine, "time") if _is(w, 2, 512, 1024) and d == "worker" else None,
    "mlp_dispatch": lambda w, v, d: (v.engine, d) if _is(w, 2, 512, 1024) else None,
    "shapes": _shape,
    "gpt": lambda w, v, d: (d, v.engine) if w == GPT_WORK["nano32"] else None,
    "matmul_rate": lambda w, v, d: _size(w, "rate") if d == "worker" and v.engine == "static" else None,
    "matmul_dispatch": lambda w, v, d: _size(w, d),
    "core_grid": lambda w, v, d: (
        ("full" if v.part == "full" else "partitioned", "time") if v.engine == "dynamic" else None
    ),
    "subdevices": lambda w, v, d: _size(w, _PARTS[v.part]),
}


def _to_ms(table: Table, work: Work) -> Callable[[float], float]:
    """From a table's unit to milliseconds."""
    if table.unit == "us":
        return lambda value: value / 1e3
    if table.unit == "TFLOP/s":
        assert isinstance(work, ProductWork)
        flops = work.flops
        return lambda value: flops / value / 1e9
    return lambda value: value
