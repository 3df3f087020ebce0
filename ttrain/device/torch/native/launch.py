"""Compiled functions as launches: the argument block is built once, a launch is one foreign call."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from ttrain.device.base import Launch, flat_launches

_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


class NativeLaunch(partial):
    """A call without arguments, whose parts `joined` can read."""

    function: int
    block: int
    kept: Any


def launch(function: int, arguments: Sequence[int], keep: Any = None) -> NativeLaunch:
    """A launch of the function at an address on these addresses and numbers; `keep` lives as long as it does."""
    block = (ctypes.c_int64 * max(len(arguments), 1))(*arguments)
    made = NativeLaunch(_SIGNATURE(function), ctypes.addressof(block))
    made.function, made.block, made.kept = function, ctypes.addressof(block), (block, keep)
    return made


def joined(launches: Iterable[Launch], run: int) -> list[Launch]:
    """The launches with neighbouring native ones as one foreign call; `run` is the address of ttrain_run."""
    result: list[Launch] = []
    group: list[NativeLaunch] = []
    for item in flat_launches(list(launches)):
        if isinstance(item, NativeLaunch):
            group.append(item)
            continue
        result += _together(group, run)
        group = []
        result.append(item)
    return result + _together(group, run)


def _together(group: Sequence[NativeLaunch], run: int) -> list[Launch]:
    if len(group) < 2:
        return list(group)
    calls = (ctypes.c_int64 * (2 * len(group)))(*(part for item in group for part in (item.function, item.block)))
    made = partial(_RUN(run), ctypes.addressof(calls), len(group))
    made.kept = (calls, list(group))  # type: ignore[attr-defined]
    return [made]
