"""Activations that are more than one primitive, and the gradients that devices have kernels for."""

from __future__ import annotations

import math

from ttrain.graph import Case, Value, cases, composite
from ttrain.ops.elementwise import PLAIN_SHAPES, cast, erf, exp, full, greater, log, relu, sigmoid, tanh

GELU_FORMS = ("none", "tanh")
_SLOPE, _CUBIC = math.sqrt(2 / math.pi), 0.044715  # of the tanh form


@composite("dy any [...], saved any [...]", outputs=("dx",), elementwise=True, differentiable=False)
def gelu_grad(dy: Value, saved: Value, approximate: str) -> Value:
    """dx = dy (Phi(x) + x phi(x)) for the saved input x, or the derivative of the tanh approximation."""
    x = saved
    if approximate == "tanh":
        t = tanh(_SLOPE * (x + _CUBIC * (x * x * x)))
        slope = _SLOPE * (3 * _CUBIC * (x * x) + 1.0)
        return dy * (0.5 * (t + 1.0) + 0.5 * x * (1.0 - t * t) * slope)
    phi = math.sqrt(0.5 / math.pi) * exp(-0.5 * (x * x))
    return dy * (0.5 * (erf(math.sqrt(0.5) * x) + 1.0) + x * phi)


@composite(elementwise=True, cheap=True, vjp=lambda node, dy: [gelu_grad(dy, node.input("x"), **node.attributes)])
def gelu(x: Value, approximate: str = "tanh") -> Value:
    """y = x Phi(x), or its tanh approximation (Hendrycks and Gimpel, 2016); `approximate` is none (exact) or tanh."""
    if approximate == "tanh":
        return 0.5 * x * (tanh(_SLOPE * (x + _CUBIC * (x * x * x))) + 1.0)
    return 0.5 * x * (erf(math.sqrt(0.5) * x) + 1.0)


@composite("dy any [...], saved any [...]", outputs=("dx",), elementwise=True, differentiable=False)
def silu_grad(dy: Value, saved: Value) -> Value:
    """dx = dy s (1 + x (1 - s)) with s = sigmoid(x), for the saved input x."""
    s = sigmoid(saved)
    return dy * s * (saved * (1.0 - s) + 1.0)


@composite(elementwise=True, cheap=True, vjp=lambda node, dy: [silu_grad(dy, node.input("x"))])
def silu(x: Value) -> Value:
    """y = x sigmoid(x) (Hendrycks and Gimpel, 2016; Ramachandran et al., 2017)."""
    return x * sigmoid(x)


@composite(elementwise=True, vjp=lambda node, dy: [dy * sigmoid(-node.input("x"))])
def log_sigmoid(x: Value) -> Value:
    """y = ln(1 / (1 + e^-x)), of any x without overflow."""
    wide = cast(x, x.spec.dtype.accumulation)
    return cast(-(relu(-wide) + log(exp(-(relu(wide) + relu(-wide))) + 1.0)), x.spec.dtype)


@composite("dy any [...], saved any [...]", outputs=("dx",), elementwise=True, differentiable=False)
def relu_grad(dy: Value, saved: Value) -> Value:
    """dx = dy where the saved output y > 0, else 0."""
    return dy * greater(saved, full(saved.graph, saved.spec.with_shape(), 0.0))


@composite("dy any [...], saved any [...]", outputs=("dx",), elementwise=True, differentiable=False)
def tanh_grad(dy: Value, saved: Value) -> Value:
    """dx = dy (1 - y^2) for the saved output y."""
    return dy * (1.0 - saved * saved)


cases(log_sigmoid, *(Case((shape,)) for shape in PLAIN_SHAPES))
cases(silu, *(Case((shape,)) for shape in PLAIN_SHAPES))
cases(gelu, *(Case((shape,), {"approximate": form}) for shape in PLAIN_SHAPES for form in GELU_FORMS))


def activation(x: Value, name: str) -> Value:
    """An activation by its config name: relu, relu_squared, tanh, silu, gelu (exact) or gelu_tanh."""
    if name in ("gelu", "gelu_tanh"):
        return gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
    if name == "relu_squared":  # So et al., 2021
        x = activation(x, "relu")
        return x * x
    return x.graph.apply(name, x)


@composite("gate [...], up [...]")
def gated_activation(gate: Value, up: Value, function: str) -> Value:
    """y = f(gate) * up for an activation f by its config name: SwiGLU with silu, GeGLU with gelu (Shazeer, 2020)."""
    return activation(gate, function) * up


cases(gated_activation, *(Case(attributes={"function": name}) for name in ("silu", "gelu", "relu")))
