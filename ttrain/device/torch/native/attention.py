"""The rules of attention: one function from queries, keys and values to the mixed values, and one back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ttrain.core.spec import TensorSpec
from ttrain.core.visibility import alibi_slopes
from ttrain.device.torch.native.codegen import call
from ttrain.device.torch.native.elementwise import NO_MASK, mask
from ttrain.device.torch.native.native import Native, Rule, Sizing, fp32
from ttrain.device.torch.native.request import Request, c_float, c_type, stored, template

_TILE = 32  # columns of a tile with the widest vectors; narrower ones need less scratch


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _scratch(qkv: TensorSpec, heads: int, backward: bool, threads: int) -> TensorSpec:
    """What HeadSizes in kernels/attention.h asks for."""
    _, time, packed = qkv.shape
    block = _up(time, 8) if time < 32 else 32
    longest, width = max(_up(time, _TILE), _up(time, block)), _up(packed // (3 * heads), _TILE)
    matrix, scores = longest * width, block * longest
    return fp32(threads, 9 * matrix + 2 * scores if backward else 3 * matrix + scores + block * width)


def _attention(request: Request, sizing: Sizing) -> Native | None:
    """Forward on (qkv, seed), backward on (dy, qkv, y, log_sum_exp, seed)."""
    backward, settings = request.op == "self_attention_grad", request.settings
    qkv, heads, p = request.input(int(backward)), settings["heads"], settings.get("p", 0.0)
    if not stored((qkv, *request.outputs)) or qkv.size == 0:
        return None
    width, features, kind = qkv.shape[2] // (3 * heads), qkv.shape[2] // 3, c_type(qkv)
    seed = len(request.inputs) - 1
    made = mask(f"*in<i64>(a, {seed})", p, settings.get("stream", 0)) if p else NO_MASK

    def parts(pointer: str) -> list[str]:
        return [pointer, f"{pointer} + {features}", f"{pointer} + {2 * features}"]

    given = parts(f"in<{kind}>(a, {int(backward)})")
    return _native(request, sizing, qkv, given, parts, heads, width, 3 * features, 1 / width**0.5, made)


def _separate(request: Request, sizing: Sizing) -> Native | None:
    """Forward on (q, k, v), backward on (dy, q, k, v, y, log_sum_exp). Keys as wide as values, no bias by distance."""
    backward, settings = request.op == "attention_grad", request.settings
    q, v, heads = request.input(int(backward)), request.input(2 + backward), settings["heads"]
    pairs, bias = settings["mask"] == "pairs", settings["position_bias"]
    if not stored((q, *request.outputs)) or q.size == 0 or q.shape != v.shape or bias == "distance":
        return None
    kind, width = c_type(q), v.shape[2] // heads
    given = [f"in<{kind}>(a, {index + backward})" for index in range(3)]
    slopes = alibi_slopes(heads).tolist() if pairs and bias == "future" else []
    packed = q.with_shape(*q.shape[:2], 3 * q.shape[2])

    def parts(pointer: str) -> list[str]:
        return [f"out<{kind}>(a, {index})" for index in range(6, 9)]

    return _native(
        request, sizing, packed, given, parts, heads, width, q.shape[2], settings["scale"], NO_MASK, pairs, slopes
    )  # fmt: skip


def _native(
    request: Request, sizing: Sizing, qkv: TensorSpec, given: list[str], parts: Callable[[str], list[str]],
    heads: int, width: int, stride: int, scale: float, made: str, pairs: bool = False, slopes: Sequence[float] = (),
) -> Native:  # fmt: skip
    """`qkv` as if packed; `given` and `parts` of an output are pointers to queries, keys and values."""
    backward, kind = request.op.endswith("_grad"), c_type(qkv)
    batch, time, packed = qkv.shape
    cost = (10 if backward else 4) * batch * time * time * packed // 3 // 8
    threads = sizing.threads_for(cost, batch * heads)
    scratch, first = _scratch(qkv, heads, backward, threads), len(request.inputs)
    work = f"out<float>(a, {first + len(request.outputs)})"
    table = f"static const float slopes[] = {{{', '.join(map(c_float, slopes))}}};\n" if slopes else ""
    near = "slopes" if slopes else "(const float*)nullptr"
    if backward:
        statistics = 1 + (len(given) if len(request.outputs) == 3 else 1)  # y and log_sum_exp follow what is given
        tensors = [
            f"in<{kind}>(a, 0)", *given, f"in<{kind}>(a, {statistics})", f"in<float>(a, {statistics + 1})",
            *parts(f"out<{kind}>(a, {first})"),
        ]  # fmt: skip
    else:
        tensors = [*given, f"out<{kind}>(a, {first})", f"out<float>(a, {first + 1})"]
    name = template(
        "attention_grad" if backward else "attention", kind, made != NO_MASK, pairs, batch, heads, time, width, stride,
        threads,
    )  # fmt: skip
    return Native((table + call(name, *tensors, c_float(scale), near, made, work),), (scratch,))


RULES: dict[str, Rule] = {
    "self_attention": _attention,
    "self_attention_grad": _attention,
    "attention": _separate,
    "attention_grad": _separate,
}
