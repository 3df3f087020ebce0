"""Rows of mixtures of experts. On the CPU a launch reads where the panels of experts begin; a GPU's launch never does.

On a GPU torch multiplies all panels of bf16 in one kernel, if its compute capability is 9 or 10. Otherwise Triton does
(triton/rows.py), or without it every expert multiplies all rows, of which those of others are zero: E/K times the work.
A plan names these ways `grouped`, `triton` and `dense`.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch

from ttrain.device.torch.kernels.common import Call, constant_like, row

_GROUPED = (9, 10)  # major compute capabilities; on others torch reads on the host where panels begin


@row("valid")
def _valid(call: Call) -> None:
    found = call.scratch(call.ins[0].shape, torch.bool)
    call.emit(torch.ge, call.ins[0], constant_like(0, call.ins[0]), out=found)
    call.emit(call.outs[0].copy_, found)


@row("top_k")
def _top_k(call: Call) -> None:
    scores = call.ins[0]
    values, ids = call.scratch(scores.shape, scores.dtype), call.scratch(scores.shape, torch.int64)
    call.emit(torch.sort, scores, stable=True, dim=1, descending=True, out=(values, ids))
    call.emit(call.outs[0].copy_, ids[:, : call.attributes["count"]])


@row("gather")
def _gather(call: Call) -> None:
    call.emit(torch.gather, call.ins[0], 1, call.ins[1], out=call.outs[0])


@row("scatter")
def _scatter(call: Call) -> None:
    (dy, ids), dx = call.ins, call.outs[0]
    call.emit(dx.zero_)
    call.emit(dx.scatter_, 1, ids, dy)


@row("sort_by_expert")
def _sort_by_expert(call: Call) -> None:
    ids, (order, places, offsets) = call.ins[0].view(-1), call.outs
    found = call.scratch(ids.shape, torch.int64)
    call.begin()
    rows, experts = (torch.arange(len(x), device=ids.device) for x in (ids, offsets))
    call.emit(torch.sort, ids, stable=True, dim=0, descending=False, out=(found, order))
    call.emit(places.view(-1).scatter_, 0, order, rows)
    call.emit(torch.searchsorted, found, experts, out=offsets)


@row("dispatch")
def _dispatch(call: Call) -> None:
    (x, order, places, weights), y = call.ins, call.outs[0]
    tokens, factors = call.scratch(order.shape, torch.int64), None
    if weights is not None:
        factors, wide = call.scratch((len(order), 1), weights.dtype), call.wide(y)
    call.emit(torch.div, order, constant_like(places.shape[1], order), rounding_mode="floor", out=tokens)
    call.emit(torch.index_select, x, 0, tokens, out=y)
    if weights is not None:
        call.emit(torch.index_select, weights.view(-1, 1), 0, order, out=factors)
        call.copy(y, wide)
        call.emit(wide.mul_, factors)
        call.copy(wide, y)


@row("combine")
def _combine(call: Call) -> None:
    (rows, _, places, weights), y = call.ins, call.outs[0]
    picked, total = call.scratch(y.shape, y.dtype), call.wide(y)
    term, column = call.wide(picked), call.scratch(places.shape[:1], torch.int64)
    call.emit(total.zero_)
    for k in range(places.shape[1]):
        call.emit(column.copy_, places[:, k])
        call.emit(torch.index_select, rows, 0, column, out=picked)
        call.copy(picked, term)
        if weights is None:
            call.emit(total.add_, term)
        else:
            call.emit(total.addcmul_, term, weights[:, k : k + 1])
    call.copy(total, y)


@row("row_products")
def _row_products(call: Call) -> None:
    (dy, rows, places), dweights = call.ins, call.outs[0]
    picked, column = call.scratch(dy.shape, dy.dtype), call.scratch(places.shape[:1], torch.int64)
    wide_dy, term = call.wide(dy), call.wide(picked)
    call.copy(dy, wide_dy)
    for k in range(places.shape[1]):
        call.emit(column.copy_, places[:, k])
        call.emit(torch.index_select, rows, 0, column, out=picked)
        call.copy(picked, term)
        call.emit(term.mul_, wide_dy)
        call.emit(torch.sum, term, 1, out=dweights[:, k])


def grouped_by_torch(call: Call) -> bool:
    """True where torch has one kernel for all panels of a product."""
    a, b, _ = call.ins
    whole = not any(size % 8 for size in (a.shape[1], *b.shape[1:]))  # of 16 bytes
    on_gpu = call.context.kind == "cuda" and call.context.capability[0] in _GROUPED
    return on_gpu and whole and a.dtype is torch.bfloat16


def _grouped(outer: bool, call: Call) -> None:
    """Multiply the panel of rows of each expert by its matrix, or with `outer` by the same rows of b."""
    (a, b, offsets), y = call.ins, call.outs[0]
    if call.attributes.get("transpose"):
        b = b.mT
    if call.context.on_cpu:

        def launch() -> None:
            for e, (begin, end) in enumerate(pairwise(offsets.tolist())):
                if outer:
                    torch.mm(a[begin:end].t(), b[begin:end], out=y[e])
                elif begin < end:
                    torch.mm(a[begin:end], b[e], out=y[begin:end])

        call.emit(launch)
        return
    call.way = "grouped" if grouped_by_torch(call) else "dense"
    if call.way == "grouped":
        left, ends = a.t() if outer else a, call.scratch((len(offsets) - 1,), torch.int32)
        call.emit(ends.copy_, offsets[1:])
        call.emit(lambda: y.copy_(torch._grouped_mm(left, b, offs=ends)))
    else:
        begun, mine = (call.scratch((len(a), count), torch.bool) for count in (len(offsets), len(offsets) - 1))
        own, masked = call.scratch(mine.shape, a.dtype), call.scratch(a.shape, a.dtype)
        call.begin()
        call.emit(torch.ge, torch.arange(len(a), device=a.device)[:, None], offsets, out=begun)
        call.emit(torch.logical_xor, begun[:, :-1], begun[:, 1:], out=mine)
        call.emit(own.copy_, mine)  # ones at the rows of each expert, and zeros elsewhere
        if not outer:
            call.emit(y.zero_)
        for e in range(len(offsets) - 1):
            call.emit(torch.mul, a, own[:, e : e + 1], out=masked)
            if outer:
                call.emit(torch.mm, masked.t(), b, out=y[e])
            else:
                call.emit(y.addmm_, masked, b[e])


for _name in ("grouped_matmul", "grouped_outer"):
    row(_name, widens=True, tells="cuda")(partial(_grouped, _name == "grouped_outer"))
