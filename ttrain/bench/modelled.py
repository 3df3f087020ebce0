"""Times of hardware that is not here by the model of its family."""

from __future__ import annotations

from contextlib import closing

from ttrain.bench.results import COST_MODEL, CaseResult, Row
from ttrain.bench.workload import Case, ProductWork
from ttrain.config import build
from ttrain.device.family import TimeModel, Variant, family_of
from ttrain.device.settings import DeviceConfig
from ttrain.device.timing import Work
from ttrain.engine.settings import EngineConfig


def modelled(case: Case, variants: tuple[Variant, ...], device: DeviceConfig) -> CaseResult:
    """One case by the model: a row per variant."""
    found = CaseResult.of(case)
    device = family_of(device).held(device, case.precision)
    model = family_of(device).time_model(device)
    found.basis, found.device = COST_MODEL, model.describe()
    planned = None
    if isinstance(case.work, ProductWork):
        found.flops_per_step = case.work.flops
    else:
        from ttrain.bench.engines import step_graph
        from ttrain.train.steps.session import flops_per_step

        planned = _planned(case, device)
        found.flops_per_step, found.parameters = flops_per_step(step_graph(case)), case.model.parameter_count
    for variant in variants:
        found.rows[variant.name] = row = _row(case, variant, model, planned)
        row.facts["of_peak"] = found.flops_per_step / (row.round_ms[0] / 1e3) / model.peak_flops(variant)
    return found


def _row(case: Case, variant: Variant, model: TimeModel, planned: Work | None) -> Row:
    if isinstance(case.work, ProductWork):
        held = "bf8" if case.precision == "bf8" else str(case.dtypes.compute)
        total, bound = model.product(case.work.size, held, variant)
    else:
        assert planned is not None
        total, bound = model.step(planned, variant)
    row = Row(variant.name, "ttrain", f"cost model, {variant.engine}", "ok", round_ms=[total], fastest_ms=total)
    row.facts = {"bound_by": bound}
    if variant.part == "both":
        row.description += "; each half makes a product of its own in this time"
    return row


def _planned(case: Case, device: DeviceConfig) -> Work:
    """What the engine static would launch on the device, planned without one."""
    from ttrain.bench.engines import step_graph
    from ttrain.engine.state import State
    from ttrain.train.steps.session import Session

    with closing(build.planned_device(device)) as planned:
        graph = step_graph(case, planned)
        state = State(planned, graph.state_tensors())
        session = Session(graph, state, build.build_engine(EngineConfig(name="static"), planned, state))
        with closing(session):
            return Work.of({"train": session.engine.build("train", graph.trace_train)}, {"train": 1})
