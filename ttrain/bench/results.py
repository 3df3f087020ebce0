"""Results of a benchmark: cases with a row for each contender, and their JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ttrain.bench.workload import Case

FORMAT = 4
PYTORCH, OURS = "PyTorch", "ttrain"
MEASURED, COST_MODEL, MOCKED, SIMULATED = "measured", "cost model", "mocked board", "simulator"
RESAMPLES, CONFIDENCE = 4000, 0.95


@dataclass
class Row:
    """One contender at one case. Numbers that were not measured are None."""

    contender: str
    side: str
    description: str = ""
    status: str = "not measured"  # ok, invalid, failed, left out, not measured
    reason: str | None = None
    round_ms: list[float] = field(default_factory=list)  # median step time of each turn
    cold_s: list[float] = field(default_factory=list)  # of each start with empty compile caches: building to first loss
    warm_s: list[float] = field(default_factory=list)  # the same with filled caches, or where nothing is compiled
    peak_bytes: int | None = None  # of the whole process
    used_bytes: int | None = None  # peak of later steps, without what the process held before it built anything
    planned_bytes: int | None = None  # what used_bytes is expected to be
    planned_ms: float | None = None  # expected of a step
    losses: list[float] = field(default_factory=list)  # of the first steps
    checked_against: str | None = None
    loss_difference: float | None = None
    weight_difference: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # such as peak_flops: FLOP/s of a large product there

    @property
    def timed(self) -> bool:
        """True if its step times may be compared: it was timed and did the same work."""
        return self.status == "ok" and bool(self.round_ms)


@dataclass
class CaseResult:
    """All contenders at one case."""

    size: str
    title: str
    precision: str
    unit: str  # what units_per_step counts
    units_per_step: int
    flops_per_step: float
    parameters: int
    basis: str = MEASURED
    device: dict[str, Any] = field(default_factory=dict)
    others_cpu: float | None = None  # share of all cores that other processes used during the steps
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def of(cls, case: Case, rows: list[Row]) -> CaseResult:
        """Return the result of a case that nobody has done yet."""
        work, count = case.work, case.model.parameter_count
        sizes = case.size, case.title, case.precision, work.unit, work.units_per_step, case.flops(), count
        return cls(*sizes, rows=rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with everything that derives from the samples."""
        valid = [row for row in self.rows if row.side == PYTORCH and row.timed]
        best = min(valid, key=lambda row: statistics.median(row.round_ms), default=None)
        reached = [1e3 * self.flops_per_step / statistics.median(row.round_ms) for row in self.rows if row.timed]
        peaks = [row.facts["peak_flops"] for row in self.rows if row.facts.get("peak_flops")]
        peak = max(peaks + reached) if peaks else None  # a step is no faster than its best product
        return {**asdict(self), "rows": [self._row(row, best, peak) for row in self.rows]}

    def _row(self, row: Row, best: Row | None, peak: float | None) -> dict[str, Any]:
        values = {**asdict(row), "losses": [finite(loss) for loss in row.losses]}
        if row.round_ms:
            q1, median, q3 = (float(value) for value in np.percentile(row.round_ms, [25, 50, 75]))
            values["step_ms"] = {"median": median, "q1": q1, "q3": q3, "rounds": len(row.round_ms)}
            if self.basis != MOCKED:  # where nothing is computed
                values["units_per_s"] = 1e3 * self.units_per_step / median
                values["flops_per_s"] = 1e3 * self.flops_per_step / median
                values["mfu"] = values["flops_per_s"] / peak if peak else None
        if row.timed and best is not None:
            values["times_as_fast"] = ratio(row.round_ms, best.round_ms)
        return values


@dataclass
class Result:
    """One run of a benchmark."""

    bench: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    cases: list[CaseResult] = field(default_factory=list)
    complete: bool = False
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of results.json."""
        cases = [case.to_dict() for case in self.cases]
        return {"format": FORMAT, **vars(self), "numbers": numbers(cases), "cases": cases}


def finite(value: float) -> float | None:
    """Return the value, or None for what JSON has no number for."""
    return value if math.isfinite(value) else None


def ratio(own_ms: Sequence[float], other_ms: Sequence[float], seed: int = 0) -> dict[str, float]:
    """Return how many times as fast: median of the other / own median, over the rounds that both took part in.

    `low` and `high` are a percentile bootstrap (Efron, 1979) over rounds. A round is drawn with the turns of both,
    since what disturbs the machine disturbs them together.
    """
    count = min(len(own_ms), len(other_ms))
    own, other = np.asarray(own_ms[:count]), np.asarray(other_ms[:count])
    drawn = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    ratios = np.median(other[drawn], axis=1) / np.median(own[drawn], axis=1)
    low, high = np.percentile(ratios, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return {"ratio": float(np.median(other) / np.median(own)), "low": float(low), "high": float(high)}


def numbers(cases: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the median step time of every contender, and how many times as fast as the best PyTorch our best is.

    Of several cases each number has its own name, and `times_as_fast` is the least of them.
    """
    found: dict[str, float] = {}
    ratios: list[float] = []
    for case in cases:
        several = [key for key in ("size", "precision") if len({each[key] for each in cases}) > 1]
        before = "".join(f"{case[key]} " for key in several)
        timed = [row for row in case["rows"] if row["status"] == "ok" and row.get("step_ms")]
        found |= {f"{before}{row['contender']}_ms": row["step_ms"]["median"] for row in timed}
        ours = [row["times_as_fast"]["ratio"] for row in timed if row["side"] == OURS and row.get("times_as_fast")]
        if ours:
            found[f"{before}times_as_fast"] = max(ours)
            ratios.append(max(ours))
    return {**found, "times_as_fast": min(ratios)} if ratios else found
