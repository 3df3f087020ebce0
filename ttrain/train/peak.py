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

MEASUREMENTS = 3
_SECONDS = 0.15
_SIZES = {"cpu": 1024, "cuda": 8192}


def measured_peak(device: str, dtype: str, index: int = 0) -> float | None:
    """FLOP/s of the best of several square matmuls on `cpu` or `cuda`, with the current number of threads.

    `dtype` is fp32 or bf16. The number is kept in the user's cache folder, so only the first runs on a machine measure
    it. None for devices that torch does not drive.
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
    """The best of the first MEASUREMENTS measurements: a neighbour on the machine can spoil one of them."""
    path = cache_folder() / "peak.json"
    known = _read(path)
    entry = known.get(key, {"flops": 0.0, "measurements": 0})
    if entry["measurements"] >= MEASUREMENTS:
        return entry["flops"]
    entry = {"flops": max(entry["flops"], measure()), "measurements": entry["measurements"] + 1}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({**known, key: entry}, indent=2) + "\n")
    except OSError:  # a home that can't be written: every run measures
        pass
    return entry["flops"]


def _read(path: Path) -> dict[str, Any]:
    """Entries of the cache that are whole."""
    try:
        stored = json.loads(path.read_text("utf-8"))
        return {key: {"flops": float(e["flops"]), "measurements": int(e["measurements"])} for key, e in stored.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def cache_folder() -> Path:
    """Where ttrain keeps what it can compute again: `$XDG_CACHE_HOME/ttrain`, else `~/.cache/ttrain`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ttrain"
