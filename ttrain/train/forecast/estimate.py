"""How long one optimizer step is expected to take, what bounds it, and which way of running it would be fastest.

On a Tenstorrent card the numbers come from the cost model of a Wormhole chip (`ttrain/cost/`), on this machine from the
time that each kernel takes by itself. No step is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ttrain.core.units import format_count
from ttrain.cost.constants import CONSTANTS, Constants
from ttrain.cost.lowering import node_programs
from ttrain.cost.programs import Program
from ttrain.cost.wormhole import Setting, Wormhole
from ttrain.device.ttnn.settings import TenstorrentConfig
from ttrain.engine.base import Step
from ttrain.graph.graph import Node
from ttrain.train.forecast.plan_report import Table

TIE = 0.03  # ways that differ by less are taken to be equally fast
COMPUTE_FAMILIES = ("matmul", "attention", "loss")  # of ops that do many operations per byte
# What the grid of a chip leaves to compute: a board of one chip loses one row to harvesting, of two chips two.
GRIDS = {"n150": {"worker": (8, 8), "eth": (9, 8)}, "n300": {"worker": (7, 8), "eth": (8, 8)}}
INPUT_CALL = 30e-6  # s to turn one host array into tiles and enqueue it: 20 to 34 us measured on a mocked board
INPUT_RATE = 8e9  # byte/s from host to card: PCIe 4 with 8 lanes at half its 15.8 GB/s
RECORD = 30e-6  # s of Python to record a node and find memory for it, which engine=dynamic does at every step
FITTED = "the cost model of a Wormhole chip, fitted to published measurements (docs/planning.md), not from a card"
LAUNCH = 2.5e-6  # s of Python per launch that a timed kernel does not contain


class Times(Protocol):
    """Seconds of kernels on this machine."""

    def of(self, nodes: Sequence[Node]) -> list[float]: ...


@dataclass(frozen=True)
class StepTime:
    """Expected seconds of one optimizer step, and what its parts would take by themselves."""

    total: float
    dispatch: float
    compute: float
    bandwidth: float
    host_input: float
    launches: int
    source: str

    @property
    def bottleneck(self) -> str:
        """dispatch, compute, bandwidth or host_input."""
        parts = {name: getattr(self, name) for name in ("dispatch", "compute", "bandwidth", "host_input")}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Way:
    """One way to run the step, and its expected seconds."""

    engine: str
    settings: str  # the words that choose it on the command line
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """The expected time as configured, the alternatives that were compared, and the recommended one with its reason."""

    time: StepTime
    tokens: int  # of one optimizer step; examples where a model has no tokens
    unit: str
    flops: int
    peak: float | None  # FLOP/s
    ways: tuple[Way, ...]
    recommended: Way
    reason: str
    split: SplitTime | None = None  # two runs on one Tenstorrent chip

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "step_ms": 1e3 * self.time.total,
            f"{self.unit}_per_s": self.tokens / self.time.total,
            "bottleneck": self.time.bottleneck,
            "parts_ms": {
                name: 1e3 * getattr(self.time, name) for name in ("dispatch", "compute", "bandwidth", "host_input")
            },
            "launches": self.time.launches,
            "source": self.time.source,
            "flops_per_s": self.flops / self.time.total,
            "peak_flops_per_s": self.peak,
            "ways": [{**vars(way), "step_ms": 1e3 * way.seconds} for way in self.ways],
            "recommended": self.recommended.settings,
            "reason": self.reason,
            **({} if self.split is None else {"two_runs_ms": {k: 1e3 * v for k, v in vars(self.split).items()}}),
        }

    def tables(self) -> list[Table]:
        """For people."""
        time, rate = self.time, self.flops / self.time.total
        share = f", {rate / self.peak:.0%} of the peak" if self.peak else ""
        rows = [
            ("step", _duration(time.total)),
            (f"{self.unit}/s", format_count(self.tokens / time.total)),
            ("FLOP/s", f"{format_count(rate)}{share}"),
            ("bottleneck", time.bottleneck.replace("_", " ")),
            (f"dispatch of {time.launches} launches", _duration(time.dispatch)),
            ("compute", _duration(time.compute)),
            ("memory bandwidth", _duration(time.bandwidth)),
            ("host input", _duration(time.host_input)),
        ]
        ways = [(way.settings, _duration(way.seconds), _mark(way, self.recommended)) for way in self.ways]
        return [
            Table("Expected time of one optimizer step", ("", "expected"), rows, (f"From {time.source}.",)),
            Table(
                "Ways to run it", ("", "step", ""), ways, (f"Recommended: {self.recommended.settings}. {self.reason}",)
            ),
        ]


def _duration(seconds: float) -> str:
    """With three digits, since steps take from microseconds to seconds."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale or unit == "us":
            return f"{seconds / scale:.3g} {unit}" if seconds < 999.5 * scale else f"{seconds / scale:.0f} {unit}"
    raise AssertionError(seconds)


