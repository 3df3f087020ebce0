"""Times of hardware that is not here, by the model of its family."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from ttrain.bench.engines import session_of
from ttrain.bench.entrants import Entrant
from ttrain.bench.results import COST_MODEL, CaseResult
from ttrain.bench.workload import Case, ProductWork
from ttrain.config import build
from ttrain.device.info import info_of
from ttrain.device.settings import DeviceConfig
from ttrain.device.timing import Work
from ttrain.engine.settings import EngineConfig


def enter_times(case: Case, found: CaseResult, entrants: Sequence[Entrant]) -> None:
    """Enter the time of every entrant into its row."""
    for row, entrant in zip(found.rows, entrants, strict=True):
        device = info_of(entrant.device).held(entrant.device, case.precision)
        model = info_of(device).time_model(device)
        found.basis, found.device = COST_MODEL, model.describe()
        if isinstance(case.work, ProductWork):
            held = "bf8" if case.precision == "bf8" else str(case.dtypes.compute)
            total, bound = model.product(case.work.size, held, entrant.own)
        else:
            total, bound = model.step(_planned(case, device), entrant.own)
        row.status, row.description = "ok", f"cost model of engine={entrant.own}"
        row.round_ms, row.fastest_ms = [total], total
        row.facts = {"bound_by": bound, "peak_flops": model.peak_flops(entrant.own)}


def _planned(case: Case, device: DeviceConfig) -> Work:
    """Return what the engine static would launch on the device, planned without one."""
    with (
        closing(build.planned_device(device)) as planned,
        closing(session_of(case, planned, EngineConfig(name="static"))) as session,
    ):
        return Work.of({"train": session.engine.build("train", session.graph.trace_train)}, {"train": 1})
