"""Softmax, and attention in three ways behind one row.

explicit: batched products over probabilities [B*H, rows, keys] in workspace, a block of query rows at a time; bf16
    products run on the matrix units.
flash: aten's blockwise attention, which never forms the probabilities; causal and without position bias only. On a GPU
    it takes bf16 and heads that share keys.
efficient: aten's memory-efficient attention on a GPU, for what flash does not take there, such as fp32.

The last rows write caches and attend over them. On the CPU no key is read that no query sees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ttrain.core.attention_mask import EVERY_KEY, HIDDEN, AttentionMask, alibi_slopes
from ttrain.device.base import Delivery
from ttrain.device.torch.kernels import explicit
from ttrain.device.torch.kernels.common import Bind, Call, Tensor, accumulation, row, scalar_like, shaped
from ttrain.device.torch.kernels.explicit import Block, Documents, ScoreBias, by_heads, softmax_into
from ttrain.device.torch.kernels.layout import heads_view

aten = torch.ops.aten
_ROWS = 64  # of scores that a mask is added to at a time


def _masked(call: Call, y: Tensor | None = None) -> Tensor:
    """Emit scale x + the bias of the mask, for x [..., T, T], into scratch, or into y where it is wide enough."""
    x, mask = call.ins[0], call.attributes["mask"]
    heads, time, dtype = x.shape[-3] if mask.biased else 1, x.shape[-1], accumulation(x.dtype)
    bias = None if mask.is_full else ScoreBias(call, heads, _ROWS, time, torch.empty(0, dtype=dtype, device=x.device))
    scores = y if y is not None and y.dtype is dtype else call.scratch(x.shape, dtype)
    call.emit(scores.copy_, x)
    _scale(call, scores)
    if bias is not None:
        by_heads = scores.view(-1, heads, time, time)
        for start in range(0, time, _ROWS):
            block = Block(start, min(start + _ROWS, time), range(time))
            bias.add(by_heads[:, :, block.start : block.stop], block)
    return scores


@row("softmax", overwrites=(0,))
def _softmax(call: Call) -> None:
    x, y = call.ins[0], call.outs[0]
    if call.attributes["scale"] == 1.0 and call.attributes["mask"].is_full:
        call.emit(softmax_into(x, y))
        return
    scores = _masked(call, y)
    call.emit(softmax_into(scores, scores))
    call.copy(scores, y)


@row("log_sum_exp")
def _log_sum_exp(call: Call) -> None:
    call.emit(torch.logsumexp, _masked(call), -1, out=call.outs[0])


def _scale(call: Call, x: Tensor) -> None:
    if (factor := call.attributes["scale"]) != 1.0:
        call.emit(torch.mul, x, scalar_like(factor, x), out=x)


@row("document_bias")
def _document_bias(call: Call) -> None:
    bias, documents = call.outs[0], Documents(call, call.ins[0], call.ins[0].shape[1])
    documents.find()
    call.emit(bias.fill_, 0.0)
    documents.hide(bias, Block(0, bias.shape[2], range(bias.shape[2])), HIDDEN)


@row("softmax_grad", overwrites=(0, 1))
def _softmax_grad(call: Call) -> None:
    dy, y = call.ins
    call.emit(aten._softmax_backward_data.out, dy, y, -1, y.dtype, grad_input=call.outs[0])
    _scale(call, call.outs[0])


# Time steps up to which the explicit way was measured to be as fast on CPUs: bf16 products run on the matrix units, and
# beyond the probabilities take too much memory.
EXPLICIT_UP_TO = {torch.bfloat16: 4096}
OTHERS_UP_TO = 256
FLASH_FROM = (8, 0)  # compute capability of a GPU


def chosen_way(call: Call, given: Sequence[Tensor | None]) -> str:
    """Return explicit, flash or efficient; forward and backward of one node agree.

    The last two know no other mask than the causal one, no dropout, no documents, and no keys of another width than
    values. On a CPU flash knows no heads that share keys.
    """
    q, k, v = by_heads(given, call.attributes)
    plain = not call.attributes.get("p", 0.0) and call.attributes["mask"].is_causal and call.ins[-1] is None
    if not plain or k.shape != v.shape or q.shape[3] != k.shape[3]:
        return "explicit"
    (_, _, time, width), limit, bf16 = q.shape, call.context.explicit_up_to, q.dtype is torch.bfloat16
    if call.context.on_cpu:
        most = EXPLICIT_UP_TO.get(q.dtype, OTHERS_UP_TO) if limit is None else limit
        return "explicit" if time <= most or q.shape != k.shape else "flash"
    if time <= (limit or 0) or q.dtype is torch.float64 or width % 8:
        return "explicit"
    return "flash" if bf16 and width <= 256 and call.context.capability >= FLASH_FROM else "efficient"


def _flash_forward(call: Call) -> None:
    q, k, v = by_heads(call.ins[:3], call.attributes)
    y, log_sum_exp = heads_view(call.outs[0], 1, call.attributes["heads"])[0], call.outs[1]
    scale = call.attributes["scale"]
    if call.context.on_cpu:
        run = partial(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, True)
    else:
        run = partial(aten._scaled_dot_product_flash_attention.default, q, k, v, 0.0, True, False)
    call.emit_returned(partial(run, scale=scale), [y, log_sum_exp])


def _flash_backward(call: Call) -> None:
    heads = call.attributes["heads"]
    q, k, v = by_heads(call.ins[1:4], call.attributes)
    dy, y = heads_view(call.ins[0], 1, heads)[0], heads_view(call.ins[4], 1, heads)[0]
    time, given = q.shape[2], (dy, q, k, v, y, call.ins[5])
    if call.context.on_cpu:
        function = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        more: tuple[Any, ...] = (0.0, True)
    else:
        function = aten._scaled_dot_product_flash_attention_backward.default
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of the generator: unused without dropout
        more = (None, None, time, time, 0.0, True, state, state)
    run = partial(function, *given, *more, scale=call.attributes["scale"])
    call.emit_returned(run, by_heads(call.outs, call.attributes))


_STATISTICS = 32  # queries: the efficient way pads log_sum_exp to a multiple


def _spread(call: Call, x: Tensor, q: Tensor) -> Tensor:
    """Return x [B, K, T, D] with a head for each of q's, [B, H, T, D]; x itself where it has as many."""
    return x if x.shape == q.shape else call.scratch(q.shape, q.dtype)


