"""Tensors in safetensors files, read one at a time."""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import CheckpointError
from ttrain.models.weight_checks import Weights
from ttrain.train.protocols import Array

MAX_HEADER_BYTES = 100_000_000  # of a safetensors file: the limit of the library


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of a file by its header; the values are read whenever an array is made of it, bf16 as fp32."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # in the words of safetensors, such as BF16
    is_meta: ClassVar[bool] = False
    layout: ClassVar[str] = "torch.strided"

    def is_floating_point(self) -> bool:
        """As of a tensor of torch."""
        return self.dtype in ("F64", "F32", "F16", "BF16")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        with _open_shard(self.path) as shard:
            return np.asarray(_array(shard, self.path, self.name), dtype)


def lazy_tensors(shards: Iterable[Path]) -> Weights:
    """The tensors of several files by name."""
    found = {tensor.name: tensor for shard in shards for tensor in tensors_of(shard)}
    return Weights(found, lambda name: np.asarray(found[name]))


def check_header(path: Path) -> None:
    """A safetensors file starts with the length of its JSON header, 8 bytes little-endian."""
    with open(path, "rb") as file:
        start = file.read(9)
    if len(start) < 9:
        raise CheckpointError(f"{path} is not a safetensors file: it has {len(start)} bytes. Bring it anew.")
    limit = min(MAX_HEADER_BYTES, path.stat().st_size - 8)
    (length,) = struct.unpack("<Q", start[:8])
    if not 2 <= length <= limit or start[8:9] != b"{":
        raise CheckpointError(
            f"{path} is not a safetensors file: its header should have 2 to {limit} bytes, not {length}."
        )


def tensors_of(path: Path) -> Iterator[LazyTensor]:
    """Every tensor of a file, from its header alone."""
    with _open_shard(path) as shard:
        for name in shard.keys():  # noqa: SIM118 - not a mapping
            described = shard.get_slice(name)
            yield LazyTensor(path, name, tuple(described.get_shape()), described.get_dtype())


def read_tensors(path: Path, wanted: Container[str]) -> Iterator[tuple[str, Array]]:
    """The wanted tensors of a shard by name, one in memory at a time."""
    with _open_shard(path) as shard:
        for name in shard.keys():  # noqa: SIM118 - not a mapping
            if name in wanted:
                yield name, _array(shard, path, name)


def _array(shard: Any, path: Path, name: str) -> Array:
    """A tensor of an open shard; bf16 comes as fp32, since numpy lacks it."""
    if shard.get_slice(name).get_dtype() != "BF16":
        tensor: Array = shard.get_tensor(name)
        return tensor
    from safetensors import safe_open

    with safe_open(path, framework="pt") as same:
        wide: Array = same.get_tensor(name).float().numpy()
        return wide


@contextmanager
def _open_shard(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as shard:
            yield shard
    except (SafetensorError, TypeError, OSError) as error:  # TypeError: a dtype that numpy does not have
        raise CheckpointError(f"{path} is not a safetensors file that can be read: {error}") from None
