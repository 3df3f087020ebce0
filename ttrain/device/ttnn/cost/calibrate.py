"""Constants of the cost model measured on an open Wormhole card, in place of fitted ones.

A handful of programs run by themselves, in a row, and replayed from a capture; each constant follows from one time by
the model's own equations. Written from ttnn's documented behaviour and tested on a pretended chip with a pretended
clock: no card has been measured by us.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Device, Launch
from ttrain.device.info import NodeOf
from ttrain.device.ttnn.cost.constants import CONSTANTS, Constants
from ttrain.device.ttnn.cost.lowering import Lowering
from ttrain.device.ttnn.cost.programs import Product, Program, Scatter
from ttrain.device.ttnn.cost.wormhole import FIDELITY_PASSES, Setting, Wormhole

Clock = Callable[[], float]
REPEATS = 9
QUEUED = 200  # small programs in a row: enough that filling the queue does not count
SMALL, LARGE, PRODUCT = (32, 32), (4096, 4096), 4096


@dataclass(frozen=True)
class Measured:
    """A launch of one node on the device, and what the model takes it for."""

    launch: Launch
    programs: list[Program]


class Calibration:
    """Measures on `device`, which is used as `setting` says, nodes that `node_of` records."""

    def __init__(
        self,
        device: Device,
        setting: Setting,
        node_of: NodeOf,
        constants: Constants = CONSTANTS,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.device, self.setting, self.constants, self.clock = device, setting, constants, clock
        self.node_of = node_of
        self.changed: dict[str, float] = {}

    def run(self) -> Constants:
        """The constants with those replaced that were measured; `changed` names them."""
        add, product, softmax = self._bind_all()
        self._dispatch(add[0])
        self._bandwidth(add[1])
        self._product(product)
        self._scatter(softmax)
        return self._now()

    def _bind_all(self) -> tuple[tuple[Measured, Measured], Measured, Measured]:
        """Everything is allocated before the first capture."""
        small, large = (self._bound("add", shape, shape) for shape in (SMALL, LARGE))
        square = (PRODUCT, PRODUCT)
        return (small, large), self._bound("matmul", square, square), self._bound("softmax", LARGE)

    def _dispatch(self, small: Measured) -> None:
        """Measure a call, a program in the queue and a replayed program."""
        (program,) = small.programs
        each = self._replayed(small) if self.device.supports_capture else None
        queued = self._queued([small.launch] * QUEUED) / QUEUED
        work = self._parts(program)
        if each is not None:
            self._set("launch", each - max(work.compute, work.bandwidth), least=0.1)
            if each < work.dispatch:  # handing out takes no longer than a program does from start to start
                self._set("eth_dispatch" if self.setting.dispatch == "eth" else "worker_dispatch", each, least=0.1)
        parts = self._parts(program)
        if queued > 1.05 * max(parts.dispatch, parts.busy):
            self._set("native_host", queued)
        call = "eth_call" if self.setting.dispatch == "eth" else "worker_call"
        self._set(call, self._alone(small.launch) - parts.dispatch - parts.busy, least=1.0)

    def _bandwidth(self, large: Measured) -> None:
        (program,) = large.programs
        assert not isinstance(program, Product)
        self._set("dram_efficiency", program.nbytes / self._busy(large) / self.constants.dram_peak, most=1.0)

    def _scatter(self, softmax: Measured) -> None:
        """Measure reads out of order: of softmax's programs, the time of those in order is known by now."""
        chip = Wormhole(self.setting, self._now())
        ordered = sum(chip.program(program).busy for program in softmax.programs if not isinstance(program, Scatter))
        scattered = [program for program in softmax.programs if isinstance(program, Scatter)]
        nbytes = sum(program.nbytes for program in scattered)
        left = self._busy(softmax) - ordered - (len(scattered) - 1) * self._now().launch
        if scattered and left > 0:
            self._set("scatter_efficiency", nbytes / left / self.constants.dram_peak, most=1.0)

    def _product(self, product: Measured) -> None:
        """Cycles of a tile product: those of the matrix unit at this fidelity, or of unpacking operands."""
        (program,) = product.programs
        assert isinstance(program, Product)
        c, inner = self._now(), program.k // 32
        share, _ = Wormhole(self.setting, c).distribution(program)
        waits = -(-inner // 2) * c.block_latency
        cycles = (self._busy(product) - waits) * c.clock_mhz / (share * inner)
        unit = 2 * 32**3 / c.flops_per_cycle * FIDELITY_PASSES[self.setting.fidelity]
        if cycles >= unit or c.operand_cycles < unit:
            self._set("matrix_efficiency", unit / cycles, most=1.0)
        else:
            self._set("operand_cycles", cycles)

    def _busy(self, measured: Measured) -> float:
        """Microseconds of the cores beyond launching, from a call that is waited for."""
        first = self._parts(measured.programs[0])
        c = self._now()
        call = c.eth_call if self.setting.dispatch == "eth" else c.worker_call
        return self._alone(measured.launch) - call - first.dispatch - c.launch

    def _parts(self, program: Program) -> Any:
        return Wormhole(self.setting, self._now()).program(program)

    def _now(self) -> Constants:
        return replace(self.constants, **self.changed)

    def _set(self, name: str, value: float, least: float = 1e-6, most: float = float("inf")) -> None:
        self.changed[name] = float(min(max(value, least), most))

    def _alone(self, launch: Launch) -> float:
        """Microseconds of a launch that is waited for."""
        return statistics.median(self._queued([launch]) for _ in range(REPEATS))

    def _queued(self, launches: list[Launch]) -> float:
        """Microseconds of launches in a row, until all are done."""
        self.device.synchronize()
        start = self.clock()
        with self.device.launching("a launch of the calibration"):
            for launch in launches:
                launch()
        self.device.synchronize()
        return 1e6 * (self.clock() - start)

    def _replayed(self, measured: Measured) -> float:
        """Microseconds per program of a replay: the difference of a long and a short one leaves the call out."""
        self._queued([measured.launch])
        short, long = (
            self.device.capture([measured.launch] * count, f"calibration of {count}") for count in (QUEUED, 2 * QUEUED)
        )
        times = [statistics.median(self._queued([replay]) for _ in range(REPEATS)) for replay in (short, long)]
        return (times[1] - times[0]) / QUEUED

    def _bound(self, op: str, *shapes: tuple[int, ...]) -> Measured:
        """A node on bf16 tensors of their own, launched once so that its program is built."""
        node = self.node_of(op, *(TensorSpec(shape, DType.BF16) for shape in shapes))
        kernel = self.device.kernels[node.op.name]
        given, made = node.specs
        ins = [None if spec is None else self.device.allocate(spec) for spec in given]
        outs = [self.device.allocate(spec) for spec in made]
        work = [self.device.allocate(spec) for spec in kernel.workspace_specs(given, made, node.attributes)]
        launch = self.device.bind(kernel, ins, outs, node.attributes, work)
        with self.device.launching("a launch of the calibration"):
            launch()
        self.device.synchronize()
        return Measured(launch, Lowering().programs(node))
