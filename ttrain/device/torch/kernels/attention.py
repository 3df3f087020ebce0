"""Softmax, and attention in several ways behind one row: explicit.py, and those of blockwise.py.

The last rows write caches and attend over them. On the CPU no key is read that no query sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch

from ttrain.core.attention_mask import EVERY_KEY, HIDDEN, AttentionMask, alibi_slopes
from ttrain.device.base import Delivery
from ttrain.device.torch.kernels import blockwise
from ttrain.device.torch.kernels.common import Call, Tensor, accumulation, row, scalar_like, shaped
from ttrain.device.torch.kernels.explicit import Block, Documents, ScoreBias, by_heads, prefer_near, softmax_into

aten = torch.ops.aten
_ROWS = 64  # of scores that a mask is added to at a time


def _hidden(scores: Tensor) -> float:
    """Return HIDDEN, or in fp16, which can't hold it, the least number."""
    return max(HIDDEN, torch.finfo(scores.dtype).min)


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
    documents.hide(bias, Block(0, bias.shape[2], range(bias.shape[2])), _hidden(bias))


@row("softmax_grad", overwrites=(0, 1))
def _softmax_grad(call: Call) -> None:
    dy, y = call.ins
    call.emit(aten._softmax_backward_data.out, dy, y, -1, y.dtype, grad_input=call.outs[0])
    _scale(call, call.outs[0])


# Time steps up to which the explicit way was measured to be as fast on CPUs: bf16 products run on the matrix units, and
# beyond the probabilities take too much memory.
EXPLICIT_UP_TO = {torch.bfloat16: 4096}
OTHERS_UP_TO = 256


def chosen_way(call: Call, given: Sequence[Tensor | None]) -> str:
    """Return BLOCKS, or the name of a way of blockwise.py; forward and backward of one node agree.

    Only blocks of rows know dropout, and keys of another width than values. On a CPU flash knows no other mask than
    the causal one, no documents, and no heads that share keys.
    """
    q, k, v = by_heads(given, call.attributes)
    mask, documents = call.attributes["mask"], call.ins[-1] is not None
    if call.attributes.get("p", 0.0) or k.shape != v.shape or q.shape[3] != k.shape[3]:
        return blockwise.BLOCKS
    if not call.context.on_cpu:
        return blockwise.chosen(call, q, documents)
    limit = call.context.explicit_up_to
    most = EXPLICIT_UP_TO.get(q.dtype, OTHERS_UP_TO) if limit is None else limit
    plain = mask.is_causal and not documents and q.shape == k.shape
    return "flash_on_cpu" if plain and q.shape[2] > most else blockwise.BLOCKS


def _attention(number: int, call: Call) -> None:
    """Go one of several ways with pass number 0 or 1 of it, forward or backward.

    Queries, keys and values begin with the input of that number. The last inputs are a bias, a seed and positions. No
    way knows a bias: such attention runs as its body.
    """
    call.way = blockwise.BLOCKS
    blockwise.emit(call, chosen_way(call, call.ins[number : number + 3]), number)


for _number, _op in enumerate(("attention", "attention_grad")):
    row(_op, widens=True, supports=lambda ins, _: ins[-3] is None, tells="cuda")(partial(_attention, _number))


@row("cache_write", delivery=Delivery.INPLACE)
def _cache_write(call: Call) -> None:
    cache, rows, positions = call.ins
    call.emit(cache.index_copy_, 2, positions, rows)


