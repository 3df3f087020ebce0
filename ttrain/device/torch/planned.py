"""The CPU and CUDA devices as a plan sees them: their kernel tables, without their memory."""

from __future__ import annotations

from ttrain.device.null.device import NullDevice
from ttrain.device.settings import DeviceConfig


def planned(config: DeviceConfig) -> NullDevice:
    """A device that plans as the named one does. CUDA is not initialised, nor need there be a GPU."""
    import torch

    from ttrain.device.torch.device import default_threads
    from ttrain.device.torch.kernels import kernel_table
    from ttrain.device.torch.kernels.common import Context

    kind = config.name
    if kind == "auto":
        # torch counts GPUs through the driver's management library, which does not initialise CUDA.
        kind = "cuda" if torch.cuda.device_count() else "cpu"
    context = Context.of(torch.device(kind), config.threads or default_threads())
    device = NullDevice(rows=kernel_table(context))
    device.name = kind
    return device
