"""An open mesh of chips: opening under a time-out, traces, queues, memory, description, and closing in every case."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any

from ttrain.core.errors import EXIT_DEVICE_BUSY, CaptureError, ConfigError, DeviceBusy, DeviceUnavailable
from ttrain.device.base import Launch, chain
from ttrain.device.ttnn.runtime.environment import holders, import_ttnn, opening_failure, reason, wheel_version
from ttrain.device.ttnn.runtime.identity import arch_of, check_board
from ttrain.device.ttnn.settings import TenstorrentConfig
from ttrain.device.ttnn.tensors.store import Store, TileLayout

NOTES = {
    "mock": "a mocked board: shapes, memory and dispatch are real, values are not computed",
    "simulator": "the numbers come from a simulator, not from a card; its times say nothing about speed",
}


class Mesh:
    """The runtime `tt` and the handle of its open chips."""

    def __init__(self, tt: Any, handle: Any, config: TenstorrentConfig) -> None:
        self.tt, self.handle, self.config = tt, handle, config
        rows, columns = config.mesh
        self.chips = rows * columns
        self.mocked = config.mode == "mock"
        self.queue = 0  # that launches
        self.part: int | None = None  # which sub-device, where this is one
        self.traces: list[tuple[Any, list[Any]]] = []  # with the tensors that replays write
        self.precision = self.matrix_unit(config.math_fidelity, config.fp32_accumulate)
        size = handle.compute_with_storage_grid_size()
        self.cores = (size.y, size.x)
        self.banks = tt.get_memory_view(handle, tt.BufferType.DRAM).num_banks
        self.whole_grid = tt.CoreGrid(y=size.y, x=size.x)
        self.grid = None  # of products: all cores
        if config.core_grid is not None:
            rows, columns = config.core_grid
            if rows > size.y or columns > size.x:  # ttnn itself takes such a grid, and fails later
                told = f"device.core_grid=[{rows},{columns}]: the chip has {size.y} rows and {size.x} columns of cores"
                raise ConfigError(f"{told}. Give at most that, or null for all.")
            self.grid = tt.CoreGrid(y=rows, x=columns)
        self.manager: Any = None  # of sub-devices
        self.parts: list[Mesh] = []  # the mesh as each of them sees it

    @classmethod
    def open(cls, config: TenstorrentConfig) -> Mesh:
        """Raises DeviceUnavailable, DeviceBusy where another process holds a card for too long, or ConfigError."""
        tt = import_ttnn(config)
        handle: Any = None
        try:
            handle = _opened(tt, config)
            check_board(tt, handle, config)
            return cls(tt, handle, config)
        except BaseException as error:
            if handle is not None:
                tt.close_mesh_device(handle)
            if isinstance(error, RuntimeError):
                raise DeviceUnavailable(f"device={config.name}: {opening_failure(error)}") from error
            raise

    def matrix_unit(self, fidelity: str, wide: bool) -> Any:
        """Return a config of the matrix unit, which sums in fp32 if `wide`."""
        options = {"math_approx_mode": False, "fp32_dest_acc_en": wide, "packer_l1_acc": True}
        passes = getattr(self.tt.MathFidelity, fidelity)
        return self.tt.init_device_compute_kernel_config(self.handle.arch(), math_fidelity=passes, **options)

    def record(self, queue: int) -> Any:
        """An event that happens when a queue has done all it was given so far."""
        return self.tt.record_event(self.handle, queue)

    def wait(self, queue: int, event: Any) -> None:
        """Hold a queue back until an event. A mocked board crashes on that, so its queues are not ordered."""
        if not self.mocked:
            self.tt.wait_for_event(queue, event)

    def synchronize(self) -> None:
        self.tt.synchronize_device(self.handle)

    def launched(self) -> int:
        """Number of device ops that were started in this process."""
        return int(self.tt._ttnn.get_device_operation_id())

    def capture(self, launches: Sequence[Launch], name: str) -> Launch:
        """Record the launches. A mocked board can't hold ops: its trace stays empty, and a replay launches again."""
        tt, run = self.tt, chain(*launches)
        self.settled()
        trace = tt.begin_trace_capture(self.handle, cq_id=self.queue)
        try:
            if not self.mocked:
                run()
        except BaseException as error:  # also Ctrl-C: an open capture would keep the device from closing
            tt.end_trace_capture(self.handle, trace, cq_id=self.queue)
            tt.release_trace(self.handle, trace)
            if isinstance(error, RuntimeError):
                raise CaptureError(f"{name}: a launch can't be captured: {reason(error)}") from error
            raise
        tt.end_trace_capture(self.handle, trace, cq_id=self.queue)
        if self.mocked:
            tt.release_trace(self.handle, trace)
            return run
        self.traces.append((trace, self.settled()))
        return partial(tt.execute_trace, self.handle, trace, cq_id=self.queue, blocking=False)

    def settled(self) -> list[Any]:
        """Return what a sub-device kept alive until now; call it when everything launched is done."""
        return [] if self.part is None else self.tt.let_go()

    def memory(self) -> dict[str, int]:
        """Bytes of DRAM over all banks of one chip; the peak is not known to ttnn."""
        view = self.tt.get_memory_view(self.handle, self.tt.BufferType.DRAM)
        used, total = view.total_bytes_allocated_per_bank, view.total_bytes_per_bank
        return {"in_use": used * view.num_banks, "peak": used * view.num_banks, "total": total * view.num_banks}

    def step_facts(self) -> dict[str, int]:
        """Device ops launched so far, programs built so far, and bytes of core memory in use over the chip."""
        tt = self.tt
        small = tt.get_memory_view(self.handle, tt.BufferType.L1)
        return {
            "device_ops": self.launched(),
            "programs": self.handle.num_program_cache_entries(),
            "dram_bytes": self.memory()["in_use"],
            "l1_bytes": small.total_bytes_allocated_per_bank * small.num_banks,
        }

    def peaks(self, launches: Sequence[Launch]) -> dict[str, int]:
        """Largest memory of one run of the launches: bytes of DRAM, and bytes of one core's memory.

        The second figure comes from a run that dispatches nothing and leaves tensors without memory behind, so the
        launches must not run again.
        """
        graph = self.tt.graph
        before = self.memory()["in_use"]
        live = peak = 0
        for node in self._captured(launches, graph.RunMode.NORMAL):
            if node["node_type"] in _BUFFER_CHANGES and node["params"]["type"] == "DRAM":
                live += _BUFFER_CHANGES[node["node_type"]] * int(node["params"]["size"])
                peak = max(peak, live)
        usage = graph.extract_resource_usage_per_core(self._captured(launches, graph.RunMode.NO_DISPATCH))
        return {"peak_dram_bytes": before + peak, "peak_core_bytes": int(usage.peak_total)}

    def _captured(self, launches: Sequence[Launch], mode: Any) -> Any:
        self.tt.graph.begin_graph_capture(mode)
        try:
            for launch in launches:
                launch()
        finally:
            captured = self.tt.graph.end_graph_capture()
        return captured

    def describe(self) -> dict[str, Any]:
        """Facts for the run record."""
        note = NOTES.get(self.config.mode)
        if self.mocked and self.part is not None:
            note = f"{note}; sub-devices are in a dry run: made but not loaded, and all launch on queue 0"
        return {
            **{key: getattr(self.config, key) for key in ("mode", "mesh", "math_fidelity", "fp32_accumulate")},
            "arch": arch_of(self.handle),
            "cores": list(self.cores),
            "queues": self.config.command_queues,
            "ttnn": wheel_version(),
            "memory_bytes": self.memory()["total"],
            **({} if self.part is None else {"subdevice": self.part}),
            **({} if note is None else {"note": note}),
        }

    def close(self) -> None:
        """Releases traces, then the chips; a sub-device only its traces."""
        for trace, _ in self.traces:
            self.tt.release_trace(self.handle, trace)
        self.traces.clear()
        self.settled()
        if self.part is not None:
            return
        if self.manager is not None:
            if not self.mocked:
                self.handle.clear_loaded_sub_device_manager()
            self.handle.remove_sub_device_manager(self.manager)
        self.tt.close_mesh_device(self.handle)
        if self.chips > 1:
            self.tt.set_fabric_config(self.tt.FabricConfig.DISABLED)


