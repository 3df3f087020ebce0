"""The largest micro-batch and context whose plan fits into memory, found by planning a few of them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttrain.core.units import format_bytes

TRIES = 10  # plans per limit, at most
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

    `needed(value)` plans it and gives its bytes, which grow with the value, in a line or faster. The next to be planned
    is by turns where the line through the two nearest plans meets the memory, and the middle between them.
    """
    fits, over = (0, 0), (0, 0)  # (value, bytes) of the largest known to fit and of the least known not to
    value = _multiple(start, step)
    for number in range(TRIES):
        nbytes = needed(value)
        if nbytes <= available:
            fits = max(fits, (value, nbytes))
        else:
            over = min(over, (value, nbytes)) if over[0] else (value, nbytes)
        if fits[0] >= ceiling:
            return Limit(*fits, capped=True)
        if over[0] and over[0] - fits[0] <= max(step, fits[0] // 50):
            break
        value = _guess(fits, over, available, step, ceiling, halve=number % 2 == 1)
    return Limit(*fits)


def _guess(fits: tuple[int, int], over: tuple[int, int], available: int, step: int, ceiling: int, halve: bool) -> int:
    """Return the size to plan next, strictly between one that fits and one that does not."""
    if not over[0]:
        grown = int(fits[0] * min(available / max(fits[1], 1), 16.0))
        return min(_multiple(max(grown, 2 * fits[0]), step), ceiling)
    if not fits[0]:
        return _multiple(over[0] // 2, step)
    slope = (over[1] - fits[1]) / (over[0] - fits[0])
    middle = (fits[0] + over[0]) // 2
    guess = middle if halve or slope <= 0 else fits[0] + int(0.99 * (available - fits[1]) / slope)
    return min(max(_multiple(guess, step), fits[0] + step), max(over[0] - step, fits[0] + step))


def _multiple(value: int, step: int) -> int:
    return max(value // step, 1) * step


def device_memory(name: str) -> tuple[int, str] | None:
    """(bytes, where the number is from) of this machine's own, without opening it; None if it can't be told."""
    if name == "cpu":
        import psutil

        limit = _control_group_limit()
        total = int(psutil.virtual_memory().total)
        return (
            (limit, "the limit of this container") if limit is not None and limit < total else (total, "this machine")
        )
    if name == "cuda":
        return _gpu_memory()
    return None


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
