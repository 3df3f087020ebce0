"""The processor: its name, its vector and matrix extensions, and the kind of processor that kernels are compiled for.

`TTRAIN_MARCH` names that kind, as the flag -march of compilers does. Without it kernels are for this processor alone.
"""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from pathlib import Path

from ttrain.core.errors import UserError
from ttrain.core.files import text_of

CPUINFO = Path("/proc/cpuinfo")
X86 = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")
ARM = ("asimd", "sve", "bf16")
VARIABLE = "TTRAIN_MARCH"
NATIVE = "native"
_V2 = ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3")
_V3 = (*_V2, "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
# By the kind of a processor, the extensions that it has at least, by the names of Linux.
_X86_LEVELS: dict[str, tuple[str, ...]] = {"x86-64": (), "x86-64-v2": _V2, "x86-64-v3": _V3, "x86-64-v4": _V4}
_ARM_LEVELS: dict[str, tuple[str, ...]] = {"armv8-a": ("asimd",)}


def processor_name() -> str:
    """Return the processor's model, or what is known instead."""
    return _fields(CPUINFO).get("model name") or platform.processor() or platform.machine()


def processor_features() -> str:
    """Return all that tells this processor from others, as text: architecture, model and extensions."""
    names = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *(f"{name}: {_fields(CPUINFO).get(name, '')}" for name in names)])


def vector_extensions() -> list[str]:
    """Return those of X86 and ARM that kernels may use: the processor has them, and so has the kind of TTRAIN_MARCH."""
    flags, kind = _flags(), march()
    usable = flags if kind == NATIVE else flags & set(_levels()[kind])
    return [name for name in (*X86, *ARM) if name in usable]


def is_x86() -> bool:
    """True on x86 processors."""
    return platform.machine().lower() in ("x86_64", "amd64", "i686")


def march() -> str:
    """Return the kind of processor that kernels are compiled for: `native`, or what TTRAIN_MARCH names.

    Raises UserError for a kind that is not known, or whose instructions this processor does not have.
    """
    given = os.environ.get(VARIABLE, "").strip() or NATIVE
    if given == NATIVE:
        return given
    known = _levels()
    if given not in known:
        raise UserError(
            f"{VARIABLE}={given} is not known on {platform.machine()}. It names the kind of processor that kernels are "
            f"compiled for: {NATIVE} (this processor, as without it), {', '.join(known)}."
        )
    absent = set(known[given]) - _flags()
    if absent:
        raise UserError(
            f"{VARIABLE}={given}: this processor ({processor_name()}) does not have {', '.join(sorted(absent))}, so it "
            f"can't run such kernels. Give a lower kind of {', '.join(known)}, or unset {VARIABLE}."
        )
    return given


def _levels() -> dict[str, tuple[str, ...]]:
    return _X86_LEVELS if is_x86() else _ARM_LEVELS


def _flags() -> set[str]:
    """Return all extensions that the system names."""
    return set((_fields(CPUINFO).get("flags") or _fields(CPUINFO).get("Features", "")).split())


@lru_cache(maxsize=1)
def _fields(path: Path) -> dict[str, str]:
    """Return the first value of every field of /proc/cpuinfo. It is kept, because Linux takes 20 ms to write it."""
    lines = reversed(text_of(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
