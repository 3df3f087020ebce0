"""Layer normalisation (Ba et al., 2016), alone and fused with the residual sum before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.core.spec import TensorSpec
from ttrain.graph.graph import Node, Value
from ttrain.graph.op import Case, Op, declare, op
from ttrain.ops.elementwise import add

_SHAPES = ((4, 8), (2, 3, 32), (1, 1, 33), (5, 257))


def _statistics(x: TensorSpec) -> TensorSpec:
    return TensorSpec(x.shape[:-1], x.dtype.wide)


def _check(owner: Op, x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None) -> None:
    owner.require(x.rank >= 1, str(x), "at least one axis")
    for name, spec in (("weight", weight), ("bias", bias)):
        if spec is not None:
            owner.require(spec.shape == x.shape[-1:], f"{name} {spec}", f"[{x.shape[-1]}], the last axis of {x}")


@declare
class LayerNorm(Op):
    """y = (x - mean) rstd * weight + bias over the last axis.

    mean and rstd = 1/sqrt(var + eps) have the shape of the other axes and are fp32 at least.
    """

    name = "layer_norm"
    family = "norm"
    inputs = ("x", "weight", "bias?")
    outputs = ("y", "mean", "rstd")
    saves = ("x", "weight", "mean", "rstd")
    cheap = True

    def infer(self, x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, eps: float) -> Sequence[TensorSpec]:
        _check(self, x, weight, bias)
        return [x, _statistics(x), _statistics(x)]

    def flops(self, node: Node) -> int:
        return 8 * node.input("x").spec.size

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        dy = gradients[0]
        assert dy is not None
        bias = node.inputs[2] is not None
        grads = op("layer_norm_grad").record(
            dy, node.input("x"), node.outputs[1], node.outputs[2], node.input("weight"), None, bias=bias
        )
        return [grads[0], grads[1], grads[2] if bias else None]

    def reference(self, x: Any, weight: Any, bias: Any, eps: float) -> Any:
        mean = x.mean(-1, keepdim=True)
        rstd = ((x - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
        y = (x - mean) * rstd * weight
        return (y if bias is None else y + bias), mean.squeeze(-1), rstd.squeeze(-1)

    def cases(self) -> Sequence[Case]:
        return [
            Case((shape, shape[-1:], shape[-1:] if bias else None), {"eps": 1e-5})
            for shape in _SHAPES
            for bias in (True, False)
        ]


@declare
class LayerNormGrad(Op):
    """dx, dweight and (if `bias`) dbias of layer_norm from dy and the saved statistics.

    `residual` is a gradient that reaches x beside the norm; dx includes it.
    """

    name = "layer_norm_grad"
    family = "norm"
    inputs = ("dy", "x", "mean", "rstd", "weight", "residual?")
    wide = ("mean", "rstd")
    outputs = ("dx", "dweight", "dbias?")
    differentiable = False

    def infer(
        self,
        dy: TensorSpec,
        x: TensorSpec,
        mean: TensorSpec,
        rstd: TensorSpec,
        weight: TensorSpec,
        residual: TensorSpec | None,
        bias: bool,
    ) -> Sequence[TensorSpec]:
        self.require(dy == x, f"dy {dy} and x {x}", "equal specs")
        self.require(mean == rstd == _statistics(x), f"mean {mean} and rstd {rstd}", f"{_statistics(x)} for {x}")
        self.require(residual is None or residual == x, f"residual {residual} and x {x}", "equal specs")
        return [x, weight, weight] if bias else [x, weight]

    def flops(self, node: Node) -> int:
        return 14 * node.input("x").spec.size

    def reference(self, dy: Any, x: Any, mean: Any, rstd: Any, weight: Any, residual: Any, bias: bool) -> Any:
        # The statistics are recomputed: the test feeds random ones, which no x could have.
        normal = (x - mean[..., None]) * rstd[..., None]
        lead = tuple(range(x.ndim - 1))
        scaled = dy * weight
        inner = (scaled * normal).mean(-1, keepdim=True)
        dx = rstd[..., None] * (scaled - scaled.mean(-1, keepdim=True) - normal * inner)
        dx = dx if residual is None else dx + residual
        gradients = (dx, (dy * normal).sum(lead) if lead else dy * normal, dy.sum(lead) if lead else dy)
        return gradients if bias else gradients[:2]

    def cases(self) -> Sequence[Case]:
        return [
            Case((s, s, s[:-1], s[:-1], s[-1:], s if residual else None), {"bias": bias}, positive=("rstd",))
            for s in _SHAPES
            for bias, residual in ((True, False), (False, True), (True, True))
        ]


@declare
class AddLayerNorm(Op):
    """total = x + branch; y = layer_norm(total): a residual sum and the norm that reads it."""

    name = "add_layer_norm"
    family = "norm"
    inputs = ("x", "branch", "weight", "bias?")
    outputs = ("total", "y", "mean", "rstd")
    saves = ("total", "weight", "mean", "rstd")

    def infer(
        self, x: TensorSpec, branch: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, eps: float
    ) -> Sequence[TensorSpec]:
        self.require(x == branch, f"{x} and {branch}", "equal specs")
        _check(self, x, weight, bias)
        return [x, x, _statistics(x), _statistics(x)]

    def flops(self, node: Node) -> int:
        return 9 * node.input("x").spec.size

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        dtotal, dy = gradients[0], gradients[1]
        if dy is None:
            return [dtotal, dtotal, None, None]
        bias = node.inputs[3] is not None
        grads = op("layer_norm_grad").record(
            dy, node.outputs[0], node.outputs[2], node.outputs[3], node.input("weight"), dtotal, bias=bias
        )
        return [grads[0], grads[0], grads[1], grads[2] if bias else None]

    def reference(self, x: Any, branch: Any, weight: Any, bias: Any, eps: float) -> Any:
        total = x + branch
        return (total, *op("layer_norm").reference(total, weight, bias, eps))

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        x, branch, weight, bias = inputs
        assert x is not None and branch is not None and weight is not None
        total = add(x, branch)
        return [total, *op("layer_norm").record(total, weight, bias, **node.attributes)]

    def rematerialized(self, node: Node) -> Node | None:
        total, *normed = node.outputs
        return Node(op("layer_norm"), (total, *node.inputs[2:]), node.attributes, tuple(normed))

    def rematerialized_outputs(self, node: Node) -> Sequence[Value]:
        return node.outputs[1:2]

    def cases(self) -> Sequence[Case]:
        return [Case((s, s, s[-1:], s[-1:] if b else None), {"eps": 1e-5}) for s in _SHAPES for b in (True, False)]


def layer_norm(x: Value, weight: Value, bias: Value | None, eps: float = 1e-5) -> Value:
    """Layer norm over the last axis of x [..., C]; weight and bias [C]."""
    return op("layer_norm").record(x, weight, bias, eps=eps)[0]


def add_layer_norm(
    x: Value, branch: Value, weight: Value, bias: Value | None, eps: float = 1e-5
) -> tuple[Value, Value]:
    """(x + branch, its layer norm)."""
    total, y, _, _ = op("add_layer_norm").record(x, branch, weight, bias, eps=eps)
    return total, y
