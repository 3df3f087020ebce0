"""Small config of the devices."""

from __future__ import annotations

from dataclasses import dataclass

from ttrain.core.options import option


@dataclass
class DeviceConfig:
    """Device that runs a step. `family` names the class that answers for the device by this config, see family.py."""

    family = "ttrain.device.family:Family"

    name: str = option("auto", "registered name of the device; auto takes a GPU where there is one, else the CPU")
    threads: int | None = option(
        None,
        "cpu: threads per kernel; null takes the physical cores that affinity and a container's quota leave",
        minimum=1,
        maximum=1024,
    )
    make_room: bool = option(
        True,
        "cpu: look for other programs between steps, and where cores are short move threads to free ones",
    )
    index: int = option(0, "cuda: which GPU", minimum=0)
    products: str = option(
        "auto",
        "cpu: who multiplies matrices; own is the compiled code of engine=traced, onednn and aten are libraries that "
        "torch brings, each where it can; auto takes for each shape what measured faster on this machine, once: traced "
        "its compiled code unless libraries make whole steps faster, the others one of the libraries",
        choices=("auto", "own", "onednn", "aten"),
    )
