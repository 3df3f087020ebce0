"""Norms. Statistics are fp32 at least.

Layer norm: weight and bias are widened first, which makes aten keep statistics so. On CUDA aten wants x and its weight
in one dtype, so there x is widened too. RMS norm, which aten fuses on CUDA alone, and its gradient: blocks of rows that
stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    constant,
    copying,
    row,
    rows_of,
)

aten = torch.ops.aten
_CPU_BLOCK, _GPU_BLOCK = 2**18, 2**25  # elements that are worked on at a time


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


def _widening(context: Context, ins: Given, outs: Specs, attributes: Attributes, position: int = 1) -> list[TensorSpec]:
    """Workspace for x, where it is widened too, and for weight and bias, the inputs from number `position` on."""
    given = [spec for spec in ins[position : position + 2] if spec is not None]
    rows = [] if context.on_cpu else [ins[0]]
    return [s.with_dtype(s.dtype.accumulation) for s in (*rows, *given) if s.dtype.accumulation is not s.dtype]


def _by_aten(
    context: Context, op: Any, x: Tensor, parameters: Sequence[Tensor | None], eps: float, outs: Tensors, work: Tensors
) -> Launch:
    """y and statistics <- a norm of aten, everything widened that has to be. CUDA wants x in its weight's dtype."""
    rows, free, launches = rows_of(x), list(work), []
    if not context.on_cpu and x.dtype is torch.bfloat16:
        wide_rows = rows_of(free.pop(0))
        launches, rows = [copying(wide_rows, rows)], wide_rows
    wide, widening = _widened(parameters, free)
    function = partial(op, rows, [rows.shape[1]], *wide, eps)
    copies = [rows_of(outs[0]).copy_, *(statistic.view(-1, 1).copy_ for statistic in outs[1:])]

    def launch() -> None:
        for copy, new in zip(copies, function(), strict=True):
            copy(new)

    return chain(*launches, *widening, launch)


_layer = aten.native_layer_norm.default


