"""Initial values as functions of (run seed, parameter path): the order in which layers are built changes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
# A distribution that the initial values of a parameter, fp32 of this shape, are drawn from.
Initializer = Callable[[np.random.Generator, tuple[int, ...]], Array]


@dataclass(frozen=True)
class Normal:
    """The normal distribution of mean 0."""

    std: float

    def __call__(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
        values = generator.standard_normal(shape, dtype=np.float32)
        values *= np.float32(self.std)
        return values


@dataclass(frozen=True)
class Uniform:
    """The uniform distribution over [-bound, bound)."""

    bound: float

    def __call__(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
        values = generator.random(shape, dtype=np.float32)
        values *= 2  # in place: a vocabulary's matrix is large
        values -= 1
        values *= np.float32(self.bound)
        return values


@dataclass(frozen=True)
class Orthogonal:
    """Draws a matrix with orthonormal rows, or columns where those are fewer, uniformly (Saxe et al., 2014)."""

    def __call__(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
        rows, columns = shape
        drawn = generator.standard_normal((max(shape), min(shape)))
        basis, triangle = np.linalg.qr(drawn)
        basis *= np.sign(np.diagonal(triangle))  # without this the distribution is not uniform (Mezzadri, 2007)
        return np.ascontiguousarray(basis.T if rows < columns else basis, np.float32)


@dataclass(frozen=True)
class Constant:
    """One number everywhere."""

    value: float

    def __call__(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return np.full(shape, self.value, np.float32)


def generator_of(seed: int, path: str) -> np.random.Generator:
    """A counter-based generator (Philox) whose key is a hash of the run seed and a parameter's path."""
    digest = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def initial_value(parameter: Any, seed: int) -> Array:
    """The first value of one parameter of a model: fp32, of the parameter's shape, without what pads it."""
    return parameter.initializer(generator_of(seed, parameter.path), parameter.shape)
