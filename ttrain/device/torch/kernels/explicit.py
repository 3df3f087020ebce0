"""Attention that forms its probabilities: batched products over blocks of query rows, each with the keys it can see."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from ttrain.core.attention_mask import AttentionMask, alibi_slopes
from ttrain.device.base import Attributes, Launch
from ttrain.device.torch.kernels.common import Call, Context, Tensor, shaped
from ttrain.device.torch.kernels.layout import heads_view
from ttrain.device.torch.kernels.random import Dropout, Rows, counting

aten = torch.ops.aten


def by_heads(tensors: Sequence[Tensor | None], attributes: Attributes) -> list[Tensor]:
    """Queries, keys and values, or their gradients, as views [B, H, T, width]; one tensor is a packed projection."""
    given, heads = [x for x in tensors if x is not None], attributes["heads"]
    if len(given) == 1:
        return list(heads_view(given[0], 3, heads))
    shared = attributes.get("kv_heads", heads)
    return [heads_view(x, 1, count)[0] for x, count in zip(given, (heads, shared, shared), strict=True)]


_GPU_SCORES, _GPU_ROWS = 2**28, (128, 1024)  # of a block on a GPU: so many scores, in rows between these bounds
_SHAPES = 16  # about so many numbers of keys that blocks of bf16 have: oneDNN keeps code for each shape of a product


@dataclass(frozen=True)
class Block:
    """Query rows from `start` up to `stop`, and keys among which are all that they see."""

    start: int
    stop: int
    keys: range

    @classmethod
    def all(cls, mask: AttentionMask, time: int, rows: int, few_shapes: bool) -> list[Block]:
        """Return all queries as blocks of `rows` rows, an even number or all."""
        step = -(-min(time, (mask.window or time) + rows) // _SHAPES) if few_shapes else 1
        found = []
        for start in range(0, time, rows):
            stop = min(start + rows, time)
            seen = mask.keys(start, stop, time)
            keys = range(seen.start // step * step, min(-(-seen.stop // step) * step, time))
            found.append(cls(start, stop, seen if step <= rows else keys))
        return found


def prefer_near(
    emit: Callable[..., Any], mask: AttentionMask, scores: Tensor, slopes: Tensor, keys: Tensor, queries: Tensor,
    distance: Tensor, whole: Tensor,
) -> None:  # fmt: skip
    """scores [..., H, R, K] <- scores - slope * distance, for keys [K] and queries [R, 1] at these places.

    slopes [H, 1, 1]. The last two are scratch [R, K]: in the scores' dtype, and in integers.
    """
    emit(torch.sub, keys, queries, out=whole)
    emit(partial(whole.clamp_, min=0) if mask.position_bias == "future" else whole.abs_)
    emit(distance.copy_, whole)
    emit(torch.addcmul, scores, slopes, distance, value=-1, out=scores)


class ScoreBias:
    """Bias that a mask adds to scaled scores: -inf where a key is hidden, and the preference for near keys.

    It is made for a block of `rows` queries at a time: nothing has an element for every query and key.
    """

    def __init__(self, call: Call, heads: int, rows: int, time: int, like: Tensor) -> None:
        self.call, self.mask, self.time = call, call.attributes["mask"], time
        self.slopes = torch.from_numpy(alibi_slopes(heads)).to(like.device, like.dtype)[:, None, None]
        if self.mask.biased:
            self.whole, self.distance = (call.scratch((rows, time), each) for each in (torch.int32, like.dtype))

    def add(self, scores: Tensor, block: Block) -> None:
        """scores [..., H or 1, rows, keys of the block] <- scores + bias."""
        if self.mask.biased:
            self._prefer(scores, block)
        first, last = (self.mask.keys(query, query + 1, self.time) for query in (block.start, block.stop - 1))
        keys, rows = block.keys, block.stop - block.start
        # In between are the keys that every query of the block sees.
        for begin, end in ((keys.start, last.start), (max(first.stop, last.start), keys.stop)):
            if end > begin:
                hidden = _hidden(self.mask, rows, begin - block.start, end - begin, scores.device)
                part = scores[..., begin - keys.start : end - keys.start]
                self.call.emit(part.masked_fill_, hidden, -math.inf)

    def _prefer(self, scores: Tensor, block: Block) -> None:
        future = self.mask.position_bias == "future"
        keys = range(max(block.keys.start, block.start if future else 0), block.keys.stop)
        part, shape = scores[..., keys.start - block.keys.start :], (block.stop - block.start, len(keys))
        whole, distance = shaped(self.whole, shape), shaped(self.distance, shape)
        places = counting(self.time, scores.device)
        at = places[keys.start : keys.stop], places[block.start : block.stop, None]
        prefer_near(self.call.emit, self.mask, part, self.slopes, *at, distance, whole)


@lru_cache(maxsize=256)
def _hidden(mask: AttentionMask, rows: int, first: int, count: int, device: torch.device) -> Tensor:
    """bool [rows, count]: the keys that are hidden of those from `first` on, as counted from the block's first query.

    They follow from the distance of query and key, and from the query's parity: every block begins with an even one.
    """
    return torch.from_numpy(mask.hidden(np.arange(rows)[:, None], first + np.arange(count))).to(device)


def softmax_into(x: Tensor, y: Tensor) -> Launch:
    """y <- softmax over the last axis of x; y may be x."""
    return partial(aten._softmax.out, x, -1, False, out=y)


class _Operand:
    """Queries, keys, values or output gradients as bmm takes them: [B*K, rows, D], for K heads of keys.

    The rows of queries whose heads share keys come one head after another. oneDNN copies an operand that isn't
    contiguous, into memory of its own, so in bf16 every range of rows is packed by itself, as is one of heads that
    share keys. Other products take slices of one packed tensor.
    """

    def __init__(self, call: Call, source: Tensor, pairs: int) -> None:
        self.call, self.source, self.pairs = call, source, pairs  # [B, H, T, D], strided; B*K
        self.packed = call.scratch(source.shape, source.dtype)
        self.sliced = source.dtype is not torch.bfloat16 and pairs == source.shape[0] * source.shape[1]

    def pack(self) -> None:
        """Once, before the first range."""
        if self.sliced:
            self.call.emit(self.packed.copy_, self.source)

    def rows(self, start: int, stop: int) -> Tensor:
        """Make the rows of a range ready, and return them."""
        if self.sliced:
            return self.packed.flatten(0, 1)[:, start:stop]
        packed = shaped(self.packed, (*self.packed.shape[:2], stop - start, self.packed.shape[3]))
        self.call.emit(packed.copy_, self.source[:, :, start:stop])
        return packed.view(self.pairs, -1, packed.shape[3])


class Documents:
    """Hides the keys of other documents, for positions int64 [B, T] that count from 0 anew in every document.

    A block of at most so many query rows at a time, so that no mask of all of them exists.
    """

    def __init__(self, call: Call, positions: Tensor, rows: int) -> None:
        self.call, self.positions, (batch, time) = call, positions, positions.shape
        self.starts = call.scratch((batch, time), torch.int64)
        self.hidden = call.scratch((batch, rows, time), torch.bool)

    def find(self) -> None:
        """Find where documents start, once, before the first block."""
        self.call.begin()
        numbers = torch.arange(self.positions.shape[1], device=self.positions.device)
        self.call.emit(torch.sub, numbers, self.positions, out=self.starts)

    def hide(self, scores: Tensor, block: Block, value: float = -math.inf) -> None:
        """scores [B, 1 or H, rows, keys of a block] <- value where query and key are not of one document."""
        (start, stop), keys = (block.start, block.stop), block.keys
        hidden = shaped(self.hidden, (self.starts.shape[0], 1, stop - start, len(keys)))
        rows, columns = self.starts[:, None, start:stop, None], self.starts[:, None, None, keys.start : keys.stop]
        self.call.emit(torch.ne, rows, columns, out=hidden)
        self.call.emit(scores.masked_fill_, hidden, value)


class _Explicit:
    """Base of forward and backward, with all operands packed."""

    def __init__(self, call: Call, sources: Sequence[Tensor], seed: Tensor | None, positions: Tensor | None) -> None:
        queries, keys, *_ = sources
        self.call, self.scale, mask = call, call.attributes["scale"], call.attributes["mask"]
        (self.batch, self.heads, self.time, _), bf16 = queries.shape, queries.dtype is torch.bfloat16
        pairs = self.batch * keys.shape[1]  # sequences of keys: heads of queries may share them
        rows = _query_rows(call.context, self.batch * self.heads, self.time, bf16)
        self.blocks = Block.all(mask, self.time, rows, bf16 and call.context.on_cpu)
        # Of the scores of a block.
        self.shape = self.batch * self.heads, rows, max(len(block.keys) for block in self.blocks)
        self.dropout: Dropout | None = None
        if seed is not None and call.attributes.get("p"):
            self.dropout = Dropout(call, seed, math.prod(self.shape), queries.dtype, (rows, self.time))
        self.bias = ScoreBias(call, self.heads, rows, self.time, queries)
        self.documents = None if positions is None else Documents(call, positions, rows)
        self.operands = [_Operand(call, source, pairs) for source in sources]

    def begin(self) -> None:
        """Emit what comes before the first block."""
        if self.documents:
            self.documents.find()
        for operand in self.operands:
            operand.pack()

    def rows_of(self, block: Block) -> list[Tensor]:
        """Make the rows of every operand that a block needs ready: of queries and what goes with them, or of keys."""
        queries, keys = (block.start, block.stop), (block.keys.start, block.keys.stop)
        ranges = (queries, keys, keys, queries)
        return [operand.rows(*each) for operand, each in zip(self.operands, ranges, strict=False)]

    def score(self, block: Block, q: Tensor, k: Tensor, scores: Tensor) -> None:
        """scores <- bias + scale q k^T."""
        scaled_product(self.call, q, k.mT, self.scale, scores)
        by_heads = self.by_heads(scores)
        self.bias.add(by_heads, block)
        if self.documents:
            self.documents.hide(by_heads, block)

    def by_heads(self, x: Tensor) -> Tensor:
        """[B*K, rows, n] as [B, H, rows of a head, n]."""
        return x.view(self.batch, self.heads, -1, x.shape[2])

    def drop(self, x: Tensor, y: Tensor, block: Block) -> None:
        """y <- x with dropout; nothing without. What is dropped does not depend on the blocks."""
        if self.dropout is not None:
            x, y = (self.by_heads(part).flatten(0, 1) for part in (x, y))
            self.dropout.mask_rows(x, y, Rows(block.start, block.keys.start, self.time))


def _query_rows(context: Context, sequences: int, time: int, bf16: bool) -> int:
    """Few rows skip more of what the mask hides, many make larger products. Even, so that no pair is cut, or all."""
    if context.query_rows:
        rows = context.query_rows
    elif context.on_cpu:
        short, long = (64, 128) if bf16 else (32, 64)
        rows = short if time < 512 else long
    else:
        least, most = _GPU_ROWS
        rows = min(max(_GPU_SCORES // (sequences * time), least), max(least, min(most, time // 2)))
    return min(time, rows + rows % 2)


def forward(call: Call) -> None:
    """The row of attention: (q, k?, v?, no bias, seed?, positions?) -> y, log_sum_exp."""
    shared = _Explicit(call, by_heads(call.ins[:3], call.attributes), *call.ins[4:6])
    y, log_sum_exp = heads_view(call.outs[0], 1, shared.heads)[0], call.outs[1].flatten(0, 1)
    results, all_scores = call.scratch(y.shape, y.dtype), call.scratch(shared.shape, y.dtype)
    diagonal = call.scratch((math.prod(shared.shape[:2]),), log_sum_exp.dtype)
    shared.begin()
    for block in shared.blocks:
        start, stop = block.start, block.stop
        q, k, v = shared.rows_of(block)
        scores = shaped(all_scores, (*q.shape[:2], len(block.keys)))
        result = shaped(results, (*y.shape[:2], stop - start, y.shape[3]))
        own = shared.by_heads(scores).flatten(0, 1).diagonal(start - block.keys.start, 1, 2)
        picked, statistic = shaped(diagonal, own.shape), log_sum_exp[:, start:stop]
        shared.score(block, q, k, scores)
        call.emit(statistic.copy_, own)
        call.emit(softmax_into(scores, scores))
        _log_sum_exp(call, own, picked, statistic)
        shared.drop(scores, scores, block)
        call.emit(torch.bmm, scores, v, out=result.view(*q.shape[:2], -1))
        call.emit(y[:, :, start:stop].copy_, result)


def _log_sum_exp(call: Call, own: Tensor, picked: Tensor, statistic: Tensor) -> None:
    """statistic <- log sum exp of a row, which is any score of it less the log of that score's probability.

    The score of a row's own time step is at hand. A probability that underflows is taken as the smallest normal one;
    backward on this way doesn't read the statistic.
    """
    call.emit(picked.copy_, own)
    call.emit(torch.clamp_min, picked, torch.finfo(picked.dtype).tiny, out=picked)
    call.emit(torch.log, picked, out=picked)
    call.emit(torch.sub, statistic, picked, out=statistic)


def backward(call: Call) -> None:
    """The row of attention_grad: (dy, q, k?, v?, y, log_sum_exp, no bias, seed?, positions?) -> dq, dk?, dv?."""
    parts, heads = by_heads(call.ins[1:4], call.attributes), call.attributes["heads"]
    shared = _Explicit(call, [*parts, heads_view(call.ins[0], 1, heads)[0]], *call.ins[7:9])
    dq, dk, dv = (call.scratch(part.shape, part.dtype) for part in parts)
    all_p, all_dp, *dropped_ones = (call.scratch(shared.shape, dq.dtype) for _ in range(3 if shared.dropout else 2))
    shared.begin()
    targets = by_heads(call.outs, call.attributes)
    whole = len(shared.blocks[-1].keys) == shared.time  # the last block writes all of dk and dv, the others add
    if not whole:
        call.emit(dk.zero_)
        call.emit(dv.zero_)
    for block in reversed(shared.blocks):
        start, stop, keys = block.start, block.stop, slice(block.keys.start, block.keys.stop)
        q, k, v, dy_rows = shared.rows_of(block)
        shape = (*q.shape[:2], len(block.keys))
        p, dp, dropped = (shaped(each, shape) for each in (all_p, all_dp, *dropped_ones, all_p)[:3])
        dq_rows = shaped(dq, (*dq.shape[:2], stop - start, dq.shape[3]))
        dk_rows, dv_rows = (each.flatten(0, 1)[:, keys] for each in (dk, dv))
        beta = 0 if whole and block is shared.blocks[-1] else 1
        shared.score(block, q, k, p)
        call.emit(softmax_into(p, p))
        shared.drop(p, dropped, block)
        call.emit(torch.baddbmm, dv_rows, dropped.mT, dy_rows, beta=beta, out=dv_rows)
        call.emit(torch.bmm, dy_rows, v.mT, out=dp)
        shared.drop(dp, dp, block)
        call.emit(aten._softmax_backward_data.out, dp, p, -1, p.dtype, grad_input=dp)
        scaled_product(call, dp, k, shared.scale, dq_rows.view(q.shape))
        call.emit(torch.baddbmm, dk_rows, dp.mT, q, beta=beta, alpha=shared.scale, out=dk_rows)
        call.emit(targets[0][:, :, start:stop].copy_, dq_rows)
    call.emit(targets[1].copy_, dk)
    call.emit(targets[2].copy_, dv)


def scaled_product(call: Call, a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """out <- scale a b."""
    call.emit(torch.baddbmm, out, a, b, beta=0, alpha=scale, out=out)
