"""The CPU and GPUs: torch's memory, copies and kernels behind the contract of `device/base.py`."""

from __future__ import annotations

import ctypes
import mmap
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ttrain.core.cores import default_threads
from ttrain.core.errors import CaptureError, GraphError
from ttrain.core.options import LARGEST_INTEGER
from ttrain.core.processor import processor_name, vector_extensions
from ttrain.core.spec import TensorSpec
from ttrain.device.base import ALIGNMENT, Buffers, Device, Group, Kernel, Launch, StepCompiler, flat_launches
from ttrain.device.settings import DeviceConfig
from ttrain.device.torch.contention import Contention
from ttrain.device.torch.info import GPUS, is_gpu, require_gpu
from ttrain.device.torch.kernels import kernel_table
from ttrain.device.torch.kernels.common import NARROW, TORCH_DTYPES, Context
from ttrain.device.torch.transfers import Inputs, Outputs
from ttrain.device.torch.triton.installed import lacking_triton

_HUGE_PAGE = 2 << 20  # bytes
_PINNED_FROM = 1 << 16  # bytes; below this the driver stages a pageable copy itself


def open_device(config: DeviceConfig, group: Group | None = None) -> TorchDevice:
    """Open device=cpu|cuda|mps|xpu, or auto: cuda where torch has it. Raises DeviceUnavailable for a missing GPU."""
    kind = config.name if config.name in GPUS else "cuda" if is_gpu(config) else "cpu"
    given = (config.threads, config.index, group, config.matmul, config.yield_cores, config.tf32)
    return TorchDevice(kind, *given, bool(config.batch_invariant))


