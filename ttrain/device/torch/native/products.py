"""Rules of matrix products, and of the cross-entropy and log-probabilities of a head, which are up to three of them."""

from __future__ import annotations

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.quantized import NF4, scale_values
from ttrain.device.torch.kernels.common import chunk_rows
from ttrain.device.torch.native.codegen import Request, addresses, c_float, c_type, call, template
from ttrain.device.torch.native.native import Native, Rule, Sizing, fp32, rows_and_width, up_to

_AFTER = {None: "nothing", "relu": "relu", "tanh": "tanh", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}
FEW_ROWS = 4  # of a product that is bound by reading its right matrix, which kernels/gemv.h never packs
_INNER, _RIGHT, _DOWN, _WAITING, _LINE = 512, 2**17, 128, 2**18, 16  # as in kernels/gemm.h


def scratch_size(inner: int) -> int:
    """Floats of scratch that one thread needs for a product along an inner axis; pairs of bf16 need no more."""
    blocks = -(-inner // _INNER)
    each = up_to(-(-inner // blocks), 16)
    return _LINE + each * _DOWN + _RIGHT + (_WAITING if blocks > 1 else 0)


def threads_of(m: int, n: int, k: int, dtype: DType, sizing: Sizing) -> int:
    """Return the number of threads for a product of [m, k] and [k, n]."""
    return sizing.threads_for(m * n * k / (16 if dtype is DType.BF16 else 8), -(-max(m, n) // 16))


def _product(request: Request, sizing: Sizing) -> Native | None:
    """One product of all rows, with bias and activation; or matrices of a batch one after another, by all threads."""
    a, c, settings, place = request.input(0), request.outputs[0], request.settings, len(request.inputs)
    linear, kind = request.op == "linear", c_type(a)
    turn_a, turn_b = (False, True) if linear else (settings["transpose_a"], settings["transpose_b"])
    m, n = rows_and_width(c.shape) if linear else c.shape[-2:]
    k = a.shape[-2 if turn_a else -1]
    # A row along an odd inner axis does not end with a whole pair of bf16.
    pairs = k % 2 == 0 or (turn_a and not turn_b) or a.dtype is DType.FP32
    if not sizing.products or not pairs:
        return None
    few = m <= FEW_ROWS and not turn_a
    threads = sizing.threads_for(n * k) if few else threads_of(m, n, k, a.dtype, sizing)
    after = f"After::{_AFTER[settings.get('activation')]}"
    kinds = (m, turn_b, request.has(2), after) if few else (turn_a, turn_b, request.has(2), False, after)
    sizes = f"Sizes{{{m}, {n}, {k}, {m if turn_a else k}, {k if turn_b else n}, {n}}}"
    steps = [f" + i * {size}" * (not linear) for size in (m * k, k * n, m * n)]
    scratch = [] if few else [f"out<float>(a, {place + 1})", str(scratch_size(k))]
    body = call(
        template("few_rows" if few else "product", *kinds), sizes,
        f"in<{kind}>(a, 0){steps[0]}", f"in<{kind}>(a, 1){steps[1]}",
        f"in<{kind}>(a, 2)" if linear else f"(const {kind}*)nullptr", f"out<{kind}>(a, {place}){steps[2]}",
        *scratch, str(threads),
    )  # fmt: skip
    turns = "" if linear else f"for (i64 i = 0; i < {c.size // (m * n)}; ++i) "
    return Native(turns + body, [] if few else [fp32(threads, scratch_size(k))])


def _quantized(request: Request, sizing: Sizing) -> Native | None:
    """A product whose right matrix is widened as it is packed. The kernel takes whole vectors of a row of it."""
    x, codes, y = request.input(0), request.input(1), request.outputs[0]
    by_rows, kind, (m, k), n = request.settings["transpose_b"], c_type(x), rows_and_width(x.shape), y.shape[-1]
    inputs, pairs = (k if by_rows else n), x.dtype is DType.FP32 or k % 2 == 0
    if not sizing.products or inputs % 32 or not pairs:
        return None
    threads, place = threads_of(m, n, k, x.dtype, sizing), len(request.inputs)
    parts, tables, bits = [str(inputs), *addresses(request.inputs, place)[1:]], "", 8
    if codes.dtype is DType.UINT8:
        parts, bits = [*parts, "levels", "scales"], 4
        known = {"levels": NF4, "scales": scale_values()}
        tables = "".join(f"static const float {x}[] = {{{', '.join(map(c_float, y))}}};\n" for x, y in known.items())
    right = f"Quantized<{bits}>{{{', '.join(parts)}}}"
    body = call(
        template("product", False, by_rows, False, False, "After::nothing"), f"Sizes{{{m}, {n}, {k}, {k}, 0, {n}}}",
        f"in<{kind}>(a, 0)", right, f"(const {kind}*)nullptr", f"out<{kind}>(a, {place})",
        f"out<float>(a, {place + 1})", str(scratch_size(k)), str(threads),
    )  # fmt: skip
    return Native(tables + body, [fp32(threads, scratch_size(k))])


def _head_cross_entropy(request: Request, sizing: Sizing) -> Native | None:
    """Form the logits in chunks of rows, for the live ids alone."""
    hidden, head, settings = request.input(0), request.input(1), request.settings
    (rows, width), (vocabulary, _), dtype = hidden.shape, head.shape, hidden.dtype
    gradients, live, smoothing = settings["gradients"], settings["live"], settings["smoothing"]
    whole = gradients and not settings.get("frozen")
    narrow, each, bias = dtype is DType.BF16, bool(request.input(3).shape), request.has(4)
    if not sizing.products or (narrow and width % 2):
        return None
    chunk = chunk_rows(rows, live, sizing.logits, 4 * width if whole and narrow else 0)
    stride = live + live % 2 if narrow else live
    threads = threads_of(chunk, live, width, dtype, sizing)
    own = max(scratch_size(inner) for inner in ((width, live, chunk) if gradients else (width,)))
    wide_total = whole and narrow and chunk < rows
    work = {
        "logits": TensorSpec((chunk, stride), dtype),
        "losses": fp32(2 if smoothing else 1, rows),
        "scratch": fp32(threads, own),
        **({"columns": fp32(live)} if whole and bias else {}),
        **({"total": fp32(live, width)} if wide_total else {}),
    }
    kind, outputs = c_type(hidden), [5 + index for index in range(len(request.outputs))]
    at = {name: 5 + len(outputs) + index for index, name in enumerate(work)}
    entropy = f"out<float>(a, {outputs[1]})" if smoothing else "(float*)nullptr"
    made = [f"out<{kind}>(a, {place})" for place in outputs[2 if smoothing else 1 :]]
    dhidden, dhead, dbias = [*made, *[f"({kind}*)nullptr"] * (3 - len(made))]
    total, columns = (f"out<float>(a, {at[name]})" if name in at else "" for name in ("total", "columns"))
    name = template(
        "head_cross_entropy", kind, "float" if wide_total else kind, gradients, whole, bias, each, smoothing > 0, rows,
        width, live, vocabulary,
    )  # fmt: skip
    body = call(
        name, str(chunk), str(stride), f"in<{kind}>(a, 0)", f"in<{kind}>(a, 1)", "in<i64>(a, 2)", "in<float>(a, 3)",
        f"in<{kind}>(a, 4)", c_float(smoothing), "out<float>(a, 5)", entropy, dhidden, dhead, dbias,
        f"out<{kind}>(a, {at['logits']})", f"out<float>(a, {at['losses']})", total or dhead,
        columns or "(float*)nullptr", f"out<float>(a, {at['scratch']})", str(own), str(threads),
    )  # fmt: skip
    return Native(body, [*work.values()])


def _head_log_probs(request: Request, sizing: Sizing) -> Native | None:
    hidden, live = request.input(0), request.settings["live"]
    (rows, width), dtype, kind = hidden.shape, hidden.dtype, c_type(hidden)
    if not sizing.products or (dtype is DType.BF16 and width % 2):
        return None
    chunk, own, made = chunk_rows(rows, live, sizing.logits, 0), scratch_size(width), 4 + len(request.outputs)
    threads = threads_of(chunk, live, width, dtype, sizing)
    body = call(
        template("head_log_probs", kind, request.has(3), rows, width, live), str(chunk), f"in<{kind}>(a, 0)",
        f"in<{kind}>(a, 1)", "in<i64>(a, 2)", f"in<{kind}>(a, 3)", "out<float>(a, 4)",
        "out<float>(a, 5)" if request.settings["entropy"] else "(float*)nullptr", f"out<{kind}>(a, {made})",
        f"out<float>(a, {made + 1})", str(own), str(threads),
    )  # fmt: skip
    return Native(body, [TensorSpec((chunk, live), dtype), fp32(threads, own)])


RULES: dict[str, Rule] = {
    **dict.fromkeys(("matmul", "linear"), _product),
    "head_cross_entropy": _head_cross_entropy,
    "head_log_probs": _head_log_probs,
}
QUANTIZED: dict[str, Rule] = dict.fromkeys(("int8_matmul", "nf4_matmul"), _quantized)  # which no library computes
