"""Small config of the Tenstorrent devices."""

from __future__ import annotations

from dataclasses import dataclass

from ttrain.core.options import option
from ttrain.device.settings import DeviceConfig

FIDELITIES = ("LoFi", "HiFi2", "HiFi3", "HiFi4")


@dataclass
class TenstorrentConfig(DeviceConfig):
    """A Tenstorrent card through ttnn, a simulator of one, or a mocked board."""

    info = "ttrain.device.ttnn.info:Tenstorrent"

    name: str = option("tt", "tt takes the installed card; the others name a board")
    mode: str = option(
        "silicon",
        "silicon is a card, simulator the library device.simulator; mock opens a board that computes nothing",
        choices=("silicon", "simulator", "mock"),
    )
    simulator: str | None = option(None, "mode=simulator: path of the simulator library", path=True)
    dispatch: str = option("auto", "cores that start programs; auto: ttnn's choice", choices=("auto", "worker", "eth"))
    command_queues: int = option(1, "number of queues; 2 writes the next batch on its own queue", minimum=1, maximum=2)
    subdevices: int = option(1, "2 trains two replicas side by side, each on half of the cores", minimum=1, maximum=2)
    core_grid: list[int] | None = option(None, "[rows, columns] of cores for matrix products; null takes all")
    trace_region_mb: int = option(64, "device memory for captured steps, in MiB", minimum=0)
    l1_small_kb: int = option(0, "memory of every core for small buffers, in KiB", minimum=0)
    math_fidelity: str = option("HiFi4", "precision of the matrix unit", choices=FIDELITIES)
    fp32_accumulate: bool = option(True, "sum in fp32 in the matrix unit, instead of bf16")
    mesh: list[int] = option([1, 1], "[rows, columns] of chips that share the batch")
    host_resident: list[str] = option(
        [], "parameter-name prefixes, such as [embedding,head], that the host stores, computes and updates"
    )  # fmt: skip
    fused_kernels: bool | None = option(
        None, "use ttnn's bf16 training kernels (moreh) instead of fp32 sums; null does, but not on a simulator"
    )
    open_timeout_s: int = option(60, "seconds to wait for a card that another process holds", minimum=1)
    step_timeout_s: int | None = option(
        600, "seconds without progress after which the process ends with exit code 75; null waits forever", minimum=1
    )
    weights: str = option("bf16", "dtype of matrices in products; precision=bf8 sets bf8", choices=("bf16", "bf8"))
    profile: str | None = option(None, "folder for the report of ttnn's device profiler; null is off", path=True)
    verbose: bool = option(False, "let ttnn write its log")

    @property
    def fuses(self) -> bool:
        """True if ttnn's fused training kernels are taken."""
        return self.mode != "simulator" if self.fused_kernels is None else self.fused_kernels


NAMES = ("tt", "n150", "n300", "t3000", "p150")
DEVICES = dict.fromkeys(NAMES, (TenstorrentConfig, "ttrain.device.ttnn.device:open_device"))
