"""A device that knows only shapes: steps are planned and placed on it, and nothing is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ttrain.core.errors import ShapeError
from ttrain.core.spec import TensorSpec
from ttrain.device.base import NUMPY_DTYPES, Buffer, Device, Kernel, Launch, Table, chain


def _idle(ins: Sequence[Buffer | None], outs: Sequence[Buffer], *_: object) -> Launch:
    """Bind a kernel that leaves its outputs as they are."""
    return lambda: outs


class _EveryOp(dict[str, Kernel]):
    """A kernel for every op."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Kernel:
        return Kernel(_idle)


class NullDevice(Device):
    """Computes nothing. All values read as zero. An arena is known by its bytes, a buffer by its spec.

    Accepts every op. With the `rows` of another device's table it plans as that device does: by the ops it has kernels
    for, how they deliver, and the workspace they want.
    """

    name = "null"
    computes = False
    supports_capture = True
    kernels: Mapping[str, Kernel] = _EveryOp()

    def __init__(self, rows: Mapping[str, Kernel] | None = None) -> None:
        super().__init__()
        if rows is not None:
            host = rows.host if isinstance(rows, Table) else None
            self.kernels = Table(_without_work(rows), None if host is None else _without_work(host))

    def _allocate(self, nbytes: int) -> int:
        return nbytes

    def place(self, arena: int, offset: int, spec: TensorSpec) -> TensorSpec:
        if offset + spec.nbytes > max(arena, 1):
            raise ShapeError(f"{spec} at byte {offset} does not fit an arena of {arena} bytes")
        return spec

    def upload(self, buffer: TensorSpec, array: np.ndarray) -> None:
        if tuple(array.shape) != buffer.shape:
            raise ShapeError(f"upload: got {array.shape}, expected {buffer.shape}")

    def download(self, buffer: TensorSpec) -> np.ndarray:
        return np.zeros(buffer.shape, NUMPY_DTYPES[buffer.dtype])

    def copy(self, source: TensorSpec, destination: TensorSpec) -> None:
        return

    def synchronize(self) -> None:
        return

    def memory(self) -> dict[str, int]:
        return {"in_use": self.counters.allocated_bytes, "peak": self.counters.allocated_bytes, "total": 0}

    def describe(self) -> dict[str, Any]:
        return {"name": "null", "computes": False}

    def capture(self, launches: Sequence[Launch], name: str) -> Launch:
        return chain(*launches)


def _without_work(rows: Mapping[str, Kernel]) -> dict[str, Kernel]:
    return {name: replace(row, bind=_idle) for name, row in rows.items()}
