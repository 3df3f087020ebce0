"""Rules of ops that one generated function runs: elementwise, norms, attention, sums, lookups, losses, moves."""

from __future__ import annotations

from math import prod

from ttrain.core.attention_mask import CAUSAL, FULL, PAIRS, alibi_slopes
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.torch.native.codegen import Request, addresses, c_float, c_type, call, template
from ttrain.device.torch.native.elementwise import EXPRESSIONS, NO_MASK, LoopNest, Step, covers, mask
from ttrain.device.torch.native.native import Native, Rule, Sizing, fp32, int32, rows_and_width, stored, up_to

_LEAST_SCALE = 1e-30  # hidden scores are the lowest numbers before they are scaled
_TILE = 32  # columns of a tile with the widest vectors; narrower ones need less scratch
_WIDEST_ROW = 2**16  # elements of a row that a kernel keeps on a thread's stack


def _fits(spec: TensorSpec) -> bool:
    """Return whether there are rows, of a width that a thread's stack can hold."""
    return spec.rank > 0 and spec.size > 0 and spec.shape[-1] <= _WIDEST_ROW


def _elementwise(request: Request, sizing: Sizing) -> Native | None:
    """One op as a program of one step."""
    step: Step = (request.op, tuple(range(len(request.inputs))), request.attributes)
    return _program(request, (step,), (0,), sizing)


def _fused(request: Request, sizing: Sizing) -> Native | None:
    settings = request.settings
    return _program(request, settings["program"], settings["results"], sizing)


def _program(request: Request, program: tuple[Step, ...], results: tuple[int, ...], sizing: Sizing) -> Native | None:
    known: list[TensorSpec | None] = list(request.inputs)
    whole = request.outputs[0]
    for name, operands, _ in program:
        if not covers(name, [known[item] for item in operands], request.outputs):
            return None
        known.append(whole.with_dtype(DType.FP32))
    nest = LoopNest(request.inputs, program, results, request.outputs)
    return Native((nest.source(sizing.threads_for(nest.cost)),))


def _norm(request: Request, sizing: Sizing) -> Native | None:
    """Normalise by layer or by RMS, where RMS has neither bias nor mean; after a residual sum or not."""
    branch, centred = request.op.startswith("add_"), "layer" in request.op
    if not stored((*request.inputs, *request.outputs)) or not _fits(request.outputs[0]):
        return None
    x, weight = request.input(0), request.input(2 if branch else 1)
    bias = request.has(3 if branch else 2)
    rows, width = rows_and_width(x.shape)
    if bias and request.input(3 if branch else 2) != weight:
        return None
    tensors = [*request.inputs, *request.outputs]
    given = addresses(tensors, len(request.inputs))
    inputs, outputs = given[: len(request.inputs)], given[len(request.inputs) :]
    if not branch:
        inputs.insert(1, "nullptr")
        outputs.insert(0, "nullptr")
    if not bias:
        inputs[3:] = ["nullptr"]
    if not centred:
        outputs.insert(2, "nullptr")
    count = sizing.threads_for(6 * x.size)
    name = template("layer_norm", c_type(x), c_type(weight), centred, branch, bias, rows, width, count)
    return Native((call(name, *inputs, c_float(request.settings["eps"]), *outputs),))


def _norm_grad(request: Request, sizing: Sizing) -> Native | None:
    if not stored((*request.inputs, *request.outputs)) or request.outputs[0].size == 0:
        return None
    centred, last = request.op == "layer_norm_grad", len(request.inputs) - 1
    dy, weight, bias = request.input(0), request.input(last - 1), request.settings.get("bias", False)
    rows, width = rows_and_width(dy.shape)
    parts = sizing.parts_for(rows, width)
    sums = fp32(parts, 2 * width)
    given = addresses((*request.inputs, *request.outputs, sums), len(request.inputs))
    if not request.has(last):
        given[last] = "nullptr"
    if not centred:
        given.insert(2, "nullptr")
    if not bias:
        given.insert(8, "nullptr")
    count = sizing.threads_for(8 * dy.size, parts)
    kinds = (c_type(dy), c_type(weight), centred, bias, request.has(last))
    return Native((call(template("layer_norm_grad", *kinds, rows, width, parts, count), *given),), (sums,))


