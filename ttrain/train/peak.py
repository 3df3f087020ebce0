"""Peak of a device in FLOP/s, measured with a large matrix product: what mfu is relative to."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ttrain.train.files import replace_file

_SECONDS = 0.3
_SIZES = {"cpu": 1024, "cuda": 8192}


def measured_peak(device: str, dtype: str, index: int = 0) -> float | None:
    """FLOP/s of the best of several square matmuls on `cpu` or `cuda`, with the current number of threads.

    `dtype` is fp32 or bf16. The number is kept in the user's cache folder, so a machine measures it once. None for
    devices that torch does not drive.
    """
    if device not in _SIZES:
        return None
    import torch

    model = torch.cuda.get_device_name(index) if device == "cuda" else platform.processor() or platform.machine()
    precision = torch.get_float32_matmul_precision()
    parts = [device, model, platform.node(), dtype, precision, torch.get_num_threads(), torch.__version__]
    return _cached(" ".join(map(str, parts)), lambda: _measure(torch, device, dtype, index))


def _measure(torch: Any, device: str, dtype: str, index: int) -> float:
    """Best FLOP/s; the best, because a neighbour on the machine can only slow a product down."""
    size = _SIZES[device]
    place = torch.device(device, index) if device == "cuda" else torch.device(device)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    x, y, out = (torch.full((size, size), 0.5, dtype=kind, device=place) for _ in range(3))
    fastest, stop = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < stop or fastest == float("inf"):
        if device == "cuda":
            torch.cuda.synchronize(index)
        start = time.perf_counter()
        torch.mm(x, y, out=out)
        if device == "cuda":
            torch.cuda.synchronize(index)
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest


def _cached(key: str, measure: Callable[[], float]) -> float:
    path = cache_folder() / "peak.json"
    try:
        known = json.loads(path.read_text("utf-8"))
        if float(known[key]) > 0:
            return float(known[key])
    except (OSError, ValueError, KeyError, TypeError):
        known = {}
    peak = measure()
    known = known if isinstance(known, dict) else {}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({**known, key: peak}, indent=2) + "\n")
    except OSError:  # a home that can't be written: the next run measures again
        pass
    return peak


def cache_folder() -> Path:
    """Where ttrain keeps what it can compute again: `$XDG_CACHE_HOME/ttrain`, else `~/.cache/ttrain`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ttrain"