def _repeat(call: Call, x: Tensor, spread: Tensor) -> None:
    """Emit the copies of heads that several heads of queries share."""
    if spread is not x:
        call.emit(spread.unflatten(1, (x.shape[1], -1)).copy_, x.unsqueeze(2))


def _efficient_forward(call: Call) -> None:
    q, *shared = by_heads(call.ins[:3], call.attributes)
    spread = [_spread(call, x, q) for x in shared]
    for x, wide in zip(shared, spread, strict=True):
        _repeat(call, x, wide)
    y, log_sum_exp = heads_view(call.outs[0], 1, call.attributes["heads"])[0], call.outs[1]
    attend = aten._scaled_dot_product_efficient_attention.default

    def launch() -> None:
        found, statistics, *_ = attend(q, *spread, None, True, 0.0, True, scale=call.attributes["scale"])
        y.copy_(found)
        log_sum_exp.copy_(statistics[..., : q.shape[2]])

    call.emit(launch)


def _efficient_backward(call: Call) -> None:
    heads = call.attributes["heads"]
    q, *shared = by_heads(call.ins[1:4], call.attributes)
    dy, y = heads_view(call.ins[0], 1, heads)[0], heads_view(call.ins[4], 1, heads)[0]
    padded = -(-q.shape[2] // _STATISTICS) * _STATISTICS
    statistics = call.scratch((*q.shape[:2], padded), torch.float32)
    spread = [_spread(call, x, q) for x in shared]
    call.emit(statistics.fill_, math.inf)
    call.emit(statistics[..., : q.shape[2]].copy_, call.ins[5])
    for x, wide in zip(shared, spread, strict=True):
        _repeat(call, x, wide)
    targets = by_heads(call.outs, call.attributes)
    state = torch.zeros((), dtype=torch.int64, device=q.device)  # of the generator: unused without dropout
    differentiate = aten._scaled_dot_product_efficient_attention_backward.default

    def launch() -> None:
        given = (dy, q, *spread, None, y, statistics, state, state, 0.0, [True, True, True, False], True)
        for target, found in zip(targets, differentiate(*given, scale=call.attributes["scale"]), strict=False):
            shares = found.shape != target.shape
            target.copy_(found.unflatten(1, (target.shape[1], -1)).sum(2) if shares else found)

    call.emit(launch)


def _row(op: str, ways: Mapping[str, Bind], first: int) -> None:
    """Declare a row that goes one of several ways, by its queries, keys and values from input number `first` on.

    The last inputs are a bias, a seed and positions. No way knows a bias: such attention runs as its body.
    """

    @row(op, widens=True, supports=lambda ins, attributes: ins[-3] is None)
    def _(call: Call) -> None:
        way = chosen_way(call, call.ins[first : first + 3])
        if way != "explicit":
            call.outside = sum(out.nbytes for out in call.outs)  # which aten returns, before they are copied
        ways[way](call)


_row("attention", {"explicit": explicit.forward, "flash": _flash_forward, "efficient": _efficient_forward}, 0)
_row("attention_grad", {"explicit": explicit.backward, "flash": _flash_backward, "efficient": _efficient_backward}, 1)


@row("cache_write", delivery=Delivery.INPLACE)
def _cache_write(call: Call) -> None:
    cache, rows, positions = call.ins
    call.emit(cache.index_copy_, 2, positions, rows)


class _CacheBias:
    """The terms of op cache_bias, one after the other, on [.., N, C] or its first columns."""

    def __init__(self, call: Call, positions: Tensor, visible: Tensor, context: int, heads: int, like: Tensor) -> None:
        self.mask: AttentionMask = call.attributes.get("mask", EVERY_KEY)
        kinds = (torch.bool, like.dtype, torch.int64)[: 3 if self.mask.biased else 1]
        # The hidden keys and, where there are slopes, distances as numbers and as integers.
        self.work = [call.scratch((len(positions), context), each) for each in kinds]
        call.begin()
        self.keys = torch.arange(context, device=like.device)
        self.places, self.limits = positions.view(-1, 1), visible.view(-1, 1)
        slopes = torch.from_numpy(alibi_slopes(heads)).to(device=like.device, dtype=like.dtype)
        self.slopes = slopes.view(-1, 1, 1)
        self.far = self.keys + (self.mask.window or 0)  # hidden from a query at this place or later

    def add(self, scores: Tensor) -> None:
        """scores [B, H, N, c] += -slope * distance, where there are slopes; keys that no query sees become HIDDEN."""
        seen = scores.shape[-1]
        keys, (hidden, *distances) = self.keys[:seen], (shaped(part, (part.shape[0], seen)) for part in self.work)
        if distances:
            distance, whole = distances
            torch.sub(keys, self.places, out=whole)
            distance.copy_(whole)
            if self.mask.position_bias == "future":
                distance.clamp_(min=0)
            else:
                distance.abs_()
            torch.addcmul(scores, self.slopes, distance, value=-1, out=scores)
        torch.ge(keys, self.limits, out=hidden)
        scores.masked_fill_(hidden, HIDDEN)
        if self.mask.window is not None:
            torch.le(self.far[:seen], self.places, out=hidden)
            scores.masked_fill_(hidden, HIDDEN)


@row("cache_bias")
def _cache_bias(call: Call) -> None:
    (positions, visible), y = call.ins, call.outs[0]
    bias = _CacheBias(call, positions, visible, call.attributes["context"], call.attributes["heads"], y)
    call.emit(lambda: bias.add(y.zero_()))


@row("cached_attention", widens=True)
def _cached_attention(call: Call) -> None:
    q, keys, values, positions, visible = call.ins
    scale = call.attributes["scale"]
    batch, heads, rows, _ = q.shape
    all_scores = call.scratch((batch * heads * rows, keys.shape[2]), q.dtype)
    bias = _CacheBias(call, positions, visible, keys.shape[2], heads, q)
    pairs = batch * keys.shape[1]
    together = batch * heads // pairs * rows
    queries, y = q.view(pairs, together, -1), call.outs[0].view(pairs, together, -1)
    all_keys, all_values = keys.view(pairs, keys.shape[2], -1), values.view(pairs, values.shape[2], -1)

    def attend(seen: int) -> None:
        scores = shaped(all_scores, (pairs, together, seen))
        torch.baddbmm(scores, queries, all_keys[:, :seen].mT, beta=0, alpha=scale, out=scores)
        bias.add(scores.view(batch, heads, rows, seen))
        softmax_into(scores, scores)()
        torch.bmm(scores, all_values[:, :seen], out=y)

    if call.context.on_cpu:
        call.emit(lambda: attend(max(visible.tolist())))
    else:
        call.emit(partial(attend, keys.shape[2]))
