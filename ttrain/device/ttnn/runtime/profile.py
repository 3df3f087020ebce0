"""ttnn's device profiler: the variables that turn it on, and the reports that it writes.

Two reports have the columns read here: `cpp_device_perf_report.csv`, which the runtime writes by itself, and
`ops_perf_results_*.csv`, which `python -m tracy -r` makes of it (docs.tenstorrent.com, Perf Report Headers).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ttrain.core.errors import UserError
from ttrain.core.tables import Table
from ttrain.device.settings import DeviceConfig
from ttrain.device.ttnn.settings import TenstorrentConfig

REPORTS = ("cpp_device_perf_report.csv", "ops_perf_results*.csv")
_NAMES = ("OP CODE", "OP NAME")
_BUSY, _GAP = ("DEVICE FW DURATION [ns]", "DEVICE KERNEL DURATION [ns]"), "OP TO OP LATENCY [ns]"
_START, _END = "DEVICE FW START CYCLE", "DEVICE FW END CYCLE"
_ABSENT = ("", "-")


@dataclass(frozen=True)
class Dispatch:
    """One program that ran on a device: nanoseconds it kept its cores, and that the device idled before it."""

    op: str
    device: int
    cores: int
    busy: float
    gap: float
    start: int  # cycles of the device's clock; 0 where the report does not tell
    end: int
    replayed: bool


def profiler_variables(folder: Path) -> dict[str, str]:
    """Return the variables with which ttnn writes a report below `folder`; they must be set before its import."""
    return {
        "TT_METAL_DEVICE_PROFILER": "1",
        "TT_METAL_PROFILER_CPP_POST_PROCESS": "1",
        "TT_METAL_PROFILER_MID_RUN_DUMP": "1",
        "TT_METAL_PROFILER_TRACE_TRACKING": "1",
        "TTNN_OP_PROFILER": "1",  # names of ops beside the programs
        "TT_METAL_PROFILER_DIR": str(folder),
    }


def find_report(folder: Path) -> Path:
    """Return the newest report below a folder. Raises UserError where the profiler wrote none."""
    for pattern in REPORTS:
        found = sorted(folder.rglob(pattern), key=lambda path: path.stat().st_mtime)
        if found:
            return found[-1]
    raise UserError(
        f"device.profile={folder}: ttnn's device profiler wrote no report. This ttnn may be built without it; "
        "profile.csv=<file> reads the report of one that is not."
    )


def read_report(path: Path) -> list[Dispatch]:
    """Return the programs that ran on a device, in order. Raises UserError for a file of another kind."""
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames = [(column or "").strip() for column in reader.fieldnames or ()]
            if _GAP not in columns or not all(set(columns).intersection(names) for names in (_NAMES, _BUSY)):
                raise UserError(
                    f"{path}: is no report of ttnn's device profiler, with columns {' or '.join(_NAMES)}, "
                    f"{' or '.join(_BUSY)} and {_GAP}. Give {' or '.join(REPORTS)}."
                )
            rows = ({name: (row.get(name) or "").strip() for name in row if name} for row in reader)
            return [found for row in rows if (found := _dispatch(row)) is not None]
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror or error}.") from None
    except csv.Error as error:
        raise UserError(f"{path}: is no CSV file: {error}.") from None
    except ValueError as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}.") from None


def _dispatch(row: dict[str, str]) -> Dispatch | None:
    """Read a row; return None for an op that ran on the host alone, which has no duration on a device.

    Raises ValueError.
    """
    busy = next((name for name in _BUSY if row.get(name, "") not in _ABSENT), None)
    if busy is None:
        return None
    return Dispatch(
        op=row.get(_NAMES[0]) or row.get(_NAMES[1]) or "not named",
        device=int(_number(row, "DEVICE ID")),
        cores=int(_number(row, "CORE COUNT")),
        busy=_number(row, busy),
        gap=max(_number(row, _GAP, least=-math.inf), 0.0),
        start=int(_number(row, _START)),
        end=int(_number(row, _END)),
        replayed=row.get("METAL TRACE REPLAY SESSION ID", "") not in _ABSENT,
    )


def _number(row: dict[str, str], name: str, least: float = 0.0) -> float:
    """Return a number; empty counts as zero: the first program of a device has nothing before it. Raises ValueError."""
    text = row.get(name, "")
    try:
        number = float(text) if text not in _ABSENT else 0.0
    except ValueError:
        number = math.nan
    if not least <= number < math.inf:
        raise ValueError(f"{name} is {text[:40]!r}; a number{' of 0 or more' if least == 0 else ''} was expected")
    return number


LONGEST = 5


@dataclass(frozen=True)
class OpTime:
    """Dispatches added up; nanoseconds over all steps."""

    op: str
    count: int
    cores: int  # most that one dispatch used
    busy: float
    gap: float  # that the device idled before it

    @classmethod
    def of(cls, op: str, runs: Sequence[Dispatch]) -> OpTime:
        busy, gap = sum(one.busy for one in runs), sum(one.gap for one in runs)
        return cls(op, len(runs), max(one.cores for one in runs), busy, gap)

    @property
    def time(self) -> float:
        return self.busy + self.gap


class DispatchProfile:
    """Programs of one device over `steps` steps. Times are nanoseconds over all of them."""

    def __init__(self, dispatches: Sequence[Dispatch], steps: int) -> None:
        """Sum up the first device; its first gap is from before the steps and counts for nothing.

        Raises UserError where nothing ran on any.
        """
        if not dispatches:
            raise UserError("task=profile: the report holds no program that ran on a device.")
        self.steps, self.device = steps, min(one.device for one in dispatches)
        first, *rest = (one for one in dispatches if one.device == self.device)
        mine = [replace(first, gap=0.0), *rest]
        ops = [OpTime.of(op, [one for one in mine if one.op == op]) for op in dict.fromkeys(one.op for one in mine)]
        self.ops, self.whole = sorted(ops, key=lambda time: -time.busy), OpTime.of("all", mine)
        gaps = sorted(((now.gap, before.op, now.op) for before, now in pairwise(mine) if now.gap), reverse=True)
        self.longest_gaps = gaps[:LONGEST]  # nanoseconds, the op before and the op after
        # The share of the time in which the device waited for its next program.
        self.overhead = self.whole.gap / self.whole.time if self.whole.time else 0.0
        self.replayed = sum(one.replayed for one in mine)  # dispatches that a captured step replayed

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "device": self.device,
            "steps": self.steps,
            "dispatches_per_step": self.whole.count / self.steps,
            "busy_ms_per_step": self.whole.busy / self.steps / 1e6,
            "idle_ms_per_step": self.whole.gap / self.steps / 1e6,
            "dispatch_overhead": self.overhead,
            "replayed": self.replayed,
            "ops": [vars(op) for op in self.ops],
            "longest_gaps_ns": [list(gap) for gap in self.longest_gaps],
        }

    def tables(self) -> list[Table]:
        """Return tables for people."""
        whole, steps = self.whole, self.steps
        columns = ("op", "dispatches", "cores", "busy", "idle before", "share of time")
        rows = [
            (op.op, f"{op.count / steps:g}", str(op.cores), f"{op.busy / steps / 1e3:.1f} us",
             f"{op.gap / steps / 1e3:.1f} us", f"{op.time / whole.time:.1%}" if whole.time else "")
            for op in (*self.ops, whole)
        ]  # fmt: skip
        note = (
            f"Dispatch overhead {self.overhead:.1%}: the device idles {whole.gap / steps / 1e6:.3f} ms of "
            f"{whole.time / steps / 1e6:.3f} ms a step. {self.replayed} of {whole.count} dispatches were replayed. "
            "The profiler itself makes gaps longer."
        )
        gaps = [(f"{before} -> {following}", f"{gap / 1e3:.1f} us") for gap, before, following in self.longest_gaps]
        return [
            Table(f"Programs of device {self.device}, per step", columns, rows, (note,)),
            Table("Longest gaps", ("between", "idle"), gaps),
        ]


def read_profile(report: Path, steps: int) -> DispatchProfile:
    """Read a report that a profiler wrote."""
    return DispatchProfile(read_report(report), steps)


class TtnnProfiler:
    """Steps on a device whose profiler writes below a folder. See `DeviceInfo.profiler`."""

    def __init__(self, config: TenstorrentConfig, folder: Path) -> None:
        self.folder = Path(config.profile or folder)
        self.config: DeviceConfig = replace(config, profile=str(self.folder))
        self._ended: dict[int, int] = {}  # by device, the cycle until which nothing counts

    def warm(self, device: Any) -> None:
        """Leave out the programs that ran until now."""
        for one in self._read(device):
            self._ended[one.device] = max(self._ended.get(one.device, 0), one.end or one.start)

    def profile(self, device: Any, steps: int) -> DispatchProfile:
        """Return the profile of the steps run since `warm`."""
        mine = [one for one in self._read(device) if one.start > self._ended.get(one.device, -1)]
        return DispatchProfile(mine, steps)

    def _read(self, device: Any) -> Sequence[Dispatch]:
        """Read what the device's profiler has recorded so far."""
        device.synchronize()
        with device.launching("reading the profiler"):
            device.mesh.tt.ReadDeviceProfiler(device.mesh.handle)
        return read_report(find_report(self.folder))
