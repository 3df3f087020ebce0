"""Softmax over the last axis, and causal self-attention on a packed projection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ttrain.core.spec import TensorSpec
from ttrain.graph.graph import Node, Value
from ttrain.graph.op import Case, Op, declare, op
from ttrain.ops.elementwise import torch_gradient
from ttrain.ops.layout import merge_heads, split_heads
from ttrain.ops.matmul import attention_scale, matmul
from ttrain.ops.random import dropout


@declare
class Softmax(Op):
    """y = softmax(scale * x) over the last axis; `causal` gives entries right of the diagonal no probability.

    With `causal`, x is [..., T, T] (query, key). Computed in fp32 at least.
    """

    name = "softmax"
    family = "attention"
    inputs = ("x",)

    def infer(self, x: TensorSpec, scale: float, causal: bool) -> TensorSpec:
        self.require(x.rank >= 1 and x.dtype.is_floating, str(x), "a floating-point tensor of rank 1 or more")
        if causal:
            self.require(x.rank >= 2 and x.shape[-1] == x.shape[-2], str(x), "[..., T, T] where causal")
        return x

    def flops(self, node: Node) -> int:
        return 5 * node.input("x").spec.size

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        return [op("softmax_grad").record(dy, node.outputs[0], scale=node.attributes["scale"])]

    def reference(self, x: Any, scale: float, causal: bool) -> Any:
        import torch

        scores = scale * x
        if causal:
            visible = torch.ones(x.shape[-2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~visible, float("-inf"))
        return scores.softmax(-1)

    def cases(self) -> Sequence[Case]:
        return [
            Case(((4, 8),), {"scale": 1.0, "causal": False}),
            Case(((2, 3, 33),), {"scale": 0.3, "causal": False}),
            Case(((2, 2, 5, 5),), {"scale": 0.5, "causal": True}),
            Case(((33, 33),), {"scale": 1.0, "causal": True}),
            Case(((1, 1),), {"scale": 1.0, "causal": True}),
        ]


@declare
class SoftmaxGrad(Op):
    """dx = scale * y (dy - sum(dy y)): the backward of softmax from its output."""

    name = "softmax_grad"
    family = "attention"
    inputs = ("dy", "y")
    outputs = ("dx",)
    differentiable = False

    def infer(self, dy: TensorSpec, y: TensorSpec, scale: float) -> TensorSpec:
        self.require(dy == y, f"{dy} and {y}", "equal specs")
        return dy

    def flops(self, node: Node) -> int:
        return 5 * node.input("y").spec.size

    def reference(self, dy: Any, y: Any, scale: float) -> Any:
        return scale * y * (dy - (dy * y).sum(-1, keepdim=True))

    def cases(self) -> Sequence[Case]:
        return [Case((shape, shape), {"scale": 0.5}) for shape in ((4, 8), (2, 2, 5, 5), (1, 33))]


def _qkv_check(owner: Op, qkv: TensorSpec, heads: int) -> tuple[int, int, int]:
    owner.require(qkv.rank == 3, str(qkv), "[batch, time, 3 * width]")
    batch, time, packed = qkv.shape
    owner.require(packed % (3 * heads) == 0, f"{packed} features", f"a multiple of 3 x {heads} heads")
    return batch, time, packed // 3


_ATTENTION_CASES = (((2, 5, 24), 2, 0.0), ((1, 33, 12), 1, 0.0), ((2, 8, 30), 5, 0.0), ((2, 8, 24), 2, 0.25))


@declare
class SelfAttention(Op):
    """Causal multi-head attention (Vaswani et al., 2017) on qkv [B, T, 3*H*D] -> y [B, T, H*D].

    y = dropout(softmax(q k^T / sqrt(D))) v per head. `log_sum_exp` [B, H, T] fp32 of the scaled scores is what
    backward needs to form the probabilities again; they are never kept.
    """

    name = "self_attention"
    family = "attention"
    inputs = ("qkv", "seed?")
    outputs = ("y", "log_sum_exp")

    def infer(
        self, qkv: TensorSpec, seed: TensorSpec | None, heads: int, p: float = 0.0, stream: int = 0
    ) -> Sequence[TensorSpec]:
        batch, time, width = _qkv_check(self, qkv, heads)
        self.require(p == 0 or seed is not None, "no seed", f"a seed, since p={p}")
        return [qkv.with_shape(batch, time, width), TensorSpec((batch, heads, time), qkv.dtype.wide)]

    def flops(self, node: Node) -> int:
        batch, time, width = node.outputs[0].shape
        return 4 * batch * time * time * width + 5 * batch * node.attributes["heads"] * time * time

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        dy = gradients[0]
        assert dy is not None
        y, log_sum_exp = node.outputs
        dqkv = op("self_attention_grad").record(
            dy, node.input("qkv"), y, log_sum_exp, node.inputs[1], **node.attributes
        )
        return [dqkv, None]

    def reference(self, qkv: Any, seed: Any, heads: int, p: float = 0.0, stream: int = 0) -> Any:
        q, k, v = op("split_heads").reference(qkv, 3, heads)
        scale = attention_scale(q.shape[-1])
        probabilities = op("softmax").reference(q @ k.mT, scale, True)
        visible = (probabilities > 0).to(qkv.dtype)
        log_sum_exp = ((scale * (q @ k.mT)).exp() * visible).sum(-1).log()
        if p:
            probabilities = op("dropout").reference(probabilities, seed, p, stream)
        return op("merge_heads").reference(probabilities @ v), log_sum_exp

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        qkv, seed = inputs
        assert qkv is not None
        q, k, v = split_heads(qkv, 3, node.attributes["heads"])
        probabilities = _probabilities(q, k, seed, node)[1]
        # log_sum_exp is not formed: only the fused backward reads it, and a device has both or neither.
        return [merge_heads([matmul(probabilities, v)])]

    def cases(self) -> Sequence[Case]:
        return [
            Case((shape, ()), {"heads": heads, "p": p, "stream": 3}, integers={"seed": 2**62})
            for shape, heads, p in _ATTENTION_CASES
        ]


def _probabilities(q: Value, k: Value, seed: Value | None, node: Node) -> tuple[Value, Value]:
    """Attention probabilities [B, H, T, T] before and after dropout."""
    scores = matmul(q, k, transpose_b=True)
    before = op("softmax").record(scores, scale=attention_scale(q.shape[-1]), causal=True)
    p, stream = node.attributes.get("p", 0.0), node.attributes.get("stream", 0)
    return before, dropout(before, seed, p, stream) if p and seed is not None else before


@declare
class SelfAttentionGrad(Op):
    """dqkv [B, T, 3*H*D] of self_attention, forming the probabilities again from log_sum_exp."""

    name = "self_attention_grad"
    family = "attention"
    inputs = ("dy", "qkv", "y", "log_sum_exp", "seed?")
    wide = ("log_sum_exp",)
    outputs = ("dqkv",)
    differentiable = False

    def infer(
        self,
        dy: TensorSpec,
        qkv: TensorSpec,
        y: TensorSpec,
        log_sum_exp: TensorSpec,
        seed: TensorSpec | None,
        heads: int,
        p: float = 0.0,
        stream: int = 0,
    ) -> TensorSpec:
        _qkv_check(self, qkv, heads)
        self.require(dy == y, f"{dy} and {y}", "equal specs")
        return qkv

    def flops(self, node: Node) -> int:
        batch, time, width = node.input("y").shape
        return 10 * batch * time * time * width + 10 * batch * node.attributes["heads"] * time * time

    def reference(
        self, dy: Any, qkv: Any, y: Any, log_sum_exp: Any, seed: Any, heads: int, p: float = 0.0, stream: int = 0
    ) -> Any:
        forward = op("self_attention").reference
        return torch_gradient(lambda leaf: forward(leaf, seed, heads, p, stream)[0], dy, qkv)

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        dy, qkv, _, _, seed = inputs
        assert dy is not None and qkv is not None
        heads = node.attributes["heads"]
        q, k, v = split_heads(qkv, 3, heads)
        (dy_heads,) = split_heads(dy, 1, heads)
        before, after = _probabilities(q, k, seed, node)
        dv = matmul(after, dy_heads, transpose_a=True)
        dprobabilities = matmul(dy_heads, v, transpose_b=True)
        p, stream = node.attributes.get("p", 0.0), node.attributes.get("stream", 0)
        if p and seed is not None:
            dprobabilities = dropout(dprobabilities, seed, p, stream)
        dscores = op("softmax_grad").record(dprobabilities, before, scale=attention_scale(q.shape[-1]))
        dq, dk = matmul(dscores, k), matmul(dscores, q, transpose_a=True)
        return [merge_heads([dq, dk, dv])]

    def cases(self) -> Sequence[Case]:
        cases = []
        for shape, heads, p in _ATTENTION_CASES:
            batch, time, packed = shape
            out = (batch, time, packed // 3)
            shapes = (out, shape, out, (batch, heads, time), ())
            attributes = {"heads": heads, "p": p, "stream": 3}
            cases.append(Case(shapes, attributes, {"seed": 2**62}))
        return cases

    def derived(self, given: Mapping[str, Any], attributes: Mapping[str, Any]) -> Mapping[str, Any]:
        y, log_sum_exp = op("self_attention").reference(given["qkv"], given["seed"], **attributes)
        return {"y": y, "log_sum_exp": log_sum_exp}


def softmax(x: Value, scale: float = 1.0, causal: bool = False) -> Value:
    """softmax(scale * x) over the last axis."""
    return op("softmax").record(x, scale=float(scale), causal=causal)


def self_attention(qkv: Value, heads: int, seed: Value | None = None, p: float = 0.0, stream: int = 0) -> Value:
    """Causal multi-head attention on a packed projection [B, T, 3*H*D] -> [B, T, H*D]."""
    return op("self_attention").record(qkv, seed if p else None, heads=heads, p=p, stream=stream)[0]
