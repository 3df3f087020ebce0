"""Memory of this process, or of the GPU that it uses."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import psutil

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def return_free_memory() -> None:
    """Collect garbage and let the allocator give back what is free, where it can (glibc)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class PeakMemory:
    """Peak in bytes since the last reset: resident size on the host (Linux: VmHWM), or torch's allocator on a GPU."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"

    def now(self) -> int:
        if self._cuda:
            import torch

            return torch.cuda.memory_allocated()
        return int(psutil.Process().memory_info().rss)

    def reset(self) -> bool:
        """Start anew from what is in use; whether the system can do that."""
        if self._cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()
            return True
        try:
            _RESET.write_text("5", "ascii")  # see proc(5): the peak becomes the present size
        except OSError:
            return False
        return True

    def peak(self) -> int:
        if self._cuda:
            import torch

            return torch.cuda.max_memory_allocated()
        try:
            lines = _STATUS.read_text("ascii", errors="replace").splitlines()
        except OSError:
            return self._peak_of_usage()
        sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
        return sizes[0] if sizes else self._peak_of_usage()

    def _peak_of_usage(self) -> int:
        """Of the whole life of the process, where there is no /proc."""
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others KiB
        return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, self.now())
