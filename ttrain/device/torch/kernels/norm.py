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
from ttrain.device.torch.kernels.common import Call, Context, Tensor, constant_like, row, rows_of

aten = torch.ops.aten
_CPU_BLOCK, _GPU_BLOCK = 2**18, 2**25  # elements that are worked on at a time


def _widened(call: Call, parameter: Tensor | None, work: list[Tensor]) -> Tensor | None:
    """Weight or bias in the statistics' dtype; the first of `work` takes a wider one."""
    if parameter is None or parameter.dtype is not torch.bfloat16:
        return parameter
    wide = work.pop(0)
    call.emit(wide.copy_, parameter)
    return wide


def _widening(call: Call, position: int = 1) -> list[TensorSpec]:
    """Workspace for x, where it is widened too, and for weight and bias, the inputs from number `position` on."""
    given = [spec for spec in call.ins[position : position + 2] if spec is not None]
    rows = [] if call.context.on_cpu else [call.ins[0]]
    return [s.with_dtype(s.dtype.accumulation) for s in (*rows, *given) if s.dtype.accumulation is not s.dtype]


def _by_aten(call: Call, op: Any, x: Tensor, parameters: Sequence[Tensor | None], outs: Sequence[Tensor]) -> None:
    """y and statistics <- a norm of aten, everything widened that has to be. CUDA wants x in its weight's dtype."""
    rows, free = rows_of(x), list(call.work)
    if not call.context.on_cpu and x.dtype is torch.bfloat16:
        wide_rows = rows_of(free.pop(0))
        call.emit(wide_rows.copy_, rows)
        rows = wide_rows
    wide = [_widened(call, parameter, free) for parameter in parameters]
    function = partial(op, rows, [rows.shape[1]], *wide, call.attributes["eps"])
    copies = [rows_of(outs[0]).copy_, *(statistic.view(-1, 1).copy_ for statistic in outs[1:])]

    def launch() -> None:
        for copy, new in zip(copies, function(), strict=True):
            copy(new)

    call.emit(launch)


_layer = aten.native_layer_norm.default


@row("layer_norm", _widening, overwrites=(0,))
def _layer_norm(call: Call) -> None:
    _by_aten(call, _layer, call.ins[0], call.ins[1:3], call.outs)


@row("add_layer_norm", partial(_widening, position=2), overwrites=(0, 1))
def _add_layer_norm(call: Call) -> None:
    total, *outs = call.outs
    call.emit(torch.add, *call.ins[:2], out=total)
    _by_aten(call, _layer, total, call.ins[2:4], outs)


def _grad_workspace(call: Call) -> list[TensorSpec]:
    x, weight = call.outs[0], call.ins[4]
    narrow = [spec for spec in (weight, x, x) if spec.dtype.accumulation is not spec.dtype]
    block = _block(call.context, x)
    summing = [block, *[block.with_shape(block.shape[1])] * len(call.outs)] if call.context.on_cpu else []
    return [*summing, *(spec.with_dtype(spec.dtype.accumulation) for spec in narrow)]


@row("layer_norm_grad", _grad_workspace, overwrites=(0, 1, 5))
def _layer_norm_grad(call: Call) -> None:
    dy, x, mean, rstd, weight, residual = call.ins
    dy, x, residual = rows_of(dy), rows_of(x), None if residual is None else rows_of(residual)
    free, outs = list(call.work), call.outs
    scratch, totals = ([free.pop(0), free.pop(0)], [free.pop(0) for _ in outs[1:]]) if call.context.on_cpu else ([], [])
    weight = _widened(call, weight, free)
    wide_x: Tensor | None = None
    if x.dtype is torch.bfloat16:
        # In bf16 aten adds dweight and dbias up in bf16, which loses most of their digits over many rows.
        wide_x, wide_dy = (rows_of(scratch) for scratch in free)
        call.emit(wide_x.copy_, x)
        call.emit(wide_dy.copy_, dy)
        dy, x = wide_dy, wide_x
    finish = _finishing(rows_of(outs[0]), residual, wide_x)
    biased, statistics = call.attributes["bias"], (mean.view(-1, 1), rstd.view(-1, 1))
    wanted = [True, not totals, biased and not totals]
    settings = ([x.shape[1]], *statistics, weight, weight if biased else None, wanted)
    function, small = partial(aten.native_layer_norm_backward.default, dy, x, *settings), outs[1:]
    if totals:
        _parameter_sums(call, dy, x, *statistics, scratch, totals)
        for out, total in zip(small, totals, strict=True):
            call.emit(out.copy_, total)
        small = ()

    def launch() -> None:
        dx, *parameters = function()
        finish(dx)
        for out, result in zip(small, parameters, strict=False):
            out.copy_(result)

    call.emit(launch)


def _parameter_sums(
    call: Call, dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, scratch: list[Tensor], totals: list[Tensor]
) -> None:
    """The gradients of weight and bias, summed over blocks of rows: aten's bits depend on the number of threads."""
    block, part = scratch
    for number, (d, rows, middle, root) in enumerate(_blocks((dy, x, mean, rstd), len(block))):
        normal = block[: len(rows)]
        call.emit(torch.sub, rows, middle, out=normal)
        call.emit(normal.mul_, root)
        call.emit(normal.mul_, d)
        for total, product in zip(totals, (normal, d), strict=False):
            call.emit(torch.sum, product, 0, out=part if number else total)
            if number:
                call.emit(total.add_, part)


