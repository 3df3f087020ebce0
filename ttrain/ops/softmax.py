"""Softmax over the last axis of scores under an attention mask, and the logarithm of its denominator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ttrain.core.attention_mask import CAUSAL, FULL, PAIRS, AttentionMask
from ttrain.core.spec import TensorSpec
from ttrain.graph.composite import cases, composite, require
from ttrain.graph.graph import Node, Value
from ttrain.graph.op import Case, Op, declare, op
from ttrain.ops.elementwise import cast
from ttrain.ops.layout import reshape
from ttrain.ops.reduce import reduce_sum

_EVERY_KEY = AttentionMask(FULL)


class _OverScores(Op):
    """On scale * x + bias, where the bias is that of `mask` for x [..., T, T] (query, key); fp32 at least inside.

    With a position bias x is [..., H, T, T].
    """

    family = "attention"
    inputs = ("x",)

    def check(self, x: TensorSpec, mask: AttentionMask) -> None:
        self.require(x.rank >= 1 and x.dtype.is_floating, str(x), "a floating-point tensor of rank 1 or more")
        if not mask.is_full:
            square = x.rank >= 2 + mask.biased and x.shape[-1] == x.shape[-2]
            self.require(square, str(x), f"[..., {'heads, ' * mask.biased}T, T] under mask {mask}")

    def scores(self, x: Any, scale: float, mask: AttentionMask) -> Any:
        """In torch."""
        import torch

        if mask.is_full:
            return scale * x
        heads = x.shape[-3] if mask.biased else 1
        bias = torch.from_numpy(mask.score_bias(heads, x.shape[-1], -math.inf)).to(x.dtype)
        return scale * x + (bias if mask.biased else bias[0])

    def cases(self) -> Sequence[Case]:
        return [
            Case((shape,), {"scale": scale, "mask": mask})
            for shape, scale, mask in (
                ((4, 8), 1.0, _EVERY_KEY),
                ((2, 3, 33), 0.3, _EVERY_KEY),
                ((2, 2, 5, 5), 0.5, AttentionMask(CAUSAL)),
                ((33, 33), 1.0, AttentionMask(CAUSAL)),
                ((1, 1), 1.0, AttentionMask(CAUSAL)),
                ((2, 3, 5, 5), 0.5, AttentionMask(PAIRS, "future")),
                ((1, 4, 8, 8), 1.0, AttentionMask(CAUSAL, "distance")),
                ((1, 1, 33, 33), 0.3, AttentionMask(PAIRS)),
                ((1, 2, 32, 32), 0.5, AttentionMask(PAIRS, "distance")),
                ((1, 2, 32, 32), 0.5, AttentionMask(CAUSAL, window=5)),
                ((2, 7, 7), 0.5, AttentionMask(FULL, "distance", 3)),
            )
        ]


@declare
class Softmax(_OverScores):
    """y = softmax(scale * x + bias) over the last axis; what the mask hides gets no probability."""

    name = "softmax"

    def infer(self, x: TensorSpec, scale: float, mask: AttentionMask) -> TensorSpec:
        self.check(x, mask)
        return x

    def flops(self, node: Node) -> int:
        return 5 * node.input("x").spec.size

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        return [softmax_grad(dy, node.outputs[0], node.attributes["scale"])]

    def reference(self, x: Any, scale: float, mask: AttentionMask) -> Any:
        return self.scores(x, scale, mask).softmax(-1)


@composite(family="attention", outputs=("dx",), differentiable=False)
def softmax_grad(dy: Value, y: Value, scale: float) -> Value:
    """dx = scale * y (dy - sum(dy y)): the backward of y = softmax(scale * x) from its output; fp32 at least inside."""
    require(dy.spec == y.spec, "softmax_grad", f"{dy.spec} and {y.spec}", "equal specs")
    given, made = cast(dy, y.spec.dtype.wide), cast(y, y.spec.dtype.wide)
    total = reshape(reduce_sum(given * made, [y.spec.rank - 1]), (*y.shape[:-1], 1))
    return cast(made * (given - total) * scale, y.spec.dtype)


cases(softmax_grad, *(Case((shape, shape), {"scale": 0.5}) for shape in ((4, 8), (2, 2, 5, 5), (1, 33))))


@declare
class LogSumExp(_OverScores):
    """y = log(sum(exp(scale * x + bias))) over the last axis, which disappears; fp32 at least."""

    name = "log_sum_exp"
    differentiable = False

    def infer(self, x: TensorSpec, scale: float, mask: AttentionMask) -> TensorSpec:
        self.check(x, mask)
        return TensorSpec(x.shape[:-1], x.dtype.wide)

    def flops(self, node: Node) -> int:
        return 0  # counted with the softmax of the same scores

    def reference(self, x: Any, scale: float, mask: AttentionMask) -> Any:
        return self.scores(x, scale, mask).logsumexp(-1)


def softmax(x: Value, scale: float = 1.0, mask: AttentionMask = _EVERY_KEY) -> Value:
    """softmax(scale * x) over the last axis, under an attention mask."""
    return op("softmax").record(x, scale=float(scale), mask=mask)


def log_sum_exp(x: Value, scale: float, mask: AttentionMask) -> Value:
    """log(sum(exp(scale * x))) over the last axis, under an attention mask."""
    return op("log_sum_exp").record(x, scale=scale, mask=mask)
