"""A chip divided into sub-devices: disjoint ranges of cores, each with a command queue of its own."""

from __future__ import annotations

import copy
from typing import Any

from ttrain.core.errors import DeviceUnavailable
from ttrain.device.ttnn.runtime.core_subset import CoreSubsetRuntime
from ttrain.device.ttnn.runtime.environment import reason
from ttrain.device.ttnn.runtime.mesh import Mesh
from ttrain.device.ttnn.settings import TenstorrentConfig

Range = tuple[int, int, int, int]  # first column, first row, last column, last row


def divided(rows: int, columns: int, count: int) -> list[Range]:
    """`count` disjoint ranges of whole columns where they come out equal, else of whole rows where those do."""
    if columns % count and rows % count == 0:
        return [(0, at * rows // count, columns - 1, (at + 1) * rows // count - 1) for at in range(count)]
    return [(at * columns // count, 0, (at + 1) * columns // count - 1, rows - 1) for at in range(count)]


def open_mesh(config: TenstorrentConfig) -> Mesh:
    """The chips of a config, divided where it says so. Raises what `Mesh.open` does."""
    mesh = Mesh.open(config)
    if config.subdevices > 1:
        try:
            mesh.divided = SubDevices(mesh, config.subdevices)
        except BaseException:
            mesh.close()
            raise
    return mesh


class SubDevices:
    """Loads a manager of sub-devices. `parts` are the mesh as each of them sees it.

    A mocked board crashes on loading one, and its second queue can't launch: there the manager is only made, and all
    parts launch on queue 0.
    """

    def __init__(self, mesh: Mesh, count: int) -> None:
        """Raises DeviceUnavailable where ttnn can't divide the chip."""
        tt, self._handle = mesh.tt, mesh.handle
        ranges = divided(*mesh.cores, count)
        cores = [_core_set(tt, part) for part in ranges]
        try:
            self._manager = self._handle.create_sub_device_manager([tt.SubDevice([part]) for part in cores], 0)
            if not mesh.mocked:
                self._handle.load_sub_device_manager(self._manager)
        except RuntimeError as error:
            raise DeviceUnavailable(f"device.subdevices={count}: {reason(error)}") from error
        self._loaded = not mesh.mocked
        self.parts = [self._part(mesh, index, part, cores[index]) for index, part in enumerate(ranges)]

    def _part(self, mesh: Mesh, index: int, part: Range, cores: Any) -> Mesh:
        tt, (x, y, last_x, last_y) = mesh.tt, part
        grid = tt.CoreGrid(y=last_y - y + 1, x=last_x - x + 1)
        found = copy.copy(mesh)
        found.part, found.queue = index, index if self._loaded else 0
        exact = tt.init_device_compute_kernel_config(
            mesh.handle.arch(), math_fidelity=tt.MathFidelity.HiFi4, math_approx_mode=False,
            fp32_dest_acc_en=True, packer_l1_acc=True,
        )  # fmt: skip
        sub_device = tt.SubDeviceId(index) if self._loaded else None
        found.tt = CoreSubsetRuntime(tt, cores, grid, found.queue, sub_device, exact)
        found.grid = found.whole_grid = grid
        found.cores = (grid.y, grid.x)
        found.traces, found.divided = [], None
        return found

    def close(self) -> None:
        if self._loaded:
            self._handle.clear_loaded_sub_device_manager()
        self._handle.remove_sub_device_manager(self._manager)


def _core_set(tt: Any, part: Range) -> Any:
    x, y, last_x, last_y = part
    return tt.CoreRangeSet({tt.CoreRange(tt.CoreCoord(x, y), tt.CoreCoord(last_x, last_y))})
