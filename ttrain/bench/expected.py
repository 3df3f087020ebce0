"""What `task=plan` expects of a step that a contender has built, and what its kernels would take at the roof."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.bench.contender import Contender

if TYPE_CHECKING:
    from ttrain.device.base import Device


def roof_facts(contender: Contender, device: Device, dtype: str, index: int) -> dict[str, Any]:
    """FLOPs and bytes of all its kernels, and milliseconds at the machine's measured rates; empty without a plan."""
    from ttrain.bench.engines import EngineContender
    from ttrain.train.forecast.peak import measured_rates

    plan = contender.built.plan if isinstance(contender, EngineContender) else None
    rates = measured_rates(device.name, dtype, index)
    if plan is None or rates is None:
        return {}
    work = [(node.op.flops(node), node.op.nbytes(node)) for node in plan.launched]
    flops, nbytes = sum(flops for flops, _ in work), sum(nbytes for _, nbytes in work)
    return {
        "roof": {
            "flops": flops, "nbytes": nbytes, "flops_ms": 1e3 * flops / rates.flops,
            "nbytes_ms": 1e3 * nbytes / rates.nbytes, "ms": 1e3 * sum(rates.roof(*each) for each in work),
        }
    }  # fmt: skip


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
        times = KernelTimes(lambda: device, "this process", Path(folder) / "kernels.json", compiler=work.compiler)
        with closing(times):
            return host_time(work, times, None, contender.name, "").total
