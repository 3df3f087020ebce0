"""Attention that forms its probabilities: batched products over blocks of query rows, each with the keys it can see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch

from ttrain.core.attention_mask import FULL, AttentionMask, alibi_slopes
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Attributes, Launch
from ttrain.device.torch.kernels.common import Call, Context, Emitter, Tensor, shaped
from ttrain.device.torch.kernels.layout import heads_view
from ttrain.device.torch.kernels.random import Rows, dropout_of, mask_workspace

aten = torch.ops.aten


def _heads_of(attributes: Attributes) -> tuple[int, int, int]:
    """Return the numbers of heads of queries, keys and values."""
    heads: int = attributes["heads"]
    shared = attributes.get("kv_heads", heads)
    return heads, shared, shared


def by_heads(tensors: Sequence[Tensor | None], attributes: Attributes) -> list[Tensor]:
    """Queries, keys and values, or their gradients, as views [B, H, T, width]; one tensor is a packed projection."""
    given = [x for x in tensors if x is not None]
    if len(given) == 1:
        return list(heads_view(given[0], 3, attributes["heads"]))
    return [heads_view(x, 1, heads)[0] for x, heads in zip(given, _heads_of(attributes), strict=True)]


def specs_by_heads(specs: Sequence[TensorSpec | None], attributes: Attributes) -> list[TensorSpec]:
    """Return the specs of queries, keys and values by heads as in `by_heads`, each contiguous."""
    given = [x for x in specs if x is not None]
    parts, given = (3, given * 3) if len(given) == 1 else (1, given)
    pairs = zip(given, _heads_of(attributes), strict=True)
    return [x.with_shape(x.shape[0], heads, x.shape[1], x.shape[2] // (parts * heads)) for x, heads in pairs]


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
        """All queries in blocks of so many, which is an even number or all."""
        step = -(-min(time, (mask.window or time) + rows) // _SHAPES) if few_shapes else 1
        found = []
        for start in range(0, time, rows):
            stop = min(start + rows, time)
            seen = mask.keys(start, stop, time)
            keys = range(seen.start // step * step, min(-(-seen.stop // step) * step, time))
            found.append(cls(start, stop, seen if step <= rows else keys))
        return found

    def columns(self, first: int, last: int) -> slice:
        """Return the place of keys `first` up to `last` among those of the block; empty where there are none."""
        inside = range(max(first, self.keys.start), min(last, self.keys.stop))
        return slice(inside.start - self.keys.start, inside.start - self.keys.start + len(inside))


class ScoreBias:
    """Bias that a mask adds to scaled scores: -inf where a key is hidden, and the preference for near keys.

    It is made for a block of `rows` queries at a time: nothing has an element for every query and key. `work` has what
    `workspace` asks for.
    """

    def __init__(
        self, mask: AttentionMask, heads: int, rows: int, time: int, like: Tensor, work: Sequence[Tensor]
    ) -> None:
        self.mask, self.rows, self.time, self.work = mask, rows, time, work
        self.places = torch.arange(time if mask.biased else 0, dtype=torch.int32, device=like.device)
        self.slopes = torch.from_numpy(alibi_slopes(heads)).to(like.device, like.dtype)[:, None, None]
        near = mask.window or 0
        self.edges = [0] * (mask.name != FULL) + [1 - near, near][: 1 + (mask.name == FULL)] * (near > 0)

    @staticmethod
    def workspace(mask: AttentionMask, rows: int, time: int, dtype: DType) -> list[TensorSpec]:
        """Return specs for the distance of queries and keys, as integers and as the numbers that count."""
        return [TensorSpec((rows, time), each) for each in ((DType.INT32, dtype) if mask.biased else ())]

    def add(self, call: Emitter, scores: Tensor, block: Block) -> None:
        """scores [..., H or 1, rows, keys of the block] <- scores + bias."""
        if self.mask.biased:
            self._prefer(call, scores, block)
        seen = self.mask.keys(block.start, block.stop, self.time)
        for outside in (block.columns(0, seen.start), block.columns(seen.stop, self.time)):
            if outside.stop > outside.start:
                call.emit(scores[..., outside].fill_, -math.inf)
        for edge in self.edges:
            first = block.start + edge  # of as many keys as there are rows, among which some rows have hidden ones
            columns = block.columns(first, first + self.rows + 1)
            width, begin = columns.stop - columns.start, block.keys.start + columns.start - first
            hidden = _hidden(self.mask, edge, self.rows, scores.device)[: block.stop - block.start]
            hidden = hidden[:, begin : begin + width] if width else hidden[:, :0]
            if hidden.any():
                call.emit(scores[..., columns].masked_fill_, hidden, -math.inf)

    def _prefer(self, call: Emitter, scores: Tensor, block: Block) -> None:
        future = self.mask.position_bias == "future"
        columns = block.columns(block.start if future else 0, self.time)
        keys, part = block.keys[columns], scores[..., columns]
        whole, distance = (shaped(each, (block.stop - block.start, len(keys))) for each in self.work)
        call.emit(
            torch.sub, self.places[keys.start : keys.stop], self.places[block.start : block.stop, None], out=whole
        )
        if future:
            call.emit(whole.clamp_, min=0)
        else:
            call.emit(whole.abs_)
        call.emit(distance.copy_, whole)
        call.emit(torch.addcmul, part, self.slopes, distance, value=-1, out=part)


@lru_cache(maxsize=16)
def _hidden(mask: AttentionMask, edge: int, rows: int, device: torch.device) -> Tensor:
    """bool [rows, rows + 1]: the keys that are hidden of those which begin `edge` behind an even query, and so on."""
    query = np.arange(rows)[:, None] + 2 * (mask.window or 0)
    return torch.from_numpy(mask.hidden(query, query[0] + edge + np.arange(rows + 1))).to(device)


def softmax_into(x: Tensor, y: Tensor) -> Launch:
    """y <- softmax over the last axis of x; y may be x."""
    return partial(aten._softmax.out, x, -1, False, out=y)


class _Operand:
    """Queries, keys, values or output gradients as bmm takes them: [B*K, rows, D], for K heads of keys.

    The rows of queries whose heads share keys come one head after another. oneDNN copies an operand that isn't
    contiguous, into memory of its own, so in bf16 every range of rows is packed by itself, as is one of heads that
    share keys. Other products take slices of one packed tensor.
    """

    def __init__(self, source: Tensor, scratch: Tensor, pairs: int) -> None:
        self.source, self.scratch, self.pairs = source, scratch, pairs  # [B, H, T, D], strided and packed; B*K
        self.sliced = source.dtype is not torch.bfloat16 and pairs == source.shape[0] * source.shape[1]

    def pack(self, call: Emitter) -> None:
        """Once, before the first range."""
        if self.sliced:
            call.emit(self.scratch.copy_, self.source)

    def rows(self, call: Emitter, start: int, stop: int) -> Tensor:
        """Make the rows of a range ready, and return them."""
        if self.sliced:
            return self.scratch.flatten(0, 1)[:, start:stop]
        packed = shaped(self.scratch, (*self.scratch.shape[:2], stop - start, self.scratch.shape[3]))
        call.emit(packed.copy_, self.source[:, :, start:stop])
        return packed.view(self.pairs, -1, packed.shape[3])


class Documents:
    """Hides the keys of other documents, for positions int64 [B, T] that count from 0 anew in every document.

    A block of query rows at a time, so that no mask of all of them exists. `work` has what `workspace` asks for.
    """

    def __init__(self, call: Emitter, positions: Tensor, work: Sequence[Tensor]) -> None:
        self.starts, self.hidden = work
        numbers = torch.arange(positions.shape[1], device=positions.device)
        call.emit(torch.sub, numbers, positions, out=self.starts)

    def hide(self, call: Emitter, scores: Tensor, block: Block, value: float = -math.inf) -> None:
        """scores [B, 1 or H, rows, keys of a block] <- value where query and key are not of one document."""
        (start, stop), keys = (block.start, block.stop), block.keys
        hidden = shaped(self.hidden, (self.starts.shape[0], 1, stop - start, len(keys)))
        rows, columns = self.starts[:, None, start:stop, None], self.starts[:, None, None, keys.start : keys.stop]
        call.emit(torch.ne, rows, columns, out=hidden)
        call.emit(scores.masked_fill_, hidden, value)

    @staticmethod
    def workspace(positions: TensorSpec, rows: int) -> list[TensorSpec]:
        """Return specs for blocks of so many rows."""
        batch, time = positions.shape
        return [positions, TensorSpec((batch, rows, time), DType.BOOL)]


class _Explicit:
    """Base of forward and backward, with all operands packed. `rest` of the workspace is left to either."""

    def __init__(self, call: Call, sources: Sequence[Tensor], seed: Tensor | None, positions: Tensor | None) -> None:
        queries, keys, *_ = sources
        self.call, self.scale, mask = call, call.attributes["scale"], call.attributes["mask"]
        (self.batch, self.heads, self.time, _), bf16 = queries.shape, queries.dtype is torch.bfloat16
        pairs = self.batch * keys.shape[1]  # sequences of keys: heads of queries may share them
        rows = _query_rows(call.context, self.batch * self.heads, self.time, bf16)
        self.blocks = Block.all(mask, self.time, rows, bf16 and call.context.on_cpu)
        rest = list(call.work)

        def taken(count: int) -> list[Tensor]:
            return [rest.pop(0) for _ in range(count)]

        self.dropout = None if seed is None else dropout_of(call, seed, taken(5 * bool(call.attributes.get("p"))))
        self.bias = ScoreBias(mask, self.heads, rows, self.time, queries, taken(2 * mask.biased))
        self.documents = None if positions is None else Documents(call, positions, taken(2))
        self.operands = [_Operand(source, taken(1)[0], pairs) for source in sources]
        for operand in self.operands:
            operand.pack(call)
        self.rest = rest

    @staticmethod
    def workspace(call: Call, queries: TensorSpec, positions: TensorSpec | None) -> tuple[TensorSpec, list[TensorSpec]]:
        """Spec of a block's scores, and of what workspace begins with, up to the packed operands."""
        (batch, heads, time, _), dtype, mask = queries.shape, queries.dtype, call.attributes["mask"]
        rows = _query_rows(call.context, batch * heads, time, dtype is DType.BF16)
        scores, found = queries.with_shape(batch * heads, rows, time), list[TensorSpec]()
        if call.attributes.get("p", 0.0):
            found += [*mask_workspace(call.context, scores.size, dtype, rows * time), TensorSpec((time,), DType.INT32)]
        found += ScoreBias.workspace(mask, rows, time, dtype)
        return scores, found + ([] if positions is None else Documents.workspace(positions, rows))

    def rows_of(self, block: Block) -> list[Tensor]:
        """Make the rows of every operand that a block needs ready: of queries and what goes with them, or of keys."""
        queries, keys = (block.start, block.stop), (block.keys.start, block.keys.stop)
        ranges = (queries, keys, keys, queries)
        return [operand.rows(self.call, *each) for operand, each in zip(self.operands, ranges, strict=False)]

    def score(self, block: Block, q: Tensor, k: Tensor, scores: Tensor) -> None:
        """scores <- bias + scale q k^T."""
        scaled_product(self.call, q, k.mT, self.scale, scores)
        by_heads = self.by_heads(scores)
        self.bias.add(self.call, by_heads, block)
        if self.documents:
            self.documents.hide(self.call, by_heads, block)

    def by_heads(self, x: Tensor) -> Tensor:
        """[B*K, rows, n] as [B, H, rows of a head, n]."""
        return x.view(self.batch, self.heads, -1, x.shape[2])

    def drop(self, x: Tensor, y: Tensor, block: Block) -> None:
        """y <- x with dropout; nothing without. What is dropped does not depend on the blocks."""
        if self.dropout is not None and self.dropout.p:
            x, y = (self.by_heads(part).flatten(0, 1) for part in (x, y))
            self.dropout.mask_rows(self.call, x, y, Rows(block.start, block.keys.start, self.time))


