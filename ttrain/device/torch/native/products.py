"""Rules of matrix products, and of the cross-entropy of a head's logits, which is three of them."""

from __future__ import annotations

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.torch.native.codegen import call
from ttrain.device.torch.native.native import Native, Rule, Sizing, fp32
from ttrain.device.torch.native.request import Request, c_float, c_type, rows_and_width, template

_AFTER = {None: "nothing", "relu": "relu", "tanh": "tanh", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}
_INNER, _RIGHT, _DOWN, _WAITING = 512, 2**17, 128, 2**18  # as in kernels/gemm.h


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _scratch(inner: int, dtype: DType) -> int:
    """Floats of scratch that one thread needs for a product along an inner axis."""
    steps = -(-inner // 2) if dtype is DType.BF16 else inner
    blocks = -(-steps // _INNER)
    each = _up(-(-steps // blocks), 16)
    return each * _DOWN + _RIGHT + (_WAITING if blocks > 1 else 0)


def _threads(m: int, n: int, k: int, dtype: DType, sizing: Sizing) -> int:
    return sizing.threads_for(m * n * k / (16 if dtype is DType.BF16 else 8), -(-max(m, n) // 16))


def _covered(dtype: DType, sizing: Sizing) -> bool:
    return dtype is DType.FP32 or (dtype is DType.BF16 and sizing.bf16_products)


def _sizes(m: int, n: int, k: int, turn_a: bool, turn_b: bool) -> str:
    return f"Sizes{{{m}, {n}, {k}, {m if turn_a else k}, {k if turn_b else n}, {n}}}"


def _matmul(request: Request, sizing: Sizing) -> Native | None:
    a, c = request.input(0), request.outputs[0]
    turn_a, turn_b = request.settings["transpose_a"], request.settings["transpose_b"]
    (m, n), k = c.shape[-2:], a.shape[-2 if turn_a else -1]
    # A row along an odd inner axis does not end with a whole pair of bf16.
    pairs = k % 2 == 0 or (turn_a and not turn_b) or a.dtype is DType.FP32
    if a.rank != 2 or not _covered(a.dtype, sizing) or not pairs or not m * n * k:
        return None
    threads, own = _threads(m, n, k, a.dtype, sizing), _scratch(k, a.dtype)
    name = template("product", turn_a, turn_b, False, False, "After::nothing")
    kind = c_type(a)
    body = call(
        name, _sizes(m, n, k, turn_a, turn_b), f"in<{kind}>(a, 0)", f"in<{kind}>(a, 1)", f"(const {kind}*)nullptr",
        f"out<{kind}>(a, 2)", "out<float>(a, 3)", str(own), str(threads),
    )  # fmt: skip
    return Native((body,), (fp32(threads, own),))


def _head_matmul(request: Request, sizing: Sizing) -> Native | None:
    """A product whose rows are those of every head."""
    x, matrix, turned = request.input(0), request.input(1), request.settings["transpose"]
    inner, outer = matrix.shape[::-1] if turned else matrix.shape
    return _matmul(_by_heads(request, x, matrix, (inner, matrix.shape[1]), outer, False, turned), sizing)


def _head_product(request: Request, sizing: Sizing) -> Native | None:
    a, b, (height, width) = request.input(0), request.input(1), request.outputs[0].shape
    return _matmul(_by_heads(request, a, b, (height, width), width, True, False), sizing)


def _by_heads(
    request: Request, a: TensorSpec, b: TensorSpec, widths: tuple[int, int], outer: int, turn_a: bool, turn_b: bool
) -> Request:
    """The plain product of two tensors seen as matrices of these widths."""
    a, b = (x.with_shape(x.size // width, width) for x, width in zip((a, b), widths, strict=True))
    c = request.outputs[0]
    attributes = {"transpose_a": turn_a, "transpose_b": turn_b}
    return Request.make("matmul", (a, b), (c.with_shape(c.size // outer, outer),), attributes)


def _linear(request: Request, sizing: Sizing) -> Native | None:
    x, weight = request.input(0), request.input(1)
    m, k = rows_and_width(x.shape)
    n = weight.shape[0]
    if not _covered(x.dtype, sizing) or not m * n * k or (k % 2 and x.dtype is DType.BF16):
        return None
    threads, own, kind = _threads(m, n, k, x.dtype, sizing), _scratch(k, x.dtype), c_type(x)
    bias = request.has(2)
    name = template("product", False, True, bias, False, f"After::{_AFTER[request.settings.get('activation')]}")
    body = call(
        name, _sizes(m, n, k, False, True), f"in<{kind}>(a, 0)", f"in<{kind}>(a, 1)", f"in<{kind}>(a, 2)",
        f"out<{kind}>(a, 3)", "out<float>(a, 4)", str(own), str(threads),
    )  # fmt: skip
    return Native((body,), (fp32(threads, own),))


def _linear_cross_entropy(request: Request, sizing: Sizing) -> Native | None:
    """In chunks of rows. Several chunks of bf16 need sums in fp32, or else room for all logits: what is smaller."""
    hidden, head = request.input(0), request.input(1)
    (rows, width), classes, dtype = hidden.shape, head.shape[0], hidden.dtype
    gradients, chunk = request.settings["gradients"], min(request.settings["chunk"], rows)
    narrow = dtype is DType.BF16
    if not _covered(dtype, sizing) or not rows * width * classes or (narrow and width % 2):
        return None
    if gradients and narrow and chunk < rows and rows <= 2 * width:
        chunk = rows
    stride = classes + classes % 2 if narrow else classes
    threads = _threads(chunk, classes, width, dtype, sizing)
    own = max(_scratch(inner, dtype) for inner in ((width, classes, chunk) if gradients else (width,)))
    work = [TensorSpec((chunk, stride), dtype), fp32(rows), fp32(threads, own)]
    wide_total = gradients and narrow and chunk < rows
    if wide_total:
        work.append(fp32(classes, width))
    kind, first = c_type(hidden), 4 + len(request.outputs)
    dhidden, dhead = (f"out<{kind}>(a, 5)", f"out<{kind}>(a, 6)") if gradients else (f"({kind}*)nullptr",) * 2
    total = f"out<float>(a, {first + 3})" if wide_total else dhead
    name = template("linear_cross_entropy", kind, "float" if wide_total else kind, gradients, rows, width, classes)
    body = call(
        name, str(chunk), str(stride), f"in<{kind}>(a, 0)", f"in<{kind}>(a, 1)", "in<i64>(a, 2)", "in<float>(a, 3)",
        "out<float>(a, 4)", dhidden, dhead, f"out<{kind}>(a, {first})", f"out<float>(a, {first + 1})", total,
        f"out<float>(a, {first + 2})", str(own), str(threads),
    )  # fmt: skip
    return Native((body,), tuple(work))


def _head_cross_entropy(request: Request, sizing: Sizing) -> Native | None:
    """As linear_cross_entropy, on the live ids alone."""
    hidden, head, settings = request.input(0), request.input(1), request.settings
    (rows, width), (vocabulary, _), dtype = hidden.shape, head.shape, hidden.dtype
    gradients, live, chunk = settings["gradients"], settings["live"], min(settings["chunk"], rows)
    narrow, bias, smoothing = dtype is DType.BF16, request.has(4), settings["smoothing"]
    if not _covered(dtype, sizing) or not rows * width or (narrow and width % 2):
        return None
    if gradients and narrow and chunk < rows and rows <= 2 * width:
        chunk = rows
    stride = live + live % 2 if narrow else live
    threads = _threads(chunk, live, width, dtype, sizing)
    own = max(_scratch(inner, dtype) for inner in ((width, live, chunk) if gradients else (width,)))
    work = [TensorSpec((chunk, stride), dtype), fp32(2, rows), fp32(threads, own), fp32(live)]
    wide_total = gradients and narrow and chunk < rows
    if wide_total:
        work.append(fp32(live, width))
    kind, first = c_type(hidden), 5 + len(request.outputs)
    absent = f"({kind}*)nullptr"
    made = [f"out<{kind}>(a, {7 + index})" for index in range(2 + bias)] if gradients else []
    dhidden, dhead, dbias = [*made, *[absent] * (3 - len(made))]
    total = f"out<float>(a, {first + 4})" if wide_total else dhead
    name = template(
        "head_cross_entropy", kind, "float" if wide_total else kind, gradients, bias, smoothing > 0, rows, width, live,
        vocabulary,
    )  # fmt: skip
    body = call(
        name, str(chunk), str(stride), f"in<{kind}>(a, 0)", f"in<{kind}>(a, 1)", "in<i64>(a, 2)", "in<float>(a, 3)",
        f"in<{kind}>(a, 4)", c_float(smoothing), "out<float>(a, 5)", "out<float>(a, 6)", dhidden, dhead, dbias,
        f"out<{kind}>(a, {first})", f"out<float>(a, {first + 1})", total, f"out<float>(a, {first + 3})",
        f"out<float>(a, {first + 2})", str(own), str(threads),
    )  # fmt: skip
    return Native((body,), tuple(work))


RULES: dict[str, Rule] = {
    "matmul": _matmul,
    "linear": _linear,
    "head_matmul": _head_matmul,
    "head_product": _head_product,
    "linear_cross_entropy": _linear_cross_entropy,
    "head_cross_entropy": _head_cross_entropy,
}
