"""Steps on a device that computes no values, such as a mocked board: what they would cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ttrain.core.units import format_bytes
from ttrain.device.base import Device
from ttrain.engine.base import Step

STEPS = 6  # the first one builds programs; the fastest of the others is what a step costs the host


@dataclass(frozen=True)
class StepCosts:
    """Costs of one optimizer step. `later` counts after the second step: programs and allocations should be 0."""

    first_ms: float
    dispatch_ms: float
    device_ops: int
    programs: int
    later: dict[str, int]
    memory: dict[str, int]
    engines: dict[str, float] = field(default_factory=dict)  # host dispatch per step in ms, by engine

    def to_dict(self) -> dict[str, Any]:
        """Values for the run record."""
        return {
            "computes": False,
            "note": "values are not computed: nothing was trained, no loss means anything, no checkpoint was written",
            "first_step_ms": round(self.first_ms, 3),
            "host_dispatch_ms": round(self.dispatch_ms, 3),
            "host_dispatch_ms_by_engine": {name: round(value, 3) for name, value in self.engines.items()},
            "device_ops": self.device_ops,
            "programs": self.programs,
            "after_second_step": self.later,
            **self.memory,
        }

    def lines(self) -> list[str]:
        """Return these values as lines for people."""
        lines = [
            f"device ops per step      {self.device_ops}",
            f"programs                 {self.programs}",
            f"host dispatch per step   {self.dispatch_ms:.1f} ms (first step {self.first_ms:.0f} ms)",
        ]
        if len(self.engines) > 1:
            listed = ", ".join(f"engine={name} {value:.1f} ms" for name, value in self.engines.items())
            lines.append(f"host dispatch by engine  {listed}")
        lines += [f"{key.replace('_', ' '):24} {format_bytes(size)}" for key, size in self.memory.items()]
        later = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in self.later.items())
        return [*lines, f"after the second step    {later}"]


def measure(device: Device, run: Callable[[int], Any], steps: Mapping[str, Step]) -> StepCosts:
    """`run(step)` is one optimizer step, counted from 1; `steps` are the built steps that it calls."""
    seconds, facts = [], [_facts(device)]
    for step in range(1, STEPS + 1):
        seconds.append(_seconds(run, step))
        facts.append(_facts(device))
    later = {key: facts[-1].get(key, 0) - facts[2].get(key, 0) for key in ("programs", "allocations")}
    memory = {"dram_bytes": facts[-1].get("dram_bytes", 0), "dram_total_bytes": device.memory().get("total", 0)}
    if "host_bytes" in facts[-1]:
        memory["host_bytes"] = facts[-1]["host_bytes"]
    for name, built in steps.items():
        launches = built.launches()  # none by an engine that records every step anew: its peaks are not known
        for key, size in device.step_peaks(launches).items() if launches else ():
            memory[f"{name}_{key}"] = size
    return StepCosts(
        1e3 * seconds[0], 1e3 * min(seconds[1:]),
        facts[-1].get("device_ops", 0) - facts[-2].get("device_ops", 0), facts[-1].get("programs", 0), later, memory,
    )  # fmt: skip


def dispatch_ms(run: Callable[[int], Any], steps: int = 4) -> float:
    """Milliseconds of host time that the fastest of some optimizer steps takes, after one that builds programs."""
    return 1e3 * min([_seconds(run, step) for step in range(1, steps + 1)][1:])


def _seconds(run: Callable[[int], Any], step: int) -> float:
    start = time.perf_counter()
    run(step)
    return time.perf_counter() - start


def _facts(device: Device) -> dict[str, int]:
    return {**device.step_facts(), "allocations": device.counters.allocations}