class TorchDevice(Device):
    """Memory and kernels of torch on one CPU or one GPU.

    An arena is a one-dimensional uint8 tensor, a buffer a typed view of it. `threads` is the number of CPU threads a
    kernel uses: by default OMP_NUM_THREADS where it is set, else the physical cores that affinity and a container's
    quota leave.
    """

    def __init__(
        self,
        kind: str = "cpu",
        threads: int | None = None,
        index: int = 0,
        group: Group | None = None,
        matmul: str = "auto",
        yield_cores: bool = True,
        tf32: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        self.group = group
        self.kind, self.name, self._backend = kind, kind, getattr(torch, kind)
        self.supports_capture, self.compiles = kind == "cuda", kind == "cpu"
        self.overlaps = kind == "cuda"
        self.threads = threads or default_threads()
        torch.set_num_threads(self.threads)
        if kind != "cpu":
            require_gpu(index, kind)
        if kind in ("cuda", "xpu"):
            self._backend.set_device(index)
        if kind == "cuda":
            # Sums of bf16 products stay in fp32 until the end, as on the CPU.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
        self.device = torch.device(kind, index) if kind != "cpu" else torch.device("cpu")
        products = "own" if batch_invariant else matmul
        self.context = Context.of(self.device, self.threads, group)
        self.context = replace(self.context, matmul=products, batch_invariant=batch_invariant)
        self._lacking: str | None = None  # why kernels of Triton can't run
        if kind == "cuda":
            capability = torch.cuda.get_device_capability(self.device)
            self._lacking = lacking_triton(capability)
            self.context = replace(self.context, capability=capability, triton=not self._lacking, attention="measured")
            self.groups = self.context.triton
        self._contention = Contention(self.threads if kind == "cpu" and yield_cores else 1)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool: Any = None  # memory of what libraries allocate in captures; one graph runs at a time
        self._first_event: torch.cuda.Event | None = None
        self._closed = False

    @cached_property
    def kernels(self) -> Mapping[str, Kernel]:
        return kernel_table(self.context)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if self._closed:
            raise GraphError(f"device {self.name} was closed; {nbytes} bytes can't be allocated on it any more.")
        if nbytes > LARGEST_INTEGER:  # more than torch can be asked for
            raise MemoryError(f"{nbytes:.1e} bytes in one piece")
        if self.kind == "cpu":  # numpy's zeros take memory when they are first written, torch's at once
            raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
            first = -raw.ctypes.data % ALIGNMENT
            if nbytes >= _HUGE_PAGE:
                _ask_for_huge_pages(raw)
            return torch.from_numpy(raw[first : first + nbytes])
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def place(self, arena: torch.Tensor, offset: int, spec: TensorSpec) -> torch.Tensor:
        return arena.narrow(0, offset, spec.nbytes).view(TORCH_DTYPES[spec.dtype]).view(spec.shape)

    def upload(self, buffer: torch.Tensor, array: np.ndarray) -> None:
        view = _host_view(buffer)
        if view is not None:
            view[...] = array
            return
        host = torch.from_numpy(array if array.flags.writeable and array.flags.c_contiguous else array.copy())
        pinned = self.kind == "cuda" and array.nbytes >= _PINNED_FROM
        buffer.copy_(host.pin_memory() if pinned else host, non_blocking=pinned)

    def download(self, buffer: torch.Tensor) -> np.ndarray:
        view = _host_view(buffer)
        if view is not None:
            return np.array(view)  # a copy: the buffer is overwritten by the next step
        host = torch.empty(buffer.shape, dtype=torch.float32 if buffer.dtype in NARROW else buffer.dtype)
        return host.copy_(buffer).numpy()

    def sample(self, buffer: torch.Tensor, first: int, stride: int) -> np.ndarray:
        return self.download(buffer.view(-1)[first::stride])

    def upload_inputs(self, buffers: Mapping[str, torch.Tensor], arrays: Mapping[str, np.ndarray]) -> None:
        if isinstance(buffers, Buffers) and buffers.transfer is not None:
            buffers.transfer.write(arrays)()
            return
        for name, array in arrays.items():
            self.upload(buffers[name], array)

    def prefetch(self, buffers: Buffers, arrays: Mapping[str, np.ndarray]) -> Launch | None:
        if self.kind != "cuda" or not buffers:
            return None
        buffers.transfer = buffers.transfer or Inputs(buffers)
        launch: Launch = buffers.transfer.write(arrays)
        return launch

    def download_outputs(self, buffers: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        if self.kind != "cuda" or not buffers or not isinstance(buffers, Buffers):
            return super().download_outputs(buffers)
        buffers.transfer = buffers.transfer or Outputs([*buffers.values()])
        return dict(zip(buffers, buffers.transfer.read(), strict=True))

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        destination.copy_(source)

    def launching(self, what: str) -> AbstractContextManager[None]:
        self._contention.look()
        return super().launching(what)

    def release_threads(self) -> None:
        self._contention.forget()

    def synchronize(self) -> None:
        if self.kind != "cpu":
            torch.accelerator.synchronize(self.device)

    def stamp(self) -> Callable[[], float]:
        if self.kind != "cuda":
            return super().stamp()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        first = self._first_event = self._first_event or event
        return lambda: first.elapsed_time(event) / 1e3

    def memory(self) -> dict[str, int]:
        """Bytes. On the CPU of the whole process (resident set), on a GPU of torch's allocator."""
        if self.kind == "mps":
            held = {"in_use": torch.mps.current_allocated_memory(), "peak": torch.mps.driver_allocated_memory()}
            return {**held, "total": torch.mps.recommended_max_memory()}
        if self.kind != "cpu":
            return {
                "in_use": self._backend.memory_allocated(self.device),
                "peak": self._backend.max_memory_allocated(self.device),
                "total": self._backend.mem_get_info(self.device)[1],
            }
        import psutil

        in_use = psutil.Process().memory_info().rss
        unit = 1 if sys.platform == "darwin" else 1024  # Linux: KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"in_use": in_use, "peak": max(peak, in_use), "total": psutil.virtual_memory().total}

    def describe(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "name": self.name,
            "hardware": processor_name(),
            "cpu_features": vector_extensions(),
            "threads": self.threads,
            "torch": torch.__version__,
        }
        if self.kind in ("cuda", "xpu"):
            properties = self._backend.get_device_properties(self.device)
            facts["hardware"] = properties.name
            facts["index"] = self.device.index
            facts["memory_bytes"] = properties.total_memory
        if self.kind == "cuda":
            facts["compute_capability"] = f"{properties.major}.{properties.minor}"
            facts["cuda"] = torch.version.cuda or f"ROCm {torch.version.hip}"
            facts["tf32"] = torch.get_float32_matmul_precision() == "high"
            facts["kernels"] = "triton" if self._lacking is None else f"aten, as {self._lacking}"
        return facts

    def compiler(self) -> StepCompiler | None:
        """Return the compiler of plans on the CPU; None on a GPU, where launches are recorded instead."""
        if not self.compiles:
            return None
        from ttrain.device.torch.native.rows import NativeKernels

        return NativeKernels(self.kernels, self.threads, context=self.context, measures=True)

    def capture(self, launches: Sequence[Launch], name: str) -> Launch:
        """Record the launches as one CUDA graph.

        Recording runs nothing, so state doesn't change. The launches must have run once before: that first run is
        the warm-up in which libraries load their kernels and take their own memory.
        """
        if self.kind != "cuda":
            return super().capture(launches, name)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self.synchronize()
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                for launch in flat_launches(launches):
                    launch()
        except RuntimeError as error:
            raise CaptureError(f"{name}: a launch can't be captured as a CUDA graph: {error}") from error
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self._graphs.append(graph)
        return graph.replay

    def close(self) -> None:
        """Release captures, then the cached memory. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        self.release_threads()
        if self.kind != "cpu":
            self.synchronize()
            for graph in self._graphs:
                graph.reset()
            self._graphs.clear()
            self._backend.empty_cache()


def _ask_for_huge_pages(raw: np.ndarray) -> None:
    """Let the system back an array by pages of 2 MiB: weights are read up to a fifth faster from them.

    Only for pages that nothing was written to yet. The system may have none, which changes nothing else.
    """
    first = -(-raw.ctypes.data // _HUGE_PAGE) * _HUGE_PAGE
    size = (raw.ctypes.data + raw.nbytes - first) // _HUGE_PAGE * _HUGE_PAGE
    if size > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


def _host_view(buffer: torch.Tensor) -> np.ndarray | None:
    """The buffer as a numpy array on the same memory; None on a GPU, and where it comes as fp32.

    Made once per buffer and kept on it: making it costs more than copying a scalar through it.
    """
    view: np.ndarray | None = getattr(buffer, "host_view", None)
    if view is None and buffer.device.type == "cpu" and buffer.dtype not in NARROW:
        view = buffer.detach().numpy()
        buffer.host_view = view  # type: ignore[attr-defined]
    return view
