"""Matrix products, each by the fastest of torch's libraries and of code that the machine's compiler makes.

On the CPU aten sends bf16 products to oneDNN, which uses AMX or AVX-512 BF16 where the machine has them, and those of
fp32 to MKL, which on some processors (such as AMD with AVX-512) runs at half the speed of oneDNN. The fastest way is
measured once per machine and shape, and kept in a table (costs.py). oneDNN's fp32 product can't write into a given
buffer: it returns a fresh tensor that is copied. Tall products go row block by row block, so that this tensor stays
small and is still in the cache when it is copied.

Of a weight in fewer bits a block is widened into scratch memory, multiplied, then the next. Of x W^T a block is some
rows of W, of x W some columns, so no two blocks are added up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import torch

from ttrain.device.base import Launch
from ttrain.device.quantized import BLOCK, GROUP, INVERSE, NF4, PARTS, scale_values
from ttrain.device.torch.kernels import common
from ttrain.device.torch.kernels.common import DTYPES, ROWS, TORCH_DTYPES, Call, Tensor, row, rows_of, spec_of
from ttrain.device.torch.kernels.costs import fastest

LIBRARIES = ("aten", "onednn")  # by their names in device.matmul
OWN = "own"  # the way of a product that compiled code makes
SMALLEST = 4_000_000  # floating-point operations; below, oneDNN's overhead per call outweighs its speed
_READ = 2**16  # elements of the matrix of a product of one row; below, a call takes longer than reading them
_BLOCK_ROWS = 256  # of a tall product are computed at once by oneDNN, at least: fewer make it slower
_BLOCK_BYTES = 2**22  # of the fresh tensor of a block, where that many rows allow it
_WIDENED = 2**20  # elements of a block of a weight in fewer bits
_FORMS = {"gelu": "none", "gelu_tanh": "tanh"}  # of GELU as the activation of a product
_LARGEST = 1024  # rows, columns and inner size of a measured product at most: larger ones run at the same rate


def product(call: Call, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out [M, N] <- a [M, K] b [K, N] + bias [N]. a and b may be transposed views."""
    (rows, inner), columns, plain, way = a.shape, b.shape[1], a.is_contiguous(), "aten"
    if call.context.on_cpu and a.dtype in (torch.float32, torch.bfloat16):
        way = way_of(rows, inner, columns, plain, b.is_contiguous(), call.context.matmul, a.dtype)
    call.way = way
    if way == OWN:
        from ttrain.device.torch.native import own

        shape = own.scratch_shape(rows, columns, inner, torch.get_num_threads(), a.dtype)
        scratch = call.scratch(shape, torch.float32)
        call.begin()
        call.emit(own.product(out, a, b, bias, scratch))
    elif way == "onednn":
        # A block of a transposed operand would be read with long strides.
        height = min(_height(columns), rows) if plain else rows
        # Bytes of the fresh tensor, and of a copy of a transposed a.
        call.outside = 4 * (height * columns + (0 if plain else rows * inner))
        for part, block in zip(out.split(height), a.split(height), strict=True):
            call.emit(_onednn_into, part, block, b.t(), bias)
    elif bias is None:
        call.emit(torch.mm, a, b, out=out)
    else:
        call.emit(torch.addmm, bias, a, b, out=out)