def _mark(way: Way, recommended: Way) -> str:
    return "recommended" if way is recommended else ""


@dataclass(frozen=True)
class Work:
    """What one optimizer step does: the launched nodes with how often they run, and the bytes of its inputs."""

    nodes: tuple[tuple[int, tuple[Node, ...]], ...]
    inputs: int
    input_bytes: int

    @classmethod
    def of(cls, steps: Mapping[str, Step], per_step: Mapping[str, int]) -> Work:
        """From built steps and how often each runs."""
        built = [(times, steps[name]) for name, times in per_step.items()]
        planned = tuple((times, tuple(step.plan.launched)) for times, step in built if step.plan is not None)
        specs = [(times, spec) for times, step in built for spec in step.inputs.values()]
        return cls(planned, sum(times for times, _ in specs), sum(times * spec.nbytes for times, spec in specs))

    @property
    def launches(self) -> int:
        return sum(times * len(nodes) for times, nodes in self.nodes)

    def programs(self) -> list[tuple[int, list[Program]]]:
        """What a Tenstorrent chip runs, in order, with how often."""
        return [(times, [program for node in nodes for program in node_programs(node)]) for times, nodes in self.nodes]


def wormhole_time(
    work: Work, config: TenstorrentConfig, engine: str, constants: Constants = CONSTANTS, source: str = FITTED
) -> StepTime:
    """By the cost model. `source` says where its constants are from."""
    chip = Wormhole(chip_setting(config, engine), constants)
    parts: dict[str, float] = dict.fromkeys(("total", "host", "dispatch", "compute", "bandwidth"), 0.0)
    programs = 0
    for times, listed in work.programs():
        estimate = chip.step(listed)
        programs += times * len(listed)
        for name in parts:
            parts[name] += times * getattr(estimate, name) / 1e6
    given = host_input(work)
    overlapped = config.command_queues == 2
    total = max(parts["total"], given) if overlapped else parts["total"] + given
    dispatch = max(parts["host"], parts["dispatch"])
    return StepTime(total, dispatch, parts["compute"], parts["bandwidth"], given, programs, source)


def host_input(work: Work) -> float:
    """Seconds that the host takes to hand a step's inputs to a card."""
    return work.inputs * INPUT_CALL + work.input_bytes / INPUT_RATE


def chip_setting(config: TenstorrentConfig, engine: str) -> Setting:
    """How the model's chip is used by an engine on a card of this config."""
    dispatch = "worker" if config.dispatch == "auto" else config.dispatch
    grid = GRIDS["n150" if config.name == "n150" else "n300"][dispatch]
    if config.core_grid is not None:
        grid = (min(config.core_grid[0], grid[0]), min(config.core_grid[1], grid[1]))
    issuer = {"traced": "replay", "static": "native"}.get(engine, "python")
    return Setting(dispatch, config.math_fidelity, grid, issuer)


