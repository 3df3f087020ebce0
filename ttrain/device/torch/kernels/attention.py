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

    def __init__(
        self, call: Call, positions: Tensor, visible: Tensor, context: int, heads: int, like: Tensor, width: int = 0
    ) -> None:
        """Keys are given for `width` places at a time, 0 for all."""
        self.mask: AttentionMask = call.attributes.get("mask", EVERY_KEY)
        self.own = context // call.attributes.get("texts", 1)  # places of a text
        self.width = width or context
        kinds = (torch.bool, like.dtype, torch.int64)[: 3 if self.mask.biased else 1]
        # The hidden keys and, where there are slopes, distances as numbers and as integers.
        self.work = [call.scratch((len(positions), context), each) for each in kinds]
        call.begin()
        self.keys = torch.arange(context, device=like.device)
        self.places, self.limits = positions.view(-1, 1), visible.view(-1, 1)
        self.slopes = torch.from_numpy(alibi_slopes(heads)).to(like.device, like.dtype)[:, None, None]
        self.far = self.keys + (self.mask.window or 0)  # hidden from a query at this place or later
        self.ends = (self.keys // self.own + 1) * self.own  # of their texts

    def add(self, scores: Tensor, queries: slice, keys: slice, seen: int) -> None:
        """scores [.., H, n, c] += -slope * distance, where there are slopes; keys that no query sees become HIDDEN.

        They are those of some of the N queries, for the first `seen` of these keys, or of those of each query's text.
        """
        count, places = scores.shape[-2], self.places[queries]
        near, far, ends = (x[keys].view(-1, self.width)[:, :seen] for x in (self.keys, self.far, self.ends))
        hidden, *distances = (shaped(x, (count, seen)) for x in self.work)
        if distances:
            prefer_near(_at_once, self.mask, scores, self.slopes, near, places, *distances)
        torch.ge(near, self.limits[queries], out=hidden)
        scores.masked_fill_(hidden, _hidden(scores))
        if self.mask.window is not None:
            torch.le(far, places, out=hidden)
            scores.masked_fill_(hidden, _hidden(scores))
        if seen > self.own:
            torch.le(ends, places, out=hidden)
            scores.masked_fill_(hidden, _hidden(scores))


def _at_once(function: Callable[..., Any], *given: Any, **settings: Any) -> None:
    function(*given, **settings)


@row("cache_bias")
def _cache_bias(call: Call) -> None:
    (positions, visible), y = call.ins, call.outs[0]
    bias = _CacheBias(call, positions, visible, call.attributes["context"], call.attributes["heads"], y)
    call.emit(lambda: bias.add(y.zero_(), slice(None), slice(None), y.shape[3]))


@row("cached_attention", widens=True)
def _cached_attention(call: Call) -> None:
    """Attend on the CPU text by text, or to as many as have a query each; elsewhere to all places, as none is known."""
    q, keys, values, positions, visible = call.ins
    scale, texts = call.attributes["scale"], call.attributes.get("texts", 1)
    batch, heads, rows, _ = q.shape
    places, pairs, y = keys.shape[2], batch * keys.shape[1], call.outs[0]
    width, share = places // texts if call.context.on_cpu else places, batch * heads // pairs
    all_scores = call.scratch((batch * heads * rows, width), q.dtype)
    packed, mixed = call.scratch(q.shape, q.dtype), call.scratch(y.shape, y.dtype)
    bias = _CacheBias(call, positions, visible, places, heads, q, width)

    def attend(queries: slice, text: int, count: int, seen: int) -> None:
        """Attend to the first `seen` keys of `count` texts, of which several have one query each."""
        own = slice(text * width, (text + count) * width)
        near, of = (x[:, :, own].view(pairs, count, width, -1)[:, :, :seen].flatten(0, 1) for x in (keys, values))
        # [B, H, count * n, K] is [pairs, share, count, n, K]; products take [pairs * count, share * n, K].
        asked, wanted = (
            x[:, :, queries].unflatten(2, (count, -1)).view(pairs, share, count, -1, x.shape[3]) for x in (q, y)
        )
        given = shaped(packed, asked.transpose(1, 2).shape).copy_(asked.transpose(1, 2)).flatten(2, 3).flatten(0, 1)
        scores = shaped(all_scores, (*given.shape[:2], seen))
        torch.baddbmm(scores, given, near.mT, beta=0, alpha=scale, out=scores)
        by_query = scores.view(pairs, count, share, -1, seen).transpose(1, 2).flatten(2, 3)
        bias.add(by_query if count > 1 else by_query.view(batch, heads, -1, seen), queries, own, seen)
        softmax_into(scores, scores)()
        found = torch.bmm(scores, of, out=shaped(mixed, (*given.shape[:2], y.shape[3])))
        wanted.copy_(found.view(pairs, count, share, -1, y.shape[3]).transpose(1, 2))

    def by_text() -> None:
        owners, ends, start = [place // width for place in positions.tolist()], visible.tolist(), 0
        if texts > 1 and owners == [*range(texts)] and not bias.mask.biased:
            attend(slice(None), 0, texts, max(end - text * width for text, end in enumerate(ends)))
            return
        for text, run in groupby(owners):
            queries = slice(start, start := start + len(list(run)))
            attend(queries, text, 1, max(ends[queries]) - text * width)

    call.emit(by_text if call.context.on_cpu else partial(attend, slice(None), 0, 1, places))
