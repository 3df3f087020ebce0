"""What task=plan says about time: which source of numbers fits the device, and what it gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING

from ttrain.config import build
from ttrain.config.schema import Config
from ttrain.device.ttnn.settings import TenstorrentConfig

if TYPE_CHECKING:
    from ttrain.device.base import Device
    from ttrain.engine.base import Step
    from ttrain.train.estimate import Estimate, Work
    from ttrain.train.plan_report import PlanReport


def expected_time(
    config: Config, steps: Mapping[str, Step], report: PlanReport, device: Device, chips: int
) -> tuple[Estimate | None, str]:
    """The expected time of one optimizer step, or why there is none."""
    from ttrain.train.calibration import known_constants
    from ttrain.train.estimate import Work, wormhole_estimate

    work = Work.of(steps, report.per_step)
    context = build.data_sizes(config).context
    tokens, unit = config.train.batch_size * (context or 1), "tokens" if context else "examples"
    flops = chips * sum(report.flops.values())
    engine = config.engine.name
    if isinstance(config.device, TenstorrentConfig):
        if device.name == "p150":
            return None, "There is no cost model of a Blackhole chip."
        if device.host is not None:
            return None, "The cost model does not know what the host computes for device.host_resident."
        constants, source = known_constants(config.device)
        return wormhole_estimate(work, config.device, engine, tokens, unit, flops, constants, source), ""
    if device.name not in ("cpu", "cuda"):
        return None, f"device={device.name} computes nothing."
    return _on_this_machine(config, work, device, tokens, unit, flops)


def _on_this_machine(
    config: Config, work: Work, device: Device, tokens: int, unit: str, flops: int
) -> tuple[Estimate | None, str]:
    """Opens the device only where a kernel has not been timed yet."""
    import torch

    from ttrain.train.estimate import host_estimate
    from ttrain.train.kernel_times import KernelTimes, machine_name
    from ttrain.train.peak import measured_peak

    if device.name == "cuda" and not torch.cuda.is_available():
        return None, "There is no GPU here whose kernels could be timed."
    threads = getattr(device, "threads", None)
    named = dataclasses.replace(config.device, name=device.name)
    times = KernelTimes(lambda: build.build_device(named), machine_name(device.name, threads), bar=True)
    with closing(times):
        peak = measured_peak(device.name, str(config.precision.compute), config.device.index)
        estimate = host_estimate(work, times, config.engine.name, tokens, unit, flops, peak, device.name)
    return estimate, ""