class _CacheBias:
    """The terms of op cache_bias, one after the other, on [.., N, C] or its first columns."""

    def __init__(self, call: Call, positions: Tensor, visible: Tensor, context: int, heads: int, like: Tensor) -> None:
        self.mask: AttentionMask = call.attributes.get("mask", EVERY_KEY)
        self.own = context // call.attributes.get("texts", 1)
        kinds = (torch.bool, like.dtype, torch.int64)[: 3 if self.mask.biased else 1]
        # The hidden keys and, where there are slopes, distances as numbers and as integers.
        self.work = [call.scratch((len(positions), context), each) for each in kinds]
        call.begin()
        self.keys = torch.arange(context, device=like.device)
        self.places, self.limits = positions.view(-1, 1), visible.view(-1, 1)
        self.slopes = torch.from_numpy(alibi_slopes(heads)).to(like.device, like.dtype)[:, None, None]
        self.far = self.keys + (self.mask.window or 0)  # hidden from a query at this place or later
        self.ends = (self.keys // self.own + 1) * self.own  # of their texts

    def add(self, scores: Tensor, queries: slice = slice(None), first: int = 0) -> None:
        """scores [B, H, n, c] += -slope * distance, where there are slopes; keys that no query sees become HIDDEN.

        They are those of some of the N queries, for keys from the place `first` on.
        """
        *_, count, seen = scores.shape
        keys, (hidden, *distances) = self.keys[first : first + seen], (shaped(x, (count, seen)) for x in self.work)
        places = self.places[queries]
        if distances:
            prefer_near(_at_once, self.mask, scores, self.slopes, keys, places, *distances)
        torch.ge(keys, self.limits[queries], out=hidden)
        scores.masked_fill_(hidden, _hidden(scores))
        if self.mask.window is not None:
            torch.le(self.far[first : first + seen], places, out=hidden)
            scores.masked_fill_(hidden, _hidden(scores))
        if seen > self.own:
            torch.le(self.ends[first : first + seen], places, out=hidden)
            scores.masked_fill_(hidden, _hidden(scores))


def _at_once(function: Callable[..., Any], *given: Any, **settings: Any) -> None:
    function(*given, **settings)


@row("cache_bias")
def _cache_bias(call: Call) -> None:
    (positions, visible), y = call.ins, call.outs[0]
    bias = _CacheBias(call, positions, visible, call.attributes["context"], call.attributes["heads"], y)
    call.emit(lambda: bias.add(y.zero_()))


@row("cached_attention", widens=True)
def _cached_attention(call: Call) -> None:
    """Attend on the CPU text by text, elsewhere to the caches of all texts at once, as no place is known there."""
    q, keys, values, positions, visible = call.ins
    scale, own = call.attributes["scale"], keys.shape[2] // call.attributes.get("texts", 1)
    batch, heads, rows, _ = q.shape
    most = own if call.context.on_cpu else keys.shape[2]
    pairs, y, all_scores = batch * keys.shape[1], call.outs[0], call.scratch((batch * heads * rows, most), q.dtype)
    packed, mixed = call.scratch(q.shape, q.dtype), call.scratch(y.shape, y.dtype)
    bias = _CacheBias(call, positions, visible, keys.shape[2], heads, q)
    all_keys, all_values = keys.view(pairs, keys.shape[2], -1), values.view(pairs, values.shape[2], -1)

    def attend(queries: slice, first: int, stop: int) -> None:
        asked, wanted = q[:, :, queries], y[:, :, queries]
        count, seen = asked.shape[2], stop - first
        scores = shaped(all_scores, (pairs, heads * batch // pairs * count, seen))
        given = shaped(packed, asked.shape).copy_(asked).view(*scores.shape[:2], -1)
        torch.baddbmm(scores, given, all_keys[:, first:stop].mT, beta=0, alpha=scale, out=scores)
        bias.add(scores.view(batch, heads, count, seen), queries, first)
        softmax_into(scores, scores)()
        found = shaped(mixed, (*scores.shape[:2], y.shape[3]))
        wanted.copy_(torch.bmm(scores, all_values[:, first:stop], out=found).view(wanted.shape))

    def by_text() -> None:
        places, ends, start = positions.tolist(), visible.tolist(), 0
        for text, run in groupby(places, lambda place: place // own):
            queries = slice(start, start := start + len(list(run)))
            attend(queries, text * own, max(ends[queries]))

    call.emit(by_text if call.context.on_cpu else partial(attend, slice(None), 0, keys.shape[2]))
