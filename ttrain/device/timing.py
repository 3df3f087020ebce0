"""The expected time of a step: its work, the time of its parts, and the ways to run it that were compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ttrain.core.tables import Table
from ttrain.core.units import format_count
from ttrain.device.base import StepCompiler

TIE = 0.03  # ways that differ by less are taken to be equally fast
PARTS = {"dispatch": "dispatch of {} launches", "compute": "compute", "bandwidth": "memory bandwidth",
         "host_input": "host input", "communication": "communication"}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """The work of one optimizer step: launched nodes with how often they run, inputs that are uploaded, their bytes."""

    nodes: tuple[tuple[int, tuple[Any, ...]], ...]
    inputs: int
    input_bytes: int
    compiler: StepCompiler | None = None  # of traced steps, where a device compiles
    tokens: int = 0  # examples where a model has no tokens
    unit: str = "tokens"
    flops: int = 0

    @classmethod
    def of(cls, steps: Mapping[str, Any], per_step: Mapping[str, int], **amounts: Any) -> Work:
        """Make the work from built steps (`plan`, `uploads` and `engine` of each count) and how often each runs."""
        built = [(times, steps[name]) for name, times in per_step.items()]
        planned = tuple((times, tuple(step.plan.launched)) for times, step in built if step.plan is not None)
        specs = [(times, spec) for times, step in built for spec in step.uploads.values()]
        (compiler,) = {getattr(step.engine, "compiler", None) for _, step in built} or {None}
        uploads = sum(times for times, _ in specs), sum(times * spec.nbytes for times, spec in specs)
        return cls(planned, *uploads, compiler, **amounts)

    @property
    def launches(self) -> int:
        return sum(times * len(nodes) for times, nodes in self.nodes)


@dataclass(frozen=True)
class StepTime:
    """Expected seconds of one optimizer step, and what its parts would take by themselves."""

    total: float
    dispatch: float
    compute: float
    bandwidth: float
    host_input: float
    launches: int
    source: str = ""
    communication: float = 0.0  # with other ranks

    @property
    def parts(self) -> dict[str, float]:
        """Return the parts by name, without communication where there is none."""
        return {name: getattr(self, name) for name in PARTS if name != "communication" or self.communication}

    @property
    def bottleneck(self) -> str:
        """Return the name of the part that takes longest."""
        return max(self.parts, key=self.parts.__getitem__)


@dataclass(frozen=True)
class Way:
    """One way to run the step, and its expected seconds."""

    engine: str
    settings: str  # the overrides that choose it
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """The expected time of a step as configured, and the ways to run it that were compared, simpler ones first."""

    work: Work
    time: StepTime
    ways: Sequence[Way]
    peak: float | None  # FLOP/s
    note: str = ""  # beside the reason for the recommended way
    more: Mapping[str, Any] = field(default_factory=dict)  # for JSON, of this kind of device alone

    @property
    def reason(self) -> str:
        """Return a comparison of the recommended way with the best of every other engine, and the note."""
        best = simplest(self.ways)
        parts = [f"{best.engine} takes {duration(best.seconds)}"]
        for engine in sorted({way.engine for way in self.ways} - {best.engine}):
            seconds = min(way.seconds for way in self.ways if way.engine == engine)
            parts.append(f"{engine} {seconds / best.seconds:.2f} times as long")
        return f"{', '.join(parts)}. {self.note}".strip()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        work, time = self.work, self.time
        return {
            "step_ms": 1e3 * time.total,
            f"{work.unit}_per_s": work.tokens / time.total,
            "bottleneck": time.bottleneck,
            "parts_ms": {name: 1e3 * seconds for name, seconds in time.parts.items()},
            "launches": time.launches,
            "source": time.source,
            "flops_per_s": work.flops / time.total,
            "peak_flops_per_s": self.peak,
            "ways": [{**vars(way), "step_ms": 1e3 * way.seconds} for way in self.ways],
            "recommended": simplest(self.ways).settings,
            "reason": self.reason,
            **self.more,
        }

    def tables(self) -> list[Table]:
        """Return tables for people."""
        work, time, best = self.work, self.time, simplest(self.ways)
        rate = work.flops / time.total
        rows = [
            ("step", duration(time.total)),
            (f"{work.unit}/s", format_count(work.tokens / time.total)),
            ("FLOP/s", format_count(rate) + (f", {rate / self.peak:.0%} of the peak" if self.peak else "")),
            ("bottleneck", time.bottleneck.replace("_", " ")),
            *((PARTS[name].format(time.launches), duration(seconds)) for name, seconds in time.parts.items()),
        ]
        ways = [(way.settings, duration(way.seconds), "recommended" * (way is best)) for way in self.ways]
        advice = f"Recommended: {best.settings}. {self.reason}"
        return [
            Table("Expected time of one optimizer step", ("", "expected"), rows, (f"From {time.source}.",)),
            Table("Ways to run it", ("", "step", ""), ways, (advice,)),
        ]


def duration(seconds: float) -> str:
    """Return a time as text with three digits, since steps take from microseconds to seconds."""
    scale, unit = next((pair for pair in ((1.0, "s"), (1e-3, "ms")) if seconds >= pair[0]), (1e-6, "us"))
    return f"{seconds / scale:.3g} {unit}" if seconds < 999.5 * scale else f"{seconds / scale:.0f} {unit}"


def simplest(ways: Sequence[Way]) -> Way:
    """Return the first of the ways that are as fast as the fastest, within TIE: simpler ones come first."""
    fastest = min(way.seconds for way in ways)
    return next(way for way in ways if way.seconds <= fastest * (1 + TIE))
