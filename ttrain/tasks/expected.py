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
    config: Config, steps: Mapping[str, Step], report: PlanReport, device: Device, chips: int, seconds: float
) -> tuple[Estimate | None, str]:
    """The expected time of one optimizer step, or why there is none.

    Kernels of this machine are timed for so many seconds; with 0 it goes by what was timed before, else by rates.
    """
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
    return _on_this_machine(config, work, device, tokens, unit, flops, seconds)


def _on_this_machine(
    config: Config, work: Work, device: Device, tokens: int, unit: str, flops: int, seconds: float
) -> tuple[Estimate | None, str]:
    """Opens the device only where a kernel has not been timed yet, and there is time for it."""
    import torch

    from ttrain.train.estimate import host_estimate
    from ttrain.train.kernel_times import KernelTimes, machine_name
    from ttrain.train.peak import measured_rates

    if device.name == "cuda" and not torch.cuda.is_available():
        return None, "There is no GPU here whose kernels could be timed."
    threads = getattr(device, "threads", None)
    named = dataclasses.replace(config.device, name=device.name)
    rates = measured_rates(device.name, str(config.precision.compute), config.device.index)
    assert rates is not None  # it is a CPU or a GPU
    machine = machine_name(device.name, threads)
    with closing(KernelTimes(lambda: build.build_device(named), machine, bar=True, seconds=seconds, rates=rates)) as by:
        estimate = host_estimate(work, by, config.engine.name, tokens, unit, flops, rates.flops, device.name)
    more = "; plan.seconds=<more> times them" if by.note and seconds else ""
    source = estimate.time.source + by.note + more
    return dataclasses.replace(estimate, time=dataclasses.replace(estimate.time, source=source)), ""
