"""The device without arithmetic, which also notes what runs on it and refuses what a real one could not repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ttrain.core.errors import CaptureError
from ttrain.core.spec import TensorSpec
from ttrain.device.base import Buffer, Delivery, Kernel, Launch
from ttrain.device.null import NullDevice


class NumberedArena(int):
    """Bytes that are told from as many others by a number."""

    number: int


class _Recorded(dict[str, Kernel]):
    """A kernel for every op; it notes its launches."""

    def __init__(self, device: RecordingDevice) -> None:
        super().__init__()
        self._device = device

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Kernel:
        return Kernel(self._device.binding(name), self._device.deliveries.get(name, Delivery.OUT))


class RecordingDevice(NullDevice):
    """Nothing may be allocated or written while a step is captured, and nothing run once the device is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.deliveries: dict[str, Delivery] = {}  # tests set rows here to play another device
        self.launched: list[str] = []
        self.capturing: str | None = None
        self.closed = False
        self.captures = self.replays = 0
        self.kernels = _Recorded(self)

    def binding(self, name: str) -> Callable[..., Launch]:
        """Return the bind of a kernel whose launches are only noted."""
        return lambda ins, outs, attributes, work: partial(self.log, name, ins, outs)

    def log(self, name: str, inputs: Sequence[Buffer | None], outputs: Sequence[Buffer]) -> list[Buffer]:
        if self.closed:
            raise CaptureError(f"{name} launched on a closed device")
        self.launched.append(name)
        return list(outputs)

    def _allocate(self, nbytes: int) -> int:
        if self.capturing is not None:
            raise CaptureError(f"{nbytes} bytes allocated while {self.capturing} is being captured")
        arena = NumberedArena(super()._allocate(nbytes))
        arena.number = self.counters.allocations
        return arena

    def upload(self, buffer: TensorSpec, array: np.ndarray) -> None:
        if self.capturing is not None:
            raise CaptureError(f"host write while {self.capturing} is being captured")
        super().upload(buffer, array)

    def copy(self, source: TensorSpec, destination: TensorSpec) -> None:
        self.log("copy", [source], [destination])

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
        self.captures += 1

        def replay() -> None:
            if self.closed:
                raise CaptureError(f"{name} replayed on a closed device")
            self.replays += 1
            self.launched.extend(captured)

        return replay

    def close(self) -> None:
        self.closed = True
