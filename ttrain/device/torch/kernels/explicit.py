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
from ttrain.device.base import Kernel, Launch, chain
from ttrain.device.torch.kernels.common import Attributes, Context, Given, Specs, Tensor, Tensors, copying, shaped
from ttrain.device.torch.kernels.layout import heads_view
from ttrain.device.torch.kernels.random import Rows, mask_workspace, masking_rows

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

    def adding(self, scores: Tensor, block: Block) -> list[Launch]:
        """scores [..., H or 1, rows, keys of the block] <- scores + bias."""
        launches = self._preferring(scores, block) if self.mask.biased else []
        seen = self.mask.keys(block.start, block.stop, self.time)
        for outside in (block.columns(0, seen.start), block.columns(seen.stop, self.time)):
            launches += [partial(scores[..., outside].fill_, -math.inf)] if outside.stop > outside.start else []
        for edge in self.edges:
            first = block.start + edge  # of as many keys as there are rows, among which some rows have hidden ones
            columns = block.columns(first, first + self.rows + 1)
            width, begin = columns.stop - columns.start, block.keys.start + columns.start - first
            hidden = _hidden(self.mask, edge, self.rows, scores.device)[: block.stop - block.start]
            hidden = hidden[:, begin : begin + width] if width else hidden[:, :0]
            if hidden.any():
                launches.append(partial(scores[..., columns].masked_fill_, hidden, -math.inf))
        return launches

    def _preferring(self, scores: Tensor, block: Block) -> list[Launch]:
        future = self.mask.position_bias == "future"
        columns = block.columns(block.start if future else 0, self.time)
        keys = block.keys[columns]
        whole, distance = (shaped(part, (block.stop - block.start, len(keys))) for part in self.work)
        queries = self.places[block.start : block.stop, None]
        return [
            partial(torch.sub, self.places[keys.start : keys.stop], queries, out=whole),
            partial(whole.clamp_, min=0) if future else whole.abs_,
            copying(distance, whole),
            partial(torch.addcmul, scores[..., columns], self.slopes, distance, value=-1, out=scores[..., columns]),
        ]


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

    def packing(self) -> list[Launch]:
        """Once, before the first range."""
        return [copying(self.scratch, self.source)] if self.sliced else []

    def rows(self, start: int, stop: int) -> tuple[list[Launch], Tensor]:
        """Launches that make the rows ready, and the rows."""
        if self.sliced:
            return [], self.scratch.flatten(0, 1)[:, start:stop]
        shape = (*self.scratch.shape[:2], stop - start, self.scratch.shape[3])
        packed = shaped(self.scratch, shape)
        return [copying(packed, self.source[:, :, start:stop])], packed.view(self.pairs, -1, shape[3])


class Documents:
    """Hides the keys of other documents, for positions int64 [B, T] that count from 0 anew in every document.

    A block of query rows at a time, so that no mask of all of them exists. `work` has what `workspace` asks for.
    """

    def __init__(self, positions: Tensor, work: Sequence[Tensor]) -> None:
        self.positions, (self.starts, self.hidden) = positions, work
        self.numbers = torch.arange(positions.shape[1], device=positions.device)

    def starting(self) -> list[Launch]:
        """Once, before the first block."""
        return [partial(torch.sub, self.numbers, self.positions, out=self.starts)]

    def hiding(self, scores: Tensor, block: Block, value: float = -math.inf) -> list[Launch]:
        """scores [B, 1 or H, rows, keys of a block] <- value where query and key are not of one document."""
        (start, stop), keys = (block.start, block.stop), block.keys
        hidden = shaped(self.hidden, (self.starts.shape[0], 1, stop - start, len(keys)))
        rows, columns = self.starts[:, None, start:stop, None], self.starts[:, None, None, keys.start : keys.stop]
        return [partial(torch.ne, rows, columns, out=hidden), partial(scores.masked_fill_, hidden, value)]

    @staticmethod
    def workspace(positions: TensorSpec, rows: int) -> list[TensorSpec]:
        """Return specs for blocks of so many rows."""
        batch, time = positions.shape
        return [positions, TensorSpec((batch, rows, time), DType.BOOL)]


