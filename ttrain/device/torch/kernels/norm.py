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
    (weight,), widening = _widened([weight], work)
    rows, dy_rows = rows_of(x), rows_of(dy)
    width, mask = [rows.shape[1]], [True, True, attributes["bias"]]
    mean, rstd, bias = mean.view(-1, 1), rstd.view(-1, 1), weight if attributes["bias"] else None
    dx, *small = outs
    dx = rows_of(dx)
    keep_dx = dx.copy_ if residual is None else partial(torch.add, rows_of(residual), out=dx)
    function = aten.native_layer_norm_backward.default

    def launch() -> None:
        results = function(dy_rows, rows, width, mean, rstd, weight, bias, mask)
        keep_dx(results[0])
        for out, result in zip(small, results[1:], strict=False):
            out.copy_(result)

    return chain(*widening, launch)


def table(context: Context) -> dict[str, Kernel]:
    return {
        "layer_norm": into(_layer_norm, _widening(1, 2)),
        "add_layer_norm": into(_add_layer_norm, _widening(2, 2)),
        "layer_norm_grad": into(_layer_norm_grad, _widening(4, 1)),
    }
