"""A device that knows only shapes. It tests graph, plan and capture rules without arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ttrain.core.errors import CaptureError, ShapeError
from ttrain.core.spec import TensorSpec
from ttrain.device.base import NUMPY_DTYPES, Buffer, Delivery, Device, Kernel, Launch, Table

Buffers = Sequence[Buffer | None]


@dataclass
class NullArena:
    """A range of bytes that does not exist."""

    number: int
    nbytes: int


@dataclass
class NullBuffer:
    """The place where a tensor would lie."""

    arena: NullArena
    offset: int
    spec: TensorSpec


class _EveryOp(dict[str, Kernel]):
    """A kernel for every op; it only records its launches."""

    def __init__(self, device: NullDevice) -> None:
        super().__init__()
        self._device = device

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Kernel:
        return Kernel(self._device.binding(name), self._device.deliveries.get(name, Delivery.OUT))


class NullDevice(Device):
    """Computes nothing, counts everything. All values read as zero.

    Accepts every op. With the `rows` of another device's table it plans as that device does: by the ops it has kernels
    for, how they deliver, and the workspace they want.
    """

    name = "null"
    computes = False
    supports_capture = True

    def __init__(self, rows: Mapping[str, Kernel] | None = None) -> None:
        super().__init__()
        self.deliveries: dict[str, Delivery] = {}  # tests set rows here to play another device
        self.launched: list[str] = []
        self.capturing: str | None = None
        self.closed = False
        host = rows.host if isinstance(rows, Table) else None
        self._table: Mapping[str, Kernel] = _EveryOp(self)
        if rows is not None:
            self._table = Table(self._recording(rows), None if host is None else self._recording(host))

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        return self._table

    def _recording(self, rows: Mapping[str, Kernel]) -> dict[str, Kernel]:
        return {name: replace(kernel, bind=self.binding(name)) for name, kernel in rows.items()}

    def binding(self, name: str) -> Callable[..., Launch]:
        """Return the bind of a kernel whose launches are only recorded."""
        return lambda ins, outs, attributes, work: partial(self.log, name, ins, outs)

    def log(self, name: str, inputs: Buffers, outputs: Buffers) -> list[Buffer]:
        if self.closed:
            raise CaptureError(f"{name} launched on a closed device")
        self.launched.append(name)
        return list(outputs)

    def _allocate(self, nbytes: int) -> NullArena:
        if self.capturing is not None:
            raise CaptureError(f"{nbytes} bytes allocated while {self.capturing} is being captured")
        return NullArena(self.counters.allocations, nbytes)

    def place(self, arena: NullArena, offset: int, spec: TensorSpec) -> NullBuffer:
        if offset + spec.nbytes > max(arena.nbytes, 1):
            raise ShapeError(f"{spec} at byte {offset} does not fit an arena of {arena.nbytes} bytes")
        return NullBuffer(arena, offset, spec)

    def upload(self, buffer: NullBuffer, array: np.ndarray) -> None:
        if self.capturing is not None:
            raise CaptureError(f"host write while {self.capturing} is being captured")
        if tuple(array.shape) != buffer.spec.shape:
            raise ShapeError(f"upload: got {array.shape}, expected {buffer.spec.shape}")
        self.counters.uploads += 1

    def download(self, buffer: NullBuffer) -> np.ndarray:
        self.counters.downloads += 1
        return np.zeros(buffer.spec.shape, NUMPY_DTYPES[buffer.spec.dtype])

    def copy(self, source: NullBuffer, destination: NullBuffer) -> None:
        self.log("copy", [source], [destination])

    def synchronize(self) -> None:
        return

    def memory(self) -> dict[str, int]:
        return {"in_use": self.counters.allocated_bytes, "peak": self.counters.allocated_bytes, "total": 0}

    def describe(self) -> dict[str, Any]:
        return {"name": "null", "computes": False}

    def capture(self, launches: Sequence[Launch], name: str) -> Launch:
        self.capturing = name
        try:
            recorded = len(self.launched)
            for launch in launches:
                launch()
            captured = self.launched[recorded:]
            del self.launched[recorded:]
        finally:
            self.capturing = None
        self.counters.captures += 1

        def replay() -> None:
            if self.closed:
                raise CaptureError(f"{name} replayed on a closed device")
            self.counters.replays += 1
            self.launched.extend(captured)

        return replay

    def close(self) -> None:
        self.closed = True
