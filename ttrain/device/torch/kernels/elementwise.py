"""Elementwise rows, which may all write over an input of the same shape, and the rotation of heads, which may not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ttrain.core.spec import TensorSpec
from ttrain.device.base import Launch, chain
from ttrain.device.torch.kernels.common import (
    Attributes,
    Context,
    Given,
    Specs,
    Tensor,
    Tensors,
    blocks,
    constant,
    copying,
    row,
    scalar_like,
)
from ttrain.device.torch.kernels.program import FUNCTIONS

aten = torch.ops.aten
_ACTIVATIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "relu": (torch.clamp_min, {"min": 0}),
    "tanh": (torch.tanh, {}),
    "gelu": (torch._C._nn.gelu, {"approximate": "none"}),
    "gelu_tanh": (torch._C._nn.gelu, {"approximate": "tanh"}),
}


def activation(name: str, x: Tensor, y: Tensor) -> Launch:
    """y <- f(x) for an activation by its config name; y may be x."""
    function, settings = _ACTIVATIONS[name]
    return partial(function, x, **settings, out=y)


def _called(
    function: Callable[..., Any], context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors
) -> Launch:
    """Bind a torch function that takes the inputs in order and `out`."""
    return partial(function, *ins, out=outs[0])


for _name, _function in FUNCTIONS.items():
    row(_name)(partial(_called, _function))
row("silu")(partial(_called, aten.silu.out))


# The tanh form of GELU is x sigmoid(z), z = x (_GELU_LINEAR + _GELU_CUBIC x^2): 0.5 (1 + tanh u) = sigmoid(2 u). On the
# CPU aten's tanh costs four times its sigmoid, so a few passes over cached blocks beat aten's own kernel.
_GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715 * _GELU_LINEAR


def _gelu_workspace(
    context: Context, ins: Specs, outs: Specs, attributes: Attributes, temporaries: int = 1
) -> list[TensorSpec]:
    """Temporaries of a block, and where x is bf16 room for a wide copy. None where aten's own kernel is taken."""
    x = outs[0]
    if not context.on_cpu or attributes["approximate"] != "tanh" or not x.size:
        return []
    count = temporaries + (x.dtype.accumulation is not x.dtype)
    return [TensorSpec((min(x.size, context.block),), x.dtype.accumulation)] * count


@row("gelu", _gelu_workspace)
def _gelu(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    if not work:
        form = "gelu_tanh" if attributes["approximate"] == "tanh" else "gelu"
        return activation(form, ins[0], outs[0])
    size = work[0].numel()
    launches: list[Launch] = []
    for x, y in zip(blocks(ins[0], size), blocks(outs[0], size), strict=True):
        s, *wide = (scratch[: x.numel()] for scratch in work)
        preparing, x = _widened(x, wide)
        launches += [*preparing, *_gelu_sigmoid(x, s)]
        # In bf16 the product is formed in fp32 and rounded once.
        launches += [partial(torch.mul, x, s, out=s), copying(y, s)] if wide else [partial(torch.mul, x, s, out=y)]
    return chain(*launches)


@row("gelu_grad", partial(_gelu_workspace, temporaries=2))
def _gelu_grad(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    if not work:
        form = attributes["approximate"]
        return partial(aten.gelu_backward.grad_input, *ins, approximate=form, grad_input=outs[0])
    size = work[0].numel()
    launches: list[Launch] = []
    for dy, x, dx in zip(*(blocks(tensor, size) for tensor in (*ins, outs[0])), strict=True):
        s, slope, *wide = (scratch[: x.numel()] for scratch in work)
        preparing, x = _widened(x, wide)
        linear = constant(_GELU_LINEAR, x.dtype, x.device)
        launches += [
            *(*preparing, *_gelu_sigmoid(x, s)),
            partial(torch.addcmul, linear, x, x, value=3 * _GELU_CUBIC, out=slope),
            partial(torch.mul, slope, x, out=slope),  # x dz/dx
            partial(aten.sigmoid_backward.grad_input, slope, s, grad_input=slope),
            partial(torch.add, slope, s, out=slope),
        ]
        preparing, dy = _widened(dy, wide)
        result = partial(torch.mul, slope, dy)
        launches += [*preparing, *([partial(result, out=s), copying(dx, s)] if wide else [partial(result, out=dx)])]
    return chain(*launches)


def _gelu_sigmoid(x: Tensor, s: Tensor) -> list[Launch]:
    """s <- sigmoid(z) for the z of the tanh form."""
    linear = constant(_GELU_LINEAR, x.dtype, x.device)
    return [
        partial(torch.addcmul, linear, x, x, value=_GELU_CUBIC, out=s),
        partial(torch.mul, s, x, out=s),
        partial(torch.sigmoid, s, out=s),
    ]


def _widened(x: Tensor, wide: Sequence[Tensor]) -> tuple[list[Launch], Tensor]:
    """x in the dtype of the scratch, where there is one."""
    return ([copying(wide[0], x)], wide[0]) if wide else ([], x)


@row("scale")
def _scale(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    return partial(torch.mul, ins[0], scalar_like(attributes["factor"], ins[0]), out=outs[0])


@row("relu_grad")
def _relu_grad(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    dy, y = ins
    return partial(aten.threshold_backward.grad_input, dy, y, 0, grad_input=outs[0])


@row("tanh_grad")
def _tanh_grad(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    dy, y = ins
    return partial(aten.tanh_backward.grad_input, dy, y, grad_input=outs[0])


@row("silu_grad")
def _silu_grad(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    return partial(aten.silu_backward.grad_input, *ins, grad_input=outs[0])


@row("cast")
def _cast(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    return copying(outs[0], ins[0])


@row("full")
def _full(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    value, y = attributes["value"], outs[0]
    return y.zero_ if value == 0 else copying(y, constant(value, y.dtype, y.device).expand(y.shape))


def _rotary_workspace(context: Context, ins: Given, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    x, cos = ins[:2]
    return [TensorSpec((*x.shape[:2], attributes["heads"], cos.shape[-1]), cos.dtype)] * 2


@row("rotary", _rotary_workspace)
def _rotary(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    x, cos, sin = ins
    pairs, sign = cos.shape[-1], -1 if attributes["inverse"] else 1
    by_head = (*x.shape[:2], attributes["heads"], -1)
    (a, b, rest), (y, z, left) = (t.view(by_head).tensor_split((pairs, 2 * pairs), -1) for t in (x, outs[0]))
    along, across, (wide, other) = cos[..., None, :], sin[..., None, :], work
    launches: list[Launch] = []
    for first, second, out, value in ((a, b, y, -sign), (b, a, z, sign)):
        launches += [copying(wide, first), copying(other, second), partial(torch.mul, wide, along, out=wide)]
        launches += [partial(torch.addcmul, wide, other, across, value=value, out=wide), copying(out, wide)]
    return chain(*launches, *([copying(left, rest)] if rest.shape[-1] else []))
