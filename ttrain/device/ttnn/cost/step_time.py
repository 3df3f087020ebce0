"""The time of a step on a card by the cost model, in every way to run it, and that of two runs on halves of a chip."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod

from ttrain.device.timing import TIE, Estimate, StepTime, Way, Work, duration, simplest
from ttrain.device.ttnn.cost.lowering import Lowering
from ttrain.device.ttnn.cost.wormhole import BYTES, CONSTANTS, Constants, Product, Setting, StepEstimate, Wormhole
from ttrain.device.ttnn.settings import TenstorrentConfig

# What the grid of a chip leaves to compute: a board of one chip loses one row to harvesting, of two chips two.
GRIDS = {"n150": {"worker": (8, 8), "eth": (9, 8)}, "n300": {"worker": (7, 8), "eth": (8, 8)}}
INPUT_CALL = 30e-6  # s to turn one host array into tiles and enqueue it: 20 to 34 us measured on a mocked board
INPUT_RATE = 8e9  # byte/s from host to card: PCIe 4 with 8 lanes at half its 15.8 GB/s
FITTED = "the cost model of a Wormhole chip, fitted to published measurements (docs/planning.md), not from a card"

Known = tuple[Constants, str]  # constants, and where they are from
FITTED_ALONE: Known = (CONSTANTS, FITTED)


class CardStep:
    """One optimizer step on a card: its programs with how often they run, and seconds of handing over its inputs."""

    def __init__(self, work: Work, config: TenstorrentConfig) -> None:
        lowering = Lowering(config.fuses, prod(config.mesh))
        self.programs = [
            (times, [run for node in nodes for run in lowering.programs(node)]) for times, nodes in work.nodes
        ]
        self.host_input = work.inputs * INPUT_CALL + work.input_bytes / INPUT_RATE

    def sums(self, chip: Wormhole) -> StepEstimate:
        """Return the estimates of its programs added up, in microseconds."""
        found = [(times, vars(chip.step(listed))) for times, listed in self.programs]
        names = StepEstimate.__dataclass_fields__
        return StepEstimate(**{name: sum(times * values[name] for times, values in found) for name in names})

    def time(
        self, config: TenstorrentConfig, engine: str, constants: Constants = CONSTANTS, source: str = FITTED
    ) -> StepTime:
        """Return the time by the cost model. `source` says where its constants are from."""
        found = self.sums(Wormhole(chip_setting(config, engine), constants))
        device, given = found.total / 1e6, self.host_input
        total = max(device, given) if config.command_queues == 2 else device + given
        dispatch = max(found.host, found.dispatch) / 1e6
        return StepTime(total, dispatch, found.compute / 1e6, found.bandwidth / 1e6, given, found.programs, source)


def chip_setting(config: TenstorrentConfig, engine: str) -> Setting:
    """Return the setting of the model's chip for an engine on a card of this config."""
    dispatch = "worker" if config.dispatch == "auto" else config.dispatch
    grid = GRIDS["n150" if config.name == "n150" else "n300"][dispatch]
    if config.core_grid is not None:
        grid = (min(config.core_grid[0], grid[0]), min(config.core_grid[1], grid[1]))
    issuer = {"traced": "replay", "static": "native"}.get(engine, "python")
    return Setting(dispatch, config.math_fidelity, grid, issuer)


def wormhole_estimate(work: Work, config: TenstorrentConfig, engine: str, known: Known = FITTED_ALONE) -> Estimate:
    """Estimate the step as configured, and beside it every combination of engine, dispatch and queues."""
    constants, source = known
    step = CardStep(work, config)
    time = step.time(config, engine, constants, source)
    ways = []
    for name, dispatch, queues in product(("static", "traced", "dynamic"), ("worker", "eth"), (1, 2)):
        tried = replace(config, dispatch=dispatch, command_queues=queues)
        overrides = f"engine={name} device.dispatch={dispatch} device.command_queues={queues}"
        ways.append(Way(name, overrides, step.time(tried, name, constants).total))
    best = simplest(ways).engine
    split = split_time(step, config, best, constants)
    note = (
        f"Dispatch would take {duration(time.dispatch)} by itself, {time.dispatch / time.total:.0%} of the step as "
        f"configured, whose bottleneck is {time.bottleneck.replace('_', ' ')}. {split.text(best)}"
    )
    peak = Wormhole(chip_setting(config, engine), constants).peak_flops()
    more = {"two_runs_ms": {key: 1e3 * value for key, value in vars(split).items()}}
    return Estimate(work, time, ways, peak, note, more)


@dataclass(frozen=True)
class SplitTime:
    """Seconds of a step of two runs on one chip: side by side on its halves, or one after the other on all of it."""

    side_by_side: float
    in_turn: float

    @property
    def gains(self) -> bool:
        return self.side_by_side * (1 + TIE) < self.in_turn

    def text(self, engine: str) -> str:
        """Return a sentence with what to choose."""
        times = (
            f"by engine={engine} a step of two runs takes {duration(self.side_by_side)} on the halves of a chip, "
            f"{duration(self.in_turn)} one after the other"
        )
        if self.gains:
            return f"device.subdevices=2 for two runs at a time: {times}."
        return f"device.subdevices=1: {times}, so halves gain nothing."


def split_time(step: CardStep, config: TenstorrentConfig, engine: str, constants: Constants = CONSTANTS) -> SplitTime:
    """Estimate two runs of the step. Halves have half the columns of cores, half the bandwidth, and one host."""
    setting = chip_setting(config, engine)
    rows, columns = setting.cores
    half = replace(constants, dram_peak=constants.dram_peak / 2)
    found = step.sums(Wormhole(replace(setting, grid=(rows, max(columns // 2, 1))), half))
    in_turn = 2 * step.time(replace(config, command_queues=1), engine, constants).total
    return SplitTime(max(found.total, 2 * found.host) / 1e6 + 2 * step.host_input, in_turn)


class WormholeModel:
    """A board as a config uses it, for benchmarks where there is no card. See `TimeModel`."""

    def __init__(self, config: TenstorrentConfig) -> None:
        self.config = config

    def describe(self) -> dict[str, object]:
        return {
            "name": self.config.name,
            "mode": "cost model",
            "model": "the cost model of a Wormhole chip",
            "source": "ttrain/device/ttnn/cost, docs/planning.md",
        }

    def product(self, size: int, dtype: str, engine: str) -> tuple[float, str]:
        estimate = self._chip(engine).blocking([Product(size, size, size, 1, BYTES[dtype])])
        bound = "call" if estimate.total > 2 * (estimate.compute + estimate.bandwidth) else estimate.bottleneck
        return estimate.total / 1e3, bound

    def step(self, work: Work, engine: str) -> tuple[float, str]:
        time = CardStep(work, self.config).time(self.config, engine)
        return 1e3 * time.total, time.bottleneck.replace("_", " ")

    def peak_flops(self, engine: str) -> float:
        return self._chip(engine).peak_flops()

    def _chip(self, engine: str) -> Wormhole:
        return Wormhole(chip_setting(self.config, engine))