@row("layer_norm", _widening, overwrites=(0,))
def _layer_norm(context: Context, ins: Given, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    return _by_aten(context, _layer, ins[0], ins[1:3], attributes["eps"], outs, work)


@row("add_layer_norm", partial(_widening, position=2), overwrites=(0, 1))
def _add_layer_norm(context: Context, ins: Given, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    total = partial(torch.add, ins[0], ins[1], out=outs[0])
    return chain(total, _by_aten(context, _layer, outs[0], ins[2:4], attributes["eps"], outs[1:], work))


def _grad_workspace(context: Context, ins: Given, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    x, weight = outs[0], ins[4]
    narrow = [spec for spec in (weight, x, x) if spec.dtype.accumulation is not spec.dtype]
    block = _block(context, x)
    summing = [block, *[block.with_shape(block.shape[1])] * len(outs)] if context.on_cpu else []
    return [*summing, *(spec.with_dtype(spec.dtype.accumulation) for spec in narrow)]


@row("layer_norm_grad", _grad_workspace, overwrites=(0, 1, 5))
def _layer_norm_grad(context: Context, ins: Given, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    dy, x, mean, rstd, weight, residual = ins
    dy, x, residual = rows_of(dy), rows_of(x), None if residual is None else rows_of(residual)
    scratch, totals = work[:0], work[:0]
    if context.on_cpu:
        scratch, totals, work = work[:2], work[2 : len(outs) + 1], work[len(outs) + 1 :]
    (weight,), preparing = _widened([weight], work)
    finish = _finishing(rows_of(outs[0]), residual)
    if x.dtype is torch.bfloat16:
        # In bf16 aten adds dweight and dbias up in bf16, which loses most of their digits over many rows.
        wide_x, wide_dy = (rows_of(scratch) for scratch in work[-2:])
        preparing += [copying(wide_x, x), copying(wide_dy, dy)]
        finish = _finishing_wide(rows_of(outs[0]), residual, wide_x)
        dy, x = wide_dy, wide_x
    bias = weight if attributes["bias"] else None
    statistics = mean.view(-1, 1), rstd.view(-1, 1)
    wanted = [True, not totals, attributes["bias"] and not totals]
    settings = ([x.shape[1]], *statistics, weight, bias, wanted)
    function, small = partial(aten.native_layer_norm_backward.default, dy, x, *settings), outs[1:]
    if totals:
        preparing += _parameter_sums(dy, x, *statistics, scratch, totals)
        preparing += [copying(out, total) for out, total in zip(small, totals, strict=True)]
        small = ()

    def launch() -> None:
        dx, *parameters = function()
        finish(dx)
        for out, result in zip(small, parameters, strict=False):
            out.copy_(result)

    return chain(*preparing, launch)


def _parameter_sums(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, scratch: Tensors, totals: Sequence[Tensor]
) -> Iterator[Launch]:
    """The gradients of weight and bias, summed over blocks of rows: aten's bits depend on the number of threads."""
    block, part = scratch
    for number, (d, rows, middle, root) in enumerate(_blocks((dy, x, mean, rstd), len(block))):
        normal = block[: len(rows)]
        yield from (partial(torch.sub, rows, middle, out=normal), partial(normal.mul_, root), partial(normal.mul_, d))
        for total, product in zip(totals, (normal, d), strict=False):
            yield partial(torch.sum, product, 0, out=part if number else total)
            if number:
                yield partial(total.add_, part)


def _finishing(dx: Tensor, residual: Tensor | None) -> Callable[[Tensor], Any]:
    """Takes the norm's part of dx to where it belongs, adding the residual."""
    return dx.copy_ if residual is None else partial(torch.add, residual, out=dx)


def _finishing_wide(dx: Tensor, residual: Tensor | None, scratch: Tensor) -> Callable[[Tensor], Any]:
    """Finish a norm's part that is wider than dx: added in full, rounded once."""
    if residual is None:
        return dx.copy_
    return lambda new: dx.copy_(new.add_(scratch.copy_(residual)))


def _block(context: Context, x: TensorSpec) -> TensorSpec:
    """Rows of x that are worked on at a time, wide: as many whatever the threads, as sums over them show."""
    width, block = max(x.shape[-1], 1), _CPU_BLOCK if context.on_cpu else _GPU_BLOCK
    return TensorSpec((max(1, min(x.size // width, block // width)), x.shape[-1]), x.dtype.accumulation)


def _blocks(tensors: Sequence[Tensor | None], step: int) -> Iterator[list[Any]]:
    """Blocks of rows of tensors [N, ...]; None for an absent one."""
    count = next(len(tensor) for tensor in tensors if tensor is not None)
    for start in range(0, count, step):
        yield [None if tensor is None else tensor[start : start + step] for tensor in tensors]


def _rms_of(context: Context, x: Tensor, weight: Tensor, eps: float, outs: Tensors, work: Tensors) -> Launch:
    """y, rstd <- the norm of the rows of x."""
    if not context.on_cpu:
        return _by_aten(context, aten._fused_rms_norm.default, x, [weight], eps, outs, work)
    (normal, square, *free), launches = work, list[Launch]()
    (weight,), widening = _widened([weight], free)
    share, floor = (constant(number, normal.dtype, normal.device) for number in (1 / x.shape[-1], eps))
    for rows, out, root in _blocks((rows_of(x), rows_of(outs[0]), outs[1].view(-1, 1)), len(normal)):
        n, s = normal[: len(rows)], square[: len(rows)]
        launches += [
            copying(n, rows),
            partial(torch.mul, n, n, out=s),
            partial(torch.sum, s, -1, True, out=root),
            partial(torch.mul, root, share, out=root),
            partial(torch.add, root, floor, out=root),
            root.rsqrt_,
            partial(torch.mul, n, root, out=n),
            partial(torch.mul, n, weight, out=n),
            copying(out, n),
        ]
    return chain(*widening, *launches)


def _rms_workspace(context: Context, ins: Given, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    wide = _widening(context, ins, outs, attributes, len(ins) - 1)
    return [*[_block(context, ins[0])] * 2, *wide] if context.on_cpu else wide


@row("rms_norm", _rms_workspace, overwrites=(0,))
def _rms_norm(context: Context, ins: Given, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    return _rms_of(context, ins[0], ins[-1], attributes["eps"], outs, work)


@row("add_rms_norm", _rms_workspace, overwrites=(0, 1))
def _add_rms_norm(context: Context, ins: Given, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    total = partial(torch.add, ins[0], ins[1], out=outs[0])
    return chain(total, _rms_of(context, outs[0], ins[-1], attributes["eps"], outs[1:], work))


def _rms_norm_grad_workspace(context: Context, ins: Given, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    block, weight = _block(context, ins[1]), ins[3]
    row = block.with_shape(block.shape[1])
    wide = [row] if weight.dtype.accumulation is not weight.dtype else []
    return [*[block] * 3, block.with_shape(block.shape[0], 1), row, row, *wide]


@row("rms_norm_grad", _rms_norm_grad_workspace, overwrites=(0, 4))
def _rms_norm_grad(context: Context, ins: Given, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    dy, x, rstd, weight, residual = ins
    (normal, scaled, product, dot, total, part, *free), launches = work, list[Launch]()
    (weight,), widening = _widened([weight], free)
    beside = None if residual is None else rows_of(residual)
    for d, rows, root, more, out in _blocks(
        (rows_of(dy), rows_of(x), rstd.view(-1, 1), beside, rows_of(outs[0])), len(normal)
    ):
        n, s, p, along = (scratch[: len(rows)] for scratch in (normal, scaled, product, dot))
        adding: list[Launch] = [] if more is None else [copying(n, more), partial(s.add_, n)]
        launches += [
            *(copying(n, rows), copying(s, d)),
            partial(torch.mul, n, root, out=n),
            partial(torch.mul, s, n, out=p),
            partial(torch.sum, p, 0, out=part),
            partial(total.add_, part),
            partial(torch.mul, p, weight, out=p),
            partial(torch.sum, p, -1, True, out=along),
            partial(torch.mul, s, weight, out=s),
            partial(torch.addcmul, s, n, along, value=-1 / x.shape[-1], out=s),
            partial(torch.mul, s, root, out=s),
            *adding,
            copying(out, s),
        ]
    return chain(*widening, total.zero_, *launches, copying(outs[1], total))
