"""Constants of the Wormhole cost model, with units and sources. Some were fitted, see benchmarks/wormhole/fit.py."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

VENDOR = "Tenstorrent, Wormhole n150/n300 product pages and tt-metal's technical reports"
FITTED = "fitted on the first half of benchmarks/wormhole/published.py"


def constant(value: float, unit: str, source: str) -> Any:
    return field(default=value, metadata={"unit": unit, "source": source})


@dataclass(frozen=True)
class Constants:
    """Times are microseconds, rates bytes per microsecond (1000 of them are a GB/s)."""

    clock_mhz: float = constant(1000.0, "MHz", VENDOR)
    flops_per_cycle: float = constant(4096.0, "FLOP/cycle/core at LoFi", VENDOR + ": 8x16 times 16x16 a cycle")
    dram_peak: float = constant(288e3, "byte/us", VENDOR + ": 288 GB/s of GDDR6 a chip")
    tile_cycles: float = constant(300.0, "cycle/tile", "vector unit: 32 lanes, about nine passes over 1024 elements")

    dram_efficiency: float = constant(0.674, "of dram_peak", FITTED)
    matrix_efficiency: float = constant(1.0, "of the matrix unit's rate", FITTED)
    operand_cycles: float = constant(49.6, "cycle/tile product: unpacking operands, whatever the fidelity", FITTED)
    block_latency: float = constant(2.38, "us/two tiles of the inner axis: read, multicast, wait", FITTED)
    launch: float = constant(3.11, "us/program: start and finish on the cores", FITTED)
    worker_dispatch: float = constant(2.58, "us/program", FITTED)
    eth_dispatch: float = constant(3.16, "us/program", FITTED)
    eth_per_core: float = constant(0.265, "us/program/core: an Ethernet core writes arguments core by core", FITTED)
    worker_call: float = constant(76.6, "us/blocking call: host, queue, completion", FITTED)
    eth_call: float = constant(65.3, "us/blocking call", FITTED)
    native_host: float = constant(33.5, "us/program issued from compiled code", FITTED)
    python_host: float = constant(263.6, "us/program issued from Python with a tape", FITTED)
    scatter_efficiency: float = constant(0.0245, "of dram_peak: of programs that read or write out of order", FITTED)

    @property
    def dram_rate(self) -> float:
        return self.dram_peak * self.dram_efficiency

    @property
    def scatter_rate(self) -> float:
        return self.dram_peak * self.scatter_efficiency


CONSTANTS = Constants()
FITTED_NAMES = tuple(declared.name for declared in fields(Constants) if declared.metadata["source"] == FITTED)
