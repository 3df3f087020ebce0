"""The devices of torch as a plan sees them: their kernel tables, without their memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from ttrain.core.cores import default_threads
from ttrain.device.base import StepCompiler
from ttrain.device.null.device import NullDevice
from ttrain.device.settings import DeviceConfig
from ttrain.device.torch.kernels import kernel_table
from ttrain.device.torch.kernels.common import Context


class PlannedDevice(NullDevice):
    """A device by its table. On the CPU a traced step is planned with the rows that would be compiled for it."""

    def __init__(self, context: Context, threads: int) -> None:
        self._context, self._rows = context, kernel_table(context)
        super().__init__(rows=self._rows)
        self.name, self.threads, self.compiles = context.kind, threads, context.on_cpu
        self.groups = context.triton

    def compiler(self) -> StepCompiler | None:
        if not self.compiles:
            return None
        from ttrain.device.torch.native.rows import NativeKernels

        # Over rows that compute, since a forecast times what is not compiled as well.
        return NativeKernels(self._rows, self.threads, context=self._context)


def planned(config: DeviceConfig) -> PlannedDevice:
    """A device that plans as the named one does. CUDA is not initialised, nor need there be a GPU."""
    kind = config.name
    if kind == "auto":
        # torch counts GPUs through the driver's management library, which does not initialise CUDA.
        kind = "cuda" if torch.cuda.device_count() else "cpu"
    threads = config.threads or default_threads()
    return PlannedDevice(replace(Context.of(torch.device(kind), threads), matmul=config.matmul), threads)
