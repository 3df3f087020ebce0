"""A table of measured costs: which of several ways to run a kernel is the faster one on this machine.

Measured once per machine and kept on disk, so that every process chooses alike and a resumed run rounds as before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path

import torch

from ttrain.core.folders import cache_folder
from ttrain.core.processor import processor_features, processor_name
from ttrain.device.base import Launch

CLEAR_WIN, TIE = 1.25, 1.03  # how many times faster than the first way another has to be
_HOLDING = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
_LEAST_TURNS, _MOST_TURNS, _TURNS_SECONDS = 5, 25, 0.05  # of every way in a series while it is timed
_MOST_SERIES, _SETTLED = 20, 1.1  # and how much a series may be better than those before if it is the last


def fastest(key: str, ways: Mapping[str, Callable[[], Launch]], margin: float = CLEAR_WIN) -> str:
    """The name of the way to take for `key`. The first is taken unless another wins by the margin.

    Each value makes a launch to time; it is only called where the table has no entry yet. A way that fails costs
    infinitely much.
    """
    return _chosen(f"{key} threads={torch.get_num_threads()}", tuple(ways.items()), margin)


@lru_cache(maxsize=512)
def _chosen(key: str, ways: tuple[tuple[str, Callable[[], Launch]], ...], margin: float = CLEAR_WIN) -> str:
    costs = recalled(key, [name for name, _ in ways], lambda: _measured(ways, margin))
    assert costs is not None  # they are measured
    return winner(costs, ways[0][0], margin)


def recalled(
    key: str, names: Collection[str], measure: Callable[[], Mapping[str, float]] | None
) -> Mapping[str, float] | None:
    """Seconds of each way by the table, or else as measured now and kept; None where neither can be."""
    known = _known(key, names)
    if known is not None or measure is None:
        return known
    costs = measure()
    if (known := _known(key, names)) is None:  # another process may have measured meanwhile: all go by the same numbers
        _write(key, costs)
    return known or costs


def _known(key: str, names: Collection[str]) -> Mapping[str, float] | None:
    costs = _read().get(_machine(), {}).get(key, {})
    return costs if set(costs) == set(names) else None


def winner(costs: Mapping[str, float], first: str, margin: float) -> str:
    """The name of the cheapest way, or of the first where that does not cost more by the margin."""
    best = min(costs, key=lambda name: costs[name])
    return best if costs[first] > margin * costs[best] else first


def _measured(ways: tuple[tuple[str, Callable[[], Launch]], ...], margin: float) -> dict[str, float]:
    """Seconds of the fastest run of each way, of series that are repeated until the last one told nothing new."""
    costs, launches = {name: float("inf") for name, _ in ways}, warmed(ways)
    for _ in range(_MOST_SERIES):
        found = {**costs, **seconds(launches)}
        lower = {name: min(cost, found[name]) for name, cost in costs.items()}
        alike = winner(found, ways[0][0], margin) == winner(lower, ways[0][0], margin)
        settled = alike and all(costs[name] <= _SETTLED * lower[name] for name in launches)
        costs = lower
        if settled:
            break
    return costs


def warmed(ways: Iterable[tuple[str, Callable[[], Launch]]]) -> dict[str, Launch]:
    """A launch by each way that works here, which has run once."""
    launches = {}
    for name, make in ways:
        with contextlib.suppress(RuntimeError):  # such as an oneDNN build without the primitive
            launch = make()
            launch()
            launches[name] = launch
    return launches


def seconds(
    launches: Mapping[str, Launch], least: int = _LEAST_TURNS, limit: float = _TURNS_SECONDS
) -> dict[str, float]:
    """Seconds of the fastest run of each: what the machine can do when nothing disturbs it.

    Ways take turns, so that a machine that is busy for a moment disturbs all of them; short ones get more turns, until
    `limit` seconds are over.
    """
    costs = {name: float("inf") for name in launches}
    end = time.perf_counter() + limit
    for turn in range(_MOST_TURNS):
        if turn >= least and time.perf_counter() > end:
            break
        for name, launch in launches.items():
            start = time.perf_counter()
            launch()
            costs[name] = min(costs[name], time.perf_counter() - start)
    return costs


def table_path() -> Path:
    """Return the path at which the table is kept."""
    return cache_folder() / "costs.json"


def _machine() -> str:
    """The key of this machine's entries. It covers what keeps libraries from instructions that the processor has."""
    held = [f"{name}={os.environ[name]}" for name in _HOLDING if name in os.environ]
    whole = hashlib.sha256("\n".join([processor_features(), *held]).encode()).hexdigest()[:16]
    return ", ".join([f"torch {torch.__version__}", processor_name(), *held, whole])


def _read() -> dict[str, dict[str, dict[str, float]]]:
    try:
        stored = json.loads(table_path().read_text("utf-8"))
        return {
            machine: {key: {way: float(cost) for way, cost in costs.items()} for key, costs in entries.items()}
            for machine, entries in stored.items()
        }
    except (OSError, ValueError, OverflowError, TypeError, AttributeError, RecursionError):
        return {}  # none yet, or damaged: measured again


def _write(key: str, costs: Mapping[str, float]) -> None:
    """Add an entry, whole or not at all. Where the cache can't be written, every process measures."""
    path = table_path()
    known = _read()
    known.setdefault(_machine(), {})[key] = dict(costs)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix="costs-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(known, file, indent=1)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
