"""The rule of attention: one function from the packed projection to the mixed values, and one back."""

from __future__ import annotations

from ttrain.core.spec import TensorSpec
from ttrain.device.torch.native.codegen import addresses, call
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
    batch, time, packed = qkv.shape
    width = packed // (3 * heads)
    cost = (10 if backward else 4) * batch * time * time * packed // 3 // 8
    threads = sizing.threads_for(cost, batch * heads)
    scratch = _scratch(qkv, heads, backward, threads)
    count = len(request.inputs)
    types = [c_type(spec) for spec in (*request.inputs[: count - 1], *request.outputs, scratch) if spec is not None]
    places = addresses([*types[: count - 1], "i64", *types[count - 1 :]], count)
    made = mask(f"*{places[count - 1]}", p, settings.get("stream", 0)) if p else NO_MASK
    scale = c_float(1 / width**0.5)
    arguments = [*places[: count - 1], *places[count:-1], scale, made, places[-1]]
    name = template(
        "attention_grad" if backward else "attention", c_type(qkv), bool(p), batch, heads, time, width, threads
    )
    return Native((call(name, *arguments),), (scratch,))


RULES: dict[str, Rule] = {"self_attention": _attention, "self_attention_grad": _attention}
