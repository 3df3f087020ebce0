"""Rows that treat every element alike: one ttnn call each, writing into the planned tensor."""

from __future__ import annotations

from functools import partial
from typing import Any

from ttrain.device.base import Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, row
from ttrain.device.ttnn.tensors.device_tensor import Tensors
from ttrain.device.ttnn.tensors.layout import dtype_name

BINARY = {
    "add": "add", "subtract": "subtract", "multiply": "multiply", "divide": "div", "maximum": "maximum",
    "greater": "gt",
}  # fmt: skip
UNARY = {
    name: name
    for name in ("exp", "expm1", "log", "sqrt", "sin", "cos", "sigmoid", "relu", "tanh", "sign", "erf", "silu")
}  # fmt: skip


def _called(name: str, c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    call, (y,) = getattr(c.tt, name), outs
    return lambda: call(*(x.t for x in ins), output_tensor=y.t)


for _op, _name in (BINARY | UNARY).items():
    row(_op)(partial(_called, _name))


@row("scale")
def _scale(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (x,), (y,), factor = ins, outs, attributes["factor"]
    return lambda: c.tt.multiply(x.t, factor, output_tensor=y.t)


@row("relu_grad")
def _relu_grad(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (dy, y), (dx,), positive = ins, outs, [c.tt.UnaryOpType.GTZ]
    return lambda: c.tt.multiply(dy.t, y.t, input_tensor_b_activations=positive, output_tensor=dx.t)


@row("tanh_grad")
def _tanh_grad(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """dx = dy - (dy y) y."""
    (dy, y), (dx,) = ins, outs
    return lambda: c.tt.addcmul(dy.t, c.tt.multiply(dy.t, y.t), y.t, value=-1.0, output_tensor=dx.t)


@row("silu_grad")
def _silu_grad(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """dx = t + t (x - silu(x)) with t = dy sigmoid(x)."""
    (dy, x), (dx,), tt = ins, outs, c.tt
    one, other = [tt.UnaryOpType.SIGMOID], [tt.UnaryOpType.SILU]

    def run() -> None:
        scaled = tt.multiply(dy.t, x.t, input_tensor_b_activations=one)
        rest = tt.subtract(x.t, x.t, input_tensor_b_activations=other)
        tt.addcmul(scaled, scaled, rest, value=1.0, output_tensor=dx.t)

    return run


@row("gated_activation", supports=lambda specs, attributes: attributes["function"] == "silu")
def _gated_activation(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """SwiGLU; ttnn's gelu within a product is off by a percent, so that GeGLU takes two launches."""
    (gate, up), (y,), gated = ins, outs, [c.tt.UnaryOpType.SILU]
    return lambda: c.tt.multiply(gate.t, up.t, input_tensor_a_activations=gated, output_tensor=y.t)


def _variant(c: Context, attributes: Attributes) -> Any:
    return c.tt.GeluVariant.Tanh if attributes["approximate"] == "tanh" else c.tt.GeluVariant.Accurate


@row("gelu")
def _gelu(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (x,), (y,), variant = ins, outs, _variant(c, attributes)
    return lambda: c.tt.gelu(x.t, variant=variant, output_tensor=y.t)


@row("gelu_grad")
def _gelu_grad(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (dy, x), (dx,), variant = ins, outs, _variant(c, attributes)
    return lambda: c.tt.gelu_bw(dy.t, x.t, variant=variant, input_grad=dx.t)


@row("cast")
def _cast(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (x,), (y,), dtype = ins, outs, getattr(c.tt, dtype_name(attributes["dtype"]))
    return lambda: c.tt.typecast(x.t, dtype, output_tensor=y.t)


@row("full")
def _full(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (y,), value = outs, attributes["value"]
    return lambda: c.tt.fill(y.t, value, output_tensor=y.t)
