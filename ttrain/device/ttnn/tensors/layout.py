"""Layouts of tensors on the device: whole, padded to tiles of 32 x 32, in a dtype of ttnn."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    if one[-1] != two[-1]:
        return False
    return one[-2] == two[-2] or (one[-2] % TILE == 0 and two[-2] % TILE == 0)
