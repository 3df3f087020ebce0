"""Activations, and their gradients as ops of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ttrain.core.spec import TensorSpec
from ttrain.graph.graph import Node, Value
from ttrain.graph.op import Case, Op, declare, op
from ttrain.ops.common import PLAIN_SHAPES
from ttrain.ops.elementwise import Unary, torch_gradient


class _Activation(Unary):
    """An activation whose backward is an op of its own, `<name>_grad`, reading what `saves` names."""

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        saved = node.outputs[0] if self.saves == ("y",) else node.input("x")
        return [op(f"{self.name}_grad").record(dy, saved, **node.attributes)]


class _ActivationGrad(Op):
    """dx from dy and the saved value of one activation."""

    family = "elementwise"
    inputs = ("dy", "saved")
    outputs = ("dx",)
    elementwise = True
    differentiable = False

    def infer(self, dy: TensorSpec, saved: TensorSpec, **attributes: Any) -> TensorSpec:
        self.require(dy.shape == saved.shape, f"{dy} and {saved}", "equal shapes")
        return dy

    def cases(self) -> Sequence[Case]:
        return [Case((shape, shape)) for shape in PLAIN_SHAPES]


@declare
class Relu(_Activation):
    """y = max(x, 0). Backward reads y, so the input needs no buffer of its own."""

    name = "relu"
    saves = ("y",)

    def reference(self, x: Any) -> Any:
        return x.relu()


@declare
class ReluGrad(_ActivationGrad):
    """dx = dy where y > 0, else 0."""

    name = "relu_grad"

    def reference(self, dy: Any, saved: Any) -> Any:
        return dy * (saved > 0)


@declare
class Tanh(_Activation):
    """y = tanh x."""

    name = "tanh"
    saves = ("y",)

    def flops(self, node: Node) -> int:
        return 8 * node.outputs[0].spec.size

    def reference(self, x: Any) -> Any:
        return x.tanh()


@declare
class TanhGrad(_ActivationGrad):
    """dx = dy (1 - y^2)."""

    name = "tanh_grad"

    def reference(self, dy: Any, saved: Any) -> Any:
        return dy * (1 - saved * saved)


GELU_FORMS = ("none", "tanh")


@declare
class Gelu(_Activation):
    """y = x Phi(x), or its tanh approximation (Hendrycks and Gimpel, 2016)."""

    name = "gelu"
    saves = ("x",)

    def flops(self, node: Node) -> int:
        return 8 * node.outputs[0].spec.size

    def reference(self, x: Any, approximate: str) -> Any:
        if approximate == "none":
            return 0.5 * x * (1 + (x / math.sqrt(2)).erf())
        return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())

    def cases(self) -> Sequence[Case]:
        return [Case((shape,), {"approximate": form}) for shape in PLAIN_SHAPES for form in GELU_FORMS]


@declare
class GeluGrad(_ActivationGrad):
    """dx = dy (Phi(x) + x phi(x)), or the derivative of the tanh approximation."""

    name = "gelu_grad"

    def flops(self, node: Node) -> int:
        return 14 * node.outputs[0].spec.size

    def reference(self, dy: Any, saved: Any, approximate: str) -> Any:
        return torch_gradient(lambda x: op("gelu").reference(x, approximate), dy, saved)

    def cases(self) -> Sequence[Case]:
        return [Case((shape, shape), {"approximate": form}) for shape in PLAIN_SHAPES for form in GELU_FORMS]


def relu(x: Value) -> Value:
    return op("relu").record(x)


def tanh(x: Value) -> Value:
    return op("tanh").record(x)


def gelu(x: Value, approximate: str = "tanh") -> Value:
    """x Phi(x); `approximate` is none (exact) or tanh."""
    return op("gelu").record(x, approximate=approximate)


def activation(x: Value, name: str) -> Value:
    """An activation by its config name: relu, tanh, gelu (exact) or gelu_tanh."""
    if name in ("gelu", "gelu_tanh"):
        return gelu(x, "tanh" if name == "gelu_tanh" else "none")
    return op(name).record(x)
