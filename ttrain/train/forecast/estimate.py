"""Estimate how long a step takes on this machine, from the time of each kernel by itself. No step is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from ttrain.device.timing import Estimate, StepTime, Way, Work, compared, duration, simplest
from ttrain.graph.graph import Node

COMPUTE_FAMILIES = ("matmul", "attention", "loss")  # of ops that do many operations per byte
RECORD = 30e-6  # s of Python to record a node and find memory for it, which engine=dynamic does at every step
LAUNCH = 2.5e-6  # s of Python per launch that a timed kernel does not contain


class Times(Protocol):
    """Seconds of kernels on this machine."""

    def of(self, nodes: Sequence[Node], fewer: Sequence[Node]) -> list[float]: ...


def host_time(work: Work, times: Times, on_fewer_rows: Work | None, engine: str, source: str) -> StepTime:
    """Return the time of a step on `engine`. `on_fewer_rows` is the same work planned on fewer rows, or None."""
    compute = bandwidth = 0.0
    small = work if on_fewer_rows is None else on_fewer_rows
    for (repeats, nodes), (_, fewer) in zip(work.nodes, small.nodes, strict=True):
        alike = [node.op for node in fewer] == [node.op for node in nodes]
        for node, seconds in zip(nodes, times.of(nodes, fewer if alike else nodes), strict=True):
            if node.op.family in COMPUTE_FAMILIES:
                compute += repeats * seconds
            else:
                bandwidth += repeats * seconds
    # Python launches kernels one by one, unless they are captured or compiled.
    dispatch, host_input = LAUNCH * work.launches * (engine != "traced"), work.inputs * 5e-6 + work.input_bytes / 4e9
    return StepTime(
        compute + bandwidth + dispatch + host_input, dispatch, compute, bandwidth, host_input, work.launches, source
    )


def host_estimate(
    times: Mapping[str, StepTime], engine: str, tokens: int, unit: str, flops: int, peak: float | None
) -> Estimate:
    """Estimate by the times of this machine's kernels: of engines static, traced or both, `engine` among them.

    dynamic launches what static does, and so is an engine of a plugin taken to.
    """
    by = dict(times)
    if "static" in by:
        static = by["static"]
        more = static.launches * RECORD
        by["dynamic"] = replace(static, dispatch=static.dispatch + more, total=static.total + more)
    ways = [Way(name, f"engine={name}", by[name].total) for name in ("static", "traced", "dynamic") if name in by]
    best, time = simplest(ways), by.get(engine) or by["static"]
    reason = compared(best, ways)
    if time.dispatch:
        share = f"{time.dispatch / time.total:.0%} of the step"
        reason += f" {time.launches} launches take Python {duration(time.dispatch)}, {share}."
    return Estimate(time, tokens, unit, flops, peak, tuple(ways), best, reason)
