"""The OpenMP runtime whose threads torch runs on, found among the libraries of this process."""

from __future__ import annotations

import ctypes
import os
import re
from functools import lru_cache
from pathlib import Path

_RUNTIMES = re.compile(r"lib(gomp|iomp5|omp)\b[^/]*\.(so|dylib)[.\d]*$")
# gcc's entry points, which Intel's and LLVM's runtimes also offer: outlined function, its data, threads, flags.
FORK, NUMBER, COUNT = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"


@lru_cache(maxsize=1)
def entry_points() -> dict[str, int]:
    """Addresses of FORK, NUMBER and COUNT; empty where no runtime is loaded, for none is loaded here."""
    import torch  # its runtime comes with it

    beside = str(Path(torch.__file__).parent)
    for path in sorted(_loaded(), key=lambda path: not path.startswith(beside)):
        try:
            runtime = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            names = (FORK, NUMBER, COUNT)
            return {name: ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value or 0 for name in names}
        except (OSError, AttributeError):
            continue
    return {}


def _loaded() -> list[str]:
    """Paths of OpenMP runtimes that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
    except OSError:
        return []
    paths = {line[line.index("/") :] for line in lines if "/" in line}
    return [path for path in paths if _RUNTIMES.search(path)]
