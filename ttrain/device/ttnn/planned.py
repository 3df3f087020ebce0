"""The Tenstorrent devices as a plan sees them: their kernel rows and layouts, without ttnn and without a card."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import cast

from ttrain.core.spec import TensorSpec
from ttrain.device.base import Layout
from ttrain.device.null.device import NullDevice
from ttrain.device.ttnn.cost.lowering import ShapeStore
from ttrain.device.ttnn.kernels import kernel_table
from ttrain.device.ttnn.kernels.common import Context
from ttrain.device.ttnn.offload import both_tables, host_device, offloaded_by
from ttrain.device.ttnn.settings import TenstorrentConfig
from ttrain.device.ttnn.tensors.layout import TileLayout, default_layout, shares_memory


class PlannedDevice(NullDevice):
    """Whole padded tensors that values take turns in."""

    arenas = False
    rematerializes = False
    uniform_compute = True
    narrow_lookups = True
    is_offloaded: Callable[[str], bool]

    def offloaded(self, name: str) -> bool:
        return self.is_offloaded(name)

    def layout(self, spec: TensorSpec) -> Layout:
        return default_layout(spec)

    def layout_bytes(self, layout: Layout) -> int:
        return cast(TileLayout, layout).nbytes

    def shares(self, spec: TensorSpec, other: TensorSpec) -> bool:
        return shares_memory(spec, other)


def planned(config: TenstorrentConfig) -> PlannedDevice:
    """A device that plans as the named one does."""
    store = ShapeStore()
    rows = kernel_table(Context(store, fused=config.fuses))
    host = host_device(config, computes=False) if config.host_resident else None
    device = PlannedDevice(rows=rows if host is None else both_tables(rows, host, store))
    device.name, device.host, device.is_offloaded = config.name, host, partial(offloaded_by, config)
    device.chips = prod(config.mesh)
    return device
