"""Ops that treat every element alike: arithmetic with broadcasting, exp, log, sqrt, casts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ttrain.core.spec import DType, TensorSpec
from ttrain.graph.graph import Graph, Node, Value
from ttrain.graph.op import Case, Op, declare, op
from ttrain.ops.common import BROADCAST_SHAPES, PLAIN_SHAPES, broadcast_shape, is_one, sum_to


class _Binary(Op):
    """z = f(x, y) with numpy broadcasting; the result has x's dtype."""

    family = "elementwise"
    inputs = ("x", "y")
    outputs = ("z",)
    elementwise = True
    cheap = True
    positive: ClassVar[tuple[str, ...]] = ()

    def infer(self, x: TensorSpec, y: TensorSpec) -> TensorSpec:
        self.require(x.dtype.is_floating and y.dtype.is_floating, f"{x} and {y}", "floating-point tensors")
        return TensorSpec(broadcast_shape(self, x, y), x.dtype)

    def cases(self) -> Sequence[Case]:
        return [Case(pair, positive=self.positive) for pair in BROADCAST_SHAPES]


@declare
class Add(_Binary):
    """z = x + y."""

    name = "add"

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dz,) = gradients
        assert dz is not None
        return [sum_to(dz, node.input("x")), sum_to(dz, node.input("y"))]

    def reference(self, x: Any, y: Any) -> Any:
        return x + y


@declare
class Subtract(_Binary):
    """z = x - y."""

    name = "subtract"

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dz,) = gradients
        assert dz is not None
        return [sum_to(dz, node.input("x")), sum_to(scale(dz, -1.0), node.input("y"))]

    def reference(self, x: Any, y: Any) -> Any:
        return x - y


@declare
class Multiply(_Binary):
    """z = x * y."""

    name = "multiply"
    saves = ("x", "y")

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dz,) = gradients
        assert dz is not None
        x, y = node.input("x"), node.input("y")
        return [sum_to(multiply(dz, y), x), sum_to(multiply(dz, x), y)]

    def reference(self, x: Any, y: Any) -> Any:
        return x * y


@declare
class Divide(_Binary):
    """z = x / y."""

    name = "divide"
    saves = ("y", "z")
    positive = ("y",)

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dz,) = gradients
        assert dz is not None
        x, y = node.input("x"), node.input("y")
        dx = divide(dz, y)
        return [sum_to(dx, x), sum_to(scale(multiply(dx, node.outputs[0]), -1.0), y)]

    def reference(self, x: Any, y: Any) -> Any:
        return x / y


class Unary(Op):
    """y = f(x), same shape and dtype."""

    family = "elementwise"
    inputs = ("x",)
    elementwise = True
    cheap = True
    positive: ClassVar[tuple[str, ...]] = ()

    def infer(self, x: TensorSpec, **attributes: Any) -> TensorSpec:
        self.require(x.dtype.is_floating, str(x), "a floating-point tensor")
        return x

    def cases(self) -> Sequence[Case]:
        return [Case((shape,), positive=self.positive) for shape in PLAIN_SHAPES]


@declare
class Scale(Unary):
    """y = factor * x for a factor that never changes during a run."""

    name = "scale"

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        return [scale(dy, node.attributes["factor"])]

    def reference(self, x: Any, factor: float) -> Any:
        return factor * x

    def cases(self) -> Sequence[Case]:
        return [Case((shape,), {"factor": factor}) for shape in PLAIN_SHAPES for factor in (-1.0, 0.125)]


@declare
class Exp(Unary):
    """y = e^x."""

    name = "exp"
    saves = ("y",)

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        return [multiply(dy, node.outputs[0])]

    def reference(self, x: Any) -> Any:
        return x.exp()


@declare
class Log(Unary):
    """y = ln x, x > 0."""

    name = "log"
    saves = ("x",)
    positive = ("x",)

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        return [divide(dy, node.input("x"))]

    def reference(self, x: Any) -> Any:
        return x.log()


@declare
class Sqrt(Unary):
    """y = the square root of x, x > 0."""

    name = "sqrt"
    saves = ("y",)
    positive = ("x",)

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        return [scale(divide(dy, node.outputs[0]), 0.5)]

    def reference(self, x: Any) -> Any:
        return x.sqrt()


def torch_gradient(function: Any, dy: Any, x: Any) -> Any:
    """The gradient of `function` at x by torch autograd: the oracle of backward ops."""
    import torch

    with torch.enable_grad():
        leaf = x.detach().requires_grad_(True)
        return torch.autograd.grad(function(leaf), leaf, dy)[0]


@declare
class Cast(Op):
    """y = x in another floating-point dtype, rounded to nearest even."""

    name = "cast"
    family = "elementwise"
    inputs = ("x",)
    cheap = True

    def infer(self, x: TensorSpec, dtype: DType) -> TensorSpec:
        self.require(x.dtype.is_floating and dtype.is_floating, f"{x} to {dtype}", "floating-point dtypes")
        return x.with_dtype(dtype)

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        return [cast(dy, node.input("x").spec.dtype)]

    def reference(self, x: Any, dtype: DType) -> Any:
        return x

    def cases(self) -> Sequence[Case]:
        return [Case((shape,), {"dtype": DType.FP32}) for shape in PLAIN_SHAPES]


@declare
class Full(Op):
    """A tensor that holds one number everywhere."""

    name = "full"
    family = "elementwise"
    inputs = ()
    differentiable = False

    def infer(self, spec: TensorSpec, value: float) -> TensorSpec:
        return spec

    def flops(self, node: Node) -> int:
        return 0

    def reference(self, spec: TensorSpec, value: float) -> Any:
        import torch

        return torch.full(spec.shape, value, dtype=torch.float64)

    def cases(self) -> Sequence[Case]:
        return [Case((), {"spec": TensorSpec(shape), "value": 0.5}) for shape in PLAIN_SHAPES]


def add(x: Value, y: Value) -> Value:
    """x + y, broadcast."""
    return op("add").record(x, y)


def subtract(x: Value, y: Value) -> Value:
    """x - y, broadcast."""
    return op("subtract").record(x, y)


def multiply(x: Value, y: Value) -> Value:
    """x * y, broadcast. A literal one on the right costs nothing."""
    return (
        x if is_one(y) and broadcast_shape(op("multiply"), x.spec, y.spec) == x.shape else op("multiply").record(x, y)
    )


def divide(x: Value, y: Value) -> Value:
    """x / y, broadcast."""
    return op("divide").record(x, y)


def scale(x: Value, factor: float) -> Value:
    """factor * x for a factor that is fixed for the whole run."""
    return x if factor == 1.0 else op("scale").record(x, factor=float(factor))


def exp(x: Value) -> Value:
    return op("exp").record(x)


def log(x: Value) -> Value:
    return op("log").record(x)


def sqrt(x: Value) -> Value:
    return op("sqrt").record(x)


def cast(x: Value, dtype: DType) -> Value:
    """x in another floating-point dtype; x itself where it has it already. A literal constant is made anew."""
    if x.spec.dtype is not dtype and x.producer is not None and x.producer.op.name == "full":
        return full(x.graph, x.spec.with_dtype(dtype), x.producer.attributes["value"])
    return x if x.spec.dtype is dtype else op("cast").record(x, dtype=dtype)


def full(graph: Graph, spec: TensorSpec, value: float) -> Value:
    """A constant tensor."""
    return op("full").record(graph=graph, spec=spec, value=float(value))
