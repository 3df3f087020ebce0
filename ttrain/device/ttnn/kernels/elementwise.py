"""Rows that treat every element alike: one ttnn call each, writing into the planned tensor."""

from __future__ import annotations

from typing import Any

from ttrain.device.base import Kernel, Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, into
from ttrain.device.ttnn.tensors.device_tensor import Tensors
from ttrain.device.ttnn.tensors.layout import dtype_name


def _binary(c: Context, name: str) -> Kernel:
    call = getattr(c.tt, name)

    def build(ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
        (x, y), (z,) = ins, outs
        return lambda: call(x.t, y.t, output_tensor=z.t)

    return into(build)


def _unary(c: Context, name: str) -> Kernel:
    call = getattr(c.tt, name)

    def build(ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
        (x,), (y,) = ins, outs
        return lambda: call(x.t, output_tensor=y.t)

    return into(build)


def _scale(c: Context) -> Kernel:
    def build(ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
        (x,), (y,), factor = ins, outs, attributes["factor"]
        return lambda: c.tt.multiply(x.t, factor, output_tensor=y.t)

    return into(build)


def _relu_grad(c: Context) -> Kernel:
    def build(ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
        (dy, y), (dx,), positive = ins, outs, [c.tt.UnaryOpType.GTZ]
        return lambda: c.tt.multiply(dy.t, y.t, input_tensor_b_activations=positive, output_tensor=dx.t)

    return into(build)


def _tanh_grad(c: Context) -> Kernel:
    """dx = dy - (dy y) y."""

    def build(ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
        (dy, y), (dx,) = ins, outs
        return lambda: c.tt.addcmul(dy.t, c.tt.multiply(dy.t, y.t), y.t, value=-1.0, output_tensor=dx.t)

    return into(build)


def _variant(c: Context, attributes: Attributes) -> Any:
    return c.tt.GeluVariant.Tanh if attributes["approximate"] == "tanh" else c.tt.GeluVariant.Accurate


def _gelu(c: Context) -> Kernel:
    def build(ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
        (x,), (y,), variant = ins, outs, _variant(c, attributes)
        return lambda: c.tt.gelu(x.t, variant=variant, output_tensor=y.t)

    return into(build)


def _gelu_grad(c: Context) -> Kernel:
    def build(ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
        (dy, x), (dx,), variant = ins, outs, _variant(c, attributes)
        return lambda: c.tt.gelu_bw(dy.t, x.t, variant=variant, input_grad=dx.t)

    return into(build)


def _cast(c: Context) -> Kernel:
    def build(ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
        (x,), (y,), dtype = ins, outs, getattr(c.tt, dtype_name(attributes["dtype"]))
        return lambda: c.tt.typecast(x.t, dtype, output_tensor=y.t)

    return into(build)


def _full(c: Context) -> Kernel:
    def build(ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
        (y,), value = outs, attributes["value"]
        return lambda: c.tt.fill(y.t, value, output_tensor=y.t)

    return into(build)


BINARY = {
    "add": "add", "subtract": "subtract", "multiply": "multiply", "divide": "div", "maximum": "maximum",
    "greater": "gt",
}  # fmt: skip
UNARY = {
    name: name
    for name in ("exp", "expm1", "log", "sqrt", "sin", "cos", "sigmoid", "relu", "tanh", "sign", "erf")
}  # fmt: skip


def table(c: Context) -> dict[str, Kernel]:
    rows = {name: _binary(c, call) for name, call in BINARY.items()}
    rows |= {name: _unary(c, call) for name, call in UNARY.items()}
    rows |= {"scale": _scale(c), "relu_grad": _relu_grad(c), "tanh_grad": _tanh_grad(c), "gelu": _gelu(c)}
    return rows | {"gelu_grad": _gelu_grad(c), "cast": _cast(c), "full": _full(c)}
