"""ttnn's device profiler: the variables that turn it on, and the reports that it writes.

Two reports have the columns read here: `cpp_device_perf_report.csv`, which the runtime writes by itself, and
`ops_perf_results_*.csv`, which `python -m tracy -r` makes of it (docs.tenstorrent.com, Perf Report Headers).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ttrain.core.errors import UserError

REPORTS = ("cpp_device_perf_report.csv", "ops_perf_results*.csv")
_NAMES = ("OP CODE", "OP NAME")
_BUSY, _GAP = ("DEVICE FW DURATION [ns]", "DEVICE KERNEL DURATION [ns]"), "OP TO OP LATENCY [ns]"
_START, _END = "DEVICE FW START CYCLE", "DEVICE FW END CYCLE"


@dataclass(frozen=True)
class Dispatch:
    """One program that ran on a device: nanoseconds it kept its cores, and that the device idled before it."""

    op: str
    device: int
    cores: int
    busy: float
    gap: float
    start: int = 0  # cycles of the device's clock; 0 where the report does not tell
    end: int = 0
    replayed: bool = False


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
    """The newest report below a folder. Raises UserError where the profiler wrote none."""
    for pattern in REPORTS:
        found = sorted(folder.rglob(pattern), key=lambda path: path.stat().st_mtime)
        if found:
            return found[-1]
    raise UserError(
        f"device.profile={folder}: ttnn's device profiler wrote no report. This ttnn may be built without it; "
        "profile.csv=<file> reads the report of one that is not."
    )


def read_report(path: Path) -> list[Dispatch]:
    """Every program that ran on a device, in the order of the file. Raises UserError for a file of another kind."""
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            reader = csv.DictReader(file)
            columns = [(column or "").strip() for column in reader.fieldnames or ()]
            reader.fieldnames = columns
            _check(path, columns)
            return [found for row in reader if (found := _dispatch(path, reader.line_num, row)) is not None]
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror or error}.") from None
    except csv.Error as error:
        raise UserError(f"{path}: is no CSV file: {error}.") from None


def _check(path: Path, columns: Sequence[str]) -> None:
    wanted = {"OP CODE or OP NAME": _NAMES, " or ".join(_BUSY): _BUSY, _GAP: (_GAP,)}
    missing = [text for text, names in wanted.items() if not any(name in columns for name in names)]
    if missing:
        raise UserError(
            f"{path}: is no report of ttnn's device profiler: it has no column {', '.join(missing)}. Give "
            f"{' or '.join(REPORTS)}."
        )


def _dispatch(path: Path, line: int, row: dict[str, str | None]) -> Dispatch | None:
    """Read a row; return None for an op that ran on the host alone, which has no duration on a device."""
    busy = next((name for name in _BUSY if (row.get(name) or "").strip() not in ("", "-")), None)
    if busy is None:
        return None
    try:
        return Dispatch(
            op=(row.get(_NAMES[0]) or row.get(_NAMES[1]) or "").strip() or "not named",
            device=int(_number(row, "DEVICE ID")),
            cores=int(_number(row, "CORE COUNT")),
            busy=_number(row, busy),
            gap=max(_number(row, _GAP, least=-math.inf), 0.0),
            start=int(_number(row, _START)),
            end=int(_number(row, _END)),
            replayed=(row.get("METAL TRACE REPLAY SESSION ID") or "").strip() not in ("", "-"),
        )
    except ValueError as error:
        raise UserError(f"{path}, line {line}: {error}.") from None


def _number(row: dict[str, str | None], name: str, least: float = 0.0) -> float:
    """Empty counts as zero: the first program of a device has nothing before it. Raises ValueError."""
    text = (row.get(name) or "").strip()
    try:
        number = float(text) if text not in ("", "-") else 0.0
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < least:
        raise ValueError(f"{name} is {text[:40]!r}; a number{' of 0 or more' if least == 0 else ''} was expected")
    return number


def after(dispatches: Sequence[Dispatch], earlier: Sequence[Dispatch]) -> list[Dispatch]:
    """The programs that started on their device after every program of an earlier report had ended."""
    last: dict[int, int] = {}
    for one in earlier:
        last[one.device] = max(last.get(one.device, 0), one.end or one.start)
    return [one for one in dispatches if one.start > last.get(one.device, -1)]
