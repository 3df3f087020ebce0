"""Fits the constants of the Wormhole model to the first half of the published tables.

python -m benchmarks.wormhole.fit
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from benchmarks.wormhole.published import SOURCE
from benchmarks.wormhole.reproduce import Number, findings, numbers
from ttrain.device.ttnn.cost.wormhole import CONSTANTS, Constants

BOUNDS = {"dram_efficiency": (0.3, 0.95), "matrix_efficiency": (0.5, 1.0), "operand_cycles": (16.0, 128.0)}
START = replace(
    CONSTANTS, dram_efficiency=0.66, matrix_efficiency=0.9, operand_cycles=50.0, block_latency=2.2, launch=4.0,
    worker_dispatch=4.0, eth_dispatch=2.0, eth_per_core=0.2, worker_call=75.0, eth_call=65.0, native_host=31.0,
    python_host=264.0, scatter_efficiency=0.1,
)  # fmt: skip
GIVEN = ("clock_mhz", "flops_per_cycle", "dram_peak", "tile_cycles")  # by the vendor
FITTED_NAMES = tuple(declared.name for declared in fields(Constants) if declared.name not in GIVEN)
ROUNDS, TRIES = 60, 40  # of the search, whose steps shrink from round to round
WIDTH, SHRINK = 0.35, 0.93


def loss(constants: Constants) -> float:
    """Mean size of the log errors over the fitted half: of its numbers, and of the ratios that its findings rest on.

    Left out is what the source contradicts.
    """
    errors = [
        math.log(number.predicted / number.published)
        for number in numbers(constants)
        if not number.held_out and number.contradicted is None
    ]
    errors += [
        3 * math.log(finding.predicted_ratio / finding.ratio)
        for finding in findings(constants)
        if not finding.held_out and finding.contradicted is None
    ]
    return statistics.fmean(math.sqrt(error * error + 1e-4) for error in errors)


def fitted(start: Constants = START) -> Constants:
    """Constants of the smallest loss that a random search from `start` reaches; the same every time."""
    generator = np.random.default_rng(0)
    best, lowest, width = start, loss(start), WIDTH
    for _ in range(ROUNDS):
        for _ in range(TRIES):
            moved = generator.random(len(FITTED_NAMES)) < 0.3
            scales = np.exp(generator.normal(0, width, len(FITTED_NAMES)) * moved)
            changed = {name: _bounded(name, getattr(best, name) * scale) for name, scale in zip(FITTED_NAMES, scales)}
            tried = replace(best, **changed)
            reached = loss(tried)
            if reached < lowest:
                best, lowest = tried, reached
        width *= SHRINK
    return best


def _bounded(name: str, value: float) -> float:
    low, high = BOUNDS.get(name, (0.0, math.inf))
    return float(min(max(value, low), high))


def median_error(found: Sequence[Number], held_out: bool, contradicted: bool = False) -> float:
    """Median of |relative error| over one half; with `contradicted` over every row of it."""
    chosen = [n for n in found if n.held_out is held_out and (contradicted or n.contradicted is None)]
    return statistics.median(abs(number.error) for number in chosen)


def report(constants: Constants = CONSTANTS) -> str:
    """Both halves beside the model, and every finding."""
    found, lines = numbers(constants), [f"Published: {SOURCE}"]
    for held_out, title in ((False, "fitted half"), (True, "held-out half")):
        lines += ["", title, f"  {'table':16}{'row':14}{'column':10}{'published':>12}{'model':>12}{'error':>8}"]
        for n in found:
            if n.held_out is held_out:
                mark = "  contradicted" if n.contradicted else ""
                values = f"{n.published:12.5g}{n.predicted:12.5g}{n.error:+8.0%}"
                lines.append(f"  {n.table:16}{n.row:14}{n.column:10}{values}{mark}")
        lines.append(
            f"  median error {median_error(found, held_out):.1%}; "
            f"with the contradicted rows {median_error(found, held_out, True):.1%}"
        )
    lines += ["", "who wins (second/first)"]
    for f in findings(constants):
        mark = "right" if f.right else "contradicted" if f.contradicted else "WRONG"
        said = f"published {f.ratio:.3f} {'/'.join(f.published)}, model {f.predicted_ratio:.3f} {f.predicted}"
        lines.append(f"  {f.table:16}{f.first:22} against {f.second:22} {said}: {mark}")
    reasons = dict.fromkeys(n.contradicted for n in found if n.contradicted)
    reasons |= dict.fromkeys(f.contradicted for f in findings(constants) if f.contradicted)
    lines += ["", "what the source itself contradicts", *(f"  {reason}" for reason in reasons)]
    return "\n".join(lines)


if __name__ == "__main__":
    found_constants = fitted()
    for name in FITTED_NAMES:
        print(f"{name:20} {getattr(found_constants, name):10.4g}")
    print(f"loss {loss(CONSTANTS):.4f} -> {loss(found_constants):.4f}\n")
    print(report(found_constants))
