"""The threads that compiled kernels run on: one pool a process, made by the library that is loaded first."""

from __future__ import annotations

import ctypes

from ttrain.device.torch.native import openmp

_pool = 0  # its address


def join(library: ctypes.CDLL, threads: int) -> int:
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
    found = openmp.entry_points() if wanted else {}
    for pointer, name in (("fork", openmp.FORK), ("number", openmp.NUMBER), ("count", openmp.COUNT)):
        ctypes.c_void_p.in_dll(library, f"ttrain_openmp_{pointer}").value = found.get(name)
