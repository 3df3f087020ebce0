"""Threads of compiled kernels: a pool of their own, or those of the OpenMP runtime that torch runs on.

There is one pool a process, made by the library that is loaded first. The runtime is found among the libraries of this
process.
"""

from __future__ import annotations

import ctypes
import os
import re
from functools import lru_cache
from pathlib import Path

from ttrain.core.files import text_of

_RUNTIMES = re.compile(r"lib(gomp|iomp5|omp)\b[^/]*\.(so|dylib)[.\d]*$")
# gcc's entry points, which Intel's and LLVM's runtimes also offer: outlined function, its data, threads, flags.
FORK, NUMBER, COUNT = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"


def address_of(library: ctypes.CDLL, symbol: str) -> int:
    """Return the address of a function. Raises AttributeError where the library has none of this name."""
    return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value or 0


@lru_cache(maxsize=1)
def entry_points() -> dict[str, int]:
    """Addresses of FORK, NUMBER and COUNT; empty where no runtime is loaded, for none is loaded here."""
    import torch  # its runtime comes with it

    beside = str(Path(torch.__file__).parent)
    mapped = [line for line in text_of(Path("/proc/self/maps")).splitlines() if "/" in line]
    runtimes = set(filter(_RUNTIMES.search, (line[line.index("/") :] for line in mapped)))
    for path in sorted(runtimes, key=lambda path: not path.startswith(beside)):
        try:
            runtime = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return {name: address_of(runtime, name) for name in (FORK, NUMBER, COUNT)}
        except (OSError, AttributeError):
            continue
    return {}


_pool = 0  # its address


def join_pool(library: ctypes.CDLL, threads: int) -> int:
    """Let a library use the pool, which gets that many threads, the caller among them; how many it has.

    The pool outlives everything: its threads sleep where nothing is to be done, and end with the process.
    """
    global _pool
    if threads == 1:
        return 1
    _pool = _pool or ctypes.addressof(ctypes.c_char.in_dll(library, "ttrain_own_pool"))
    grow = library.ttrain_grow
    grow.argtypes, grow.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_int
    ctypes.c_void_p.in_dll(library, "ttrain_pool").value = _pool
    return int(grow(_pool, threads))


def use_openmp(library: ctypes.CDLL, wanted: bool) -> None:
    """Run a library on the threads of OpenMP's runtime where it is `wanted` and one is loaded, else on its own.

    For plans that launch products of other libraries as well: both would spin for work on the same cores.
    """
    found = entry_points() if wanted else {}
    for pointer, name in (("fork", FORK), ("number", NUMBER), ("count", COUNT)):
        ctypes.c_void_p.in_dll(library, f"ttrain_openmp_{pointer}").value = found.get(name)
