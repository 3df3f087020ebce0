"""Plans of every mode of parallel, and the fastest that fits: parallel=auto of task=plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ttrain.config import build
from ttrain.config.schema import Config
from ttrain.core.tables import Table
from ttrain.core.units import format_bytes
from ttrain.core.waiting import waited_for
from ttrain.data.batches import Dataset
from ttrain.device.info import info_of
from ttrain.device.timing import Work, duration
from ttrain.parallel.settings import AUTO, SEVERAL
from ttrain.tasks.training import expected
from ttrain.train.forecast.limits import device_memory
from ttrain.train.forecast.plan_report import plan_report
from ttrain.train.forecast.step_cost import collectives, link_seconds


@dataclass(frozen=True)
class Planned:
    """The cost of a rank in a mode: bytes of memory, bytes that it sends in a step, and seconds of a step.

    Without the time of computing, `seconds` are those of all communication.
    """

    mode: str
    memory: int
    fits: bool
    sent: int
    seconds: float


def memory_to_fit(config: Config, device: str) -> tuple[int, str] | None:
    """Return the bytes to fit into, and where the number is from; None if it can't be told."""
    given = config.plan.memory_gb
    if given is not None:
        return int(given * 2**30), "plan.memory_gb"
    return info_of(config.device).memory(config.device) or device_memory(device, config.device.index)


def with_mode(config: Config, dataset: Dataset | None) -> tuple[Config, dict[str, Any], list[Table]]:
    """Return the config with the fastest mode that fits, the numbers of all, and a table of them.

    Only parallel=auto asks for one. Of equally fast modes the first is taken. Where none fits, it is the smallest.
    """
    if config.parallel.name != AUTO:
        return config, {}, []
    ranks = build.planned_ranks(config.parallel)
    modes = waited_for(SEVERAL if ranks.count > 1 else ("none",), "Planning modes")
    found = [planned(expected.changed(config, {"parallel": mode}), dataset) for mode in modes]
    fits = [each for each in found if each.fits]
    best = min(fits, key=lambda each: each.seconds) if fits else min(found, key=lambda each: each.memory)
    rows = [
        (each.mode, format_bytes(each.memory), "yes" if each.fits else "no", format_bytes(each.sent),
         duration(each.seconds), "<-" if each is best else "")
        for each in found
    ]  # fmt: skip
    names = "parallel", "memory", "fits", "sent", "time of " + ("a step" if config.plan.time else "communication"), ""
    table = Table(f"Modes of {ranks.count} ranks", names, rows, (f"parallel={best.mode} is planned below.",))
    return expected.changed(config, {"parallel": best.mode}), {"modes": list(map(asdict, found))}, [table]


def planned(config: Config, dataset: Dataset | None) -> Planned:
    """Return the cost of a rank in the config's mode."""
    with expected.planned_session(config, dataset) as session:
        steps = session.build_training(further=False)
        report = plan_report(session.graph, session.state, steps)
        found = collectives(Work.of(steps, report.per_step), session.graph.ranks)
        known, sent = memory_to_fit(config, session.engine.device.name), sum(each["nbytes"] for each in found.values())
        time = link_seconds(sent, config.parallel.link_gbps)
        if config.plan.time:
            estimate = expected.expected_time(config, session, steps, report, config.plan.seconds)
            time = time if isinstance(estimate, str) else estimate.time.total
    return Planned(config.parallel.name, report.memory, known is None or report.memory <= known[0], sent, time)
