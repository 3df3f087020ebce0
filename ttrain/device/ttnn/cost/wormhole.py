"""Time of programs on one Wormhole chip: max(dispatch, compute, memory bandwidth) per program, and their pipeline.

Three stages work at once: the host issues programs, the dispatch cores hand them out, the compute cores run them. A
program starts when it has been handed out and its predecessor is done. A captured step leaves the first stage out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ttrain.device.ttnn.cost.constants import CONSTANTS, Constants
from ttrain.device.ttnn.cost.programs import Product, Program, Scatter, tiles

GRIDS = {"worker": (7, 8), "eth": (8, 8)}  # rows, columns that compute
FIDELITY_PASSES = {"LoFi": 1, "HiFi2": 2, "HiFi3": 3, "HiFi4": 4}  # of the matrix unit over the mantissas


@dataclass(frozen=True)
class Setting:
    """The use of a chip. `grid` is [rows, columns] of cores; None takes what the dispatch type leaves."""

    dispatch: str = "worker"
    fidelity: str = "HiFi4"
    grid: tuple[int, int] | None = None
    issuer: str = "replay"  # what hands programs to the queue: replay of a capture, native (compiled code), python

    @property
    def cores(self) -> tuple[int, int]:
        return self.grid or GRIDS[self.dispatch]

    @property
    def count(self) -> int:
        return math.prod(self.cores)


@dataclass(frozen=True)
class ProgramTime:
    """Microseconds of one program by what could bound it, and the cores it runs on."""

    host: float
    dispatch: float
    compute: float
    bandwidth: float
    launch: float
    cores: int

    @property
    def busy(self) -> float:
        """Microseconds in which the compute cores are taken."""
        return self.launch + max(self.compute, self.bandwidth)

    @property
    def bound(self) -> str:
        """The name of the longest part where programs follow one another without a gap."""
        parts = {"host": self.host, "dispatch": self.dispatch, "compute": self.compute, "bandwidth": self.bandwidth}
        parts[max(("compute", "bandwidth"), key=lambda name: parts[name])] += self.launch
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class StepEstimate:
    """Microseconds of a sequence of programs: in all, and the sums of what could bound it."""

    total: float
    host: float
    dispatch: float
    compute: float
    bandwidth: float
    launch: float
    programs: int

    @property
    def bottleneck(self) -> str:
        parts = {"host": self.host, "dispatch": self.dispatch, "compute": self.compute, "bandwidth": self.bandwidth}
        return max(parts, key=lambda name: parts[name])


class Wormhole:
    """One chip with one setting."""

    def __init__(self, setting: Setting = Setting(), constants: Constants = CONSTANTS) -> None:
        self.setting, self.constants = setting, constants

    def program(self, program: Program) -> ProgramTime:
        """The parts of one program."""
        c, setting = self.constants, self.setting
        if isinstance(program, Product):
            compute, cores = self._product(program)
            bandwidth = program.nbytes / c.dram_rate
        else:
            cores = min(program.tiles, setting.count)
            compute = -(-program.tiles // setting.count) * c.tile_cycles / c.clock_mhz
            rate = c.scatter_rate if isinstance(program, Scatter) else c.dram_rate
            bandwidth = program.nbytes / rate
        host = {"replay": 0.0, "native": c.native_host, "python": c.python_host}[setting.issuer]
        dispatch = c.worker_dispatch if setting.dispatch == "worker" else c.eth_dispatch + c.eth_per_core * cores
        return ProgramTime(host, dispatch, compute, bandwidth, c.launch, cores)

    def step(self, programs: Sequence[Program]) -> StepEstimate:
        """Programs that follow one another on one queue, without a wait of the host until the end."""
        times = [self.program(program) for program in programs]
        issued = handed = done = 0.0
        for time in times:
            issued += time.host
            handed = max(issued, handed) + time.dispatch
            done = max(handed, done) + time.busy
        return self._estimate(done, times)

    def blocking(self, programs: Sequence[Program]) -> StepEstimate:
        """Programs whose end the host waits for one by one."""
        c, times = self.constants, [self.program(program) for program in programs]
        call = c.worker_call if self.setting.dispatch == "worker" else c.eth_call
        return self._estimate(sum(call + time.dispatch + time.busy for time in times), times)

    def stalling(self, programs: Sequence[Program]) -> StepEstimate:
        """Programs that alternate between sub-devices on one queue: each is issued when its predecessor is done."""
        times = [self.program(program) for program in programs]
        return self._estimate(sum(time.host + time.dispatch + time.busy for time in times), times)

    def peak_flops(self) -> float:
        """FLOP/s of the matrix units at this fidelity, if they never waited."""
        c = self.constants
        return self.setting.count * c.flops_per_cycle / FIDELITY_PASSES[self.setting.fidelity] * c.clock_mhz * 1e6

    def _product(self, product: Product) -> tuple[float, int]:
        """(microseconds of the slowest core, cores that work)."""
        c = self.constants
        share, cores = self.distribution(product)
        inner = tiles(product.k)
        passes = FIDELITY_PASSES[self.setting.fidelity]
        cycles = max(2 * 32**3 / c.flops_per_cycle * passes / c.matrix_efficiency, c.operand_cycles)
        rounds = -(-product.batch // self.setting.count) if product.batch > 1 else 1
        return share * inner * cycles / c.clock_mhz + rounds * -(-inner // 2) * c.block_latency, cores

    def distribution(self, product: Product) -> tuple[int, int]:
        """(output tiles of the busiest core, cores that work): the best of a grid, rows only and columns only."""
        rows, columns = self.setting.cores
        m, n, count = tiles(product.m), tiles(product.n), self.setting.count
        if product.batch > 1:
            blocks = product.batch * m  # a row of output tiles is the smallest share
            return -(-blocks // count) * n, min(blocks, count)
        choices = []
        for high, wide in ((rows, columns), (count, 1), (1, count)):
            tall, broad = -(-m // high), -(-n // wide)
            choices.append((tall * broad, -(-m // tall) * -(-n // broad)))
        return min(choices)

    @staticmethod
    def _estimate(total: float, times: Sequence[ProgramTime]) -> StepEstimate:
        """Each program counts under what its cores waited for: compute or bandwidth."""
        sums = {"compute": 0.0, "bandwidth": 0.0}
        for time in times:
            sums["compute" if time.compute >= time.bandwidth else "bandwidth"] += time.busy
        return StepEstimate(
            total,
            sum(time.host for time in times),
            sum(time.dispatch for time in times),
            sums["compute"],
            sums["bandwidth"],
            sum(time.launch for time in times),
            len(times),
        )
