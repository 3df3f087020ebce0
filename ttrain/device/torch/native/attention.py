"""The rules of attention: one function from queries, keys and values to the mixed values, and one back."""

from __future__ import annotations

from ttrain.core.attention_mask import CAUSAL, FULL, PAIRS, alibi_slopes
from ttrain.core.spec import TensorSpec
from ttrain.device.torch.native.codegen import call
from ttrain.device.torch.native.elementwise import NO_MASK, mask
from ttrain.device.torch.native.native import Native, Rule, Sizing, fp32
from ttrain.device.torch.native.request import Request, c_float, c_type, stored, template

_LEAST_SCALE = 1e-30  # hidden scores are the lowest numbers before they are scaled
_TILE = 32  # columns of a tile with the widest vectors; narrower ones need less scratch


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _scratch(qkv: TensorSpec, heads: int, backward: bool, threads: int) -> TensorSpec:
    """Return the scratch memory that HeadSizes in kernels/attention.h asks for."""
    _, time, packed = qkv.shape
    block = _up(time, 8) if time < 32 else 32
    longest, width = max(_up(time, _TILE), _up(time, block)), _up(packed // (3 * heads), _TILE)
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
    scratch = _scratch(q.with_shape(batch, time, 3 * features), heads, backward, threads)
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


RULES: dict[str, Rule] = {"attention": _attention, "attention_grad": _attention}
