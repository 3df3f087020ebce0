"""Which values of a file can be weights, and which have to agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def unusable(values: Mapping[str, Any]) -> list[str]:
    """A sentence for each value that is no dense array or torch tensor of floating numbers in memory."""
    return [f"{name}: {problem}" for name, value in values.items() if (problem := _problem(value)) is not None]


def same(a: Any, b: Any) -> bool:
    """Whether two weights have the same shape and values."""
    return tuple(a.shape) == tuple(b.shape) and bool((a == b).all())


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
