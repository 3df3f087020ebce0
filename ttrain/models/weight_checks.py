"""Which values of a file can be weights, and which have to agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Weight = NDArray[np.float32]


def unusable(values: Mapping[str, Any]) -> list[str]:
    """A sentence for each value that is no dense array or torch tensor of floating numbers in memory."""
    return [f"{name}: {problem}" for name, value in values.items() if (problem := _problem(value)) is not None]


def same(a: Any, b: Any) -> bool:
    """Whether two weights have the same shape and values."""
    return tuple(a.shape) == tuple(b.shape) and bool((as_fp32(a) == as_fp32(b)).all())


def as_fp32(value: Any) -> Weight:
    """A contiguous fp32 array of an array or a tensor of any floating dtype, without a copy where possible."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().float().numpy()
    return np.ascontiguousarray(value, np.float32)


class Converted(Mapping[str, Weight]):
    """Weights by name, each made when it is asked for, so that no two are in memory at once."""

    def __init__(self, makers: Mapping[str, Callable[[], Weight]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Weight:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def different(name: str, other: str) -> str:
    """What is wrong with a head of its own in a file that is read into a tied model."""
    return f"{name}: differs from {other}, which a tied model has in its place"


def _problem(value: Any) -> str | None:
    if isinstance(value, np.ndarray):
        return None if np.issubdtype(value.dtype, np.floating) else f"holds {value.dtype}, expected floating numbers"
    if not hasattr(value, "is_floating_point"):
        return f"is {type(value).__name__}, expected a tensor"
    if not value.is_floating_point():
        return f"holds {value.dtype}, expected floating numbers"
    if value.is_meta or str(value.layout) != "torch.strided":
        return f"is {'without values' if value.is_meta else value.layout}, expected a dense tensor"
    return None
