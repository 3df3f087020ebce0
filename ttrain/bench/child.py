"""The measuring process of one contender: `python -m ttrain.bench.child`.

The first line of its input is an order, a JSON object. Every later line is a command with its arguments, a JSON list.
Each is answered by one line: {"ok": value}, or {"failed": reason} after an error of the contender.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

from ttrain.bench.baselines import DistributedContender, PyTorchContender
from ttrain.bench.contender import STEPS, Contender
from ttrain.bench.engines import EngineContender
from ttrain.bench.products import EngineProduct, TorchProduct
from ttrain.bench.settings import BASELINES
from ttrain.bench.workload import Case, ProductWork, TrainingWork
from ttrain.config import components, registry  # noqa: F401 - components fills the registry
from ttrain.core.errors import TtrainError
from ttrain.device.settings import DeviceConfig
from ttrain.engine.settings import EngineConfig

_LONGEST = 240  # characters of a reason
# Of torch's error classes: how they end, since their modules move between versions.
_NO_COMPILER = ("InvalidCxxCompiler", "CppCompileError", "CppWrapperCodeGenError")


def make_contender(name: str, case: Case, device: DeviceConfig, engine: EngineConfig, mode: str = "none") -> Contender:
    """Return a contender by its name in the config; `mode` is how it shares its batch with other ranks."""
    engine = replace(engine, name=name)
    if isinstance(case.work, ProductWork):
        return TorchProduct(name, case, device) if name in BASELINES else EngineProduct(case, device, engine)
    if name in BASELINES:
        return PyTorchContender(name, case, device) if mode == "none" else DistributedContender(name, case, device)
    return EngineContender(case, device, engine, mode)


class PeakMemory:
    """Peak in bytes since the last reset: resident size on the host (VmHWM), or torch's allocator on a GPU."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda

    def now(self) -> int:
        """Return what is in use."""
        return torch.cuda.memory_allocated() if self._cuda else int(psutil.Process().memory_info().rss)

    def reset(self) -> bool:
        """Start anew from what is in use. Return False where the system can't do that."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            return True
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", "ascii")  # see proc(5): the peak becomes the present size
            return True
        return False

    def peak(self) -> int:
        """Return the peak."""
        if self._cuda:
            return torch.cuda.max_memory_allocated()
        lines = Path("/proc/self/status").read_text("ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


class Measured:
    """One contender, and the commands that measure it."""

    def __init__(self, order: dict[str, Any]) -> None:
        registry.load_plugins(order["plugins"])
        device, engine = order["device"], EngineConfig(**order["engine"])
        self._case, self._order = Case(**order["case"]), order
        self._device = registry.component("device", device["name"]).config(**device)
        self._parts = (self._device, engine, order["mode"])
        self.contender = make_contender(order["name"], self._case, *self._parts)
        self._step = 0

    def start(self, memory: bool) -> dict[str, Any]:
        """Build, and do the first steps.

        With `memory` such work is done on a small scale before that, so that the process holds modules, threads,
        compiled code and what libraries keep; and further steps are done afterwards.
        """
        imports = time.time() - psutil.Process().create_time()
        if memory:
            small = make_contender(self._order["name"], replace(self._case, small=True), *self._parts)
            small.build()
            list(small.first_losses())
            small.close()
            if isinstance(self._case.work, TrainingWork):
                _ = self._case.batches
            gc.collect()
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc: give back what is free
            if trim is not None:
                trim(0)
        name = self._device.name
        usage = PeakMemory(name == "cuda" or (name == "auto" and torch.cuda.is_available()))
        base = usage.now()
        usage.reset()
        began = time.perf_counter()
        self.contender.build()
        timed = [(loss, time.perf_counter()) for loss in self.contender.first_losses()]
        self.contender.synchronize()
        self._step, peak = STEPS, usage.peak()
        found = {
            "description": self.contender.description, "imports_s": imports, "first_step_s": timed[0][1] - began,
            "losses": [loss for loss, _ in timed], "rss": psutil.Process().memory_info().rss,
            "step_seconds": statistics.median([after - before for (_, before), (_, after) in pairwise(timed)][-3:]),
        }  # fmt: skip
        gc.freeze()  # what exists now lives to the end and need not be searched again
        if memory:
            reset = usage.reset()
            list(self.contender.first_losses(self._step + 1))
            self.contender.synchronize()
            found |= {
                "base_bytes": base, "peak_bytes": max(peak, usage.peak()),
                "steady_bytes": usage.peak() if reset else None, "planned_bytes": self.contender.planned_bytes(),
            }  # fmt: skip
        return found

    def turn(self, settle: int, timed: int, each: bool) -> list[float]:
        """Do steps that warm caches up again.

        Then time steps, in s: each of them, or without `each` their mean, so that a device can run ahead.
        """
        contender, handle = self.contender, None
        gc.collect()
        for _ in range(settle):
            self._step += 1
            handle = contender.step(self._step)
        if handle is not None:
            contender.loss(handle)
        contender.synchronize()
        marks = [time.perf_counter()]
        for _ in range(timed):
            self._step += 1
            contender.step(self._step)
            if each:
                marks.append(time.perf_counter())
        if not each:
            contender.synchronize()
            marks.append(time.perf_counter())
        contender.rest()
        return [(after - before) / (1 if each else timed) for before, after in pairwise(marks)]

    def facts(self, planned: bool) -> dict[str, Any]:
        """Return the device and what the contender tells of itself, and if `planned` the expected time of a step."""
        from ttrain.config.build import build_device
        from ttrain.train.forecast.peak import measured_rates

        contender = self.contender
        device = getattr(contender, "device", None) or build_device(self._device)
        rates = measured_rates(device.name, str(self._case.dtypes.compute), self._device.index)
        peak = None if rates is None else rates.flops
        forecast = contender.planned_ms() if planned and isinstance(contender, EngineContender) else None
        return {
            "device": device.describe(), "facts": {**contender.facts(), "peak_flops": peak}, "planned_ms": forecast,
        }  # fmt: skip

    def repeat(self) -> None:
        """Do steps until somebody ends this process."""
        for number in count(self._step + 1):
            self.contender.step(number)


def reason(error: BaseException) -> str:
    """Return the innermost cause that says something, as one line; a missing C++ compiler is named as such."""
    if isinstance(error, TtrainError):
        return _short(str(error))
    causes = [error]
    while (inner := causes[-1].__cause__ or getattr(causes[-1], "inner_exception", None)) is not None:
        if inner in causes:
            break
        causes.append(inner)
    text = " ".join(f"{type(cause).__name__}: {cause}" for cause in causes)
    if any(name in text for name in _NO_COMPILER):
        first = next(line for cause in reversed(causes) for line in str(cause).splitlines() if line.strip())
        return _short(f"no working C++ compiler: {first}")
    lines = [line for line in str(causes[-1]).splitlines() if line.strip()]
    return _short(f"{type(causes[-1]).__name__}: {lines[0] if lines else 'no message'}")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."


def main() -> None:
    """Answer commands until there are no more."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:  # libraries may print
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        measured: Measured | None = None
        for line in sys.stdin:
            try:
                given = json.loads(line)
                if measured is None:
                    measured, answer = Measured(given), None
                else:
                    command, *words = given
                    answer = getattr(measured if hasattr(measured, command) else measured.contender, command)(*words)
                print(json.dumps({"ok": answer}), file=answers, flush=True)
            except Exception as error:  # what a contender raises is its result
                print(json.dumps({"failed": reason(error)}), file=answers, flush=True)
        if measured is not None:
            measured.contender.close()


if __name__ == "__main__":
    main()
