"""The processor cores that this process may use: by machine, affinity mask and container quota."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ttrain.core.files import text_of

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """The least of the physical cores, the affinity mask and the quota rounded up; at least 1."""
    return max(1, min(core_limits().values()))


def default_threads(environment: Mapping[str, str] = os.environ) -> int:
    """Threads where nothing else says how many: OMP_NUM_THREADS, else the cores that may be used."""
    given = environment.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) > 0 else usable_cores()


def core_limits() -> dict[str, int]:
    """Return the bounds on the number of threads in whole cores: `physical`, `affinity`, and `quota` if any."""
    import psutil

    affinity = affinity_cores()
    limits = {"physical": psutil.cpu_count(logical=False) or affinity, "affinity": affinity}
    quota = quota_cores()
    return limits if quota is None else {**limits, "quota": math.ceil(quota)}


class OtherWork:
    """Measures the CPU contention: what other processes take of the cores that this process may use."""

    def __init__(self, children: bool = False) -> None:
        """With `children` those of this process are no others."""
        self._children = children
        self._last = self._read()

    def cores(self) -> float:
        """Return the cores that others took since the last call."""
        last, self._last = self._last, self._read()
        elapsed, busy, own = (now - before for now, before in zip(self._last, last, strict=True))
        return max(0.0, busy - own) / max(elapsed, 1e-9)

    def _read(self) -> tuple[float, float, float]:
        import psutil

        mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        each = [times for number, times in enumerate(psutil.cpu_times(percpu=True)) if mine is None or number in mine]
        busy, own = sum(t.user + t.system + getattr(t, "nice", 0.0) for t in each), time.process_time()
        if self._children:
            own += sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True))
        return time.monotonic(), busy, own


def affinity_cores() -> int:
    """Logical cores that the system lets this process run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota_cores(root: Path | None = None, membership: Path | None = None) -> float | None:
    """Return cores' worth of time that the cgroups of this process allow, version 2 or 1; None where nothing bounds it.

    psutil does not tell it. A group is bounded by every group above it too, so the least counts.
    """
    found = []
    for folder in _groups(root or CGROUPS, membership or MEMBERSHIP):
        text = text_of(folder / "cpu.max")
        text = text or text_of(folder / "cpu.cfs_quota_us") + text_of(folder / "cpu.cfs_period_us")
        numbers = [int(word) for word in text.split() if word.isdecimal()]  # `max` and -1 are none
        if len(numbers) == 2 and all(numbers):
            found.append(numbers[0] / numbers[1])
    return min(found, default=None)


def _groups(root: Path, membership: Path) -> Iterator[Path]:
    """Yield folders of the groups that this process is in, each with those above it.

    In a container the path that the system tells may be the host's, and not be there: then its parents are read alone.
    """
    for line in ["0::/", *text_of(membership).splitlines()]:
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in (controllers, "cpu") if controllers else ("", "unified", "cpu", "cpu,cpuacct"):
            folder = root / mount / path.lstrip("/")
            yield from (each for each in (folder, *folder.parents) if each.is_relative_to(root / mount))
