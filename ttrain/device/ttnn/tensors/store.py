"""What buffers need of the runtime: making tensors, and moving values between host and device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ttrain.device.ttnn.tensors.form import ROWS, TileForm


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
        self.beside: Callable[[Any, TileForm], Any] | None = None  # where to write instead of into a tensor

    def empty(self, form: TileForm) -> Any:
        """A tensor of zeros."""
        tensor = self.blank(form)
        return self.tt.fill(tensor, 0.0, output_tensor=tensor) if form.layout != ROWS else tensor

    def blank(self, form: TileForm) -> Any:
        """A tensor whose values mean nothing yet."""
        self._count(form.nbytes)
        tt = self.tt
        dtype, layout = getattr(tt, form.dtype), getattr(tt, form.layout)
        return tt.allocate_tensor_on_device(tt.Shape(form.shape), dtype, layout, self.mesh, tt.DRAM_MEMORY_CONFIG)

    def filled(self, form: TileForm, array: np.ndarray) -> Any:
        """A tensor with values from the host."""
        tensor = self.blank(form)
        self.write(tensor, form, array)
        return tensor

    def write(self, tensor: Any, form: TileForm, array: np.ndarray) -> None:
        """Host values into a tensor. Values for several chips lie below one another."""
        target = tensor if self.beside is None else self.beside(tensor, form)
        self.tt.copy_host_to_device_tensor(self.host(form, array), target, cq_id=self.queue)

    def host(self, form: TileForm, array: np.ndarray) -> Any:
        """Host values as ttnn wants them: of the form's dtype and layout, one shard per chip where they differ."""
        import torch

        tt, shape = self.tt, form.shape
        mapper = None
        if self.chips > 1:
            split = array.size == self.chips * int(np.prod(shape))
            shape = (shape[0] * self.chips, *shape[1:]) if split else shape
            mapper = tt.ShardTensorToMesh(self.mesh, dim=0) if split else tt.ReplicateTensorToMesh(self.mesh)
        values = torch.from_numpy(np.require(array.reshape(shape), requirements=["C", "W"]))
        if form.dtype == "bfloat16":
            values = values.bfloat16()  # torch rounds faster than ttnn
        elif form.dtype in ("int32", "uint32"):
            values = values.to(torch.int32)
        return tt.from_torch(values, dtype=getattr(tt, form.dtype), layout=getattr(tt, form.layout), mesh_mapper=mapper)

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
