"""Time of programs on one Wormhole chip: max(dispatch, compute, memory bandwidth) per program, and their pipeline.

A program is the work of one launch on the chip's cores. Three stages work at once: the host issues programs, the
dispatch cores hand them out, the compute cores run them. A program starts when it has been handed out and its
predecessor is done. A captured step leaves the first stage out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Every field can be measured on a card or fitted anew."""

    clock_mhz: float = 1000.0
    flops_per_cycle: float = 4096.0  # of a core at LoFi: 8x16 times 16x16 a cycle
    dram_peak: float = 288e3  # 288 GB/s of GDDR6 a chip
    tile_cycles: float = 300.0  # of the vector unit for a tile: 32 lanes, about nine passes over 1024 elements

    dram_efficiency: float = 0.674  # of dram_peak
    matrix_efficiency: float = 1.0  # of the matrix unit's rate
    operand_cycles: float = 49.6  # of a tile product: unpacking operands, at any fidelity
    block_latency: float = 2.38  # of two tiles of the inner axis: read, multicast, wait
    launch: float = 3.11  # of a program: start and finish on the cores
    worker_dispatch: float = 2.58  # of a program
    eth_dispatch: float = 3.16  # of a program
    eth_per_core: float = 0.265  # of a program and a core: an Ethernet core writes arguments core by core
    worker_call: float = 76.6  # of a blocking call: host, queue, completion
    eth_call: float = 65.3  # of a blocking call
    native_host: float = 33.5  # of a program issued from compiled code
    python_host: float = 263.6  # of a program issued from Python with a tape
    scatter_efficiency: float = 0.0245  # of dram_peak: of programs that read or write out of order


CONSTANTS = Constants()


GRIDS = {"worker": (7, 8), "eth": (8, 8)}  # rows, columns that compute on a board of two chips
FIDELITY_PASSES = {"LoFi": 1, "HiFi2": 2, "HiFi3": 3, "HiFi4": 4}  # of the matrix unit over the mantissas
TILE = 32  # rows and columns of a tile


def tiles(size: int) -> int:
    """Return the number of tiles along an axis."""
    return -(-size // TILE)


@dataclass(frozen=True)
class Product:
    """Matrix product [m, k] x [k, n] of `batch` independent pairs."""

    m: int
    k: int
    n: int
    batch: int = 1
    bytes_per_element: float = 2.0

    @property
    def nbytes(self) -> float:
        """Padded bytes of the two inputs and the output, each once."""
        m, k, n = (tiles(size) * TILE for size in (self.m, self.k, self.n))
        return self.bytes_per_element * self.batch * (m * k + k * n + m * n)


@dataclass(frozen=True)
class Stream:
    """Whole tiles come in, whole tiles go out, in the order in which they lie: elementwise ops and plain sums."""

    nbytes: float
    tiles: int  # of the largest tensor: the work that cores share


class Scatter(Stream):
    """Rows of tiles are read or written out of order, or read several times: norms, softmax, head moves, lookup."""


Program = Product | Stream


@dataclass(frozen=True)
class ProgramTime:
    """Microseconds of one program by what could bound it."""

    host: float
    dispatch: float
    compute: float
    bandwidth: float
    busy: float  # in which the compute cores are taken


@dataclass(frozen=True)
class StepEstimate:
    """Microseconds of a sequence of programs: in all, and the sums of what could bound it."""

    total: float
    host: float
    dispatch: float
    compute: float
    bandwidth: float
    programs: int


@dataclass(frozen=True)
class Wormhole:
    """One chip as it is used. `grid` is [rows, columns] of cores; None takes what the dispatch type leaves."""

    dispatch: str = "worker"
    fidelity: str = "HiFi4"
    grid: tuple[int, int] | None = None
    issuer: str = "replay"  # what hands programs to the queue: replay of a capture, native (compiled code), python
    constants: Constants = CONSTANTS

    @property
    def cores(self) -> tuple[int, int]:
        return self.grid or GRIDS[self.dispatch]

    @property
    def count(self) -> int:
        return math.prod(self.cores)

    @property
    def tile_product(self) -> float:
        """Cycles of the matrix unit for a product of two tiles, if it never waited."""
        return 2 * TILE**3 / self.constants.flops_per_cycle * FIDELITY_PASSES[self.fidelity]

    @property
    def call(self) -> float:
        """Microseconds of a call that is waited for, beside its program."""
        return self.constants.worker_call if self.dispatch == "worker" else self.constants.eth_call

    def program(self, program: Program) -> ProgramTime:
        """Return the parts of one program."""
        c = self.constants
        if isinstance(program, Product):
            compute, cores = self._product(program)
            rate = c.dram_efficiency
        else:
            cores = min(program.tiles, self.count)
            compute = -(-program.tiles // self.count) * c.tile_cycles / c.clock_mhz
            rate = c.scatter_efficiency if isinstance(program, Scatter) else c.dram_efficiency
        host = {"replay": 0.0, "native": c.native_host, "python": c.python_host}[self.issuer]
        dispatch = c.worker_dispatch if self.dispatch == "worker" else c.eth_dispatch + c.eth_per_core * cores
        bandwidth = program.nbytes / (c.dram_peak * rate)
        return ProgramTime(host, dispatch, compute, bandwidth, c.launch + max(compute, bandwidth))

    def step(self, programs: Sequence[Program]) -> StepEstimate:
        """Estimate programs that follow one another on one queue, without a wait of the host until the end."""
        times = [self.program(program) for program in programs]
        issued = handed = done = 0.0
        for time in times:
            issued += time.host
            handed = max(issued, handed) + time.dispatch
            done = max(handed, done) + time.busy
        # Each program counts under what its cores waited for: compute or bandwidth.
        host, dispatch = sum(time.host for time in times), sum(time.dispatch for time in times)
        compute = sum(time.busy for time in times if time.compute >= time.bandwidth)
        bandwidth = sum(time.busy for time in times if time.compute < time.bandwidth)
        return StepEstimate(done, host, dispatch, compute, bandwidth, len(times))

    def peak_flops(self) -> float:
        """Return the FLOP/s of the matrix units at this fidelity, if they never waited."""
        c = self.constants
        return self.count * c.flops_per_cycle / FIDELITY_PASSES[self.fidelity] * c.clock_mhz * 1e6

    def _product(self, product: Product) -> tuple[float, int]:
        """Return (microseconds of the slowest core, cores that work)."""
        c = self.constants
        share, cores = self.distribution(product)
        inner = tiles(product.k)
        cycles = max(self.tile_product / c.matrix_efficiency, c.operand_cycles)
        rounds = -(-product.batch // self.count) if product.batch > 1 else 1
        return share * inner * cycles / c.clock_mhz + rounds * -(-inner // 2) * c.block_latency, cores

    def distribution(self, product: Product) -> tuple[int, int]:
        """Return (output tiles of the busiest core, cores that work): the best of a grid, rows only, columns only."""
        rows, columns = self.cores
        m, n, count = tiles(product.m), tiles(product.n), self.count
        if product.batch > 1:
            blocks = product.batch * m  # a row of output tiles is the smallest share
            return -(-blocks // count) * n, min(blocks, count)
        choices = []
        for high, wide in ((rows, columns), (count, 1), (1, count)):
            tall, broad = -(-m // high), -(-n // wide)
            choices.append((tall * broad, -(-m // tall) * -(-n // broad)))
        return min(choices)
