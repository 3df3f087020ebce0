"""Constants of the cost model measured on an open Wormhole card, and kept in the user's cache folder.

A handful of programs run by themselves, in a row, and replayed from a capture; each constant follows from one time by
the model's own equations. Written from ttnn's documented behaviour and tested on a pretended chip with a pretended
clock: no card has been measured by us.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from typing import Any

from ttrain.core.errors import UserError
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Device, Launch
from ttrain.device.info import SILICON, NodeOf
from ttrain.device.ttnn.cost.lowering import Lowering
from ttrain.device.ttnn.cost.step_time import KEPT, card_key, chip_of, is_blackhole
from ttrain.device.ttnn.cost.wormhole import CONSTANTS, Constants, Product, Program, Scatter, Wormhole
from ttrain.device.ttnn.settings import TenstorrentConfig

REPEATS = 9
QUEUED = 200  # small programs in a row: enough that filling the queue does not count
SMALL, LARGE, PRODUCT = (32, 32), (4096, 4096), 4096


Bound = tuple[Launch, list[Program]]  # a launch of one node on the device, and what the model takes it for


class Calibration:
    """Measures on `device`, used as the chip `fitted` is, nodes that `node_of` records."""

    def __init__(
        self, device: Device, fitted: Wormhole, node_of: NodeOf, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.device, self.fitted, self.node_of, self.clock = device, fitted, node_of, clock
        self.changed: dict[str, float] = {}

    @property
    def chip(self) -> Wormhole:
        """The model with what is measured by now."""
        return replace(self.fitted, constants=replace(CONSTANTS, **self.changed))

    def run(self) -> Constants:
        """Return the constants with those replaced that were measured; `changed` names them."""
        # Everything is allocated before the first capture.
        small, large = (self._bound("add", shape, shape) for shape in (SMALL, LARGE))
        product, softmax = self._bound("matmul", (PRODUCT, PRODUCT), (PRODUCT, PRODUCT)), self._bound("softmax", LARGE)
        self._dispatch(small)
        nbytes = sum(program.nbytes for program in large[1])
        self._set("dram_efficiency", nbytes / self._busy(large) / CONSTANTS.dram_peak, most=1.0)
        self._product(product)
        self._scatter(softmax)
        return self.chip.constants

    def _dispatch(self, small: Bound) -> None:
        """Measure a call, a program in the queue and a replayed program."""
        launch, (program,) = small
        replayed = self._replayed(launch)
        queued = self._timed([launch] * QUEUED) / QUEUED
        work = self.chip.program(program)
        self._set("launch", replayed - max(work.compute, work.bandwidth), least=0.1)
        if replayed < work.dispatch:  # handing out takes no longer than a program does from start to start
            self._set(f"{self.fitted.dispatch}_dispatch", replayed, least=0.1)
        work = self.chip.program(program)
        if queued > 1.05 * max(work.dispatch, work.busy):
            self._set("native_host", queued)
        self._set(f"{self.fitted.dispatch}_call", self._alone(launch) - work.dispatch - work.busy, least=1.0)

    def _scatter(self, softmax: Bound) -> None:
        """Measure reads out of order: of softmax's programs, the time of those in order is known by now."""
        chip = self.chip
        ordered = sum(chip.program(program).busy for program in softmax[1] if not isinstance(program, Scatter))
        scattered = [program.nbytes for program in softmax[1] if isinstance(program, Scatter)]
        left = self._busy(softmax) - ordered - (len(scattered) - 1) * chip.constants.launch
        if scattered and left > 0:
            self._set("scatter_efficiency", sum(scattered) / left / CONSTANTS.dram_peak, most=1.0)

    def _product(self, product: Bound) -> None:
        """Measure cycles of a tile product: those of the matrix unit at this fidelity, or of unpacking operands."""
        (program,) = product[1]
        assert isinstance(program, Product)
        chip, inner = self.chip, program.k // 32
        c, (share, _) = chip.constants, chip.distribution(program)
        cycles = (self._busy(product) - -(-inner // 2) * c.block_latency) * c.clock_mhz / (share * inner)
        unit = chip.tile_product
        if cycles >= unit or c.operand_cycles < unit:
            self._set("matrix_efficiency", unit / cycles, most=1.0)
        else:
            self._set("operand_cycles", cycles)

    def _busy(self, bound: Bound) -> float:
        """Return the microseconds of the cores beyond launching, from a call that is waited for."""
        (launch, programs), chip = bound, self.chip
        return self._alone(launch) - chip.call - chip.program(programs[0]).dispatch - chip.constants.launch

    def _set(self, name: str, value: float, least: float = 1e-6, most: float = float("inf")) -> None:
        self.changed[name] = float(min(max(value, least), most))

    def _alone(self, launch: Launch) -> float:
        """Return the median microseconds of a launch that is waited for."""
        return statistics.median(self._timed([launch]) for _ in range(REPEATS))

    def _timed(self, launches: list[Launch]) -> float:
        """Return the microseconds of launches in a row, until all are done."""
        self.device.synchronize()
        start = self.clock()
        with self.device.launching("a launch of the calibration"):
            for launch in launches:
                launch()
        self.device.synchronize()
        return 1e6 * (self.clock() - start)

    def _replayed(self, launch: Launch) -> float:
        """Return the microseconds per program of a replay: a long one less a short one leaves the call out."""
        self._timed([launch])
        replays = [self.device.capture([launch] * count, f"calibration of {count}") for count in (QUEUED, 2 * QUEUED)]
        short, long = map(self._alone, replays)
        return (long - short) / QUEUED

    def _bound(self, op: str, *shapes: tuple[int, ...]) -> Bound:
        """Bind a node on bf16 tensors of its own, and launch it once so that its program is built."""
        node, device = self.node_of(op, *(TensorSpec(shape, DType.BF16) for shape in shapes)), self.device
        kernel, (given, made) = device.kernels[node.op.name], node.specs
        ins = [None if spec is None else device.allocate(spec) for spec in given]
        outs = [device.allocate(spec) for spec in made]
        work = [device.allocate(spec) for spec in kernel.workspace(given, made, node.attributes)]
        launch = device.bind(kernel, ins, outs, node.attributes, work)
        self._timed([launch])
        return launch, Lowering().programs(node)


def calibrate(config: TenstorrentConfig, node_of: NodeOf) -> str:
    """Open the card, measure, keep what was found and say it. Raises UserError, DeviceUnavailable or DeviceBusy."""
    from ttrain.device.ttnn.device import open_device

    if config.mode != SILICON or is_blackhole(config):
        raise UserError("plan.calibrate=true: measures the cost model of a Wormhole card. Give device=n150 or n300.")
    with closing(open_device(replace(config, mesh=[1, 1], subdevices=1, command_queues=1))) as device:
        measured = Calibration(device, chip_of(config, "static"), node_of)
        measured.run()
        return keep(config, measured.changed, device.describe())


def keep(config: TenstorrentConfig, changed: dict[str, float], facts: dict[str, Any]) -> str:
    """Keep measured constants for a board and a dispatch type. Return what a person should know of it."""
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    if not KEPT.keep({card_key(config, config.dispatch): {"constants": changed, "date": date, "device": facts}}):
        raise UserError(f"plan.calibrate=true: {KEPT.path} can't be written. Set TTRAIN_CACHE to another folder.")
    lines = [f"  {name:20} {value:10.4g}  fitted {getattr(CONSTANTS, name):.4g}" for name, value in changed.items()]
    return "\n".join([f"Measured on this card and kept in {KEPT.path}:", *lines])
