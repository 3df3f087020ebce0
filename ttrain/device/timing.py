"""The expected time of a step: its work, the answer, and the ways to run it that were compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ttrain.core.tables import Table
from ttrain.core.units import format_count
from ttrain.device.base import StepCompiler

TIE = 0.03  # ways that differ by less are taken to be equally fast
PARTS = ("dispatch", "compute", "bandwidth", "host_input")


@dataclass(frozen=True)
class Work:
    """The work of one optimizer step: launched nodes with how often they run, inputs that are uploaded, their bytes."""

    nodes: tuple[tuple[int, tuple[Any, ...]], ...]
    inputs: int
    input_bytes: int
    compiler: StepCompiler | None = None  # of traced steps, where a device compiles

    @classmethod
    def of(cls, steps: Mapping[str, Any], per_step: Mapping[str, int]) -> Work:
        """Make the work from built steps (`plan`, `uploads` and `engine` of each count) and how often each runs."""
        built = [(times, steps[name]) for name, times in per_step.items()]
        planned = tuple((times, tuple(step.plan.launched)) for times, step in built if step.plan is not None)
        specs = [(times, spec) for times, step in built for spec in step.uploads.values()]
        (compiler,) = {getattr(step.engine, "compiler", None) for _, step in built} or {None}
        uploads = sum(times for times, _ in specs), sum(times * spec.nbytes for times, spec in specs)
        return cls(planned, *uploads, compiler)

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
    source: str
    communication: float = 0.0  # with other ranks

    @property
    def bottleneck(self) -> str:
        """dispatch, compute, bandwidth, host_input or communication."""
        return max((*PARTS, "communication"), key=lambda name: getattr(self, name))

    def communicating(self, seconds: float, exposed: float) -> StepTime:
        """Return the step with so many seconds of communication, `exposed` of them beside nothing else."""
        return replace(self, total=self.total + exposed, communication=seconds)


@dataclass(frozen=True)
class Way:
    """One way to run the step, and its expected seconds."""

    engine: str
    settings: str  # the overrides that choose it
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """The expected time as configured, the alternatives that were compared, and the recommended one with its reason."""

    time: StepTime
    tokens: int  # of one optimizer step; examples where a model has no tokens
    unit: str
    flops: int
    peak: float | None  # FLOP/s
    ways: tuple[Way, ...]
    recommended: Way
    reason: str
    more: Mapping[str, Any] = field(default_factory=dict)  # for JSON, of this kind of device alone

    @property
    def _communication(self) -> tuple[str, ...]:
        return ("communication",) if self.time.communication else ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "step_ms": 1e3 * self.time.total,
            f"{self.unit}_per_s": self.tokens / self.time.total,
            "bottleneck": self.time.bottleneck,
            "parts_ms": {name: 1e3 * getattr(self.time, name) for name in (*PARTS, *self._communication)},
            "launches": self.time.launches,
            "source": self.time.source,
            "flops_per_s": self.flops / self.time.total,
            "peak_flops_per_s": self.peak,
            "ways": [{**vars(way), "step_ms": 1e3 * way.seconds} for way in self.ways],
            "recommended": self.recommended.settings,
            "reason": self.reason,
            **self.more,
        }

    def tables(self) -> list[Table]:
        """Return tables for people."""
        time, rate = self.time, self.flops / self.time.total
        share = f", {rate / self.peak:.0%} of the peak" if self.peak else ""
        rows = [
            ("step", duration(time.total)),
            (f"{self.unit}/s", format_count(self.tokens / time.total)),
            ("FLOP/s", f"{format_count(rate)}{share}"),
            ("bottleneck", time.bottleneck.replace("_", " ")),
            (f"dispatch of {time.launches} launches", duration(time.dispatch)),
            ("compute", duration(time.compute)),
            ("memory bandwidth", duration(time.bandwidth)),
            ("host input", duration(time.host_input)),
            *(("communication", duration(getattr(time, name))) for name in self._communication),
        ]
        ways = [
            (way.settings, duration(way.seconds), "recommended" if way is self.recommended else "") for way in self.ways
        ]
        return [
            Table("Expected time of one optimizer step", ("", "expected"), rows, (f"From {time.source}.",)),
            Table(
                "Ways to run it", ("", "step", ""), ways, (f"Recommended: {self.recommended.settings}. {self.reason}",)
            ),
        ]


def duration(seconds: float) -> str:
    """Return a time as text with three digits, since steps take from microseconds to seconds."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale or unit == "us":
            return f"{seconds / scale:.3g} {unit}" if seconds < 999.5 * scale else f"{seconds / scale:.0f} {unit}"
    raise AssertionError(seconds)


def simplest(ways: Sequence[Way]) -> Way:
    """The first of the ways that are as fast as the fastest, within TIE: simpler ones come first."""
    fastest = min(way.seconds for way in ways)
    return next(way for way in ways if way.seconds <= fastest * (1 + TIE))


def compared(best: Way, ways: Sequence[Way]) -> str:
    """The recommended way against the best of every other engine."""
    others = {way.engine for way in ways} - {best.engine}
    parts = []
    for engine in sorted(others):
        seconds = min(way.seconds for way in ways if way.engine == engine)
        parts.append(f"{engine} {seconds / best.seconds:.2f} times as long")
    return ", ".join([f"{best.engine} takes {duration(best.seconds)}", *parts]) + "."
