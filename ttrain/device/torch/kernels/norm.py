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

from ttrain.device.torch.kernels.common import Call, Tensor, accumulation, constant_like, row, rows_of

aten = torch.ops.aten
_CPU_BLOCK, _GPU_BLOCK = 2**18, 2**25  # elements that are worked on at a time


def _by_aten(call: Call, op: Any, parameters: int) -> None:
    """y and statistics <- a norm of aten, everything widened that has to be. CUDA wants x in its weight's dtype.

    Of two tensors before the parameters, the sum is normalised, which is the first output then.
    """
    x, outs, addends = _normalised(call, parameters)
    rows, given = rows_of(x), call.ins[len(call.ins) - parameters :]
    wide_rows = rows if call.context.on_cpu else call.wide(rows)
    wide = [None if parameter is None else call.wide(parameter) for parameter in given]
    function = partial(op, wide_rows, [rows.shape[1]], *wide, call.attributes["eps"])
    if addends:
        call.emit(torch.add, *addends, out=x)
    for source, target in zip((rows, *given), (wide_rows, *wide), strict=True):
        call.copy(source, target)
    call.emit_returned(function, [rows_of(outs[0]), *(statistic.view(-1, 1) for statistic in outs[1:])])


def _normalised(call: Call, parameters: int) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
    """Return what is normalised, the outputs of its norm, and what it is the sum of, if it is one."""
    if len(call.ins) == 1 + parameters:
        return call.ins[0], call.outs, ()
    return call.outs[0], call.outs[1:], call.ins[:2]


@row("layer_norm", overwrites=(0,))
@row("add_layer_norm", overwrites=(0, 1))
def _layer_norm(call: Call) -> None:
    _by_aten(call, aten.native_layer_norm.default, 2)


@row("layer_norm_grad", overwrites=(0, 1, 5))
def _layer_norm_grad(call: Call) -> None:
    dy, x, mean, rstd, weight, residual = call.ins
    dy, x, residual = rows_of(dy), rows_of(x), None if residual is None else rows_of(residual)
    outs = call.outs
    sums = _ParameterSums(call, x, outs[1:]) if call.context.on_cpu else None
    # In bf16 aten adds dweight and dbias up in bf16, which loses most of their digits over many rows.
    wide_weight, wide_x, wide_dy = call.wide(weight), call.wide(x), call.wide(dy)
    for source, target in ((weight, wide_weight), (x, wide_x), (dy, wide_dy)):
        call.copy(source, target)
    finish = _finishing(rows_of(outs[0]), residual, None if wide_x is x else wide_x)
    biased, statistics = call.attributes["bias"], (mean.view(-1, 1), rstd.view(-1, 1))
    wanted = [True, sums is None, biased and sums is None]
    settings = ([x.shape[1]], *statistics, wide_weight, wide_weight if biased else None, wanted)
    function = partial(aten.native_layer_norm_backward.default, wide_dy, wide_x, *settings)
    if sums is not None:
        sums.form(wide_dy, wide_x, *statistics)
    small = outs[1:] if sums is None else ()

    def launch() -> None:
        dx, *parameters = function()
        finish(dx)
        for out, result in zip(small, parameters, strict=False):
            out.copy_(result)

    call.emit(launch)


