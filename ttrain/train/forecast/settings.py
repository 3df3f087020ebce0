"""Small config of task=plan and task=profile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ttrain.core.options import option, rule
from ttrain.device.info import MOCK, info_of


@dataclass
class PlanConfig:
    """Options of task=plan, which predicts the cost of a run."""

    show: str | None = option(
        None, "also print the graph, the graph with gradients, the plan with buffers, or the cost of each op",
        choices=("graph", "backward", "plan", "ops"),
    )  # fmt: skip
    json: str | None = option(None, "file for the same numbers, in bytes and operations", path=True)
    picture: str | None = option(None, "image file of the planned memory over time, such as plan.png", path=True)
    time: bool = option(True, "predict a step's time; on the CPU and on a GPU this times each kernel once")
    seconds: float = option(10.0, "seconds for timing kernels; the rest is estimated from FLOPs and bytes", minimum=0)
    calibrate: bool = option(False, "first measure the constants of the card's cost model, and keep them")
    limits: bool = option(False, "search the largest micro-batch and context that fit")
    memory_gb: float | None = option(None, "memory to fit into, in GiB; null takes the device's", above=0)


@dataclass
class ProfileConfig:
    """Options of task=profile, which times the nodes of a step, or reads a report of a device's own profiler."""

    steps: int = option(5, "training steps to profile; with profile.csv the steps in it", minimum=1)
    top: int = option(20, "slowest nodes in the table", minimum=1)
    csv: str | None = option(
        None, "report of a device's own profiler to read instead of running, such as cpp_device_perf_report.csv",
        path=True,
    )  # fmt: skip
    json: str | None = option(None, "file for the numbers of every node", path=True)
    trace: str | None = option(
        None, "file for one step in Chrome's trace format, for ui.perfetto.dev; not with a device's own profiler",
        path=True,
    )  # fmt: skip

    @rule
    def _something_takes_time(self, others: Any) -> Iterator[str]:
        if others.task.name != "profile":
            return
        device, profiled = others.device, others.info_that(lambda each: each.profiles)
        info = info_of(device)
        if self.csv is None and (device.name == "null" or info.mode(device) == MOCK):
            yield (
                f"task=profile: {info.named(device)} computes nothing that takes time. Give device=cpu, device=cuda, "
                f"a {profiled.title} card or simulator, or profile.csv=<its report>; task=plan plan.show=ops tells "
                "what ops cost on any device."
            )
        if self.trace is not None and (self.csv is not None or info.profiles):
            yield "profile.trace: a device's own profiler gives no timeline. Give device=cpu or device=cuda, or null."