class _Explicit:
    """Base of forward and backward. `work` has what `workspace` asks for, and behind it what the caller wants."""

    def __init__(
        self,
        context: Context,
        parts: Sequence[Tensor],
        seed: Tensor | None,
        positions: Tensor | None,
        attributes: Attributes,
        work: Sequence[Tensor],
    ) -> None:
        self.context, self.seed, self.parts = context, seed, parts
        self.p, self.stream = attributes.get("p", 0.0), attributes.get("stream", 0)
        (self.batch, self.heads, self.time, _), dtype = parts[0].shape, parts[0].dtype
        self.pairs = self.batch * parts[1].shape[1]  # sequences of keys: heads of queries may share them
        self.scale, mask = attributes["scale"], attributes["mask"]
        rows = _query_rows(context, self.batch * self.heads, self.time, dtype is torch.bfloat16)
        self.blocks = Block.all(mask, self.time, rows, dtype is torch.bfloat16 and context.on_cpu)
        masks, biases, documents = 5 * (self.p > 0), 2 * mask.biased, 2 * (positions is not None)
        rest = list(work)
        self.masks, rest = rest[:masks], rest[masks:]
        self.bias, rest = ScoreBias(mask, self.heads, rows, self.time, parts[0], rest[:biases]), rest[biases:]
        self.documents = None if positions is None else Documents(positions, rest[:documents])
        self.work = rest[documents:]

    @staticmethod
    def workspace(
        context: Context, queries: TensorSpec, positions: TensorSpec | None, attributes: Attributes
    ) -> tuple[TensorSpec, list[TensorSpec]]:
        """Spec of a block's scores, and of what `work` begins with."""
        (batch, heads, time, _), dtype, mask = queries.shape, queries.dtype, attributes["mask"]
        rows = _query_rows(context, batch * heads, time, dtype is DType.BF16)
        scores, found = queries.with_shape(batch * heads, rows, time), list[TensorSpec]()
        if attributes.get("p", 0.0):
            found += [*mask_workspace(context, scores.size, dtype, rows * time), TensorSpec((time,), DType.INT32)]
        found += ScoreBias.workspace(mask, rows, time, dtype)
        return scores, found + ([] if positions is None else Documents.workspace(positions, rows))

    def probabilities(self, block: Block, q: Tensor, k: Tensor, scores: Tensor) -> list[Launch]:
        """scores <- bias + scale q k^T: all launches but the last; then their softmax in place."""
        by_heads = self.by_heads(scores)
        hiding = self.documents.hiding(by_heads, block) if self.documents else []
        product = scaled_product(q, k.mT, self.scale, scores)
        return [product, *self.bias.adding(by_heads, block), *hiding, softmax_into(scores, scores)]

    def by_heads(self, x: Tensor) -> Tensor:
        """[B*K, rows, n] as [B, H, rows of a head, n]."""
        return x.view(self.batch, self.heads, -1, x.shape[2])

    def starting(self) -> list[Launch]:
        return self.documents.starting() if self.documents else []

    def drop(self, x: Tensor, y: Tensor, block: Block) -> list[Launch]:
        """y <- x with dropout; nothing without. What is dropped does not depend on the blocks."""
        if not self.p:
            return []
        assert self.seed is not None
        at = Rows(block.start, block.keys.start, self.time)
        x, y = (self.by_heads(part).flatten(0, 1) for part in (x, y))
        return [masking_rows(self.context, x, y, at, self.seed, self.p, self.stream, self.masks)]


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


