"""Peak of a device in FLOP/s, measured with a large matrix product: what mfu is relative to; and what follows from it.

With the bytes per second of its memory the peak bounds the time of any kernel from below.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ttrain.core.folders import cache_folder
from ttrain.device.measured import Section, positive
from ttrain.graph import Node

_FIRST, _AGAIN = 0.1, 0.02  # seconds for each of what is measured before a step: two products and a copy
_SIZES = {"cpu": 1024, "cuda": 8192}
_KEPT = Section("peak", positive, max)
_MOVED = 64 * 2**20  # bytes that are copied: more than caches hold
LEAST = 2e-6  # s that a launch takes however small its kernel is
REACHED = 0.6  # share of peak and bandwidth that kernels are taken to reach where none was timed


@dataclass(frozen=True)
class Rates:
    """The best rates of a device: FLOP/s of products, and byte/s of memory, read and written together."""

    flops: float
    nbytes: float

    def seconds(self, node: Node) -> float:
        """Return about how many seconds a kernel takes, from its operations and bytes."""
        return LEAST + self.roof(node.op.flops(node), node.op.nbytes(node)) / REACHED

    def roof(self, flops: int, nbytes: int) -> float:
        """Seconds at these rates: of the operations or of the bytes, whichever takes longer."""
        return max(flops / self.flops, nbytes / self.nbytes)


_rates: dict[str, Rates] = {}  # as this process measured them


def measured_rates(device: str, dtype: str, index: int = 0) -> Rates | None:
    """Return the best rates ever timed on `cpu` or `cuda`, with the current number of threads.

    `dtype` is fp32 or bf16. Every process times some products and copies once, the first one for longer; the best
    numbers are kept in the user's cache folder. None for devices that torch does not drive.
    """
    if device not in _SIZES:
        return None
    key = f"{cache_folder()} {_key(device, dtype, index)}"
    if key not in _rates:
        flops = _cached(_key(device, dtype, index), partial(_measure, device, dtype, index))
        moved = _cached(f"bandwidth {_key(device, 'bytes', index)}", partial(_measure_bandwidth, device, index))
        _rates[key] = Rates(flops, moved)
    return _rates[key]


def _key(device: str, dtype: str, index: int) -> str:
    """Return the conditions that a measurement holds for."""
    import torch

    model = torch.cuda.get_device_name(index) if device == "cuda" else platform.processor() or platform.machine()
    precision = torch.get_float32_matmul_precision()
    parts = [device, model, platform.node(), dtype, precision, torch.get_num_threads(), torch.__version__]
    return " ".join(map(str, parts))


def _measure_bandwidth(device: str, index: int, seconds: float) -> float:
    """Byte/s of a copy, which reads and writes."""
    import torch

    place = torch.device(device, index)
    source, target = (torch.zeros(_MOVED, dtype=torch.uint8, device=place) for _ in range(2))
    return 2 * _MOVED / _fastest(lambda: target.copy_(source), place, seconds)


def _measure(device: str, dtype: str, index: int, seconds: float) -> float:
    """Best FLOP/s over the libraries that torch brings; a neighbour on the machine can only slow a product down."""
    import torch

    size = _SIZES[device]
    place = torch.device(device, index)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    x, y, out = (torch.full((size, size), 0.5, dtype=kind, device=place) for _ in range(3))
    products = [lambda: torch.mm(x, y, out=out)]
    onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if device == "cpu" and kind is torch.float32 and onednn is not None and torch.backends.mkldnn.is_available():
        products.append(lambda: onednn.default(x, y, None, "none", [], ""))
    fastest = min(_fastest(product, place, seconds) for product in products)
    return 2 * size**3 / fastest


def _fastest(product: Callable[[], Any], place: Any, seconds: float) -> float:
    """Seconds of the fastest of the products on a device of torch that fit into the time."""
    import torch

    synchronize = partial(torch.cuda.synchronize, place) if place.type == "cuda" else lambda: None
    fastest, stop = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < stop or fastest == float("inf"):
        synchronize()
        start = time.perf_counter()
        product()
        synchronize()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def _cached(key: str, measure: Callable[[float], float]) -> float:
    """The best of all measurements: a neighbour on the machine can spoil one of them, or many. Later ones are short."""
    before = _KEPT.known().get(key, 0.0)
    best = max(before, measure(_AGAIN if before else _FIRST))
    if best > before:
        _KEPT.keep({key: best})
    return best
