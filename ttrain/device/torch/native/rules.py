"""Rules of ops that one generated function runs: elementwise, norms, attention, sums, lookups, losses, moves."""

from __future__ import annotations

from functools import partial
from math import prod

from ttrain.core.attention_mask import CAUSAL, EVERY_KEY, FULL, PAIRS, alibi_slopes
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.torch.loops import program_of
from ttrain.device.torch.native.codegen import Request, addresses, c_float, c_type, call, template
from ttrain.device.torch.native.elementwise import EXPRESSIONS, NO_MASK, CppNest, mask
from ttrain.device.torch.native.native import Native, Rule, Sizing, fp32, one_call, rows_and_width, up_to

_LEAST_SCALE = 1e-30  # hidden scores are the lowest numbers before they are scaled
_TILE = 32  # columns of a tile with the widest vectors; narrower ones need less scratch
_WIDEST_ROW = 2**16  # elements of a row that a kernel keeps on a thread's stack


def _program(request: Request, sizing: Sizing) -> Native | None:
    """Op fused, or one other op as a program of one step."""
    found = program_of(request.op, request.inputs, request.settings, EXPRESSIONS)
    if found is None:
        return None
    nest = CppNest(request.inputs, *found, request.outputs)
    nest.rounds = sizing.batch_invariant
    return Native(nest.source(sizing.threads_for(nest.cost)))


def _norm(request: Request, sizing: Sizing) -> Native | None:
    """Normalise by layer or by RMS, where RMS has neither bias nor mean; after a residual sum or not."""
    branch, centred = request.op.startswith("add_"), "layer" in request.op
    x, weight = request.input(0), request.input(2 if branch else 1)
    bias = request.has(3 if branch else 2)
    rows, width = rows_and_width(x.shape)
    if width > _WIDEST_ROW or (bias and request.input(3 if branch else 2) != weight):
        return None
    given = addresses([*request.inputs, *request.outputs], len(request.inputs))
    inputs, outputs = given[: len(request.inputs)], given[len(request.inputs) :]
    if not branch:
        inputs.insert(1, "nullptr")
        outputs.insert(0, "nullptr")
    if not centred:
        inputs.append("nullptr")
        outputs.insert(2, "nullptr")
    kinds = (c_type(x), c_type(weight), centred, branch, bias)
    pointers = [*inputs, c_float(request.settings["eps"]), *outputs]
    return one_call(request, "layer_norm", (*kinds, rows, width, sizing.threads_for(6 * x.size)), pointers=pointers)


def _norm_grad(request: Request, sizing: Sizing) -> Native:
    centred, last = request.op == "layer_norm_grad", len(request.inputs) - 1
    dy, weight, bias = request.input(0), request.input(last - 1), request.settings.get("bias", False)
    rows, width = rows_and_width(dy.shape)
    parts = sizing.parts_for(rows, width)
    sums = fp32(parts, 2 * width)
    given = addresses((*request.inputs, *request.outputs, sums), len(request.inputs))
    if not centred:
        given.insert(2, "nullptr")
    if not bias:
        given.insert(8, "nullptr")
    kinds = (c_type(dy), c_type(weight), centred, bias, request.has(last))
    arguments = (*kinds, rows, width, parts, sizing.threads_for(8 * dy.size, parts))
    return one_call(request, "layer_norm_grad", arguments, pointers=given, work=[sums])


