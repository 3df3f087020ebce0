"""Softmax over the last axis of scores under an attention mask, and the logarithm of its denominator."""

from __future__ import annotations

import math
from typing import Any

from ttrain.core.attention_mask import CAUSAL, EVERY_KEY, FULL, PAIRS, AttentionMask
from ttrain.core.spec import TensorSpec
from ttrain.graph.composite import cases, composite, primitive, require
from ttrain.graph.graph import Case, Value
from ttrain.ops.common import free
from ttrain.ops.elementwise import cast
from ttrain.ops.layout import reshape
from ttrain.ops.reduce import reduce_sum


def _check(owner: str, x: TensorSpec, mask: AttentionMask) -> None:
    require(x.rank >= 1 and x.dtype.is_floating, owner, x, "a floating-point tensor of rank 1 or more")
    square = x.rank >= 2 + mask.biased and x.shape[-1] == x.shape[-2]
    require(mask.is_full or square, owner, x, f"[..., {'heads, ' * mask.biased}T, T] under mask {mask}")


def _scores_in_torch(x: Any, scale: float, mask: AttentionMask) -> Any:
    import torch

    if mask.is_full:
        return scale * x
    heads = x.shape[-3] if mask.biased else 1
    bias = torch.from_numpy(mask.score_bias(heads, x.shape[-1], -math.inf)).to(x.dtype)
    return scale * x + (bias if mask.biased else bias[0])


@composite(family="attention", outputs=("dx",), differentiable=False)
def softmax_grad(dy: Value, y: Value, scale: float) -> Value:
    """dx = scale * y (dy - sum(dy y)): the backward of y = softmax(scale * x) from its output; fp32 at least inside."""
    require(dy.spec == y.spec, "softmax_grad", f"{dy.spec} and {y.spec}", "equal specs")
    given, made = cast(dy, y.spec.dtype.wide), cast(y, y.spec.dtype.wide)
    total = reshape(reduce_sum(given * made, [y.spec.rank - 1]), (*y.shape[:-1], 1))
    return cast(made * (given - total) * scale, y.spec.dtype)


cases(softmax_grad, *(Case((shape, shape), {"scale": 0.5}) for shape in ((4, 8), (2, 2, 5, 5), (1, 33))))


@primitive(
    family="attention",
    flops=lambda node: 5 * node.input("x").spec.size,
    reference=lambda x, scale, mask: _scores_in_torch(x, scale, mask).softmax(-1),
    vjp=lambda node, dy: [softmax_grad(dy, node.outputs[0], node.attributes["scale"])],
)
def softmax(x: Value, scale: float = 1.0, mask: AttentionMask = EVERY_KEY) -> TensorSpec:
    """y = softmax(scale * x + bias) over the last axis; what the mask hides gets no probability.

    The bias is that of `mask` for x [..., T, T] (query, key), or [..., H, T, T] with a position bias; in fp32 at least.
    """
    _check("softmax", x.spec, mask)
    return x.spec


@primitive(
    family="attention",
    flops=free,  # counted with the softmax of the same scores
    reference=lambda x, scale, mask: _scores_in_torch(x, scale, mask).logsumexp(-1),
)
def log_sum_exp(x: Value, scale: float = 1.0, mask: AttentionMask = EVERY_KEY) -> TensorSpec:
    """y = log(sum(exp(scale * x + bias))) over the last axis, which disappears; bias as in softmax; fp32 at least."""
    _check("log_sum_exp", x.spec, mask)
    return TensorSpec(x.shape[:-1], x.spec.dtype.wide)


for _shape, _scale, _mask in (
    ((4, 8), 1.0, EVERY_KEY),
    ((2, 3, 33), 0.3, EVERY_KEY),
    ((2, 2, 5, 5), 0.5, AttentionMask(CAUSAL)),
    ((33, 33), 1.0, AttentionMask(CAUSAL)),
    ((1, 1), 1.0, AttentionMask(CAUSAL)),
    ((2, 3, 5, 5), 0.5, AttentionMask(PAIRS, "future")),
    ((1, 4, 8, 8), 1.0, AttentionMask(CAUSAL, "distance")),
    ((1, 1, 33, 33), 0.3, AttentionMask(PAIRS)),
    ((1, 2, 32, 32), 0.5, AttentionMask(PAIRS, "distance")),
    ((1, 2, 32, 32), 0.5, AttentionMask(CAUSAL, window=5)),
    ((2, 7, 7), 0.5, AttentionMask(FULL, "distance", 3)),
):
    for _op in (softmax, log_sum_exp):
        cases(_op, Case((_shape,), {"scale": _scale, "mask": _mask}))
