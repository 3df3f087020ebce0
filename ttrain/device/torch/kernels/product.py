"""One matrix product, by the faster of the libraries that torch brings.

On the CPU aten sends fp32 products to MKL, which on some processors (such as AMD with AVX-512) runs at half the speed
of oneDNN. Which one is faster here is measured once per machine and shape, and kept in a table (costs.py).
oneDNN's fp32 product can't write into a given buffer: it returns a fresh tensor that is copied. Tall products go row
block by row block, so that this tensor stays small and is still in the cache when it is copied.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch

from ttrain.device.base import Launch, chain
from ttrain.device.torch.kernels.common import Tensor
from ttrain.device.torch.kernels.costs import fastest

LIBRARIES = ("aten", "onednn")  # by their names in device.matmul
SMALLEST = 4_000_000  # floating-point operations; below, oneDNN's overhead per call outweighs its speed
_BLOCK_ROWS = 256  # of a tall product are computed at once by oneDNN, at least: fewer make it slower
_BLOCK_BYTES = 2**22  # of the fresh tensor of a block, where that many rows allow it
_LARGEST = 1024  # rows, columns and inner size of a measured product at most: larger ones run at the same rate


def product(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, pinned: str = "auto") -> Launch:
    """out [M, N] <- a [M, K] b [K, N] + bias [N]. a and b may be transposed views; `pinned` is device.matmul."""
    (rows, inner), columns = a.shape, b.shape[1]
    sizes = rows, inner, columns, a.is_contiguous(), b.is_contiguous()
    if a.device.type == "cpu" and a.dtype is torch.float32 and uses_onednn(*sizes, pinned):
        if not a.is_contiguous():  # a block of a transposed operand would be read with long strides
            return partial(_onednn_into, out, a, b.t(), bias)
        height = _height(columns)
        blocks = zip(out.split(height), a.split(height), strict=True)
        return chain(*(partial(_onednn_into, part, block, b.t(), bias) for part, block in blocks))
    if bias is None:
        return partial(torch.mm, a, b, out=out)
    return partial(torch.addmm, bias, a, b, out=out)


def fresh_bytes(rows: int, inner: int, columns: int, plain_a: bool, plain_b: bool, pinned: str = "auto") -> int:
    """Bytes that an fp32 product on the CPU allocates while it runs: the fresh tensor, and a copy of a transposed a.

    `plain_a` and `plain_b` say whether a [M, K] and b [K, N] lie in memory as their shapes say.
    """
    if not uses_onednn(rows, inner, columns, plain_a, plain_b, pinned):
        return 0
    height = min(_height(columns), rows) if plain_a else rows
    return 4 * (height * columns + (0 if plain_a else rows * inner))


def _height(columns: int) -> int:
    """Rows of a block."""
    return max(_BLOCK_ROWS, _BLOCK_BYTES // (4 * columns) // _BLOCK_ROWS * _BLOCK_ROWS)


def _worth(rows: int, inner: int, columns: int) -> bool:
    """Return whether a product is large enough for oneDNN's overhead per call."""
    return 2 * rows * inner * columns >= SMALLEST and min(rows, inner, columns) >= 16


def uses_onednn(rows: int, inner: int, columns: int, plain_a: bool, plain_b: bool, pinned: str) -> bool:
    """Return whether a fp32 product on the CPU goes to oneDNN directly instead of through aten; see fresh_bytes."""
    if pinned == "aten" or not _worth(rows, inner, columns):
        return False
    if pinned == "onednn":
        return _onednn_available()
    timed = (min(size, _LARGEST) for size in (rows, inner, columns))
    return _decided(*timed, plain_a, plain_b, torch.get_num_threads())


def _onednn_into(out: Tensor, a: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    out.copy_(torch.ops.mkldnn._linear_pointwise.default(a, weight, bias, "none", [], ""))


def _onednn_available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@lru_cache(maxsize=512)
def _decided(rows: int, inner: int, columns: int, plain_a: bool, plain_b: bool, threads: int) -> bool:
    """Return whether oneDNN is faster for this product here, once per process and number of threads."""
    if not _onednn_available():
        return False

    def operands() -> tuple[Tensor, Tensor, Tensor]:
        a = torch.ones(rows, inner) if plain_a else torch.ones(inner, rows).t()
        return a, torch.ones(inner, columns) if plain_b else torch.ones(columns, inner).t(), torch.ones(rows, columns)

    def through_aten() -> Launch:
        a, b, out = operands()
        return partial(torch.mm, a, b, out=out)

    def through_onednn() -> Launch:
        a, b, out = operands()
        return partial(_onednn_into, out, a, b.t(), None)

    layout = f"{'N' if plain_a else 'T'}{'N' if plain_b else 'T'}"
    ways = {"aten": through_aten, "onednn": through_onednn}
    return fastest(f"product fp32 {layout} {rows}x{columns}x{inner}", ways) == "onednn"
