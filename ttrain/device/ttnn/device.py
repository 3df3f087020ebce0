"""Tenstorrent devices behind the contract of device/base.py: whole padded tensors, traces, command queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ttrain.core.errors import GraphError
from ttrain.core.spec import TensorSpec
from ttrain.device.base import Buffers, Device, Kernel, Launch
from ttrain.device.ttnn.kernels import kernel_table
from ttrain.device.ttnn.kernels.common import Context
from ttrain.device.ttnn.planned import TileDevice, both_tables, host_device
from ttrain.device.ttnn.runtime.mesh import NOTES, DoubleBuffer, Mesh
from ttrain.device.ttnn.runtime.subdevices import divide
from ttrain.device.ttnn.runtime.watch import Watch
from ttrain.device.ttnn.settings import TenstorrentConfig
from ttrain.device.ttnn.tensors.device_tensor import DeviceTensor, IntegerInput, deliver
from ttrain.device.ttnn.tensors.store import Store, TileLayout


@dataclass
class BufferPool:
    """Device tensors in place of an arena, made when they are asked for.

    An offset means one tensor, which values take turns in, each by a view with its own spec.
    """

    matrices: str | None = None  # dtype that matrices are held in, if not their spec's
    tensors: dict[int, DeviceTensor] = field(default_factory=dict)
    views: dict[tuple[int, TensorSpec], DeviceTensor] = field(default_factory=dict)


def open_device(config: TenstorrentConfig) -> TenstorrentDevice:
    """Open device=tt|n150|n300|t3000|p150. Raises DeviceUnavailable, DeviceBusy, or ConfigError."""
    mesh = Mesh.open(config)
    try:
        if config.subdevices > 1:
            divide(mesh, config.subdevices)
        return TenstorrentDevice(mesh, config)
    except BaseException:
        mesh.close()
        raise


class TenstorrentDevice(TileDevice):
    """One mesh of chips. Values are computed unless it is a mocked board."""

    supports_capture = True

    def __init__(self, mesh: Mesh, config: TenstorrentConfig, watch: Watch | None = None) -> None:
        """Parts of one chip share the `watch` of the whole."""
        super().__init__()
        self.mesh, self.config, self.name = mesh, config, config.name
        self.caution = f"SIMULATED on {config.name}: {NOTES['simulator']}." if config.mode == "simulator" else None
        reset = "Reset the card with tt-smi -r, check the links with task=doctor, and start again."
        mend = reset if config.mode == "silicon" else "Start it again."
        self.watch = watch or Watch(config.name, config.step_timeout_s, mesh.launched, mend, self.last_words)
        self.computes, self.chips = config.mode != "mock", mesh.chips
        self.store = Store(mesh.tt, mesh.handle, mesh.chips, mesh.banks, self.count_allocation, mesh.queue)
        self.host = host_device(config, self.computes) if config.host_resident else None
        # True if the host can go on while a step computes: to write the next inputs, or to launch another replica.
        self.overlaps = config.command_queues == 2 and self.host is None
        # By the buffers' id, which the pair keeps alive.
        self._replicas: list[Device] = []
        self._closed = False

    @cached_property
    def context(self) -> Context:
        """The context that kernel rows are built in."""
        mesh, core_subset = self.mesh, self.mesh.part is not None
        fused = self.config.fuses and not core_subset
        context = Context(self.store, mesh.precision, mesh.grid, mesh.whole_grid, fused, core_subset=core_subset)
        if core_subset:
            mesh.tt.constant = context.constant
        return context

    @cached_property
    def kernels(self) -> Mapping[str, Kernel]:
        rows = kernel_table(self.context)
        return rows if self.host is None else both_tables(rows, self.host, self.store)

    def allocate_arena(self, nbytes: int, purpose: str, copies: bool = False) -> BufferPool:
        """A pool takes no memory; its tensors do, when they are made."""
        if self._closed:
            raise GraphError(f"device {self.name} was closed; nothing can be allocated on it any more.")
        return BufferPool("bfloat8_b" if copies and self.config.weights == "bf8" else None)

    def _allocate(self, nbytes: int) -> BufferPool:
        return BufferPool()

    def place(self, arena: BufferPool, offset: int, spec: TensorSpec) -> DeviceTensor:
        """Return the tensor of an offset, seen as `spec`."""
        if (offset, spec) not in arena.views:
            whole = arena.tensors.get(offset)
            made = self._new(spec, arena.matrices) if whole is None else whole.view(spec)
            arena.views[offset, spec] = made
            arena.tensors.setdefault(offset, made)
        return arena.views[offset, spec]

    def _new(self, spec: TensorSpec, matrices: str | None) -> DeviceTensor:
        if not spec.dtype.is_floating:
            return IntegerInput(self.store, spec)
        tensor = DeviceTensor(self.store, spec)
        if matrices is not None and spec.rank == 2:
            tensor.hold_as(TileLayout(tensor.layout.shape, matrices))
        return tensor

    def launching(self, what: str) -> AbstractContextManager[None]:
        return self.watch(what)

    def upload(self, buffer: DeviceTensor, array: np.ndarray) -> None:
        with self.watch("an upload"):
            buffer.upload(array)

    def upload_inputs(self, buffers: Mapping[str, DeviceTensor], arrays: Mapping[str, np.ndarray]) -> None:
        """All inputs, then what the host derives from them."""
        with self.watch("the upload of a step's inputs"):
            super().upload_inputs(buffers, arrays)
            self.store.refresh()

    def prefetch(self, buffers: Buffers, arrays: Mapping[str, np.ndarray]) -> Launch | None:
        if not self.overlaps or self.mesh.part is not None:
            return None  # the queue of a sub-device launches too: a write waits for what was launched before
        if buffers.transfer is None:
            if self._frozen_by is not None:
                return None
            buffers.transfer = DoubleBuffer(self.mesh, self.store)

        def upload() -> None:
            Device.upload_inputs(self, buffers, arrays)
            self.store.refresh()

        with self.watch("the upload of the next inputs"):
            launch: Launch = buffers.transfer.write(upload)
            return launch

    def download(self, buffer: DeviceTensor) -> np.ndarray:
        with self.watch("what was launched"):
            values = buffer.download()
            self.mesh.settled()
        return values

    def deliver(self, launch: Launch, outputs: Sequence[DeviceTensor]) -> None:
        deliver(launch(), outputs)

    def copy(self, source: DeviceTensor, destination: DeviceTensor) -> None:
        with self.watch("a copy"):
            self.store.tt.copy(source.t, destination.t)

    def synchronize(self) -> None:
        with self.watch("what was launched"):
            self.mesh.synchronize()

    def memory(self) -> dict[str, int]:
        return self.mesh.memory()

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "computes": self.computes, **self.mesh.describe()}

    def capture(self, launches: Sequence[Launch], name: str) -> Launch:
        """Record the launches as one trace. A mocked board makes an empty trace, and runs them one by one."""
        with self.watch(f"the capture of {name}"):
            self.store.refresh()
            return self.mesh.capture(launches, name)

    def replicas(self) -> list[Device]:
        if len(self._replicas) < len(self.mesh.parts):
            self._replicas = [TenstorrentDevice(part, self.config, self.watch) for part in self.mesh.parts]
            for replica in self._replicas:
                replica.last_words = self.last_words
        return self._replicas or [self]

    def expect_capture(self) -> None:
        self.context.replayed = True

    def step_facts(self) -> dict[str, int]:
        host = {} if self.host is None else {"host_bytes": self.host.counters.allocated_bytes}
        return self.mesh.step_facts() | host

    def step_peaks(self, launches: Sequence[Launch]) -> dict[str, int]:
        with self.watch("a step"):
            return self.mesh.peaks(launches) if self.mesh.mocked else {}

    def close(self) -> None:
        """Release captures, then the device. Closing twice does nothing."""
        if not self._closed:
            self._closed = True
            for replica in self._replicas:
                replica.close()
            with self.watch("closing the device"):
                self.mesh.close()
            if self.mesh.part is None:
                self.watch.close()
