"""How long a step takes on this machine, from the time that each of its kernels takes by itself. No step is run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ttrain.device.timing import Estimate, StepTime, Way, Work, compared, duration, simplest
from ttrain.graph.graph import Node

COMPUTE_FAMILIES = ("matmul", "attention", "loss")  # of ops that do many operations per byte
RECORD = 30e-6  # s of Python to record a node and find memory for it, which engine=dynamic does at every step
LAUNCH = 2.5e-6  # s of Python per launch that a timed kernel does not contain


class Times(Protocol):
    """Seconds of kernels on this machine."""

    def of(self, nodes: Sequence[Node]) -> list[float]: ...


def host_estimate(
    work: Work, times: Times, engine: str, tokens: int, unit: str, flops: int, peak: float | None, device: str
) -> Estimate:
    """By the times of this machine's kernels. An engine of a plugin counts as static."""
    compute = bandwidth = 0.0
    for repeats, nodes in work.nodes:
        for node, seconds in zip(nodes, times.of(nodes), strict=True):
            if node.op.family in COMPUTE_FAMILIES:
                compute += repeats * seconds
            else:
                bandwidth += repeats * seconds
    dispatch, host_input = work.launches * LAUNCH, work.inputs * 5e-6 + work.input_bytes / 4e9
    total = compute + bandwidth + dispatch + host_input
    source = f"the time of each kernel by itself on this {device}"
    if engine == "traced":
        source += "; of static's kernels, since compiling for traced is left to the run"
    totals = {"static": total, "traced": max(total - dispatch, 0.0), "dynamic": total + work.launches * RECORD}
    if engine not in totals:  # of a plugin
        source += f"; engine={engine} is taken to launch them as static does"
    ways = [Way(name, f"engine={name}", seconds) for name, seconds in totals.items()]
    best = simplest(ways)
    dispatch += work.launches * RECORD * (engine == "dynamic")
    time = StepTime(totals.get(engine, total), dispatch, compute, bandwidth, host_input, work.launches, source)
    reason = (
        f"{compared(best, ways)} {work.launches} launches take Python {duration(dispatch)}, "
        f"{dispatch / total:.0%} of the step; a compiler may gain more by fusing, which is not counted."
    )
    return Estimate(time, tokens, unit, flops, peak, tuple(ways), best, reason)
