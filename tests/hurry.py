"""Shortcuts of runs in tests, which would take most of their time otherwise."""

from __future__ import annotations

import gc
import shutil
import sys
from contextlib import suppress
from functools import cache, wraps
from typing import Any

import yaml

from tests.composing import compose_once

# A third of the time of -O3, with the same multiply-adds. Clang doesn't know the passes of GCC that are left out.
QUICKLY = ("-O1", "-fexpensive-optimizations", "-fno-schedule-insns")
if shutil.which("g++"):
    LEFT_OUT = ("ivopts", "tree-pta", "tree-loop-im", "gcse", "tree-dse", "dse", "thread-jumps", "tree-ccp")
    QUICKLY += ("-fira-region=one", *(f"-fno-{name}" for name in LEFT_OUT))


def hurry() -> None:
    """Let runs in this process draw no loss curve, time only small products and copies, and compile quickly.
    YAML is read and written by C, and the plugins that are installed are looked for once.

    What was imported by now is never garbage: runs that look for the memory of old steps need not search it.
    """
    from ttrain.config import registry
    from ttrain.device.torch.info import Torch
    from ttrain.device.torch.native import toolchain
    from ttrain.device.ttnn.info import Tenstorrent
    from ttrain.train.forecast import step_time
    from ttrain.train.runs import summary

    for info in (Torch, Tenstorrent):  # to compile every little step would take most of the time
        real = info.best_engine
        info.best_engine = wraps(real)(lambda self, config: ("static", "tests compile what they say"))  # type: ignore[method-assign]
    summary.draw_loss_curve = lambda *_: None  # type: ignore[assignment]
    step_time._FIRST = step_time._AGAIN = 0.0
    step_time._SIZES["cpu"], step_time._MOVED = 256, 2**20
    toolchain.FLAGS = (*toolchain.FLAGS, *QUICKLY)
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # type: ignore[misc]
    yaml.safe_dump = dumped  # type: ignore[assignment]
    registry.entry_points = cache(registry.entry_points)
    compose_once()
    leave_imported()
    gc.set_threshold(20_000, 20, 100)


_modules = 0


def leave_imported() -> None:
    """Leave what was imported by now out of searches for garbage, if it is much that is new."""
    global _modules
    if len(sys.modules) > _modules + 100:
        _modules = len(sys.modules)
        gc.collect()
        gc.freeze()


def dumped(data: Any, **how: Any) -> Any:
    """Return YAML as C writes it, or Python, which takes names that are no Unicode."""
    with suppress(UnicodeEncodeError):
        return yaml.dump(data, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), **how)
    return yaml.dump(data, Dumper=yaml.SafeDumper, **how)
