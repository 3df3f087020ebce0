"""Matrix products, each by the faster of the libraries that torch brings.

On the CPU bf16 goes to oneDNN, which uses AMX or AVX-512 BF16 where the machine has them. aten sends fp32 products to
MKL, which on some processors (such as AMD with AVX-512) runs at half the speed of oneDNN. The faster one is measured
once per machine and shape, and kept in a table (costs.py). oneDNN's fp32 product can't write into a given buffer: it
returns a fresh tensor that is copied. Tall products go row block by row block, so that this tensor stays small and is
still in the cache when it is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Attributes, Kernel, Launch, Specs, chain
from ttrain.device.torch.kernels.common import ROWS, Bind, Call, Context, Tensor, Workspace, kernel, rows_of
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


def _matmul(call: Call) -> None:
    (a, b), c = call.ins, call.outs[0]
    a, b = a.mT if call.attributes["transpose_a"] else a, b.mT if call.attributes["transpose_b"] else b
    if a.ndim == 2:
        call.emit(product(a, b, c, pinned=call.context.matmul))
    else:
        call.emit(torch.bmm, a.flatten(0, -3), b.flatten(0, -3), out=c.flatten(0, -3))


_Sizes = tuple[int, int, int, bool, bool]  # rows, inner, columns, whether a [M, K] and b [K, N] lie as their shapes say


def _matmul_sizes(ins: Sequence[TensorSpec | None], outs: Specs, attributes: Attributes) -> _Sizes | None:
    """Return the sizes of a product in fp32; None for other products."""
    a, (rows, columns) = ins[0], outs[0].shape[-2:]
    if a is None or a.rank != 2 or a.dtype is not DType.FP32:
        return None
    return rows, a.size // rows, columns, not attributes["transpose_a"], not attributes["transpose_b"]


def _linear_sizes(ins: Sequence[TensorSpec | None], outs: Specs, attributes: Attributes) -> _Sizes | None:
    weight, y = ins[1], outs[0]
    if weight is None or y.dtype is not DType.FP32:
        return None
    columns, inner = weight.shape
    return y.size // columns, inner, columns, True, False


def _product_row(
    bind: Bind, sizes: Callable[..., _Sizes | None], workspace: Workspace | None, context: Context
) -> Kernel:
    """The row, on a CPU telling what its products allocate and who makes them."""
    made = kernel(context, bind, workspace)

    def outside(*given: Any) -> int:
        found = sizes(*given)
        return 0 if found is None else fresh_bytes(*found, context.matmul)

    def way(*given: Any) -> str:
        found = sizes(*given)
        return "onednn" if found is not None and uses_onednn(*found, context.matmul) else "aten"

    return replace(made, outside=outside, way=way) if context.on_cpu else made


def _activation(call: Call) -> tuple[Kernel, Attributes] | None:
    """The row of the activation and the attributes of its op; None where there is none."""
    name = call.attributes.get("activation")
    forms = {"gelu": "none", "gelu_tanh": "tanh"}
    op, settings = ("gelu", {"approximate": forms[name]}) if name in forms else (name, {})
    return None if op is None else (ROWS[op](call.context), settings)


def _linear(call: Call) -> None:
    """A product, then the activation's own row in place: fused or not, the bits are the same."""
    x, weight, bias = call.ins
    rows, y = rows_of(x), rows_of(call.outs[0])
    call.emit(product(rows, weight.t(), y, bias, call.context.matmul))
    if (found := _activation(call)) is not None:
        activation, settings = found
        call.emit(activation.bind([y], [y], settings, call.work))


def _linear_workspace(call: Call) -> list[TensorSpec]:
    if (found := _activation(call)) is None:
        return []
    activation, settings = found
    return activation.workspace_specs(call.outs, call.outs, settings)


ROWS.update(
    matmul=partial(_product_row, _matmul, _matmul_sizes, None),
    linear=partial(_product_row, _linear, _linear_sizes, _linear_workspace),
)