_BUFFER_CHANGES = {"buffer_allocate": 1, "buffer_deallocate": -1}


def _opened(tt: Any, config: TenstorrentConfig) -> Any:
    """The handle of an open mesh, by a thread that is waited for only so long."""
    rows, columns = config.mesh
    # Newer ops place programs on cores that a mocked board gives to its dispatch unless workers dispatch.
    dispatch = "worker" if config.dispatch == "auto" and config.mode != "silicon" else config.dispatch
    options: dict[str, Any] = {
        "l1_small_size": config.l1_small_kb * 1024,
        "trace_region_size": config.trace_region_mb << 20,
        "num_command_queues": config.command_queues,
    }
    if dispatch != "auto":
        options["dispatch_core_config"] = tt.DispatchCoreConfig(getattr(tt.DispatchCoreType, dispatch.upper()))
    opening = Future[Any]()

    def work() -> None:
        try:
            if rows * columns > 1:
                tt.set_fabric_config(tt.FabricConfig.FABRIC_1D)
            opening.set_result(tt.open_mesh_device(tt.MeshShape(rows, columns), **options))
        except BaseException as error:
            opening.set_exception(error)

    threading.Thread(target=work, name="open ttnn device", daemon=True).start()
    try:
        return opening.result(config.open_timeout_s)
    except FutureTimeout:
        atexit.register(_leave, opening)
        held = holders()
        raise DeviceBusy(
            f"device={config.name}: the card did not open within {config.open_timeout_s} s. "
            f"{f'It is held by {held}' if held else 'No other process of this user holds it; tt-smi -r resets it'}. "
            "Try again later, or give device.open_timeout_s more seconds."
        ) from None


def _leave(opening: Future[Any]) -> None:
    """End the process where the device still does not open: tearing ttnn down would wait for it."""
    if not opening.done():
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(EXIT_DEVICE_BUSY)


class DoubleBuffer:
    """The second tensors of one step's inputs, made as they are first written."""

    def __init__(self, mesh: Mesh, store: Store) -> None:
        self._mesh, self._store = mesh, store
        self._pairs: dict[int, tuple[Any, Any]] = {}  # by the tensor's id, which the pair keeps alive
        self._taken: Any = None

    def write(self, upload: Callable[[], None]) -> Launch:
        """Run `upload`, whose writes go to the second tensors. The returned call copies what was written."""
        store, pairs = self._store, {}

        def redirect(tensor: Any, layout: TileLayout) -> Any:
            key = id(tensor)
            if key not in self._pairs:
                self._pairs[key] = (tensor, store.blank(layout))
            pairs[key] = self._pairs[key]
            return pairs[key][1]

        # New tensors may get memory that launches under way still use: the first write waits for all of them.
        self._mesh.wait(1, self._mesh.record(0) if self._taken is None else self._taken)
        store.queue, store.redirect = 1, redirect
        try:
            upload()
        finally:
            store.queue, store.redirect = 0, None
        written = self._mesh.record(1)

        def take() -> None:
            self._mesh.wait(0, written)
            for tensor, second in pairs.values():
                store.tt.copy(second, tensor)
            self._taken = self._mesh.record(0)

        return take
