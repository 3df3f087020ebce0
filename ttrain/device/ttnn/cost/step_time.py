"""Predicted time of a step on a card, in every way to run it, and of two runs on halves of a chip."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

from ttrain.device.measured import Section
from ttrain.device.timing import TIE, Estimate, StepTime, Way, Work, duration, simplest
from ttrain.device.ttnn.cost.lowering import Lowering
from ttrain.device.ttnn.cost.wormhole import CONSTANTS, Constants, StepEstimate, Wormhole
from ttrain.device.ttnn.runtime.identity import board
from ttrain.device.ttnn.settings import TenstorrentConfig

INPUT_CALL = 30e-6  # s to turn one host array into tiles and enqueue it: 20 to 34 us measured on a mocked board
INPUT_RATE = 8e9  # byte/s from host to card: PCIe 4 with 8 lanes at half its 15.8 GB/s
FITTED = "the cost model of a Wormhole chip, fitted to published measurements (docs/planning.md), not from a card"


def _entry(value: Any) -> dict[str, Any]:
    constants = {name: float(number) for name, number in value["constants"].items() if name in vars(CONSTANTS)}
    return {"constants": constants, "date": str(value["date"]), "device": value["device"]}


KEPT = Section("wormhole", _entry)  # what was measured on cards of this machine


def card_key(config: TenstorrentConfig, dispatch: str) -> str:
    """Return the key of the constants of a board, by dispatch type and fidelity."""
    return f"{config.name} {'worker' if dispatch == 'auto' else dispatch} {config.math_fidelity}"


def known_constants(config: TenstorrentConfig) -> tuple[Constants, str]:
    """Return the constants for a device, measured here as far as they were, fitted else; and where they are from."""
    kept, changed, date = KEPT.known(), dict[str, float](), ""
    # The configured dispatch type comes last, so that it counts where both tell.
    own = card_key(config, config.dispatch)
    for key in sorted((card_key(config, "worker"), card_key(config, "eth")), key=own.__eq__):
        if key in kept:
            changed |= kept[key]["constants"]
            date = kept[key]["date"]
    if not changed:
        return CONSTANTS, FITTED
    source = f"the cost model of a Wormhole chip with {len(changed)} constants measured on this card, {date}"
    return replace(CONSTANTS, **changed), source


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
        found = self.sums(chip_of(config, engine, constants))
        device, given = found.total / 1e6, self.host_input
        total = max(device, given) if config.command_queues == 2 else device + given
        dispatch = max(found.host, found.dispatch) / 1e6
        return StepTime(total, dispatch, found.compute / 1e6, found.bandwidth / 1e6, given, found.programs, source)


def is_blackhole(config: TenstorrentConfig) -> bool:
    """True for a board whose chip has no cost model."""
    return board(config).arch == "blackhole"


def chip_of(config: TenstorrentConfig, engine: str, constants: Constants = CONSTANTS) -> Wormhole:
    """Return the model's chip as an engine uses it on a card of this config."""
    dispatch = "worker" if config.dispatch == "auto" else config.dispatch
    rows, columns = Wormhole(dispatch).cores
    grid = (rows + (config.name == "n150"), columns)  # a board of one chip loses one row to harvesting, of two two
    if config.core_grid is not None:
        grid = (min(config.core_grid[0], grid[0]), min(config.core_grid[1], grid[1]))
    issuer = {"traced": "replay", "static": "native"}.get(engine, "python")
    return Wormhole(dispatch, config.math_fidelity, grid, issuer, constants)


def estimate(config: TenstorrentConfig, work: Work, engine: str) -> Estimate | str:
    """Estimate the step as configured, and beside it every combination of engine, dispatch and queues."""
    if is_blackhole(config):
        return "There is no cost model of a Blackhole chip."
    if config.host_resident:
        return "The cost model does not know what the host computes for device.host_resident."
    constants, source = known_constants(config)
    step = CardStep(work, config)
    time = step.time(config, engine, constants, source)
    ways = []
    for name, dispatch, queues in product(("static", "traced", "dynamic"), ("worker", "eth"), (1, 2)):
        tried = replace(config, dispatch=dispatch, command_queues=queues)
        overrides = f"engine={name} device.dispatch={dispatch} device.command_queues={queues}"
        ways.append(Way(name, overrides, step.time(tried, name, constants).total))
    best = simplest(ways).engine
    halves, whole = split_time(step, config, best, constants)
    gains = halves * (1 + TIE) < whole
    note = (
        f"Dispatch would take {duration(time.dispatch)} by itself, {time.dispatch / time.total:.0%} of the step as "
        f"configured, whose bottleneck is {time.bottleneck.replace('_', ' ')}. "
        f"device.subdevices={'2 for two runs at a time' if gains else 1}: by engine={best} a step of two runs takes "
        f"{duration(halves)} on the halves of a chip, {duration(whole)} one after the other"
        f"{'' if gains else ', so halves gain nothing'}."
    )
    peak = chip_of(config, engine, constants).peak_flops()
    more = {"two_runs_ms": {"side_by_side": 1e3 * halves, "in_turn": 1e3 * whole}}
    return Estimate(work, time, ways, peak, note, more)


def split_time(
    step: CardStep, config: TenstorrentConfig, engine: str, constants: Constants = CONSTANTS
) -> tuple[float, float]:
    """Return the seconds of a step of two runs: side by side on the halves of a chip, and one after the other on all.

    Halves have half the columns of cores, half the bandwidth, and one host.
    """
    chip = chip_of(config, engine, replace(constants, dram_peak=constants.dram_peak / 2))
    rows, columns = chip.cores
    found = step.sums(replace(chip, grid=(rows, max(columns // 2, 1))))
    in_turn = 2 * step.time(replace(config, command_queues=1), engine, constants).total
    return max(found.total, 2 * found.host) / 1e6 + 2 * step.host_input, in_turn