def _query_rows(context: Context, sequences: int, time: int, bf16: bool) -> int:
    """Few rows skip more of what the mask hides, many make larger products. Even, so that no pair is cut, or all."""
    if context.query_rows:
        rows = context.query_rows
    elif context.on_cpu:
        short, long = (64, 128) if bf16 else (32, 64)
        rows = short if time < 512 else long
    else:
        least, most = _GPU_ROWS
        rows = min(max(_GPU_SCORES // (sequences * time), least), most)
    return min(time, rows + rows % 2)


def forward(call: Call) -> None:
    """The row of attention: (q, k?, v?, no bias, seed?, positions?) -> y, log_sum_exp."""
    shared = _Explicit(call, by_heads(call.ins[:3], call.attributes), *call.ins[4:6])
    results, all_scores, diagonal = shared.rest
    y, log_sum_exp = heads_view(call.outs[0], 1, shared.heads)[0], call.outs[1].flatten(0, 1)
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


def forward_workspace(call: Call) -> list[TensorSpec]:
    """Return specs of the scratch memory of attention, by blocks of rows."""
    queries, keys, values = specs_by_heads(call.ins[:3], call.attributes)
    results = queries.with_shape(*queries.shape[:3], values.shape[3])
    scores, first = _Explicit.workspace(call, queries, call.ins[5])
    diagonal = scores.with_shape(scores.shape[0] * scores.shape[1]).with_dtype(scores.dtype.accumulation)
    return [*first, queries, keys, values, results, scores, diagonal]


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
    dq, dk, dv, all_p, all_dp, *dropped_ones = shared.rest
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


def backward_workspace(call: Call) -> list[TensorSpec]:
    """Return specs of the scratch memory of attention's gradients, by blocks of rows."""
    queries, keys, values = specs_by_heads(call.ins[1:4], call.attributes)
    gradients = queries.with_shape(*queries.shape[:3], values.shape[3])
    scores, first = _Explicit.workspace(call, queries, call.ins[8])
    blocks = [scores] * (3 if call.attributes.get("p", 0.0) else 2)
    return [*first, queries, keys, values, gradients, queries, keys, values, *blocks]


def scaled_product(call: Emitter, a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """out <- scale a b."""
    call.emit(torch.baddbmm, out, a, b, beta=0, alpha=scale, out=out)
