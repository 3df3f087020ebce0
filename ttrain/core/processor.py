"""The processor's name, and the vector and matrix extensions that kernels can use."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
X86 = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")
ARM = ("asimd", "sve", "bf16")


def processor_name() -> str:
    """Its model, or what is known instead."""
    return _field("model name") or platform.processor() or platform.machine()


def vector_extensions() -> list[str]:
    """Those of X86 and ARM that it has, by the names of Linux."""
    flags = set((_field("flags") or _field("Features")).split())
    return [name for name in (*X86, *ARM) if name in flags]


def _field(key: str) -> str:
    """The first value of a field of /proc/cpuinfo, or nothing."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), "")
