"""The largest micro-batch and context whose plan fits into memory, found by planning a few of them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ttrain.core.units import format_bytes

TRIES = 14  # plans per limit, at most
CEILING = 2**20
CLOSE = 0.95  # of the memory: a plan above it has little room for what is in no plan


@dataclass(frozen=True)
class Limit:
    """The largest `value` of what was varied, and the bytes that its plan takes; 0 where not even the least fits."""

    value: int
    nbytes: int
    capped: bool = False  # more would fit


def largest(needed: Callable[[int], int], start: int, available: int, step: int = 1, ceiling: int = CEILING) -> Limit:
    """The largest multiple of `step` up to `ceiling` whose plan fits, to about 2 %.

    `needed(value)` plans it and gives its bytes, which grow with the value. Larger ones are planned until one does not
    fit, then the middle between the largest that fits and the least that does not.
    """
    fits, over, value = Limit(0, 0), ceiling + step, _multiple(start, step)
    for _ in range(TRIES):
        nbytes = needed(value)
        if nbytes <= available:
            fits = Limit(value, nbytes, capped=value >= ceiling)
        else:
            over = value
        if fits.capped or over - fits.value <= max(step, fits.value // 50):
            break
        if over > ceiling:
            grown = int(value * min(available / max(nbytes, 1), 16.0))
            value = min(_multiple(max(grown, 2 * value), step), ceiling)
        else:
            value = max(_multiple((fits.value + over) // 2, step), fits.value + step)
    return fits


def _multiple(value: int, step: int) -> int:
    return max(value // step, 1) * step


def device_memory(name: str) -> tuple[int, str] | None:
    """(bytes, where the number is from) of this machine's own, without opening it; None if it can't be told."""
    if name == "cuda":
        return _gpu_memory()
    if name != "cpu":
        return None
    limit, total = _control_group_limit(), int(psutil.virtual_memory().total)
    return (limit, "the limit of this container") if limit is not None and limit < total else (total, "this machine")


def fit_text(needed: int, available: int, source: str, keys: Sequence[str]) -> str:
    """Return a sentence for people: whether planned bytes fit, and if not, the keys that would take less."""
    room = f"{format_bytes(needed)} of {format_bytes(available)}, {source}"
    if needed <= CLOSE * available:
        return f"It fits: {room}."
    if needed <= available:
        return f"It may fit: {room}, and what the runtime itself takes comes on top. Less take: {', '.join(keys)}."
    return f"It does not fit: {room}. Less take: {', '.join(keys)}. plan.limits=true finds the largest that fits."


def _control_group_limit() -> int | None:
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _gpu_memory() -> tuple[int, str] | None:
    """Return the memory of the first GPU from the driver's tool, since asking torch would initialise CUDA."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
        return int(listed[0]) * 2**20, "the driver"
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def limit_text(limit: Limit, what: str) -> str:
    """A limit for people."""
    if not limit.value:
        return f"none: not even the least {what} fits"
    return f"{limit.value}{' or more' if limit.capped else ''} ({format_bytes(limit.nbytes)})"
