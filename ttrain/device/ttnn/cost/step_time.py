"""How long a step takes on a card by the cost model, in every way to run it, and whether two runs gain by halves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ttrain.device.timing import TIE, Estimate, StepTime, Way, Work, compared, duration, simplest
from ttrain.device.ttnn.cost.constants import CONSTANTS, Constants
from ttrain.device.ttnn.cost.lowering import node_programs
from ttrain.device.ttnn.cost.programs import Program
from ttrain.device.ttnn.cost.wormhole import Setting, Wormhole
from ttrain.device.ttnn.settings import TenstorrentConfig

# What the grid of a chip leaves to compute: a board of one chip loses one row to harvesting, of two chips two.
GRIDS = {"n150": {"worker": (8, 8), "eth": (9, 8)}, "n300": {"worker": (7, 8), "eth": (8, 8)}}
INPUT_CALL = 30e-6  # s to turn one host array into tiles and enqueue it: 20 to 34 us measured on a mocked board
INPUT_RATE = 8e9  # byte/s from host to card: PCIe 4 with 8 lanes at half its 15.8 GB/s
FITTED = "the cost model of a Wormhole chip, fitted to published measurements (docs/planning.md), not from a card"


def programs_of(work: Work) -> Iterator[tuple[int, list[Program]]]:
    """What a chip runs, in order, with how often."""
    for times, nodes in work.nodes:
        yield times, [program for node in nodes for program in node_programs(node)]


def wormhole_time(
    work: Work, config: TenstorrentConfig, engine: str, constants: Constants = CONSTANTS, source: str = FITTED
) -> StepTime:
    """By the cost model. `source` says where its constants are from."""
    chip = Wormhole(chip_setting(config, engine), constants)
    parts: dict[str, float] = dict.fromkeys(("total", "host", "dispatch", "compute", "bandwidth"), 0.0)
    programs = 0
    for times, listed in programs_of(work):
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
                overrides = f"engine={name} device.dispatch={dispatch} device.command_queues={queues}"
                ways.append(Way(name, overrides, wormhole_time(work, tried, name, constants).total))
    best = simplest(ways)
    share = time.dispatch / time.total
    reason = (
        f"{compared(best, ways)} Dispatch would take {duration(time.dispatch)} by itself, {share:.0%} of the "
        f"step as configured, whose bottleneck is {time.bottleneck.replace('_', ' ')}. "
    )
    peak = Wormhole(chip_setting(config, engine), constants).peak_flops()
    split = split_time(work, config, best.engine, constants)
    more = {"two_runs_ms": {key: 1e3 * value for key, value in vars(split).items()}}
    return Estimate(time, tokens, unit, flops, peak, tuple(ways), best, reason + split.text(best.engine), more)


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
        both, turn = duration(self.side_by_side), duration(self.in_turn)
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
    estimates = [(times, chip.step(listed)) for times, listed in programs_of(work)]
    device = sum(times * estimate.total for times, estimate in estimates) / 1e6
    host = 2 * sum(times * estimate.host for times, estimate in estimates) / 1e6
    in_turn = 2 * wormhole_time(work, replace(config, command_queues=1), engine, constants).total
    return SplitTime(max(device, host) + 2 * host_input(work), in_turn)
