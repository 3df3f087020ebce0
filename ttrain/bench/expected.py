"""What `task=plan` expects of a step that a contender has built."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from ttrain.bench.contender import Contender

if TYPE_CHECKING:
    from ttrain.device.base import Device


def expected_seconds(contender: Contender, device: Device) -> float | None:
    """Seconds of a step by the time of each kernel of its plan; None for who has no plan, or runs no such kernels.

    Kernels are timed on `device` now, whatever was measured before: what disturbs the machine then disturbs both.
    """
    from ttrain.bench.engines import EngineContender
    from ttrain.device.timing import Work
    from ttrain.train.forecast.estimate import host_time
    from ttrain.train.forecast.kernel_times import KernelTimes

    if not isinstance(contender, EngineContender) or contender.name not in ("static", "traced"):
        return None
    work = Work.of({"train": contender.built}, {"train": 1})
    with tempfile.TemporaryDirectory() as folder:
        times = KernelTimes(
            lambda: device, "this process", Path(folder) / "kernels.json", compiled=contender.name == "traced"
        )
        with closing(times):
            return host_time(work, times, None, contender.name, "").total
