"""Times of hardware that is not here, by the model of its family."""

from __future__ import annotations

from contextlib import closing

from ttrain.bench.engines import session_of
from ttrain.bench.results import COST_MODEL, CaseResult, Row
from ttrain.bench.workload import Case
from ttrain.config import build
from ttrain.device.info import MOCK, info_of
from ttrain.device.settings import DeviceConfig
from ttrain.device.timing import Work
from ttrain.engine.settings import EngineConfig


def modelled(device: DeviceConfig) -> bool:
    """Return True if times have to come from the model of a device, because it is not here."""
    info = info_of(device)
    return info.mode(device) != MOCK and not info.present(device)


def enter_times(case: Case, found: CaseResult, row: Row, device: DeviceConfig, engine: str) -> None:
    """Enter the time of a contender into its row."""
    device = info_of(device).held(device, case.precision)
    model = info_of(device).time_model(device)
    found.basis, found.device = COST_MODEL, model.describe()
    total, bound = model.step(_planned(case, device), engine)
    row.status, row.description, row.round_ms = "ok", f"cost model of engine={engine}", [total]
    row.facts = {"bound_by": bound, "peak_flops": model.peak_flops(engine)}


def _planned(case: Case, device: DeviceConfig) -> Work:
    """Return what the engine static would launch on the device, planned without one."""
    with (
        closing(build.planned_device(device)) as planned,
        closing(session_of(case, planned, EngineConfig(name="static"))) as session,
    ):
        return Work.of(session.build_training(further=False), {"train": 1})
