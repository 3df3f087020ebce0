"""Make tensors, and move values between host and device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ttrain.core.errors import GraphError
from ttrain.core.spec import DType, TensorSpec

TILE = 32
TILES, ROWS = "TILE_LAYOUT", "ROW_MAJOR_LAYOUT"
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "bfloat8_b": 1.0625, "int32": 4.0, "uint32": 4.0}
_NAMES = {DType.FP32: "float32", DType.BF16: "bfloat16", DType.INT64: "int32", DType.INT32: "int32"}


@dataclass(frozen=True, slots=True)
class TileLayout:
    """Shape (rank 2 or more), dtype and order of elements, the last two as ttnn names them."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    order: str = TILES

    @property
    def padded(self) -> tuple[int, ...]:
        """The shape in memory."""
        if self.order == ROWS:
            return self.shape
        return (*self.shape[:-2], up_to_tile(self.shape[-2]), up_to_tile(self.shape[-1]))

    @property
    def tiles(self) -> int:
        """Number of tiles, which are the pages of its buffer."""
        return math.prod(self.padded) // (TILE * TILE)

    @property
    def bytes_per_element(self) -> float:
        return _BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return int(math.prod(self.padded) * self.bytes_per_element)


def up_to_tile(size: int) -> int:
    """The next multiple of a tile's side."""
    return -(-size // TILE) * TILE


def dtype_name(dtype: DType) -> str:
    """ttnn's name of a dtype. Raises GraphError for one that the device does not have."""
    if dtype not in _NAMES:
        raise GraphError(f"dtype {dtype} does not exist on Tenstorrent devices; fp32, bf16 and int64 inputs do.")
    return _NAMES[dtype]


def device_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of rank 2 or more: scalars are [1, 1], vectors one row."""
    return (1,) * (2 - len(shape)) + shape if len(shape) < 2 else shape


def default_layout(spec: TensorSpec) -> TileLayout:
    """The layout of a spec where nothing asks for another."""
    return TileLayout(device_shape(spec.shape), dtype_name(spec.dtype))


def shares_memory(spec: TensorSpec, other: TensorSpec) -> bool:
    """True if two shapes of equally many elements lie in tiles in the same way.

    They do if rows are equally long and no row changes its place within a tile. Integers are step inputs, which the
    host lays out for every reader.
    """
    if not spec.dtype.is_floating:
        return True
    one, two = device_shape(spec.shape), device_shape(other.shape)
    return one[-1] == two[-1] and (one[-2] == two[-2] or (one[-2] % TILE == 0 and two[-2] % TILE == 0))


class Store:
    """Makes tensors on an open mesh of chips. `tt` is ttnn, or what stands in for it in the tests."""

    def __init__(
        self, tt: Any, mesh: Any, chips: int, banks: int, count: Callable[[int], None], queue: int = 0
    ) -> None:
        self.tt, self.mesh, self.chips, self.banks = tt, mesh, chips, banks
        self._count = count  # told the bytes of every tensor before it is made
        self.stale: set[Any] = set()  # tensors to `refresh`, whose values follow from what was uploaded
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

    def filled(self, layout: TileLayout, values: Callable[[], np.ndarray]) -> Any:
        """A tensor with values that the host works out."""
        tensor = self.blank(layout)
        self.write(tensor, layout, values())
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
