"""Programs that a device ran during some steps: their number, their time, and the idle time between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ttrain.core.errors import UserError
from ttrain.core.tables import Table
from ttrain.device.settings import DeviceConfig
from ttrain.device.ttnn.runtime.profile import Dispatch, after, find_report, read_report
from ttrain.device.ttnn.settings import TenstorrentConfig

LONGEST = 5


@dataclass(frozen=True)
class OpTime:
    """All dispatches of one op; nanoseconds over all steps."""

    op: str
    count: int
    cores: int  # most that one dispatch used
    busy: float
    gap: float  # that the device idled before it


@dataclass(frozen=True)
class DispatchProfile:
    """Programs of one device over `steps` steps. Times are nanoseconds over all of them."""

    device: int
    steps: int
    ops: tuple[OpTime, ...]  # the busiest first
    longest_gaps: tuple[tuple[float, str, str], ...]  # nanoseconds, the op before and the op after
    replayed: int  # dispatches that a captured step replayed

    @classmethod
    def of(cls, dispatches: Sequence[Dispatch], steps: int) -> DispatchProfile:
        """Sum up the first device; its first gap is from before the steps and counts for nothing.

        Raises UserError where nothing ran on any.
        """
        if not dispatches:
            raise UserError("task=profile: the report holds no program that ran on a device.")
        device = min(one.device for one in dispatches)
        mine = [one for one in dispatches if one.device == device]
        gaps = [0.0, *(one.gap for one in mine[1:])]
        found: dict[str, list[tuple[Dispatch, float]]] = {}
        for one, gap in zip(mine, gaps, strict=True):
            found.setdefault(one.op, []).append((one, gap))
        ops = [
            OpTime(op, len(of), max(one.cores for one, _ in of), sum(one.busy for one, _ in of), sum(g for _, g in of))
            for op, of in found.items()
        ]
        pairs = [(gap, mine[index - 1].op, mine[index].op) for index, gap in enumerate(gaps) if index and gap]
        longest = tuple(sorted(pairs, reverse=True)[:LONGEST])
        replayed = sum(one.replayed for one in mine)
        return cls(device, steps, tuple(sorted(ops, key=lambda time: -time.busy)), longest, replayed)

    @property
    def busy(self) -> float:
        return sum(op.busy for op in self.ops)

    @property
    def idle(self) -> float:
        return sum(op.gap for op in self.ops)

    @property
    def overhead(self) -> float:
        """Share of the time in which the device waited for its next program."""
        return self.idle / (self.busy + self.idle) if self.busy + self.idle else 0.0

    @property
    def dispatches(self) -> int:
        return sum(op.count for op in self.ops)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "device": self.device,
            "steps": self.steps,
            "dispatches_per_step": self.dispatches / self.steps,
            "busy_ms_per_step": self.busy / self.steps / 1e6,
            "idle_ms_per_step": self.idle / self.steps / 1e6,
            "dispatch_overhead": self.overhead,
            "replayed": self.replayed,
            "ops": [vars(op) for op in self.ops],
            "longest_gaps_ns": [list(gap) for gap in self.longest_gaps],
        }

    def tables(self) -> list[Table]:
        """Return tables for people."""
        whole = self.busy + self.idle
        columns = ("op", "dispatches", "cores", "busy", "idle before", "share of time")
        rows = [(op.op, *self._cells(op.count, str(op.cores), op.busy, op.gap, whole)) for op in self.ops]
        rows.append(("all", *self._cells(self.dispatches, "", self.busy, self.idle, whole)))
        note = (
            f"Dispatch overhead {self.overhead:.1%}: the device idles {self.idle / self.steps / 1e6:.3f} ms of "
            f"{whole / self.steps / 1e6:.3f} ms a step. {self.replayed} of {self.dispatches} dispatches were replayed. "
            "The profiler itself makes gaps longer."
        )
        gaps = [(f"{before} -> {following}", f"{gap / 1e3:.1f} us") for gap, before, following in self.longest_gaps]
        return [
            Table(f"Programs of device {self.device}, per step", columns, rows, (note,)),
            Table("Longest gaps", ("between", "idle"), gaps),
        ]

    def _cells(self, count: int, cores: str, busy: float, gap: float, whole: float) -> tuple[str, ...]:
        share = f"{(busy + gap) / whole:.1%}" if whole else ""
        steps = self.steps
        return f"{count / steps:g}", cores, f"{busy / steps / 1e3:.1f} us", f"{gap / steps / 1e3:.1f} us", share


class TtnnProfiler:
    """Steps on a device whose profiler writes below a folder. See `Profiler`."""

    def __init__(self, config: TenstorrentConfig, folder: Path) -> None:
        self.folder = Path(config.profile or folder)
        self.config: DeviceConfig = replace(config, profile=str(self.folder))
        self._earlier: Sequence[Dispatch] = ()

    def warm(self, device: Any) -> None:
        """Leave out the programs that ran until now."""
        self._earlier = self._read(device)

    def profile(self, device: Any, steps: int) -> DispatchProfile:
        """Return the profile of the steps run since `warm`."""
        return DispatchProfile.of(after(self._read(device), self._earlier), steps)

    def _read(self, device: Any) -> Sequence[Dispatch]:
        """Read what the device's profiler has recorded so far."""
        device.synchronize()
        with device.launching("reading the profiler"):
            device.mesh.tt.ReadDeviceProfiler(device.mesh.handle)
        return read_report(find_report(self.folder))
