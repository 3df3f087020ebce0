"""Check which values of a file can be weights, and which have to agree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import CheckpointError
from ttrain.core.names import listed

Array = NDArray[Any]
Weight = NDArray[np.float32]


def unusable(values: Mapping[str, Any]) -> list[str]:
    """A sentence for each value that is no dense array or torch tensor of floating numbers in memory."""
    return [f"{name}: {problem}" for name, value in values.items() if (problem := _problem(value)) is not None]


def same(a: Any, b: Any) -> bool:
    """True if two weights have the same shape and values."""
    return tuple(a.shape) == tuple(b.shape) and bool((as_fp32(a) == as_fp32(b)).all())


def as_fp32(value: Any) -> Weight:
    """A contiguous fp32 array of an array or a tensor of any floating dtype, without a copy where possible."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().float().numpy()
    with np.errstate(over="ignore"):  # what is too large becomes infinite, which is told as such
        return np.ascontiguousarray(value, np.float32)


def unwrapped(name: Any) -> str:
    """A weight's name without what torch.compile and DataParallel put before it."""
    return str(name).removeprefix("_orig_mod.").removeprefix("module.")


def renamed(path: str, outside: Mapping[str, str], block: Mapping[str, str], prefix: str) -> str:
    """Our path -> an original's name, by tables of modules; `block` may name a whole weight in blocks.<i> as well.

    Raises KeyError or ValueError for what they don't have.
    """
    module, _, leaf = path.rpartition(".")
    if module in outside:
        return f"{outside[module]}.{leaf}"
    _, number, inner = path.split(".", 2)
    return f"{prefix}.{number}." + (block.get(inner) or f"{block[inner.rpartition('.')[0]]}.{leaf}")


class Weights(Mapping[str, Array]):
    """Arrays by name, each made by `read` when it is asked for, so that no two have to be in memory at once."""

    def __init__(self, names: Collection[str], read: Callable[[str], Array]) -> None:
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @classmethod
    def widened(cls, given: Mapping[str, Any]) -> Weights:
        """Arrays or tensors of any floating dtype as fp32."""
        return cls(given, lambda name: as_fp32(given[name]))


def bf16_bits(weight: Any) -> NDArray[np.uint16]:
    """The bits of a weight rounded to bf16, to the even neighbour at a tie."""
    bits = np.ascontiguousarray(weight, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def mismatches(
    given: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], spare: str = "not a weight of this model"
) -> list[str]:
    """A sentence for each value that is missing, left over, unusable or, where all can be used, of another shape."""
    problems = [f"{name}: missing" for name in shapes if name not in given]
    problems += [f"{name}: {spare}" for name in given if name not in shapes]
    own = {name: given[name] for name in shapes if name in given}
    return problems + (
        unusable(own)
        or [
            f"{name}: got {list(value.shape)}, expected {list(shapes[name])}"
            for name, value in own.items()
            if tuple(value.shape) != tuple(shapes[name])
        ]
    )


def different(name: str, other: str) -> str:
    """Return what is wrong with a head of its own in a file that is read into a tied model."""
    return f"{name}: differs from {other}, which a tied model has in its place"


def unfitting(problems: Sequence[str], keys: str, shown: int = 8) -> CheckpointError:
    """Weights that are not those of the model, in one line; `keys` are what their names and shapes follow from."""
    told = listed(problems, shown, "; ")
    return CheckpointError(f"the weights do not fit this model; {keys} must agree: {told}")


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
