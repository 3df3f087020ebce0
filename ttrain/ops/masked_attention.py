"""Attention on separate queries, keys and values, under a choice of masks and position biases (core/visibility.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ttrain.core.spec import TensorSpec
from ttrain.core.visibility import MASKS, POSITION_BIASES, score_bias
from ttrain.graph.graph import Node, Value
from ttrain.graph.op import Case, Op, declare, op
from ttrain.ops.layout import merge_heads, split_heads
from ttrain.ops.matmul import attention_scale, matmul


def _bias(mask: str, position_bias: str, heads: int, time: int) -> Any:
    """fp64 [heads or 1, T, T] in torch."""
    import torch

    return torch.from_numpy(score_bias(mask, position_bias, heads, time, -math.inf)).double()


def _require_rules(owner: Op, mask: str, position_bias: str) -> None:
    owner.require(mask in MASKS, f"mask={mask}", f"one of {', '.join(MASKS)}")
    owner.require(position_bias in POSITION_BIASES, f"{position_bias=}", f"one of {', '.join(POSITION_BIASES)}")


@declare
class MaskedSoftmax(Op):
    """y = softmax(scale * x + bias) over the last axis of scores x [B, H, T, T]; hidden keys get no probability.

    Computed in fp32 at least.
    """

    name = "masked_softmax"
    family = "attention"
    inputs = ("x",)

    def infer(self, x: TensorSpec, scale: float, mask: str, position_bias: str) -> TensorSpec:
        self.require(x.rank == 4 and x.shape[2] == x.shape[3] and x.dtype.is_floating, str(x), "[B, H, T, T]")
        _require_rules(self, mask, position_bias)
        return x

    def flops(self, node: Node) -> int:
        return 6 * node.input("x").spec.size

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        return [op("softmax_grad").record(dy, node.outputs[0], scale=node.attributes["scale"])]

    def reference(self, x: Any, scale: float, mask: str, position_bias: str) -> Any:
        return (scale * x + _bias(mask, position_bias, x.shape[1], x.shape[2]).to(x.dtype)).softmax(-1)

    def cases(self) -> Sequence[Case]:
        return [
            Case((shape,), {"scale": scale, "mask": mask, "position_bias": bias})
            for shape, scale, mask, bias in (
                ((2, 3, 5, 5), 0.5, "pairs", "future"),
                ((1, 4, 8, 8), 1.0, "causal", "distance"),
                ((1, 1, 33, 33), 0.3, "pairs", "none"),
                ((1, 2, 32, 32), 0.5, "pairs", "distance"),
                ((1, 1, 1, 1), 1.0, "causal", "none"),
            )
        ]


# shapes of queries (and keys) and of values, heads, mask, position bias
_CASES: tuple[tuple[Any, ...], ...] = (
    ((2, 5, 8), (2, 5, 8), 2, "causal", "none"),
    ((2, 6, 12), (2, 6, 12), 3, "pairs", "future"),
    ((1, 33, 16), (1, 33, 16), 1, "pairs", "future"),
    ((1, 7, 20), (1, 7, 12), 4, "pairs", "distance"),
    ((1, 40, 96), (1, 40, 32), 2, "causal", "none"),
    ((1, 8, 6), (1, 8, 24), 2, "causal", "distance"),
    ((1, 3, 4), (1, 3, 4), 1, "pairs", "none"),
)


def _settings(keys: tuple[int, ...], heads: int, mask: str, position_bias: str) -> dict[str, Any]:
    scale = attention_scale(keys[2] // heads)
    return {"heads": heads, "scale": scale, "mask": mask, "position_bias": position_bias}


@declare
class Attention(Op):
    """Multi-head attention (Vaswani et al., 2017): q, k [B, T, H*E], v [B, T, H*D] -> y [B, T, H*D].

    y = softmax(scale * q k^T + bias) v per head, where the bias hides keys and prefers near ones. `log_sum_exp`
    [B, H, T] fp32 of the biased scores is what backward needs to form the probabilities again; they are never kept.
    """

    name = "attention"
    family = "attention"
    inputs = ("q", "k", "v")
    outputs = ("y", "log_sum_exp")

    def infer(
        self, q: TensorSpec, k: TensorSpec, v: TensorSpec, heads: int, scale: float, mask: str, position_bias: str
    ) -> Sequence[TensorSpec]:
        self.require(q.rank == 3 and k == q, f"q {q} and k {k}", "two equal [batch, time, heads * key width]")
        self.require(
            v.rank == 3 and v.shape[:2] == q.shape[:2] and v.dtype is q.dtype, f"q {q} and v {v}", "equal [batch, time]"
        )
        for spec in (q, v):
            self.require(spec.shape[2] % heads == 0, f"{spec.shape[2]} features", f"a multiple of {heads} heads")
        _require_rules(self, mask, position_bias)
        return [v, TensorSpec((v.shape[0], heads, v.shape[1]), v.dtype.wide)]

    def flops(self, node: Node) -> int:
        (batch, time, keys), values = node.input("q").shape, node.input("v").shape[2]
        return batch * time * time * (2 * (keys + values) + 5 * node.attributes["heads"])

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        dy = gradients[0]
        assert dy is not None
        given = (node.input("q"), node.input("k"), node.input("v"), *node.outputs)
        return list(op("attention_grad").record(dy, *given, **node.attributes))

    def reference(self, q: Any, k: Any, v: Any, heads: int, scale: float, mask: str, position_bias: str) -> Any:
        q, k, v = (op("split_heads").reference(x, 1, heads)[0] for x in (q, k, v))
        scores = scale * (q @ k.mT) + _bias(mask, position_bias, heads, q.shape[2]).to(q.dtype)
        return op("merge_heads").reference(scores.softmax(-1) @ v), scores.logsumexp(-1)

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        q, k, v = _by_heads(node, inputs)
        # log_sum_exp is not formed: only the fused backward reads it, and a device has both or neither.
        return [merge_heads([matmul(_probabilities(q, k, node), v)])]

    def cases(self) -> Sequence[Case]:
        return [Case((keys, keys, values), _settings(keys, *rest)) for keys, values, *rest in _CASES]


def _by_heads(node: Node, inputs: Sequence[Value | None]) -> list[Value]:
    """Each [B, T, H*D] as [B, H, T, D]."""
    return [split_heads(x, 1, node.attributes["heads"])[0] for x in inputs if x is not None]


def _probabilities(q: Value, k: Value, node: Node) -> Value:
    """[B, H, T, T]."""
    rules = {name: node.attributes[name] for name in ("scale", "mask", "position_bias")}
    scores = matmul(q, k, transpose_b=True)
    if rules["mask"] == "causal" and rules["position_bias"] in ("none", "future"):
        return op("softmax").record(scores, scale=rules["scale"], causal=True)
    return op("masked_softmax").record(scores, **rules)


@declare
class AttentionGrad(Op):
    """dq, dk and dv of attention, forming the probabilities again from log_sum_exp."""

    name = "attention_grad"
    family = "attention"
    inputs = ("dy", "q", "k", "v", "y", "log_sum_exp")
    wide = ("log_sum_exp",)
    outputs = ("dq", "dk", "dv")
    differentiable = False

    def infer(
        self,
        dy: TensorSpec,
        q: TensorSpec,
        k: TensorSpec,
        v: TensorSpec,
        y: TensorSpec,
        log_sum_exp: TensorSpec,
        **attributes: Any,
    ) -> Sequence[TensorSpec]:
        self.require(dy == y, f"{dy} and {y}", "equal specs")
        return [q, k, v]

    def flops(self, node: Node) -> int:
        (batch, time, keys), values = node.input("q").shape, node.input("v").shape[2]
        return batch * time * time * (2 * (3 * keys + 2 * values) + 10 * node.attributes["heads"])

    def reference(self, dy: Any, q: Any, k: Any, v: Any, y: Any, log_sum_exp: Any, **attributes: Any) -> Any:
        import torch

        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(True) for x in (q, k, v)]
            result = op("attention").reference(*leaves, **attributes)[0]
            return torch.autograd.grad(result, leaves, dy)

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        dy, q, k, v = _by_heads(node, inputs[:4])
        probabilities = _probabilities(q, k, node)
        dv = matmul(probabilities, dy, transpose_a=True)
        dprobabilities = matmul(dy, v, transpose_b=True)
        dscores = op("softmax_grad").record(dprobabilities, probabilities, scale=node.attributes["scale"])
        parts = matmul(dscores, k), matmul(dscores, q, transpose_a=True), dv
        return [merge_heads([part]) for part in parts]

    def cases(self) -> Sequence[Case]:
        cases = []
        for keys, values, *rest in _CASES:
            statistic = (values[0], rest[0], values[1])
            cases.append(Case((values, keys, keys, values, values, statistic), _settings(keys, *rest)))
        return cases

    def derived(self, given: Mapping[str, Any], attributes: Mapping[str, Any]) -> Mapping[str, Any]:
        y, log_sum_exp = op("attention").reference(*(given[name] for name in ("q", "k", "v")), **attributes)
        return {"y": y, "log_sum_exp": log_sum_exp}


def attention(
    q: Value, k: Value, v: Value, heads: int, *, scale: float, mask: str = "causal", position_bias: str = "none"
) -> Value:
    """Multi-head attention: q, k [B, T, H*E], v [B, T, H*D] -> [B, T, H*D]."""
    attended: tuple[Value, Value] = op("attention").record(
        q, k, v, heads=heads, scale=float(scale), mask=mask, position_bias=position_bias
    )
    return attended[0]
