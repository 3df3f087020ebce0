"""Tensors in safetensors files, read one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import CheckpointError, raised_as
from ttrain.core.spec import stored_part
from ttrain.device.quantized import PARTS, Quantized, code_of
from ttrain.models.weight_checks import Weights

_OF_TORCH = ("BF16", "F8_E4M3", "F8_E5M2")  # dtypes that numpy lacks; such values come as fp32


def in_shards(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Return groups of tensor names for files of at most `limit` bytes each; a larger tensor is alone."""
    names, filled = list[str](), 0
    for name, size in sizes.items():
        if names and filled + size > limit:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    if names:
        yield names


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of a file by its header; the values are read whenever an array is made of it."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # in the words of safetensors, such as BF16
    parts: tuple[LazyTensor, ...] = ()  # that ranks wrote, in their order
    values: Callable[[], NDArray[Any]] | None = field(default=None, compare=False)  # of a file of another form
    is_meta: ClassVar[bool] = False
    layout: ClassVar[str] = "torch.strided"

    def is_floating_point(self) -> bool:
        """Return whether the dtype is a float, as a tensor of torch does."""
        return self.dtype in ("F64", "F32", "F16", *_OF_TORCH)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if self.values is not None:
            return np.asarray(self.values(), dtype)
        if self.parts:
            return np.concatenate([np.asarray(part, dtype) for part in self.parts]).reshape(self.shape)
        torch_only = self.dtype in _OF_TORCH
        with open_shard(self.path, "pt" if torch_only else "numpy") as shard:
            tensor = shard.get_tensor(self.name)
            return np.asarray(tensor.float().numpy() if torch_only else tensor, dtype)


def lazy_tensors(shards: Iterable[Path]) -> Weights:
    """The tensors of several files by name."""
    found = tensors_in(shards)
    return Weights(found, lambda name: np.asarray(found[name]))


def whole(found: Mapping[str, NDArray[Any]]) -> Weights:
    """Tensors by name, the parts of a weight in fewer bits as one Quantized under its path."""
    of_parts = {name: name.rpartition("/")[0] for name in found}
    coded = {path: code for path in of_parts.values() if (code := code_of(path, found)) is not None}

    def read(name: str) -> Any:
        if name not in coded:
            return found[name]
        return Quantized(coded[name], {part: found[f"{name}/{part}"] for part in PARTS[coded[name]]})

    return Weights([name for name, path in of_parts.items() if path not in coded] + [*coded], read)


def tensors_in(shards: Iterable[Path]) -> dict[str, LazyTensor]:
    """The tensors of several files by name, those that were written in parts as one.

    Raises CheckpointError where a part is missing.
    """
    found: dict[str, LazyTensor] = {}
    parts: dict[str, list[tuple[int, int, LazyTensor]]] = {}
    for tensor in (tensor for shard in shards for tensor in tensors_of(shard)):
        if (told := stored_part(tensor.name)) is None:
            found[tensor.name] = tensor
        else:
            name, (start, stop), shape = told
            parts.setdefault(name, []).append((start, stop, tensor))
            found[name] = LazyTensor(tensor.path, name, shape, tensor.dtype)
    for name, given in parts.items():
        given.sort(key=lambda part: part[:2])
        starts, stops = [part[0] for part in given], [part[1] for part in given]
        if [*starts, math.prod(found[name].shape)] != [0, *stops]:
            raise CheckpointError(f"{found[name].path} and the files beside it lack parts of {name}.")
        found[name] = replace(found[name], parts=tuple(tensor for *_, tensor in given))
    return found


def tensors_of(path: Path) -> Iterator[LazyTensor]:
    """Every tensor of a file, from its header alone."""
    with open_shard(path) as shard:
        for name in shard.keys():  # noqa: SIM118 - not a mapping
            described = shard.get_slice(name)
            yield LazyTensor(path, name, tuple(described.get_shape()), described.get_dtype())


@contextmanager
def open_shard(path: Path, framework: str = "numpy") -> Iterator[Any]:
    """Open a safetensors file, for tensors of a framework. Raises CheckpointError for one that can't be read."""
    from safetensors import SafetensorError, safe_open

    told = f"{path} is not a safetensors file that can be read"
    kinds = SafetensorError, TypeError, OSError  # TypeError: a dtype that numpy does not have
    with raised_as(CheckpointError, told, "Bring it anew.", kinds), safe_open(path, framework=framework) as shard:
        yield shard
