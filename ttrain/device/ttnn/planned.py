"""The Tenstorrent devices as a plan sees them: rows and layouts without a card, and offloading to host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, cast

import numpy as np

from ttrain.core.spec import TensorSpec
from ttrain.device.base import Attributes, Device, GivenSpecs, Kernel, Launch, Layout, Specs, Table
from ttrain.device.null.device import NullDevice
from ttrain.device.settings import DeviceConfig
from ttrain.device.ttnn.cost.lowering import ShapeStore
from ttrain.device.ttnn.kernels import kernel_table
from ttrain.device.ttnn.kernels.common import Context
from ttrain.device.ttnn.settings import TenstorrentConfig
from ttrain.device.ttnn.tensors.device_tensor import DeviceTensor, IntegerInput
from ttrain.device.ttnn.tensors.store import Store, TileLayout, default_layout, shares_memory


class TileDevice(Device):
    """A device of whole padded tensors that values take turns in. Its config names what stays in host memory."""

    arenas = False
    rematerializes = False
    uniform_compute = True
    narrow_lookups = True
    config: TenstorrentConfig

    def offloaded(self, name: str) -> bool:
        return any(belongs(name.partition("/")[0], prefix) for prefix in self.config.host_resident)

    def layout(self, spec: TensorSpec) -> Layout:
        return default_layout(spec)

    def layout_bytes(self, layout: Layout) -> int:
        return cast(TileLayout, layout).nbytes

    def shares(self, spec: TensorSpec, other: TensorSpec) -> bool:
        return shares_memory(spec, other)


def belongs(path: str, name: str) -> bool:
    """True if a name of host_resident means a parameter: `head` is head.weight, and ar_head.weight as well."""
    return path == name or path.startswith(f"{name}.") or path.partition(".")[0].endswith(f"_{name}")


def host_device(config: TenstorrentConfig, computes: bool) -> Device:
    """The CPU; where values are not computed, one that only knows its rows and takes no memory."""
    if computes:
        from ttrain.device.torch.device import TorchDevice

        return TorchDevice("cpu", threads=config.threads)
    from ttrain.device.torch.planned import planned as planned_host

    return planned_host(DeviceConfig(name="cpu", threads=config.threads))


def both_tables(card: Mapping[str, Kernel], host: Device, store: Store) -> Table:
    """Return the rows of the card and of the host, each with those that transfer values to it."""

    def to_device(x: Any, y: DeviceTensor) -> None:
        """Written past the buffer's own `upload`: a scalar that changes within a step is no step input."""
        store.write(y.t, y.layout, np.asarray(host.download(x), np.float32))

    return Table(
        {**card, "stage": _moved(lambda x, y: store.tt.copy(x.t, y.t), _apart), "to_device": _moved(to_device, _apart)},
        {
            **host.kernels,
            "to_host": _moved(lambda x, y: host.upload(y, x.download())),
            "host_input": _moved(lambda x, y: host.upload(y, _as_uploaded(x))),
        },
    )


def _apart(inputs: GivenSpecs, outputs: Specs, attributes: Attributes) -> list[Layout | None]:
    """Naming the default layout keeps such values in tensors that nothing else takes turns in.

    So a tensor stays the same from step to step, and the host finds it after a captured step has run.
    """
    return [default_layout(output) for output in outputs]


def _moved(move: Callable[[Any, Any], None], layouts: Any = None) -> Kernel:
    """Return the row of an op that moves one tensor into another."""

    def bind(ins: Sequence[Any], outs: Sequence[Any], attributes: Attributes, work: Sequence[Any]) -> Launch:
        return partial(move, *ins, *outs)

    return Kernel(bind, layouts=layouts)


def _as_uploaded(tensor: DeviceTensor) -> np.ndarray:
    """The values of a step input, of which the host keeps integers and scalars."""
    if not isinstance(tensor, IntegerInput) and tensor.value is not None:
        return np.full(tensor.spec.shape, tensor.value, np.float32)
    return tensor.download()


class PlannedDevice(TileDevice, NullDevice):
    """The device of a config, on which nothing runs."""


def planned(config: TenstorrentConfig) -> PlannedDevice:
    """Return a device that plans as the named one does."""
    store = ShapeStore()
    rows = kernel_table(Context(store, fused=config.fuses))
    host = host_device(config, computes=False) if config.host_resident else None
    device = PlannedDevice(rows=rows if host is None else both_tables(rows, host, store))
    device.name, device.host, device.config, device.chips = config.name, host, config, prod(config.mesh)
    return device