def _rotary(request: Request, sizing: Sizing) -> Native | None:
    x, cos = request.input(0), request.input(1)
    if not stored((x,)) or cos.dtype is not DType.FP32 or x.size == 0:
        return None
    heads, (places, pairs) = request.settings["heads"], rows_and_width(cos.shape)
    sizes = (x.shape[0] * x.shape[1], heads, x.shape[2] // heads, places, pairs, sizing.threads_for(3 * x.size))
    name = template("rotary", c_type(x), -1 if request.settings["inverse"] else 1, *sizes)
    return Native((call(name, *addresses((*request.inputs, x), 3)),))


def _softmax(request: Request, sizing: Sizing) -> Native | None:
    x, settings = request.input(0), request.settings
    hidden = settings["mask"]
    if not stored((x,)) or not _fits(x) or not (hidden.is_full or hidden.is_causal):
        return None
    rows, width = rows_and_width(x.shape)
    name = template("softmax", c_type(x), hidden.is_causal, rows, width, sizing.threads_for(10 * x.size))
    return Native((call(name, *addresses((x, x), 1), c_float(settings["scale"])),))


def _softmax_grad(request: Request, sizing: Sizing) -> Native | None:
    dy = request.input(0)
    if not stored((dy,)) or dy.rank == 0 or dy.size == 0:
        return None
    rows, width = rows_and_width(dy.shape)
    name = template("softmax_grad", c_type(dy), rows, width, sizing.threads_for(4 * dy.size))
    return Native((call(name, *addresses((dy, dy, dy), 2), c_float(request.settings["scale"])),))


def _reduce_sum(request: Request, sizing: Sizing) -> Native | None:
    x, y = request.input(0), request.outputs[0]
    axes = request.settings["axes"]
    if not stored((x, y)) or x.size == 0 or not axes or axes != tuple(range(axes[0], axes[-1] + 1)):
        return None
    before, middle = prod(x.shape[: axes[0]]), prod(x.shape[axes[0] : axes[-1] + 1])
    after = prod(x.shape[axes[-1] + 1 :])
    count = sizing.threads_for(2 * x.size)
    if before == 1 and after > 1:
        parts = sizing.parts_for(middle, after)
        sums = fp32(parts, after)
        name = template("sum_columns", c_type(x), c_type(y), middle, after, parts, min(count, parts))
        return Native((call(name, *addresses((x, y, sums), 1)),), (sums,))
    name = template("sum_middle", c_type(x), c_type(y), before, middle, after, min(count, before))
    return Native((call(name, *addresses((x, y), 1)),))


def _cross_entropy(request: Request, sizing: Sizing) -> Native | None:
    logits = request.input(0)
    if not stored((logits, request.input(2))) or logits.size == 0:
        return None
    rows, width = logits.shape
    body = call(
        template("cross_entropy", c_type(logits), width), str(rows), f"in<{c_type(logits)}>(a, 0)", "in<i64>(a, 1)",
        "out<float>(a, 5)", "out<float>(a, 4)", str(sizing.threads_for(10 * logits.size)),
    )  # fmt: skip
    total = call("sum_losses", str(rows), "in<float>(a, 5)", "in<float>(a, 2)", "out<float>(a, 3)")
    return Native((f"{body}\n{total}",), (fp32(rows),))


def _cross_entropy_grad(request: Request, sizing: Sizing) -> Native | None:
    logits = request.input(0)
    if not stored((logits, *request.inputs[2:])) or logits.size == 0:
        return None
    rows, width = logits.shape
    name = template("cross_entropy_grad", c_type(logits), rows, width, sizing.threads_for(10 * logits.size))
    return Native((call(name, *addresses((*request.inputs, logits), 4)),))


def _squared_error(request: Request, sizing: Sizing) -> Native | None:
    prediction, target = request.input(0), request.input(1)
    if not stored(request.inputs) or prediction.size == 0:
        return None
    partial = fp32(-(-prediction.size // 4096))
    count = sizing.threads_for(3 * prediction.size)
    name = template("squared_error", c_type(prediction), c_type(target), prediction.size, count)
    return Native((call(name, *addresses((*request.inputs, request.outputs[0], partial), 3)),), (partial,))


def _embedding_grad(request: Request, sizing: Sizing) -> Native | None:
    """Sum the gradients of rows; with three inputs (base, dy, ids) add them to `base`, which may be overwritten."""
    base = len(request.inputs) == 3
    dy, ids = request.input(base), request.input(base + 1)
    if not stored((dy, request.outputs[0])) or dy.size == 0:
        return None
    vocabulary, width = request.outputs[0].shape
    cost = 2 * dy.size + (0 if base else request.outputs[0].size)
    count = sizing.threads_for(cost, width * dy.dtype.itemsize // 64)
    name = template("embedding_grad", c_type(dy), base, ids.size, vocabulary, width, count)
    starts, order = int32(vocabulary + 1), int32(ids.size)
    given = addresses([*request.inputs, request.outputs[0], starts, order], len(request.inputs))
    if base:
        given = [*given[1:3], given[0], *given[3:]]
    else:
        given.insert(2, "nullptr")
    return Native((call(name, *given),), (starts, order))


def _transpose(request: Request, sizing: Sizing) -> Native | None:
    x = request.input(0)
    if not stored((x,)) or x.size == 0:
        return None
    before, (rows, columns) = prod(x.shape[:-2]), x.shape[-2:]
    name = template("transpose", c_type(x), before, rows, columns, sizing.threads_for(3 * x.size))
    return Native((call(name, *addresses((x, x), 1)),))


def _split_heads(request: Request, sizing: Sizing) -> Native | None:
    x, part = request.input(0), request.outputs[0]
    if not stored((x,)) or x.size == 0:
        return None
    return Native((heads_body(part, len(request.outputs), True, "a[0]", "a + 1", sizing),))


def _merge_heads(request: Request, sizing: Sizing) -> Native | None:
    count, part = len(request.inputs), request.input(0)
    if not stored((part,)) or part.size == 0:
        return None
    return Native((heads_body(part, count, False, f"a[{count}]", "a", sizing),))


def heads_body(part: TensorSpec, count: int, split: bool, packed: str, parts: str, sizing: Sizing) -> str:
    """Body that moves `count` tensors [B, H, T, D] like `part` out of a packed one, or back."""
    batch, heads, time, width = part.shape
    kind = c_type(part)
    name = template(
        "move_heads", kind, split, batch, time, count, heads, width, sizing.threads_for(2 * count * part.size)
    )
    return call(name, f"({kind}*){packed}", f"({kind}* const*)({parts})")


def _attention_scratch(qkv: TensorSpec, heads: int, backward: bool, threads: int) -> TensorSpec:
    """Return the scratch memory that HeadSizes in kernels/attention.h asks for."""
    _, time, packed = qkv.shape
    block = up_to(time, 8) if time < 32 else 32
    longest, width = max(up_to(time, _TILE), up_to(time, block)), up_to(packed // (3 * heads), _TILE)
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
    if not stored((q, *request.outputs)) or q.size == 0 or not alike or not ordinary:
        return None
    windowed = rules.window is not None and rules.name != CAUSAL
    if rules.name == FULL or windowed or rules.position_bias == "distance":
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
    scratch = _attention_scratch(q.with_shape(batch, time, 3 * features), heads, backward, threads)
    made = mask(f"*in<i64>(a, {first - 2})", p, settings.get("stream", 0)) if p else NO_MASK
    slopes = alibi_slopes(heads).tolist() if rules.biased else []
    table = f"static const float slopes[] = {{{', '.join(map(c_float, slopes))}}};\n" if slopes else ""
    near, work = "slopes" if slopes else "(const float*)nullptr", f"out<float>(a, {first + len(request.outputs)})"
    documents = request.has(first - 1)
    places = f"in<i64>(a, {first - 1})" if documents else "(const i64*)nullptr"
    rows = (q.shape[2], q.shape[2] if packed else kv_heads * width)
    shape = (batch, heads, kv_heads, time, width, *rows, threads)
    name = template(request.op, kind, made != NO_MASK, rules.name == PAIRS, documents, rules.window or 0, *shape)
    return Native((table + call(name, *tensors, c_float(settings["scale"]), near, places, made, work),), (scratch,))


def _three(pointer: str, first: int, packed: bool, features: int) -> list[str]:
    """Pointers to queries, keys and values, which lie side by side where packed."""
    if packed:
        return [pointer.format(first) + f" + {part * features}" * bool(part) for part in range(3)]
    return [pointer.format(first + part) for part in range(3)]


RULES: dict[str, Rule] = {
    **dict.fromkeys(EXPRESSIONS, _elementwise),
    "fused": _fused,
    **dict.fromkeys(("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"), _norm),
    **dict.fromkeys(("layer_norm_grad", "rms_norm_grad"), _norm_grad),
    "rotary": _rotary,
    "softmax": _softmax,
    "softmax_grad": _softmax_grad,
    "reduce_sum": _reduce_sum,
    "cross_entropy": _cross_entropy,
    "cross_entropy_grad": _cross_entropy_grad,
    "squared_error": _squared_error,
    "embedding_grad": _embedding_grad,
    "add_embedding_grad": _embedding_grad,
    "transpose": _transpose,
    "split_heads": _split_heads,
    "merge_heads": _merge_heads,
    "attention": _attention,
    "attention_grad": _attention,
}
