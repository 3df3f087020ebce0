"""Small config of the devices."""

from __future__ import annotations

from dataclasses import dataclass

from ttrain.core.options import option


@dataclass
class DeviceConfig:
    """Device that runs a step.

    `info` names the class that answers for the device by this config, see info.py.
    """

    info = "ttrain.device.info:DeviceInfo"
    tf32 = False  # whether a GPU rounds the inputs of fp32 products to TF32

    name: str = option("auto", "registered name of the device; auto takes a GPU where there is one, else the CPU")
    threads: int | None = option(
        None, "cpu: threads per kernel; null is the physical cores within affinity and quota", minimum=1, maximum=1024
    )
    yield_cores: bool = option(True, "cpu: move threads to free cores when other programs take some")
    index: int = option(0, "cuda: number of the GPU", minimum=0)
    matmul: str = option(
        "auto",
        "cpu: library of matrix products; own is ours, onednn and aten are torch's; auto takes the fastest as "
        "measured on this machine",
        choices=("auto", "own", "onednn", "aten"),
    )
    batch_invariant: bool | None = option(
        None, "cpu, traced: give a row the same bits in any batch, cached or not; null does for objective=grpo"
    )


@dataclass
class TorchConfig(DeviceConfig):
    """The CPU, or a GPU through torch."""

    info = "ttrain.device.torch.info:Torch"


class Tf32Config(TorchConfig):
    """A GPU as precision=tf32 opens it."""

    tf32 = True
