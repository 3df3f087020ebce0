"""Small config of task=plan and task=profile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ttrain.core.options import option, rule
from ttrain.device.family import MOCK, family_of


@dataclass
class PlanConfig:
    """Options of task=plan: the parts that it prints after its summary."""

    show: str | None = option(
        None, "also print the traced graph, the graph with gradients, the op list with buffers, or what each op costs",
        choices=("graph", "backward", "plan", "ops"),
    )  # fmt: skip
    json: str | None = option(None, "file to write the same numbers into, in bytes and operations", path=True)
    picture: str | None = option(None, "image file for the planned memory over time, such as plan.png", path=True)
    time: bool = option(
        True, "expect a step's time; on the CPU and on a GPU each kernel is timed for that, and its best time kept"
    )
    seconds: float = option(
        10.0, "time kernels for so long; those that are left then are estimated from their FLOPs and bytes", minimum=0
    )
    calibrate: bool = option(
        False, "first open the device and measure the constants of its cost model on it; they are kept for later"
    )
    limits: bool = option(False, "search the largest micro-batch and context that fit, by planning a few of each")
    memory_gb: float | None = option(None, "memory to fit into, in GiB; null takes that of the device", above=0)


@dataclass
class ProfileConfig:
    """Options of task=profile: it measures the nodes of a step, or reads the report of a device's own profiler."""

    steps: int = option(5, "training steps that are profiled; with profile.csv the steps that it covers", minimum=1)
    top: int = option(20, "nodes in the table, those first that take longest", minimum=1)
    csv: str | None = option(
        None, "report of such a profiler to read instead of running, such as cpp_device_perf_report.csv",
        path=True,
    )  # fmt: skip
    json: str | None = option(None, "file to write the same numbers into, of every node", path=True)
    trace: str | None = option(
        None, "file for one step as a timeline in Chrome's trace format, which ui.perfetto.dev opens; not for "
        "devices with a profiler of their own", path=True,
    )  # fmt: skip

    @rule
    def _something_takes_time(self, others: Any) -> Iterator[str]:
        if others.task.name != "profile":
            return
        device, profiled = others.device, others.family_that(lambda each: each.profiles)
        family = family_of(device)
        if self.csv is None and (device.name == "null" or family.mode(device) == MOCK):
            yield (
                f"task=profile: {family.named(device)} computes nothing that takes time. Give device=cpu, device=cuda, "
                f"a {profiled.title} card or simulator, or profile.csv=<its report>; task=plan plan.show=ops tells "
                "what ops cost on any device."
            )
        if self.trace is not None and (self.csv is not None or family.profiles):
            yield "profile.trace: a device's own profiler gives no timeline. Give device=cpu or device=cuda, or null."
