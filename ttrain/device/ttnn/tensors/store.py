"""The runtime as buffers use it: making tensors, and moving values between host and device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ttrain.device.ttnn.tensors.layout import ROWS, TileLayout


class Dependent(Protocol):
    """A tensor whose values follow from what was uploaded."""

    def refresh(self) -> None: ...


class Store:
    """Makes tensors on an open mesh of chips. `tt` is ttnn, or what stands in for it in the tests."""

    def __init__(
        self, tt: Any, mesh: Any, chips: int, banks: int, count: Callable[[int], None], queue: int = 0
    ) -> None:
        self.tt, self.mesh, self.chips, self.banks = tt, mesh, chips, banks
        self._count = count  # told the bytes of every tensor before it is made
        self.stale: set[Dependent] = set()
        self.queue = queue  # that host writes go through
        self.redirect: Callable[[Any, TileLayout], Any] | None = None  # where to write instead of into a tensor

    def empty(self, layout: TileLayout) -> Any:
        """A tensor of zeros."""
        tensor = self.blank(layout)
        return self.tt.fill(tensor, 0.0, output_tensor=tensor) if layout.order != ROWS else tensor

    def blank(self, layout: TileLayout) -> Any:
        """A tensor whose values mean nothing yet."""
        self._count(layout.nbytes)
        tt = self.tt
        dtype, order = getattr(tt, layout.dtype), getattr(tt, layout.order)
        return tt.allocate_tensor_on_device(tt.Shape(layout.shape), dtype, order, self.mesh, tt.DRAM_MEMORY_CONFIG)

    def filled(self, layout: TileLayout, array: np.ndarray) -> Any:
        """A tensor with values from the host."""
        tensor = self.blank(layout)
        self.write(tensor, layout, array)
        return tensor

    def write(self, tensor: Any, layout: TileLayout, array: np.ndarray) -> None:
        """Host values into a tensor. Values for several chips lie below one another."""
        target = tensor if self.redirect is None else self.redirect(tensor, layout)
        self.tt.copy_host_to_device_tensor(self.host(layout, array), target, cq_id=self.queue)

    def host(self, layout: TileLayout, array: np.ndarray) -> Any:
        """Host values as ttnn wants them: of the layout's dtype and order, one shard per chip where they differ."""
        import torch

        tt, shape = self.tt, layout.shape
        mapper = None
        if self.chips > 1:
            split = array.size == self.chips * int(np.prod(shape))
            shape = (shape[0] * self.chips, *shape[1:]) if split else shape
            mapper = tt.ShardTensorToMesh(self.mesh, dim=0) if split else tt.ReplicateTensorToMesh(self.mesh)
        values = torch.from_numpy(np.require(array.reshape(shape), requirements=["C", "W"]))
        if layout.dtype == "bfloat16":
            values = values.bfloat16()  # torch rounds faster than ttnn
        elif layout.dtype in ("int32", "uint32"):
            values = values.to(torch.int32)
        return tt.from_torch(
            values, dtype=getattr(tt, layout.dtype), layout=getattr(tt, layout.order), mesh_mapper=mapper
        )

    def read(self, tensor: Any) -> np.ndarray:
        """The values of a tensor; of the first chip's where there are several. Waits for pending work."""
        self.tt.synchronize_device(self.mesh, cq_id=self.queue)  # waits without holding up Python, as to_torch does
        if self.chips > 1:
            tensor = self.tt.get_device_tensors(tensor)[0]
        values = self.tt.to_torch(tensor)
        return values.float().numpy() if values.is_floating_point() else values.numpy()

    def refresh(self) -> None:
        """Bring what depends on uploaded values up to date: derived scalars and mask keys."""
        for scalar in list(self.stale):
            scalar.refresh()
        self.stale.clear()
