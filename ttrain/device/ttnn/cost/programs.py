"""Programs: one is the work of one launch on the chip's cores."""

from __future__ import annotations

from dataclasses import dataclass

TILE = 32  # rows and columns of a tile
BYTES = {"fp32": 4.0, "bf16": 2.0, "bf8": 1.0625}  # per element; bf8 shares an exponent among 16 elements


@dataclass(frozen=True)
class Product:
    """Matrix product [m, k] x [k, n] of `batch` independent pairs."""

    m: int
    k: int
    n: int
    batch: int = 1
    bytes_per_element: float = 2.0

    @property
    def flops(self) -> int:
        """A multiply-add counts two."""
        return 2 * self.batch * self.m * self.k * self.n

    @property
    def nbytes(self) -> float:
        """Padded bytes of the two inputs and the output, each once."""
        m, k, n = (tiles(size) * TILE for size in (self.m, self.k, self.n))
        return self.bytes_per_element * self.batch * (m * k + k * n + m * n)


@dataclass(frozen=True)
class Stream:
    """Whole tiles come in, whole tiles go out, in the order in which they lie: elementwise ops and plain sums."""

    nbytes: float
    tiles: int  # of the largest tensor: the work that cores share


@dataclass(frozen=True)
class Scatter:
    """Rows of tiles are read or written out of order, or read several times: norms, softmax, head moves, lookup."""

    nbytes: float
    tiles: int


Program = Product | Stream | Scatter


def tiles(size: int) -> int:
    """Tiles along an axis."""
    return -(-size // TILE)
