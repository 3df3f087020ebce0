"""Norms over the last axis. Statistics are formed and kept in fp32 at least."""

from __future__ import annotations

from collections.abc import Sequence

from ttrain.graph import Case, Node, Value, cases, composite, op
from ttrain.ops.elementwise import cast, sqrt
from ttrain.ops.layout import reshape
from ttrain.ops.reduce import mean, reduce_sum

_ADDED = "x [..., C], branch [..., C], weight any [C]"


@composite("x [..., C], weight any [C], bias any [C]", name="layer_norm", outputs=("y", "mean", "rstd"), cheap=True)
def _layer_norm(x: Value, weight: Value, bias: Value | None, eps: float) -> tuple[Value, Value, Value]:
    """y = (x - mean) rstd * weight + bias over the last axis of x [..., C] (Ba et al., 2016); weight, bias [C].

    mean and rstd = 1 / sqrt(var + eps) are [...], fp32 at least.
    """
    wide = cast(x, x.spec.dtype.accumulation)
    centre = mean(wide, -1)  # [..., 1]
    shifted = wide - centre
    rstd = 1.0 / sqrt(mean(shifted * shifted, -1) + eps)  # [..., 1]
    y = shifted * rstd * cast(weight, wide.spec.dtype)
    y = y if bias is None else y + cast(bias, wide.spec.dtype)
    return cast(y, x.spec.dtype), reshape(centre, x.shape[:-1]), reshape(rstd, x.shape[:-1])


@_layer_norm.gradient
def _(node: Node, dy: Value, *statistics: None) -> Sequence[Value | None]:
    bias, (_, centre, rstd) = node.inputs[2] is not None, node.outputs
    return [*layer_norm_grad(dy, node.input("x"), centre, rstd, node.input("weight"), None, bias), None][:3]


@composite(
    "x [..., C], dy [..., C], residual [..., C], weight any [C], mean accumulation [...], rstd accumulation [...]",
    outputs=("dx", "dweight", "dbias?"),
    differentiable=False,
)
def layer_norm_grad(
    dy: Value, x: Value, mean: Value, rstd: Value, weight: Value, residual: Value | None, bias: bool
) -> tuple[Value, ...]:
    """dx, dweight and (if `bias`) dbias of layer_norm from dy and the statistics that it kept.

    `residual` is a gradient that reaches x beside the norm; dx includes it.
    """
    return _gradients(dy, x, mean, rstd, weight, residual, bias)


def _gradients(
    dy: Value, x: Value, centre: Value | None, rstd: Value, weight: Value, residual: Value | None, bias: bool
) -> tuple[Value, ...]:
    """Return the gradients of a norm that subtracts the mean, or of one that does not."""
    wide, column, lead = x.spec.dtype.accumulation, (*x.shape[:-1], 1), range(x.spec.rank - 1)
    shifted = cast(x, wide) if centre is None else cast(x, wide) - reshape(centre, column)
    rstd = reshape(rstd, column)
    normal, given = shifted * rstd, cast(dy, wide)
    scaled = given * cast(weight, wide)
    centred = scaled if centre is None else scaled - mean(scaled, -1)
    dx = rstd * (centred - normal * mean(scaled * normal, -1))
    dx = dx if residual is None else dx + cast(residual, wide)
    sums = [given * normal, given] if bias else [given * normal]
    return cast(dx, x.spec.dtype), *(cast(reduce_sum(each, lead), weight.spec.dtype) for each in sums)


def _norm_again(node: Node) -> Node:
    """The norm of the sum, which is kept, makes y again."""
    total, *normed = node.outputs
    norm = op(node.op.name.removeprefix("add_"))
    return Node(norm, (total, *node.inputs[2:]), node.attributes, tuple(normed))


@composite(
    _ADDED + ", bias any [C]", outputs=("total", "y", "mean", "rstd"), differentiable=False, rematerialized=_norm_again
)
def add_layer_norm(
    x: Value, branch: Value, weight: Value, bias: Value | None, eps: float
) -> tuple[Value, Value, Value, Value]:
    """total = x + branch; y = layer_norm(total): a residual sum and the norm that reads it, joined by a pass."""
    total = x + branch
    return total, *_layer_norm(total, weight, bias, eps)


@composite("x [..., C], weight any [C]", name="rms_norm", outputs=("y", "rstd"), cheap=True)
def _rms_norm(x: Value, weight: Value, eps: float) -> tuple[Value, Value]:
    """y = x rstd * weight over the last axis of x [..., C] (Zhang and Sennrich, 2019); weight [C].

    rstd = 1 / sqrt(mean(x^2) + eps) is [...], fp32 at least.
    """
    wide = cast(x, x.spec.dtype.accumulation)
    rstd = 1.0 / sqrt(mean(wide * wide, -1) + eps)  # [..., 1]
    return cast(wide * rstd * cast(weight, wide.spec.dtype), x.spec.dtype), reshape(rstd, x.shape[:-1])


@_rms_norm.gradient
def _(node: Node, dy: Value, rstd: None) -> Sequence[Value | None]:
    return rms_norm_grad(dy, node.input("x"), node.outputs[1], node.input("weight"), None)


@composite(
    "x [..., C], dy [..., C], residual [..., C], weight any [C], rstd accumulation [...]",
    outputs=("dx", "dweight"),
    differentiable=False,
)
def rms_norm_grad(dy: Value, x: Value, rstd: Value, weight: Value, residual: Value | None) -> tuple[Value, ...]:
    """Gradients of an RMS norm from its input and rstd; `residual` as in layer_norm_grad."""
    return _gradients(dy, x, None, rstd, weight, residual, False)


@composite(_ADDED, outputs=("total", "y", "rstd"), differentiable=False, rematerialized=_norm_again)
def add_rms_norm(x: Value, branch: Value, weight: Value, eps: float) -> tuple[Value, Value, Value]:
    """total = x + branch; y = rms_norm(total), likewise."""
    total = x + branch
    return total, *_rms_norm(total, weight, eps)


for _op in (_layer_norm, add_layer_norm, _rms_norm, add_rms_norm):
    cases(_op, Case(attributes={"eps": 1e-5}))
cases(rms_norm_grad, Case(positive=("rstd",)))
cases(layer_norm_grad, *(Case(attributes={"bias": bias}, positive=("rstd",)) for bias in (True, False)))


def layer_norm(x: Value, weight: Value, bias: Value | None, eps: float = 1e-5) -> Value:
    """Layer norm over the last axis of x [..., C]; weight and bias [C]."""
    return _layer_norm(x, weight, bias, eps)[0]


def rms_norm(x: Value, weight: Value, eps: float = 1e-5) -> Value:
    """RMS norm over the last axis of x [..., C]; weight [C]."""
    return _rms_norm(x, weight, eps)[0]
