"""The measuring process of one contender: `python -m ttrain.bench.child DESCRIPTOR`, a descriptor of a connection.

Every message is the name of a method of `Measured` or of the contender, with its arguments. Each is answered by
{"ok": value}, or {"failed": reason} after an error of the contender.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from ttrain.bench.baselines import DistributedContender, PyTorchContender
from ttrain.bench.contender import STEPS, Contender, EngineContender
from ttrain.bench.settings import BASELINES
from ttrain.bench.workload import Case
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
    if name in BASELINES:
        return PyTorchContender(name, case, device) if mode == "none" else DistributedContender(name, case, device)
    return EngineContender(case, device, engine, mode)


class Measured:
    """The contender of this process. It is made anew by each `make`."""

    contender: Contender

    def make(
        self, plugins: Sequence[str], name: str, case: Case, device: DeviceConfig, engine: EngineConfig, mode: str
    ) -> None:
        """Make the contender, see `make_contender`."""
        registry.load_plugins(plugins)
        self._made = partial(make_contender, name, device=device, engine=engine, mode=mode)
        self.contender = self._made(case=case)
        self._cuda = device.name == "cuda" or (device.name == "auto" and torch.cuda.is_available())

    def memory(self) -> dict[str, Any]:
        """Start the contender, do further steps, and return the peaks of memory as well.

        Such work is done on a small scale before that, so that the process holds modules, threads, compiled code and
        what libraries keep.
        """
        case = self.contender.case
        small = self._made(case=replace(case, small=True))
        small.start()
        small.close()
        _ = case.batches
        gc.unfreeze()
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc: give back what is free
        if trim is not None:
            trim(0)
        base = torch.cuda.memory_allocated() if self._cuda else int(psutil.Process().memory_info().rss)
        self._reset_peak()
        found, peak = self.contender.start(), self._peak()
        self._reset_peak()
        self.contender.turn(0, STEPS, each=False)
        used = {"peak_bytes": max(peak, self._peak()), "used_bytes": self._peak() - base}
        return {**found, **used, "planned_bytes": self.contender.planned_bytes()}

    def _peak(self) -> int:
        """Return the peak in bytes since it was reset, of resident memory or of torch's allocator on a GPU."""
        if self._cuda:
            return torch.cuda.max_memory_allocated()
        lines = Path("/proc/self/status").read_text("ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

    def _reset_peak(self) -> None:
        """Let the peak start anew from what is in use, where the system can do that."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", "ascii")  # see proc(5): the peak becomes the present size


def reason(error: BaseException) -> str:
    """Return the innermost cause that says something, as one line; a missing C++ compiler is named as such."""
    if isinstance(error, TtrainError):
        return _short(str(error))
    causes = [error]
    while (inner := causes[-1].__cause__ or getattr(causes[-1], "inner_exception", None)) and inner not in causes:
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
    """Answer messages until there are no more."""
    measured = Measured()
    with Connection(int(sys.argv[1])) as link, suppress(EOFError):
        while True:
            command, *words = link.recv()
            try:
                answer = getattr(measured if hasattr(measured, command) else measured.contender, command)(*words)
                link.send({"ok": answer})
            except Exception as error:  # what a contender raises is its result
                link.send({"failed": reason(error)})
    if hasattr(measured, "contender"):
        measured.contender.close()


if __name__ == "__main__":
    main()