class _ParameterSums:
    """The gradients of weight and bias, summed over blocks of rows: aten's bits depend on the number of threads."""

    def __init__(self, call: Call, x: Tensor, outs: Sequence[Tensor]) -> None:
        dtype = accumulation(x.dtype)
        self.call, self.outs, self.block = call, outs, _block(call, x)
        self.part, *self.totals = (call.scratch(x.shape[1:], dtype) for _ in range(1 + len(outs)))

    def form(self, dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> None:
        call, part = self.call, self.part
        for number, (d, rows, middle, root) in enumerate(_blocks((dy, x, mean, rstd), len(self.block))):
            normal = self.block[: len(rows)]
            call.emit(torch.sub, rows, middle, out=normal)
            call.emit(normal.mul_, root)
            call.emit(normal.mul_, d)
            for total, product in zip(self.totals, (normal, d), strict=False):
                call.emit(torch.sum, product, 0, out=part if number else total)
                if number:
                    call.emit(total.add_, part)
        for out, total in zip(self.outs, self.totals, strict=True):
            call.emit(out.copy_, total)


def _finishing(dx: Tensor, residual: Tensor | None, wide: Tensor | None) -> Callable[[Tensor], Any]:
    """Return what takes the norm's part of dx to where it belongs, adding the residual.

    A part that is wider than dx is added in full, with scratch that is as `wide`, and rounded once.
    """
    if residual is None:
        return dx.copy_
    if wide is None:
        return partial(torch.add, residual, out=dx)
    return lambda new: dx.copy_(new.add_(wide.copy_(residual)))


def _block(call: Call, x: Tensor) -> Tensor:
    """Take scratch for rows of x, wide, to work on at a time: as many whatever the threads, as sums over them show."""
    width, block = max(x.shape[-1], 1), _CPU_BLOCK if call.context.on_cpu else _GPU_BLOCK
    rows = max(1, min(x.numel() // width, block // width))
    return call.scratch((rows, x.shape[-1]), accumulation(x.dtype))


def _blocks(tensors: Sequence[Tensor | None], step: int) -> Iterator[list[Any]]:
    """Blocks of rows of tensors [N, ...]; None for an absent one."""
    count = next(len(tensor) for tensor in tensors if tensor is not None)
    for start in range(0, count, step):
        yield [None if tensor is None else tensor[start : start + step] for tensor in tensors]


@row("rms_norm", overwrites=(0,))
@row("add_rms_norm", overwrites=(0, 1))
def _rms_norm(call: Call) -> None:
    if not call.context.on_cpu:
        _by_aten(call, aten._fused_rms_norm.default, 1)
        return
    x, outs, addends = _normalised(call, 1)
    normal, square, weight = _block(call, x), _block(call, x), call.wide(call.ins[-1])
    share, floor = (constant_like(number, normal) for number in (1 / x.shape[-1], call.attributes["eps"]))
    if addends:
        call.emit(torch.add, *addends, out=x)
    call.copy(call.ins[-1], weight)
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


@row("rms_norm_grad", overwrites=(0, 4))
def _rms_norm_grad(call: Call) -> None:
    dy, x, rstd, weight, residual = call.ins
    normal, scaled, product = (_block(call, x) for _ in range(3))
    dot = call.scratch((len(normal), 1), normal.dtype)
    total, part = (call.scratch(normal.shape[1:], normal.dtype) for _ in range(2))
    wide = call.wide(weight)
    call.copy(weight, wide)
    call.emit(total.zero_)
    beside = None if residual is None else rows_of(residual)
    every = (rows_of(dy), rows_of(x), rstd.view(-1, 1), beside, rows_of(call.outs[0]))
    for d, rows, root, more, out in _blocks(every, len(normal)):
        n, s, p, along = (scratch[: len(rows)] for scratch in (normal, scaled, product, dot))
        call.emit(n.copy_, rows)
        call.emit(s.copy_, d)
        call.emit(torch.mul, n, root, out=n)
        call.emit(torch.mul, s, n, out=p)
        call.emit(torch.sum, p, 0, out=part)
        call.emit(total.add_, part)
        call.emit(torch.mul, p, wide, out=p)
        call.emit(torch.sum, p, -1, True, out=along)
        call.emit(torch.mul, s, wide, out=s)
        call.emit(torch.addcmul, s, n, along, value=-1 / x.shape[-1], out=s)
        call.emit(torch.mul, s, root, out=s)
        if more is not None:
            call.emit(n.copy_, more)
            call.emit(s.add_, n)
        call.emit(out.copy_, s)
    call.emit(call.outs[1].copy_, total)