def wormhole_estimate(
    work: Work,
    config: TenstorrentConfig,
    engine: str,
    tokens: int,
    unit: str,
    flops: int,
    constants: Constants = CONSTANTS,
    source: str = FITTED,
) -> Estimate:
    """As configured, and every combination of engine, dispatch and queues beside it."""
    time = wormhole_time(work, config, engine, constants, source)
    ways = []
    for name in ("static", "traced", "dynamic"):
        for dispatch in ("worker", "eth"):
            for queues in (1, 2):
                tried = replace(config, dispatch=dispatch, command_queues=queues)
                words = f"engine={name} device.dispatch={dispatch} device.command_queues={queues}"
                ways.append(Way(name, words, wormhole_time(work, tried, name, constants).total))
    best = _simplest(ways)
    share = time.dispatch / time.total
    reason = (
        f"{_compared(best, ways)} Dispatch would take {_duration(time.dispatch)} by itself, {share:.0%} of the "
        f"step as configured, whose bottleneck is {time.bottleneck.replace('_', ' ')}. "
    )
    peak = Wormhole(chip_setting(config, engine), constants).peak_flops()
    split = split_time(work, config, best.engine, constants)
    reason += split.text(best.engine)
    return Estimate(time, tokens, unit, flops, peak, tuple(ways), best, reason, split)


@dataclass(frozen=True)
class SplitTime:
    """Seconds of a step of two runs on one chip: side by side on its halves, or one after the other on all of it."""

    side_by_side: float
    in_turn: float

    @property
    def gains(self) -> bool:
        return self.side_by_side * (1 + TIE) < self.in_turn

    def text(self, engine: str) -> str:
        """A sentence with what to choose."""
        both, turn = _duration(self.side_by_side), _duration(self.in_turn)
        times = (
            f"by engine={engine} a step of two runs takes {both} on the halves of a chip, {turn} one after the other"
        )
        if self.gains:
            return f"device.subdevices=2 for two runs at a time: {times}."
        return f"device.subdevices=1: {times}, so halves gain nothing."


def split_time(work: Work, config: TenstorrentConfig, engine: str, constants: Constants = CONSTANTS) -> SplitTime:
    """Two runs of the same work. Halves have half the columns of cores, half the bandwidth, and one host."""
    setting = chip_setting(config, engine)
    rows, columns = setting.cores
    half = replace(
        constants,
        dram_efficiency=constants.dram_efficiency / 2,
        scatter_efficiency=constants.scatter_efficiency / 2,
    )
    chip = Wormhole(replace(setting, grid=(rows, max(columns // 2, 1))), half)
    estimates = [(times, chip.step(listed)) for times, listed in work.programs()]
    device = sum(times * estimate.total for times, estimate in estimates) / 1e6
    host = 2 * sum(times * estimate.host for times, estimate in estimates) / 1e6
    in_turn = 2 * wormhole_time(work, replace(config, command_queues=1), engine, constants).total
    return SplitTime(max(device, host) + 2 * host_input(work), in_turn)


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
    best = _simplest(ways)
    dispatch += work.launches * RECORD * (engine == "dynamic")
    time = StepTime(totals.get(engine, total), dispatch, compute, bandwidth, host_input, work.launches, source)
    reason = (
        f"{_compared(best, ways)} {work.launches} launches take Python {_duration(dispatch)}, "
        f"{dispatch / total:.0%} of the step; a compiler may gain more by fusing, which is not counted."
    )
    return Estimate(time, tokens, unit, flops, peak, tuple(ways), best, reason)


def _simplest(ways: Sequence[Way]) -> Way:
    """The first of the ways that are as fast as the fastest, within TIE: simpler ones come first."""
    fastest = min(way.seconds for way in ways)
    return next(way for way in ways if way.seconds <= fastest * (1 + TIE))


def _compared(best: Way, ways: Sequence[Way]) -> str:
    """The recommended way against the best of every other engine."""
    others = {way.engine for way in ways} - {best.engine}
    parts = []
    for engine in sorted(others):
        seconds = min(way.seconds for way in ways if way.engine == engine)
        parts.append(f"{engine} {seconds / best.seconds:.2f} times as long")
    return f"{best.engine} takes {_duration(best.seconds)}, {', '.join(parts)}."
