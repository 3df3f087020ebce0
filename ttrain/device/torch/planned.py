"""The CPU and CUDA devices as a plan sees them: their kernel tables, without their memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ttrain.device.base import Kernel, StepCompiler
from ttrain.device.null.device import NullDevice
from ttrain.device.settings import DeviceConfig


class PlannedDevice(NullDevice):
    """A device by its table. On the CPU a traced step is planned with the rows that would be compiled for it."""

    def __init__(
        self,
        kind: str,
        rows: Mapping[str, Kernel],
        threads: int,
        matmul: str = "auto",
        libraries: Mapping[str, Mapping[str, Kernel]] | None = None,
    ) -> None:
        """`libraries` are as of product_libraries; without them nothing is compared."""
        super().__init__(rows=rows)
        self.name, self.threads, self.matmul, self._libraries = kind, threads, matmul, libraries
        self._rows = rows
        self.compiles = kind == "cpu"

    def compiler(self) -> StepCompiler | None:
        if not self.compiles:
            return None
        from ttrain.device.torch.native import NativeKernels

        # Over rows that compute, since a forecast times what is not compiled as well.
        return NativeKernels(self._rows, self.threads, matmul=self.matmul, libraries=self._libraries)


def planned(config: DeviceConfig) -> PlannedDevice:
    """A device that plans as the named one does. CUDA is not initialised, nor need there be a GPU."""
    import torch

    from ttrain.core.cores import default_threads
    from ttrain.device.torch.kernels import kernel_table, product_libraries
    from ttrain.device.torch.kernels.common import Context

    kind = config.name
    if kind == "auto":
        # torch counts GPUs through the driver's management library, which does not initialise CUDA.
        kind = "cuda" if torch.cuda.device_count() else "cpu"
    threads = config.threads or default_threads()
    context = replace(Context.of(torch.device(kind), threads), matmul=config.matmul)
    libraries = product_libraries(context) if kind == "cpu" else None
    return PlannedDevice(kind, kernel_table(context), threads, config.matmul, libraries)
