"""What a benchmark found: rows per contender, as JSON, as CSV, and as it was in an earlier file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ttrain.bench.ratios import Ratio, Spread, ratio, spread
from ttrain.bench.workload import Case
from ttrain.core.errors import UserError

FORMAT = 2
BASELINE_SIDE = "PyTorch"
MEASURED, COST_MODEL, MOCKED, SIMULATED = "measured", "cost model", "mocked board", "simulator"
_WARNINGS = {
    MEASURED: "",
    COST_MODEL: "from the cost model, not from a card",
    SIMULATED: "on a simulator, not on a card",
    MOCKED: "host dispatch alone on a mocked board, which computes nothing",
}


@dataclass
class Row:
    """One contender at one case. Numbers that were not measured are None."""

    contender: str
    side: str = ""
    description: str = ""
    status: str = "not measured"  # ok, invalid, failed, left out, not measured
    reason: str | None = None
    round_ms: list[float] = field(default_factory=list)  # median step time of each turn
    fastest_ms: float | None = None
    cold_s: float | None = None  # start of building until the first loss, with empty compile caches
    warm_s: float | None = None  # the same with filled caches, or where nothing is compiled
    imports_s: float | None = None  # start of the process until building starts
    base_bytes: int | None = None  # before building
    peak_bytes: int | None = None  # of the warm process, until a few steps are done
    steady_bytes: int | None = None  # the part of it after the first step
    losses: list[float] = field(default_factory=list)
    loss_difference: float | None = None
    weight_difference: float | None = None
    checked_against: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    cold_samples_s: list[float] = field(default_factory=list)  # of every start, where there are several
    warm_samples_s: list[float] = field(default_factory=list)
    planned_bytes: int | None = None  # what task=plan expects to be used above base_bytes
    planned_ms: float | None = None  # what task=plan expects of a step

    @property
    def used_bytes(self) -> int | None:
        """Peak above what the process held before."""
        if self.peak_bytes is None or self.base_bytes is None:
            return None
        return (self.steady_bytes or self.peak_bytes) - self.base_bytes

    @property
    def timed(self) -> bool:
        """Whether its step times may be compared: it was timed and did the same work."""
        return self.status == "ok" and bool(self.round_ms)

    @property
    def spread(self) -> Spread | None:
        return spread(self.round_ms, self.fastest_ms or min(self.round_ms)) if self.round_ms else None

    def fail(self, why: str) -> None:
        """It takes no further part."""
        self.status, self.reason = "failed", why


@dataclass
class CaseResult:
    """All contenders at one case."""

    title: str
    precision: str
    item: str  # what items_per_step counts, in plural
    items_per_step: int
    work: dict[str, Any]
    rows: dict[str, Row]
    device: dict[str, Any] = field(default_factory=dict)
    parameters: int | None = None
    flops_per_step: float | None = None
    peak_flops: float | None = None  # FLOP/s of a large matmul on this device in this precision
    others_cpu: float | None = None  # share of all cores that other processes used during the interleaved steps
    resident: bool = False  # whether one batch stayed on the device for all steps
    basis: str = MEASURED  # or COST_MODEL, MOCKED or SIMULATED

    @classmethod
    def of(cls, case: Case) -> CaseResult:
        """Before anybody has done the case."""
        work = case.work
        found = cls(case.title, case.precision, work.item_plural, work.items_per_step, asdict(work), {})
        found.resident = case.resident
        return found

    @property
    def heading(self) -> str:
        """The work, its precision, and where the numbers come from if they were not measured."""
        return ", ".join(filter(None, (self.title, self.precision, _WARNINGS[self.basis])))

    @property
    def best_baseline(self) -> Row | None:
        """The fastest valid PyTorch."""
        rows = [row for row in self.rows.values() if row.side == BASELINE_SIDE and row.timed]
        return min(rows, key=lambda row: row.spread.median if row.spread else 0.0, default=None)

    def ratio(self, row: Row, other: Row | None) -> Ratio | None:
        """How many times as fast as another row; None unless both are valid."""
        return ratio(row.round_ms, other.round_ms) if other is not None and row.timed and other.timed else None

    def per_second(self, row: Row) -> float | None:
        """Items per second at the median step time."""
        return 1e3 * self.items_per_step / row.spread.median if row.spread else None

    def mfu(self, row: Row) -> float | None:
        """Share of the device's measured peak."""
        if not (row.spread and self.flops_per_step and self.peak_flops):
            return None
        return self.flops_per_step / (row.spread.median / 1e3) / self.peak_flops

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with everything that derives from the samples."""
        best = self.best_baseline
        values = asdict(self)
        values["best_baseline"] = best.contender if best else None
        values["rows"] = [self._row_dict(row) for row in self.rows.values()]
        return values

    def _row_dict(self, row: Row) -> dict[str, Any]:
        ratios = {other.contender: self.ratio(row, other) for other in self.rows.values() if other is not row}
        return {
            **asdict(row),
            "step_ms": asdict(row.spread) if row.spread else None,
            "items_per_s": self.per_second(row),
            "mfu": self.mfu(row),
            "times_as_fast_as": {name: asdict(found) for name, found in ratios.items() if found},
        }


@dataclass
class Result:
    """One run of a benchmark."""

    bench: str
    label: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    cases: list[CaseResult] = field(default_factory=list)
    complete: bool = False
    kind: str = "contest"  # see studies.Study
    notes: list[str] = field(default_factory=list)  # on all cases
    mark: str = ""  # of this result on a page, see page.py

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT, "bench": self.bench, "label": self.label, "complete": self.complete, "kind": self.kind,
            "notes": self.notes, "settings": self.settings, "environment": self.environment,
            "cases": [case.to_dict() for case in self.cases],
        }  # fmt: skip

    def to_csv(self) -> str:
        """One line per case and contender."""
        text = io.StringIO()
        writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        for case in self.cases:
            writer.writerows(_csv_rows(case))
        return text.getvalue()


_COLUMNS = (
    "case", "precision", "basis", "contender", "side", "status", "reason", "median_ms", "q1_ms", "q3_ms", "fastest_ms",
    "rounds", "items_per_s", "item", "mfu", "best_baseline", "times_as_fast", "times_low", "times_high",
    "cold_s", "warm_s", "imports_s", "base_bytes", "peak_bytes", "steady_bytes", "loss_difference", "weight_difference",
    "planned_bytes", "planned_ms",
)  # fmt: skip


def _csv_rows(case: CaseResult) -> Iterator[dict[str, Any]]:
    best = case.best_baseline
    for row in case.rows.values():
        times, steps = case.ratio(row, best), row.spread
        plain = {name: value for name, value in asdict(row).items() if name in _COLUMNS}
        yield {
            **plain,
            "case": case.title, "precision": case.precision, "basis": case.basis, "item": case.item,
            "median_ms": steps and steps.median, "q1_ms": steps and steps.q1, "q3_ms": steps and steps.q3,
            "rounds": len(row.round_ms), "items_per_s": case.per_second(row), "mfu": case.mfu(row),
            "best_baseline": best and best.contender, "times_as_fast": times and times.ratio,
            "times_low": times and times.low, "times_high": times and times.high,
        }  # fmt: skip


@dataclass(frozen=True)
class Earlier:
    """The step times of an earlier results.json, by (case, precision, contender)."""

    path: str
    environment: dict[str, Any]
    step_ms: dict[tuple[str, str, str], Spread]

    def find(self, case: CaseResult, row: Row) -> Spread | None:
        return self.step_ms.get((case.title, case.precision, row.contender))


def read_earlier(path: str, bench: str) -> Earlier:
    """Reads a file to compare with. Raises UserError where it is missing, no result of ours or of another benchmark."""
    try:
        values = json.loads(Path(path).read_text("utf-8"))
        if values["format"] != FORMAT:
            raise UserError(f"bench.compare={path}: has format {values['format']}, this ttrain reads format {FORMAT}.")
        found = values["bench"]
        steps = {
            (case["title"], case["precision"], row["contender"]): Spread(**row["step_ms"])
            for case in values["cases"]
            for row in case["rows"]
            if row["step_ms"] and row["status"] == "ok"
        }
        environment = dict(values["environment"])
    except OSError as error:
        fix = "Give the results.json of an earlier run."
        raise UserError(f"bench.compare={path}: can't be read ({error.strerror}). {fix}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"bench.compare={path}: is not a results.json of task=bench.") from error
    if found != bench:
        raise UserError(f"bench.compare={path}: holds bench={found}, this is bench={bench}. Give bench={found}.")
    return Earlier(path, environment, steps)
