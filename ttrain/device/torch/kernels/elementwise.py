"""Elementwise rows. All may write over an input of the same shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ttrain.device.base import Kernel, Launch
from ttrain.device.torch.kernels.common import Attributes, Context, Tensor, constant, copying, into, scalar_like

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


def _function(function: Callable[..., Any]) -> Kernel:
    """A row for a torch function that takes the inputs in order and `out`."""

    def bind(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        return partial(function, *ins, out=outs[0])

    return into(bind)


def _activation(name: str) -> Kernel:
    def bind(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        form = "gelu_tanh" if attributes.get("approximate") == "tanh" else name
        return activation(form, ins[0], outs[0])

    return into(bind)


def _scale(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
    return partial(torch.mul, ins[0], scalar_like(attributes["factor"], ins[0]), out=outs[0])


def _relu_grad(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
    dy, y = ins
    return partial(aten.threshold_backward.grad_input, dy, y, 0, grad_input=outs[0])


def _tanh_grad(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
    dy, y = ins
    return partial(aten.tanh_backward.grad_input, dy, y, grad_input=outs[0])


def _gelu_grad(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
    dy, x = ins
    form = attributes["approximate"]
    return partial(aten.gelu_backward.grad_input, dy, x, approximate=form, grad_input=outs[0])


def _cast(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
    return copying(outs[0], ins[0])


def _full(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
    value, y = attributes["value"], outs[0]
    return y.zero_ if value == 0 else copying(y, constant(value, y.dtype, y.device).expand(y.shape))


def table(context: Context) -> dict[str, Kernel]:
    functions = {
        "add": torch.add,
        "subtract": torch.sub,
        "multiply": torch.mul,
        "divide": torch.div,
        "exp": torch.exp,
        "log": torch.log,
        "sqrt": torch.sqrt,
    }
    return {
        **{name: _function(function) for name, function in functions.items()},
        **{name: _activation(name) for name in ("relu", "tanh", "gelu")},
        "scale": into(_scale),
        "relu_grad": into(_relu_grad),
        "tanh_grad": into(_tanh_grad),
        "gelu_grad": into(_gelu_grad),
        "cast": into(_cast),
        "full": into(_full),
    }