def _finishing(dx: Tensor, residual: Tensor | None, wide: Tensor | None) -> Callable[[Tensor], Any]:
    """Return what takes the norm's part of dx to where it belongs, adding the residual.

    A part that is wider than dx is added in full, with scratch that is as `wide`, and rounded once.
    """
    if residual is None:
        return dx.copy_
    if wide is None:
        return partial(torch.add, residual, out=dx)
    return lambda new: dx.copy_(new.add_(wide.copy_(residual)))


def _block(context: Context, x: TensorSpec) -> TensorSpec:
    """Rows of x that are worked on at a time, wide: as many whatever the threads, as sums over them show."""
    width, block = max(x.shape[-1], 1), _CPU_BLOCK if context.on_cpu else _GPU_BLOCK
    return TensorSpec((max(1, min(x.size // width, block // width)), x.shape[-1]), x.dtype.accumulation)


def _blocks(tensors: Sequence[Tensor | None], step: int) -> Iterator[list[Any]]:
    """Blocks of rows of tensors [N, ...]; None for an absent one."""
    count = next(len(tensor) for tensor in tensors if tensor is not None)
    for start in range(0, count, step):
        yield [None if tensor is None else tensor[start : start + step] for tensor in tensors]


def _rms_of(call: Call, x: Tensor, outs: Sequence[Tensor]) -> None:
    """y, rstd <- the norm of the rows of x."""
    weight = call.ins[-1]
    if not call.context.on_cpu:
        _by_aten(call, aten._fused_rms_norm.default, x, [weight], outs)
        return
    normal, square, *free = call.work
    weight = _widened(call, weight, free)
    share, floor = (constant_like(number, normal) for number in (1 / x.shape[-1], call.attributes["eps"]))
    for rows, out, root in _blocks((rows_of(x), rows_of(outs[0]), outs[1].view(-1, 1)), len(normal)):
        n, s = normal[: len(rows)], square[: len(rows)]
        call.emit(n.copy_, rows)
        call.emit(torch.mul, n, n, out=s)
        call.emit(torch.sum, s, -1, True, out=root)
        call.emit(torch.mul, root, share, out=root)
        call.emit(torch.add, root, floor, out=root)
        call.emit(root.rsqrt_)
        call.emit(torch.mul, n, root, out=n)
        call.emit(torch.mul, n, weight, out=n)
        call.emit(out.copy_, n)


def _rms_workspace(call: Call) -> list[TensorSpec]:
    wide = _widening(call, len(call.ins) - 1)
    return [*[_block(call.context, call.ins[0])] * 2, *wide] if call.context.on_cpu else wide


@row("rms_norm", _rms_workspace, overwrites=(0,))
def _rms_norm(call: Call) -> None:
    _rms_of(call, call.ins[0], call.outs)


@row("add_rms_norm", _rms_workspace, overwrites=(0, 1))
def _add_rms_norm(call: Call) -> None:
    total, *outs = call.outs
    call.emit(torch.add, *call.ins[:2], out=total)
    _rms_of(call, total, outs)


def _rms_norm_grad_workspace(call: Call) -> list[TensorSpec]:
    block, weight = _block(call.context, call.ins[1]), call.ins[3]
    row = block.with_shape(block.shape[1])
    wide = [row] if weight.dtype.accumulation is not weight.dtype else []
    return [*[block] * 3, block.with_shape(block.shape[0], 1), row, row, *wide]


@row("rms_norm_grad", _rms_norm_grad_workspace, overwrites=(0, 4))
def _rms_norm_grad(call: Call) -> None:
    dy, x, rstd, weight, residual = call.ins
    normal, scaled, product, dot, total, part, *free = call.work
    weight = _widened(call, weight, free)
    call.emit(total.zero_)
    beside = None if residual is None else rows_of(residual)
    for d, rows, root, more, out in _blocks(
        (rows_of(dy), rows_of(x), rstd.view(-1, 1), beside, rows_of(call.outs[0])), len(normal)
    ):
        n, s, p, along = (scratch[: len(rows)] for scratch in (normal, scaled, product, dot))
        call.emit(n.copy_, rows)
        call.emit(s.copy_, d)
        call.emit(torch.mul, n, root, out=n)
        call.emit(torch.mul, s, n, out=p)
        call.emit(torch.sum, p, 0, out=part)
        call.emit(total.add_, part)
        call.emit(torch.mul, p, weight, out=p)
        call.emit(torch.sum, p, -1, True, out=along)
        call.emit(torch.mul, s, weight, out=s)
        call.emit(torch.addcmul, s, n, along, value=-1 / x.shape[-1], out=s)
        call.emit(torch.mul, s, root, out=s)
        if more is not None:
            call.emit(n.copy_, more)
            call.emit(s.add_, n)
        call.emit(out.copy_, s)
    call.emit(call.outs[1].copy_, total)