def explicit_forward(context: Context) -> Kernel:
    """The row of attention: (q, k?, v?, no bias, seed?, positions?) -> y, log_sum_exp."""

    def bind(ins: Given, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
        parts = by_heads(ins[:3], attributes)
        shared = _Explicit(context, parts, ins[4], ins[5], attributes, work)
        *scratch, results, all_scores, diagonal = shared.work
        operands = [_Operand(part, packed, shared.pairs) for part, packed in zip(parts, scratch, strict=True)]
        y, log_sum_exp = heads_view(outs[0], 1, shared.heads)[0], outs[1].flatten(0, 1)
        launches = [*shared.starting(), *(launch for operand in operands for launch in operand.packing())]
        for block in shared.blocks:
            start, stop, keys = block.start, block.stop, (block.keys.start, block.keys.stop)
            (pack_q, q), (pack_k, k), (pack_v, v) = (
                operand.rows(*rows) for operand, rows in zip(operands, ((start, stop), keys, keys), strict=True)
            )
            scores = shaped(all_scores, (*q.shape[:2], len(block.keys)))
            result = shaped(results, (*y.shape[:2], stop - start, y.shape[3]))
            *product, softmax = shared.probabilities(block, q, k, scores)
            own = shared.by_heads(scores).flatten(0, 1).diagonal(start - block.keys.start, 1, 2)
            picked, statistic = shaped(diagonal, own.shape), log_sum_exp[:, start:stop]
            launches += [*pack_q, *pack_k, *pack_v, *product, copying(statistic, own), softmax]
            launches += _log_sum_exp(own, picked, statistic)
            launches += [
                *shared.drop(scores, scores, block),
                partial(torch.bmm, scores, v, out=result.view(*q.shape[:2], -1)),
                copying(y[:, :, start:stop], result),
            ]
        return chain(*launches)

    def workspace(ins: Given, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        queries, keys, values = specs_by_heads(ins[:3], attributes)
        results = queries.with_shape(*queries.shape[:3], values.shape[3])
        scores, first = _Explicit.workspace(context, queries, ins[5], attributes)
        diagonal = scores.with_shape(scores.shape[0] * scores.shape[1]).with_dtype(scores.dtype.accumulation)
        return [*first, queries, keys, values, results, scores, diagonal]

    return Kernel(bind, workspace=workspace)


def _log_sum_exp(own: Tensor, picked: Tensor, statistic: Tensor) -> list[Launch]:
    """statistic <- log sum exp of a row, which is any score of it less the log of that score's probability.

    The score of a row's own time step is at hand. A probability that underflows is taken as the smallest normal one;
    backward on this way doesn't read the statistic.
    """
    return [
        copying(picked, own),
        partial(torch.clamp_min, picked, torch.finfo(picked.dtype).tiny, out=picked),
        partial(torch.log, picked, out=picked),
        partial(torch.sub, statistic, picked, out=statistic),
    ]


def explicit_backward(context: Context) -> Kernel:
    """The row of attention_grad: (dy, q, k?, v?, y, log_sum_exp, no bias, seed?, positions?) -> dq, dk?, dv?."""

    def bind(ins: Given, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
        parts = by_heads(ins[1:4], attributes)
        shared = _Explicit(context, parts, ins[7], ins[8], attributes, work)
        sources = (*parts, heads_view(ins[0], 1, shared.heads)[0])
        *scratch, dq, dk, dv, all_p, all_dp, all_dropped = [*shared.work, *shared.work[-2:-1] * (not shared.p)]
        operands = [_Operand(source, packed, shared.pairs) for source, packed in zip(sources, scratch, strict=True)]
        targets = by_heads(outs, attributes)
        launches = [*shared.starting(), *(launch for operand in operands for launch in operand.packing())]
        whole = len(shared.blocks[-1].keys) == shared.time  # the last block writes all of dk and dv, the others add
        launches += [] if whole else [dk.zero_, dv.zero_]
        for block in reversed(shared.blocks):
            start, stop, keys = block.start, block.stop, (block.keys.start, block.keys.stop)
            (pack_q, q), (pack_k, k), (pack_v, v), (pack_dy, dy_rows) = (
                operand.rows(*rows)
                for operand, rows in zip(operands, ((start, stop), keys, keys, (start, stop)), strict=True)
            )
            shape = (*q.shape[:2], len(block.keys))
            p, dp, dropped = (shaped(each, shape) for each in (all_p, all_dp, all_dropped))
            dq_rows = shaped(dq, (*dq.shape[:2], stop - start, dq.shape[3]))
            dk_rows, dv_rows = (each.flatten(0, 1)[:, slice(*keys)] for each in (dk, dv))
            beta = 0 if whole and block is shared.blocks[-1] else 1
            launches += [
                *(*pack_q, *pack_k, *pack_v, *pack_dy),
                *shared.probabilities(block, q, k, p),
                *shared.drop(p, dropped, block),
                partial(torch.baddbmm, dv_rows, dropped.mT, dy_rows, beta=beta, out=dv_rows),
                partial(torch.bmm, dy_rows, v.mT, out=dp),
                *shared.drop(dp, dp, block),
                partial(aten._softmax_backward_data.out, dp, p, -1, p.dtype, grad_input=dp),
                scaled_product(dp, k, shared.scale, dq_rows.view(q.shape)),
                partial(torch.baddbmm, dk_rows, dp.mT, q, beta=beta, alpha=shared.scale, out=dk_rows),
                copying(targets[0][:, :, start:stop], dq_rows),
            ]
        return chain(*launches, copying(targets[1], dk), copying(targets[2], dv))

    def workspace(ins: Given, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        queries, keys, values = specs_by_heads(ins[1:4], attributes)
        gradients = queries.with_shape(*queries.shape[:3], values.shape[3])
        scores, first = _Explicit.workspace(context, queries, ins[8], attributes)
        blocks = [scores] * (3 if attributes.get("p", 0.0) else 2)
        return [*first, queries, keys, values, gradients, queries, keys, values, *blocks]

    return Kernel(bind, workspace=workspace)


def scaled_product(a: Tensor, b: Tensor, scale: float, out: Tensor) -> Launch:
    """out <- scale a b."""
    return partial(torch.baddbmm, out, a, b, beta=0, alpha=scale, out=out)
