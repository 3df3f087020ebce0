"""A table of measured times, which tells the fastest of several ways to run a kernel on this machine.

Measured once per machine and kept on disk, so that every process chooses alike and a resumed run rounds as before.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from ttrain.core.processor import processor_features, processor_name
from ttrain.device.base import Launch
from ttrain.device.measured import Section

Costs = Mapping[str, float]  # seconds by way


def _entry(value: Any) -> dict[str, float]:
    return {way: float(cost) for way, cost in value.items()}


def _first(known: dict[str, float], new: dict[str, float]) -> dict[str, float]:
    """Return the costs that are known already, unless they are those of other ways."""
    return known if known.keys() == new.keys() else new


KEPT = Section("costs", _entry, _first)
TIE = 1.03  # how many times faster than the first way another has to be
_HOLDING = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
_LEAST_TURNS, _MOST_TURNS, _TURNS_SECONDS = 5, 25, 0.05  # of every way in a series while it is timed
_GRACE = 1.0  # seconds more for the least turns
_SIDE = 256  # of the matrices in which bf16 and fp32 are compared
_MOST_SERIES, _SETTLED = 20, 1.1  # and how much a series may be better than those before if it is the last


def fastest(key: str, names: Sequence[str], ways: Callable[[], Mapping[str, Launch]]) -> str:
    """Return the name of the way to take for `key`. The first is taken unless another wins by more than TIE.

    `ways` makes the launches to time; it is only called where the table has no entry yet. A way that fails costs
    infinitely much.
    """
    costs = recalled(f"{key} threads={torch.get_num_threads()}", names, lambda: _measured(names, ways()))
    assert costs is not None  # they are measured
    return winner(costs, names[0])


@lru_cache(maxsize=1)
def multiplies_faster_in_fp32() -> bool:
    """Return True if bf16 matrices are multiplied faster as fp32 copies: a CPU may have no instructions for bf16."""

    def ways() -> dict[str, Launch]:
        a, out = (torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16) for _ in range(2))
        return {"bf16": partial(torch.mm, a, a, out=out), "fp32": lambda: out.copy_(a.float() @ a.float())}

    return fastest(f"products of bf16 {_SIDE}", ("bf16", "fp32"), ways) == "fp32"


def recalled(key: str, names: Collection[str], measure: Callable[[], Costs] | None) -> Costs | None:
    """Seconds of each way by the table, or else as measured now and kept; None where neither can be."""
    key = f"{machine()}, {key}"
    known = KEPT.known().get(key)
    if known is not None and set(known) == set(names):
        return known
    if measure is None:
        return None
    costs = dict(measure())
    KEPT.keep({key: costs})
    return KEPT.known().get(key, costs)  # another process may have measured meanwhile: all go by the same numbers


def winner(costs: Costs, first: str) -> str:
    """Return the name of the cheapest way, or of the first where that does not cost more by TIE."""
    best = min(costs, key=lambda name: costs[name])
    return best if costs[first] > TIE * costs[best] else first


def _measured(names: Sequence[str], ways: Mapping[str, Launch]) -> dict[str, float]:
    """Seconds of the fastest run of each way, of series that are repeated until the last one told nothing new."""
    costs, launches = dict.fromkeys(names, float("inf")), warmed(ways)
    for _ in range(_MOST_SERIES):
        before, found = costs, seconds(launches)
        costs = {name: min(cost, found.get(name, cost)) for name, cost in before.items()}
        if all(before[name] <= _SETTLED * costs[name] for name in launches):
            break
    return costs


def warmed(ways: Mapping[str, Launch]) -> dict[str, Launch]:
    """Return the launches that work here, which have run once."""
    launches = {}
    for name, launch in ways.items():
        with contextlib.suppress(RuntimeError):  # such as an oneDNN build without the primitive
            launch()
            launches[name] = launch
    return launches


def seconds(
    launches: Mapping[str, Launch],
    least: int = _LEAST_TURNS,
    limit: float = _TURNS_SECONDS,
    most: int = _MOST_TURNS,
    before: Mapping[str, Launch] | None = None,
) -> dict[str, float]:
    """Seconds of the fastest run of each: what the machine can do when nothing disturbs it.

    Ways take turns, so that a machine that is busy for a moment disturbs all of them; short ones get more turns, until
    `limit` seconds are over. Others get the `least` turns, but none begins _GRACE seconds after that. The launches of
    `before` run before each of the same name, and are not timed.
    """
    costs = {name: float("inf") for name in launches}
    end = time.perf_counter() + limit
    for turn in range(most):
        if turn and time.perf_counter() > end + (_GRACE if turn < least else 0.0):
            break
        for name, launch in launches.items():
            if before is not None:
                before[name]()
            start = time.perf_counter()
            launch()
            costs[name] = min(costs[name], time.perf_counter() - start)
    return costs


def machine() -> str:
    """The key of this machine's entries. It covers what keeps libraries from instructions that the processor has."""
    held = [f"{name}={os.environ[name]}" for name in _HOLDING if name in os.environ]
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        held.append(f"fp32={precision}")
    whole = hashlib.sha256("\n".join([processor_features(), *held]).encode()).hexdigest()[:16]
    return ", ".join([f"torch {torch.__version__}", processor_name(), *held, whole])
