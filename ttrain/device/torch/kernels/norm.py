"""Layer norm. Statistics are fp32 at least: weight and bias are widened first, which makes aten keep them so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ttrain.core.spec import TensorSpec
from ttrain.device.base import Kernel, Launch
from ttrain.device.torch.kernels.common import (
    Attributes,
    Context,
    Specs,
    Tensor,
    chain,
    copying,
    into,
    rows_of,
)

aten = torch.ops.aten


def _widened(parameters: Sequence[Tensor | None], work: Sequence[Tensor]) -> tuple[list[Any], list[Launch]]:
    """Weight and bias in the statistics' dtype, and the launches that make them so."""
    free, wide_ones, launches = list(work), [], []
    for parameter in parameters:
        if parameter is not None and parameter.dtype is torch.bfloat16:
            target = free.pop(0)
            launches.append(copying(target, parameter))
            parameter = target
        wide_ones.append(parameter)
    return wide_ones, launches


def _widening(position: int, count: int) -> Callable[[Sequence[Any], Specs, Attributes], list[TensorSpec]]:
    """Workspace for `count` parameters from input `position` on."""

    def workspace(ins: Sequence[Any], outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        given = [spec for spec in ins[position : position + count] if spec is not None]
        return [spec.with_dtype(spec.dtype.wide) for spec in given if spec.dtype.wide is not spec.dtype]

    return workspace


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, results: Sequence[Tensor]) -> Launch:
    """y, mean, rstd <- layer norm of the rows of x."""
    rows = rows_of(x)
    width = [rows.shape[1]]
    y, mean, rstd = rows_of(results[0]), results[1].view(-1, 1), results[2].view(-1, 1)
    function = aten.native_layer_norm.default
    copy_y, copy_mean, copy_rstd = y.copy_, mean.copy_, rstd.copy_

    def launch() -> None:
        new_y, new_mean, new_rstd = function(rows, width, weight, bias, eps)
        copy_y(new_y)
        copy_mean(new_mean)
        copy_rstd(new_rstd)

    return launch


def _layer_norm(ins: Sequence[Any], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
    (weight, bias), widening = _widened(ins[1:3], work)
    return chain(*widening, _forward(ins[0], weight, bias, attributes["eps"], outs))


def _add_layer_norm(
    ins: Sequence[Any], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]
) -> Launch:
    x, branch, *_ = ins
    (weight, bias), widening = _widened(ins[2:4], work)
    total = partial(torch.add, x, branch, out=outs[0])
    return chain(total, *widening, _forward(outs[0], weight, bias, attributes["eps"], outs[1:]))


def _layer_norm_grad(
    ins: Sequence[Any], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]
) -> Launch:
    dy, x, mean, rstd, weight, residual = ins
    dy, x, residual = rows_of(dy), rows_of(x), None if residual is None else rows_of(residual)
    (weight,), preparing = _widened([weight], work)
    finish = _finishing(rows_of(outs[0]), residual)
    if x.dtype is torch.bfloat16:
        # In bf16 aten adds dweight and dbias up in bf16, which loses most of their digits over many rows.
        wide_x, wide_dy = (rows_of(scratch) for scratch in work[-2:])
        preparing += [copying(wide_x, x), copying(wide_dy, dy)]
        finish = _finishing_wide(rows_of(outs[0]), residual, wide_x)
        dy, x = wide_dy, wide_x
    bias = weight if attributes["bias"] else None
    settings = ([x.shape[1]], mean.view(-1, 1), rstd.view(-1, 1), weight, bias, [True, True, attributes["bias"]])
    function, small = partial(aten.native_layer_norm_backward.default, dy, x, *settings), outs[1:]

    def launch() -> None:
        dx, *parameters = function()
        finish(dx)
        for out, result in zip(small, parameters, strict=False):
            out.copy_(result)

    return chain(*preparing, launch)


def _finishing(dx: Tensor, residual: Tensor | None) -> Callable[[Tensor], Any]:
    """Takes the norm's part of dx to where it belongs, adding the residual."""
    return dx.copy_ if residual is None else partial(torch.add, residual, out=dx)


def _finishing_wide(dx: Tensor, residual: Tensor | None, scratch: Tensor) -> Callable[[Tensor], Any]:
    """The same where the norm's part is wider than dx: added in full, rounded once."""
    if residual is None:
        return dx.copy_
    return lambda new: dx.copy_(new.add_(scratch.copy_(residual)))


def _grad_workspace(ins: Sequence[Any], outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    x = outs[0]
    rows = [x.with_dtype(x.dtype.wide)] * 2 if x.dtype is not x.dtype.wide else []
    return [*_widening(4, 1)(ins, outs, attributes), *rows]


def table(context: Context) -> dict[str, Kernel]:
    return {
        "layer_norm": into(_layer_norm, _widening(1, 2)),
        "add_layer_norm": into(_add_layer_norm, _widening(2, 2)),
        "layer_norm_grad": into(_layer_norm_grad, _grad_workspace),
    }
