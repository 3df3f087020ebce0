"""Tensor specs: the shape and the dtype of a tensor without its values."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class DType(Enum):
    """Element types, named as the config names them. The value is (name, bytes per element, name in torch)."""

    FP64 = ("fp64", 8, "float64")
    FP32 = ("fp32", 4, "float32")
    BF16 = ("bf16", 2, "bfloat16")
    FP16 = ("fp16", 2, "float16")
    INT64 = ("int64", 8, "int64")
    INT32 = ("int32", 4, "int32")
    INT16 = ("int16", 2, "int16")
    INT8 = ("int8", 1, "int8")
    UINT8 = ("uint8", 1, "uint8")
    BOOL = ("bool", 1, "bool")

    def __init__(self, label: str, itemsize: int, in_torch: str) -> None:
        self.label, self.itemsize, self.in_torch = label, itemsize, in_torch

    @property
    def is_floating(self) -> bool:
        return self in (DType.FP64, DType.FP32, DType.BF16, DType.FP16)

    @property
    def accumulation(self) -> DType:
        """The dtype in which sums, statistics and losses over this dtype are formed: fp32 at least."""
        return DType.FP64 if self is DType.FP64 else DType.FP32

    def __str__(self) -> str:
        return self.label

    @staticmethod
    def parse(label: str) -> DType:
        """Return the dtype of a label, or of its name in torch and numpy. Raises ValueError."""
        for dtype in DType:
            if label in (dtype.label, dtype.in_torch):
                return dtype
        raise ValueError(f"dtype {label!r} is not one of {', '.join(d.label for d in DType)}")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a dense, contiguous, row-major tensor."""

    shape: tuple[int, ...]
    dtype: DType = DType.FP32

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def with_shape(self, *shape: int) -> TensorSpec:
        return TensorSpec(tuple(shape), self.dtype)

    def with_dtype(self, dtype: DType) -> TensorSpec:
        return TensorSpec(self.shape, dtype)

    def __str__(self) -> str:
        return f"{self.dtype.label}[{', '.join(map(str, self.shape))}]"


FLAT_ALIGNMENT = 64  # elements; gives equal element offsets in every dtype, each a multiple of a cache line


def flat_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Element offsets of tensors laid side by side, and the elements they take with gaps."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // FLAT_ALIGNMENT) * FLAT_ALIGNMENT
    return offsets, end


Part = tuple[int, int]  # [start, stop) of the elements of a tensor, in their order


def part_name(name: str, part: Part) -> str:
    """Return the name of a part of a persistent tensor."""
    return f"{name}[{part[0]}:{part[1]}]"


def stored_part_name(name: str, part: Part, shape: tuple[int, ...]) -> str:
    """Return the name of a part in a file, where it also tells the shape of the whole tensor."""
    return f"{name}[{part[0]}:{part[1]} of {'x'.join(map(str, shape))}]"


def stored_part(name: str) -> tuple[str, Part, tuple[int, ...]] | None:
    """Tensor, part and shape of the whole by that name; None for a tensor that is in one piece."""
    found = re.fullmatch(r"(.+)\[(\d+):(\d+) of (\d+(?:x\d+)*)\]", name)
    if found is None:
        return None
    return found[1], (int(found[2]), int(found[3])), tuple(map(int, found[4].split("x")))


def part_spec(spec: TensorSpec, part: Part) -> TensorSpec:
    """Return the spec of a part: a vector, or the tensor's own spec where the part is all of it."""
    return spec if part == (0, spec.size) else spec.with_shape(part[1] - part[0])