def _height(columns: int) -> int:
    """Rows of a block."""
    return max(_BLOCK_ROWS, _BLOCK_BYTES // (4 * columns) // _BLOCK_ROWS * _BLOCK_ROWS)


def way_of(
    rows: int, inner: int, columns: int, plain_a: bool, plain_b: bool, pinned: str, dtype: torch.dtype = torch.float32
) -> str:
    """Return the way of a product on the CPU: `aten`, `onednn` without aten (fp32), or our OWN compiled code.

    `plain_a` and `plain_b` say whether a [M, K] and b [K, N] lie in memory as their shapes say. `pinned` is
    device.matmul.
    """
    one_row = pinned == "auto" and rows == 1 and not plain_b and inner * columns >= _READ
    small = 2 * rows * inner * columns < SMALLEST or min(rows, inner, columns) < 16
    if pinned == "aten" or (small and not one_row):
        return "aten"
    if pinned == "onednn":
        return "onednn" if _onednn_serves(dtype) else "aten"
    # An odd inner axis stays odd: there may be no code for it.
    timed = min(rows, _LARGEST), min(inner, _LARGEST - inner % 2), min(columns, _LARGEST)
    return _decided(*timed, plain_a, plain_b, torch.get_num_threads(), dtype)


def _onednn_into(out: Tensor, a: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    out.copy_(torch.ops.mkldnn._linear_pointwise.default(a, weight, bias, "none", [], ""))


def _onednn_serves(dtype: torch.dtype) -> bool:
    """True for fp32; bf16 reaches oneDNN through aten."""
    there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return dtype is torch.float32 and there


@lru_cache(maxsize=512)
def _decided(
    rows: int, inner: int, columns: int, plain_a: bool, plain_b: bool, threads: int, dtype: torch.dtype
) -> str:
    """Return the fastest way of this product here, once per process and number of threads."""
    from ttrain.device.torch.native import own

    version = own.version(dtype) if own.serves(inner, plain_a, plain_b, dtype) else None
    there = {"aten": True, "onednn": _onednn_serves(dtype), OWN: version is not None}
    names = [name for name in there if there[name]]

    def ways() -> dict[str, Launch]:
        ones = partial(torch.ones, dtype=dtype)
        a = ones(rows, inner) if plain_a else ones(inner, rows).t()
        b = ones(inner, columns) if plain_b else ones(columns, inner).t()
        out, scratch = ones(rows, columns), torch.ones(own.scratch_shape(rows, columns, inner, threads, dtype))
        onednn = partial(_onednn_into, out, a, b.t(), None)
        found: dict[str, Launch] = {"aten": partial(torch.mm, a, b, out=out), "onednn": onednn}
        if version is not None:
            found[OWN] = own.product(out, a, b, None, scratch)
        return {name: found[name] for name in names}

    layout = f"{'N' if plain_a else 'T'}{'N' if plain_b else 'T'}"
    code = "" if version is None else f" code={version}"
    return fastest(f"product {DTYPES[dtype]} {layout} {rows}x{columns}x{inner}{code}", names, ways)


@row("matmul", widens=True, tells="cpu")
def _matmul(call: Call) -> None:
    (a, b), c = call.ins, call.outs[0]
    a, b = a.mT if call.attributes["transpose_a"] else a, b.mT if call.attributes["transpose_b"] else b
    if a.ndim == 2:
        product(call, a, b, c)
    else:
        call.emit(torch.bmm, a.flatten(0, -3), b.flatten(0, -3), out=c.flatten(0, -3))


@row("linear", widens=True, tells="cpu")
def _linear(call: Call) -> None:
    """A product, then the activation's own row in place: fused or not, the bits are the same."""
    x, weight, bias = call.ins
    rows, y, activated = rows_of(x), rows_of(call.outs[0]), None
    if (name := call.attributes.get("activation")) is not None:
        op, settings = ("gelu", {"approximate": _FORMS[name]}) if name in _FORMS else (name, {})
        kernel, specs = ROWS[op](call.context), [spec_of(y)]
        work = [call.scratch(x.shape, TORCH_DTYPES[x.dtype]) for x in kernel.workspace(specs, specs, settings)]
        activated = None if call.planning else kernel.bind([y], [y], settings, work)
    product(call, rows, weight.t(), y, bias)
    if activated is not None:
        call.emit(activated)


def _quantized(code: str, call: Call) -> None:
    (x, codes), y, by_rows = call.ins[:2], rows_of(call.outs[0]), call.attributes["transpose_b"]
    x, outputs = rows_of(x), codes.shape[0]
    inputs, dtype, wide = (x if by_rows else y).shape[1], x.dtype, common.accumulation(x.dtype)
    height = min(outputs, max(_WIDENED // inputs, 1)) if by_rows else outputs
    width = inputs if by_rows else min(inputs, max(_WIDENED // outputs // BLOCK, 1) * BLOCK)
    block = call.scratch((height * width,), wide)
    narrow = block if dtype is wide else call.scratch((height * width,), dtype)
    widen = (_int8 if code == "int8" else _nf4)(call, height * width, wide)
    for top in range(0, outputs, height):
        for left in range(0, inputs, width):
            rows, columns = slice(top, min(top + height, outputs)), slice(left, min(left + width, inputs))
            shape = rows.stop - top, columns.stop - left
            widen(rows, columns, common.shaped(block, shape))
            weight = common.shaped(narrow, shape)
            call.copy(common.shaped(block, shape), None if narrow is block else weight)
            given, made = (weight.t(), rows) if by_rows else (weight, columns)
            call.emit(torch.mm, x, given, out=y[:, made])


def _int8(call: Call, size: int, wide: torch.dtype) -> Callable[[slice, slice, Tensor], None]:
    codes, absmax = call.ins[1:]
    call.begin()

    def widen(rows: slice, columns: slice, block: Tensor) -> None:
        call.emit(block.copy_, codes[rows, columns])
        call.emit(block.mul_, absmax[rows, None])
        call.emit(block.mul_, common.constant_like(INVERSE, block))

    return widen


def _nf4(call: Call, size: int, wide: torch.dtype) -> Callable[[slice, slice, Tensor], None]:
    codes, absmax, above, mean = call.ins[1:]
    scales = call.scratch(absmax.shape, wide)
    index = call.scratch((max(size // 2, absmax.numel()),), torch.int32)
    call.begin()
    known = torch.from_numpy(scale_values()).to(codes.device, wide)
    pairs = torch.from_numpy(np.stack(np.broadcast_arrays(NF4[:, None], NF4), -1).reshape(-1, 2))
    pairs = pairs.to(codes.device, wide)

    def look_up(table: Tensor, numbers: Tensor, found: Tensor) -> None:
        places = common.shaped(index, numbers.shape)
        call.emit(places.copy_, numbers)
        call.emit(torch.index_select, table, 0, places.view(-1), out=found)

    flat, whole = scales.view(-1), scales.numel() // GROUP
    look_up(known, absmax, flat)
    call.emit(flat[: whole * GROUP].view(whole, GROUP).mul_, above[:whole, None])
    call.emit(flat[whole * GROUP :].mul_, above[-1])
    call.emit(flat.add_, mean)

    def widen(rows: slice, columns: slice, block: Tensor) -> None:
        halves, blocks = (slice(columns.start // each, columns.stop // each) for each in (2, BLOCK))
        look_up(pairs, codes[rows, halves], block.view(-1, 2))
        call.emit(block.view(block.shape[0], -1, BLOCK).mul_, scales[rows, blocks].unsqueeze(-1))

    return widen


for _code in PARTS:
    row(f"{_code}_matmul", widens=True)(partial(_quantized, _code))