def _rotary(request: Request, sizing: Sizing) -> Native | None:
    x, cos = request.input(0), request.input(1)
    if cos.dtype is not DType.FP32:
        return None
    heads, (places, pairs) = request.settings["heads"], rows_and_width(cos.shape)
    sizes = (x.shape[0] * x.shape[1], heads, x.shape[2] // heads, places, pairs, sizing.threads_for(3 * x.size))
    return one_call(request, "rotary", (c_type(x), -1 if request.settings["inverse"] else 1, *sizes))


def _softmax(request: Request, sizing: Sizing) -> Native | None:
    x, hidden, (rows, width) = request.input(0), request.settings["mask"], rows_and_width(request.input(0).shape)
    if width > _WIDEST_ROW or not (hidden.is_full or hidden.is_causal):
        return None
    arguments = (c_type(x), hidden.is_causal, rows, width, sizing.threads_for(10 * x.size))
    return one_call(request, "softmax", arguments, c_float(request.settings["scale"]))


def _log_sum_exp(request: Request, sizing: Sizing) -> Native | None:
    x, settings = request.input(0), request.settings
    if settings["scale"] != 1 or not settings["mask"].is_full:
        return None
    return one_call(request, "log_sum_exp", (c_type(x), *rows_and_width(x.shape), sizing.threads_for(10 * x.size)))


def _by_rows(cost: int, request: Request, sizing: Sizing) -> Native:
    """Treat each row by itself, at a cost of so many additions an element."""
    x, scale = request.input(0), request.settings.get("scale")
    arguments = (c_type(x), *rows_and_width(x.shape), sizing.threads_for(cost * x.size))
    return one_call(request, request.op, arguments, *([] if scale is None else [c_float(scale)]))


def _reduce_sum(request: Request, sizing: Sizing) -> Native | None:
    x, y = request.input(0), request.outputs[0]
    axes = request.settings["axes"]
    if not axes or axes != tuple(range(axes[0], axes[-1] + 1)):
        return None
    before, middle = prod(x.shape[: axes[0]]), prod(x.shape[axes[0] : axes[-1] + 1])
    after = prod(x.shape[axes[-1] + 1 :])
    count, kinds = sizing.threads_for(2 * x.size), (c_type(x), c_type(y))
    if before == 1 and after > 1:
        parts = sizing.parts_for(middle, after)
        arguments = (*kinds, middle, after, parts, min(count, parts))
        return one_call(request, "sum_columns", arguments, work=[fp32(parts, after)])
    return one_call(request, "sum_middle", (*kinds, before, middle, after, min(count, before)))


def _cross_entropy(request: Request, sizing: Sizing) -> Native:
    logits = request.input(0)
    rows, width = logits.shape
    body = call(
        template("cross_entropy", c_type(logits), width), str(rows), f"in<{c_type(logits)}>(a, 0)", "in<i64>(a, 1)",
        "out<float>(a, 5)", "out<float>(a, 4)", str(sizing.threads_for(10 * logits.size)),
    )  # fmt: skip
    total = call("sum_losses", str(rows), "in<float>(a, 5)", "in<float>(a, 2)", "out<float>(a, 3)")
    return Native(f"{body}\n{total}", [fp32(rows)])


def _squared_error(request: Request, sizing: Sizing) -> Native:
    prediction, target = request.input(0), request.input(1)
    arguments = (c_type(prediction), c_type(target), prediction.size, sizing.threads_for(3 * prediction.size))
    return one_call(request, "squared_error", arguments, work=[fp32(-(-prediction.size // 4096))])


def _embedding_grad(request: Request, sizing: Sizing) -> Native:
    """Sum the gradients of rows; with three inputs (base, dy, ids) add them to `base`, which may be overwritten."""
    base = len(request.inputs) == 3
    dy, ids = request.input(base), request.input(base + 1)
    vocabulary, width = request.outputs[0].shape
    cost = 2 * dy.size + (0 if base else request.outputs[0].size)
    count = sizing.threads_for(cost, width * dy.dtype.itemsize // 64)
    work = [TensorSpec((size,), DType.INT32) for size in (vocabulary + 1, ids.size)]
    given = addresses([*request.inputs, request.outputs[0], *work], len(request.inputs))
    if base:
        given = [*given[1:3], given[0], *given[3:]]
    else:
        given.insert(2, "nullptr")
    arguments = (c_type(dy), base, ids.size, vocabulary, width, count)
    return one_call(request, "embedding_grad", arguments, pointers=given, work=work)


def _transpose(request: Request, sizing: Sizing) -> Native:
    x = request.input(0)
    arguments = (c_type(x), prod(x.shape[:-2]), *x.shape[-2:], sizing.threads_for(3 * x.size))
    return one_call(request, "transpose", arguments)


def _move_heads(request: Request, sizing: Sizing) -> Native:
    """Move tensors [B, H, T, D] out of a packed one, or back."""
    split = request.op == "split_heads"
    part, kind = (request.outputs[0] if split else request.input(0)), c_type(request.input(0))
    count, (batch, heads, time, width) = len(request.outputs if split else request.inputs), part.shape
    threads = sizing.threads_for(2 * count * part.size)
    packed, parts = ("a[0]", "a + 1") if split else (f"a[{count}]", "a")
    pointers = [f"({kind}*){packed}", f"({kind}* const*)({parts})"]
    return one_call(request, "move_heads", (kind, split, batch, time, count, heads, width, threads), pointers=pointers)


def _attention_scratch(time: int, width: int, backward: bool, threads: int) -> TensorSpec:
    """Return the scratch memory that HeadSizes in kernels/attention.h asks for, for heads of so many columns."""
    block = up_to(time, 8) if time < 32 else 32
    longest, width = max(up_to(time, _TILE), up_to(time, block)), up_to(width, _TILE)
    matrix, scores = longest * width, block * longest
    return fp32(threads, 9 * matrix + 2 * scores if backward else 4 * matrix + scores + block * width)


def _attention(request: Request, sizing: Sizing) -> Native | None:
    """Forward on (q, k?, v?, no bias, seed?, positions?), backward on (dy, q, k?, v?, y, log_sum_exp, and those).

    Keys as wide as values; no bias by distance, a window under the causal mask alone, and no key that lies further
    ahead than in a pair.
    """
    backward, settings = request.op == "attention_grad", request.settings
    q, heads, rules = request.input(int(backward)), settings["heads"], settings["mask"]
    packed, first = not request.has(1 + backward), len(request.inputs)
    features = q.shape[2] // (3 if packed else 1)
    kv_heads = settings.get("kv_heads", heads)
    alike = packed or request.input(2 + backward).shape[2] * heads == features * kv_heads
    ordinary = settings["scale"] > _LEAST_SCALE
    windowed = rules.window is not None and rules.name != CAUSAL
    if not alike or not ordinary or rules.name == FULL or windowed or rules.position_bias == "distance":
        return None
    kind, p = c_type(q), settings.get("p", 0.0)
    given = _three(f"in<{kind}>(a, {{}})", int(backward), packed, features)
    if backward:
        targets = _three(f"out<{kind}>(a, {{}})", first, packed, features)
        tensors = [f"in<{kind}>(a, 0)", *given, f"in<{kind}>(a, 4)", "in<float>(a, 5)", *targets]
    else:
        tensors = [*given, f"out<{kind}>(a, {first})", f"out<float>(a, {first + 1})"]
    batch, time, width = *q.shape[:2], features // heads
    threads = sizing.threads_for((10 if backward else 4) * batch * time * time * features // 8, batch * kv_heads)
    scratch = _attention_scratch(time, width, backward, threads)
    made = mask(f"*in<i64>(a, {first - 2})", p, settings.get("stream", 0)) if p else NO_MASK
    (table, near), work = _slopes(heads if rules.biased else 0), f"out<float>(a, {first + len(request.outputs)})"
    documents = request.has(first - 1)
    places = f"in<i64>(a, {first - 1})" if documents else "(const i64*)nullptr"
    rows = (q.shape[2], q.shape[2] if packed else kv_heads * width)
    shape = (batch, heads, kv_heads, time, width, *rows, threads)
    kept = [] if backward else ["float" if sizing.batch_invariant else f"VectorOperand<{kind}>"]
    name = template(request.op, kind, *kept, made != NO_MASK, rules.name == PAIRS, documents, rules.window or 0, *shape)
    return Native(table + call(name, *tensors, c_float(settings["scale"]), near, places, made, work), [scratch])


def _cache_write(request: Request, sizing: Sizing) -> Native:
    cache, rows = request.input(0), request.input(1)
    kind, (places, width) = c_type(cache), cache.shape[2:]
    pointers = [f"in<{kind}>(a, 1)", "in<i64>(a, 2)", f"out<{kind}>(a, 0)"]
    arguments = (kind, prod(rows.shape[:2]), rows.shape[2], places, width)
    return one_call(request, "cache_write", arguments, pointers=pointers)


def _cached_attention(request: Request, sizing: Sizing) -> Native | None:
    q, keys, values, rules = (*map(request.input, range(3)), request.settings.get("mask", EVERY_KEY))
    (batch, heads, rows, width), groups, texts = q.shape, keys.shape[1], request.settings.get("texts", 1)
    places = keys.shape[2] // texts
    if places > _WIDEST_ROW or (width % 2 and q.dtype is DType.BF16):
        return None
    table, near = _slopes(heads if rules.biased else 0)
    threads = sizing.threads_for(q.size * places // 8, batch * heads * rows)
    shape = (batch * heads, heads, heads // groups, rows, texts, places, width, values.shape[3], threads)
    name = template(request.op, c_type(q), f"PositionBias::{rules.position_bias}", rules.window or 0, *shape)
    given = addresses([*request.inputs, *request.outputs], len(request.inputs))
    return Native(table + call(name, *given, c_float(request.settings["scale"]), near))


def _slopes(heads: int) -> tuple[str, str]:
    """Return C++ of a table of the slopes of so many heads, and of the pointer to it, which is null for no heads."""
    if not heads:
        return "", "(const float*)nullptr"
    return f"static const float slopes[] = {{{', '.join(map(c_float, alibi_slopes(heads).tolist()))}}};\n", "slopes"


def _three(pointer: str, first: int, packed: bool, features: int) -> list[str]:
    """Pointers to queries, keys and values, which lie side by side where packed."""
    if packed:
        return [pointer.format(first) + f" + {part * features}" * bool(part) for part in range(3)]
    return [pointer.format(first + part) for part in range(3)]


RULES: dict[str, Rule] = {
    **dict.fromkeys((*EXPRESSIONS, "fused"), _program),
    **dict.fromkeys(("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"), _norm),
    **dict.fromkeys(("layer_norm_grad", "rms_norm_grad"), _norm_grad),
    "rotary": _rotary,
    "softmax": _softmax,
    "log_sum_exp": _log_sum_exp,
    "softmax_grad": partial(_by_rows, 4),
    "reduce_sum": _reduce_sum,
    "cross_entropy": _cross_entropy,
    "cross_entropy_grad": partial(_by_rows, 10),
    "squared_error": _squared_error,
    "embedding_grad": _embedding_grad,
    "add_embedding_grad": _embedding_grad,
    "transpose": _transpose,
    "split_heads": _move_heads,
    "merge_heads": _move_heads,
    "attention": _attention,
    "attention_grad": _attention,
    "cache_write": _cache_write,
    "cached_attention": _cached_attention,
}
