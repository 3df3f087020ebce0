"""task=doctor: tell what is installed and usable on this machine, and how to fix the rest."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import psutil

from ttrain.config.registry import infos
from ttrain.config.schema import Config
from ttrain.core.cores import core_limits
from ttrain.core.errors import TtrainError, UserError
from ttrain.core.processor import ARM, X86, processor_name, vector_extensions
from ttrain.core.units import counted, format_bytes
from ttrain.device.info import Finding
from ttrain.device.settings import TorchConfig
from ttrain.device.torch.info import GPUS, Torch, why_no_gpu
from ttrain.device.torch.native.toolchain import Toolchain, find_compiler
from ttrain.device.torch.triton.installed import lacking_triton
from ttrain.train.forecast.limits import device_memory


def run(config: Config) -> dict[str, Any]:
    """Prints one line a finding as it comes, + usable, - not there, ! broken, and returns all of them."""
    found = []
    for finding in examine():
        found.append(asdict(finding))
        mark = {"ok": "+", "missing": "-", "broken": "!"}[finding.state]
        fix = f"  -> {finding.fix}" if finding.fix and finding.state != "ok" else ""
        print(f"{mark} {finding.subject:16} {finding.text}{fix}", flush=True)
    return {"findings": found}


def examine() -> Iterator[Finding]:
    """All findings in order. Devices are opened too, each in a process of its own, and C++ is compiled."""
    yield Finding("Python", "ok", f"{platform.python_version()} on {platform.platform()}")
    yield from _machine()
    yield from _torch()
    yield _cpp_compiler()
    for info in infos():
        yield from info.findings()


def _machine() -> Iterator[Finding]:
    """Cores, memory and vector extensions."""
    limits = core_limits()
    cores = f"{counted(limits['physical'], 'physical core')}, {limits['affinity']:,} that this process may use"
    quota = f", a container's quota of {limits['quota']:,}" if "quota" in limits else ""
    yield Finding("processor", "ok", f"{processor_name()}: {cores}{quota}")
    if (memory := device_memory("cpu")) is not None:
        free = psutil.virtual_memory().available
        yield Finding("memory", "ok", f"{format_bytes(memory[0])}, {memory[1]}; {format_bytes(free)} free")
    try:
        found = vector_extensions()
    except UserError as error:
        yield Finding("vector units", "broken", str(error))
        return
    known = ARM if set(found) & set(ARM) else X86
    absent = f" (not {', '.join(each for each in known if each not in found)})" if set(known) - set(found) else ""
    fix = "kernels run without them, more slowly"
    yield Finding("vector units", "ok" if found else "missing", f"{', '.join(found) or 'none'}{absent}", fix)
    precision, reason = Torch().best_precision(TorchConfig("cpu"))
    yield Finding("precision", "ok", f"precision=auto is {precision} on the CPU: {reason}")


def _torch() -> Iterator[Finding]:
    """The library, and the GPUs that it finds."""
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", "broken", f"torch can not be imported: {error}", "pip install torch")
        return
    yield Finding("torch", "ok", torch.__version__)
    for name, title in GPUS.items():
        backend = getattr(torch, name)
        if backend.is_available():
            named = getattr(backend, "get_device_name", lambda number: "of Apple")
            yield Finding(title, "ok", ", ".join(map(named, range(backend.device_count()))))
        elif name == "cuda":
            yield Finding(title, "missing", why_no_gpu(name), "only device=cuda needs one")
    if torch.cuda.is_available():
        lacking = lacking_triton(torch.cuda.get_device_capability())
        fix = "norms, elementwise chains and experts run without it, in more launches: pip install triton"
        yield Finding("Triton", "missing" if lacking else "ok", lacking or "kernels of a GPU are made by it", fix)


def _cpp_compiler() -> Finding:
    """Find the compiler that engine=traced on the CPU takes, and check that it makes a library that loads."""
    fix = "only engine=traced on the CPU needs one: install g++ or clang++, or set CXX to one"
    try:
        command = " ".join(find_compiler()[0])
    except UserError:
        given = os.environ.get("CXX", "").strip()
        return Finding("C++ compiler", "missing", f"CXX={given} can't be run" if given else "none is found", fix)
    try:
        Toolchain().load(['extern "C" int ttrain_doctor() { return 0; }\n'])
    except (TtrainError, OSError) as error:
        return Finding("C++ compiler", "broken", f"{command}: {str(error).splitlines()[0][:200]}", fix)
    return Finding("C++ compiler", "ok", command)
