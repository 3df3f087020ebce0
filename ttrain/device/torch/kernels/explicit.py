"""Attention that forms its probabilities: batched products over blocks of query rows, each with the keys it can see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from ttrain.core.attention_mask import CAUSAL, FULL, AttentionMask
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Kernel, Launch, chain
from ttrain.device.torch.kernels.common import Attributes, Context, Given, Specs, Tensor, Tensors, copying
from ttrain.device.torch.kernels.layout import heads_view
from ttrain.device.torch.kernels.random import mask_workspace, masking

aten = torch.ops.aten


def _heads_of(attributes: Attributes) -> tuple[int, int, int]:
    """Of queries, keys and values."""
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
    """The same of specs, each contiguous."""
    given = [x for x in specs if x is not None]
    parts, given = (3, given * 3) if len(given) == 1 else (1, given)
    pairs = zip(given, _heads_of(attributes), strict=True)
    return [x.with_shape(x.shape[0], heads, x.shape[1], x.shape[2] // (parts * heads)) for x, heads in pairs]


_DOCUMENT_ROWS = 512  # of queries at a time on a GPU, where no blockwise kernel knows documents


@lru_cache(maxsize=4)  # of long sequences and many heads they are large
def bias_tensor(mask: AttentionMask, heads: int, time: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[heads or 1, T, T]: what is added to scaled scores, -inf where a key is hidden."""
    return torch.from_numpy(mask.score_bias(heads, time, -math.inf)).to(device, dtype)


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
        packed = _shaped(self.scratch, shape)
        return [copying(packed, self.source[:, :, start:stop])], packed.view(self.pairs, -1, shape[3])


def _shaped(scratch: Tensor, shape: Sequence[int]) -> Tensor:
    """The first elements of a scratch buffer under another shape."""
    return scratch.view(-1)[: math.prod(shape)].view(shape)


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

    def hiding(self, scores: Tensor, start: int, stop: int, keys: int, value: float = -math.inf) -> list[Launch]:
        """scores [B, 1 or H, stop - start, keys] <- value where query and key are not of one document."""
        hidden = _shaped(self.hidden, (self.starts.shape[0], 1, stop - start, keys))
        rows, columns = self.starts[:, None, start:stop, None], self.starts[:, None, None, :keys]
        return [partial(torch.ne, rows, columns, out=hidden), partial(scores.masked_fill_, hidden, value)]

    @staticmethod
    def workspace(positions: TensorSpec, rows: int) -> list[TensorSpec]:
        """For blocks of so many rows."""
        batch, time = positions.shape
        return [positions, TensorSpec((batch, rows, time), DType.BOOL)]


@dataclass(frozen=True)
class _Block:
    """Query rows start to stop, and how many keys they see."""

    start: int
    stop: int
    keys: int


class _Explicit:
    """What forward and backward share."""

    def __init__(
        self,
        context: Context,
        parts: Sequence[Tensor],
        seed: Tensor | None,
        documents: Documents | None,
        attributes: Attributes,
    ) -> None:
        self.context, self.seed, self.parts, self.documents = context, seed, parts, documents
        self.p, self.stream = attributes.get("p", 0.0), attributes.get("stream", 0)
        (self.batch, self.heads, self.time, _), dtype = parts[0].shape, parts[0].dtype
        self.pairs = self.batch * parts[1].shape[1]  # sequences of keys: heads of queries may share them
        self.scale, mask = attributes["scale"], attributes["mask"]
        self.bias = bias_tensor(mask, self.heads, self.time, dtype, parts[0].device)
        step = _query_rows(context, self.time, dtype is torch.bfloat16, self.p, documents is not None)
        starts = range(0, self.time, step)
        stops = [min(start + step, self.time) for start in starts]
        self.blocks = [
            _Block(start, stop, _keys_up_to(mask, stop, self.time)) for start, stop in zip(starts, stops, strict=True)
        ]

    def probabilities(self, block: _Block, q: Tensor, k: Tensor, scores: Tensor) -> list[Launch]:
        """scores <- bias + scale q k^T: all launches but the last; then their softmax in place."""
        bias = self.bias[:, block.start : block.stop, : block.keys]
        softmax, by_heads = softmax_into(scores, scores), self.by_heads(scores)
        hiding = self.documents.hiding(by_heads, block.start, block.stop, block.keys) if self.documents else []
        if self.pairs == self.batch * self.heads and (bias.shape[0] == 1 or self.batch == 1):
            product: list[Launch] = [partial(torch.baddbmm, bias, q, k.mT, beta=1, alpha=self.scale, out=scores)]
        else:
            product = [scaled_product(q, k.mT, self.scale, scores), partial(torch.add, by_heads, bias, out=by_heads)]
        return [*product, *hiding, softmax]

    def by_heads(self, x: Tensor) -> Tensor:
        """[B*K, rows, n] as [B, H, rows of a head, n]."""
        return x.view(self.batch, self.heads, -1, x.shape[2])

    def starting(self) -> list[Launch]:
        return self.documents.starting() if self.documents else []

    def drop(self, x: Tensor, y: Tensor, work: Sequence[Tensor]) -> list[Launch]:
        """y <- x with dropout; nothing without. Only where one block holds all rows, whose index the mask hashes."""
        if not self.p:
            return []
        assert self.seed is not None
        return [masking(self.context, x, y, self.seed, self.p, self.stream, work)]


def _keys_up_to(mask: AttentionMask, stop: int, time: int) -> int:
    """Keys from the first on among which are all that the queries before `stop` see."""
    if mask.name == FULL:
        return time
    return stop if mask.name == CAUSAL else min(stop + stop % 2, time)


def _query_rows(context: Context, time: int, bf16: bool, p: float, documents: bool) -> int:
    """Few rows skip more of what the mask hides, many make larger products. Dropout hashes indices of whole rows."""
    if p or not (context.on_cpu or context.query_rows):
        return min(time, _DOCUMENT_ROWS) if documents and not p else time
    short, long = (64, 128) if bf16 else (32, 64)
    return min(time, context.query_rows or (short if time < 512 else long))


def _scores_spec(
    context: Context, queries: TensorSpec, positions: TensorSpec | None, attributes: Attributes
) -> tuple[TensorSpec, list[TensorSpec]]:
    """Spec of one block's scores, and of what hides other documents."""
    batch, heads, time, _ = queries.shape
    rows = _query_rows(context, time, queries.dtype is DType.BF16, attributes.get("p", 0.0), positions is not None)
    return queries.with_shape(batch * heads, rows, time), Documents.workspace(positions, rows) if positions else []


def _documents(positions: Tensor | None, work: Sequence[Tensor]) -> tuple[Documents | None, Sequence[Tensor]]:
    """What hides other documents, and the workspace without what that takes, the end of it."""
    return (None, work) if positions is None else (Documents(positions, work[-2:]), work[:-2])


def explicit_forward(context: Context) -> Kernel:
    """The row of attention: (q, k?, v?, no bias, seed?, positions?) -> y, log_sum_exp."""

    def bind(ins: Given, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
        parts = by_heads(ins[:3], attributes)
        documents, work = _documents(ins[5], work)
        shared = _Explicit(context, parts, ins[4], documents, attributes)
        operands = [_Operand(part, scratch, shared.pairs) for part, scratch in zip(parts, work[:3], strict=True)]
        results, all_scores, diagonal, *mask_work = work[3:]
        y, log_sum_exp = heads_view(outs[0], 1, shared.heads)[0], outs[1].flatten(0, 1)
        launches = [*shared.starting(), *(launch for operand in operands for launch in operand.packing())]
        for block in shared.blocks:
            start, stop = block.start, block.stop
            (pack_q, q), (pack_k, k) = operands[0].rows(start, stop), operands[1].rows(0, block.keys)
            pack_v, v = operands[2].rows(0, block.keys)
            scores = _shaped(all_scores, (*q.shape[:2], block.keys))
            result = _shaped(results, (*y.shape[:2], stop - start, y.shape[3]))
            *product, softmax = shared.probabilities(block, q, k, scores)
            own = shared.by_heads(scores).flatten(0, 1).diagonal(start, 1, 2)
            picked, statistic = _shaped(diagonal, own.shape), log_sum_exp[:, start:stop]
            launches += [*pack_q, *pack_k, *pack_v, *product, copying(statistic, own), softmax]
            launches += _log_sum_exp(own, picked, statistic)
            launches += [
                *shared.drop(scores, scores, mask_work),
                partial(torch.bmm, scores, v, out=result.view(*q.shape[:2], -1)),
                copying(y[:, :, start:stop], result),
            ]
        return chain(*launches)

    def workspace(ins: Given, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        queries, keys, values = specs_by_heads(ins[:3], attributes)
        results = queries.with_shape(*queries.shape[:3], values.shape[3])
        scores, documents = _scores_spec(context, queries, ins[5], attributes)
        diagonal = scores.with_shape(scores.shape[0] * scores.shape[1]).with_dtype(scores.dtype.wide)
        masks = mask_workspace(context, scores.size, scores.dtype) if attributes.get("p", 0.0) else []
        return [queries, keys, values, results, scores, diagonal, *masks, *documents]

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
        documents, work = _documents(ins[8], work)
        shared = _Explicit(context, parts, ins[7], documents, attributes)
        sources = (*parts, heads_view(ins[0], 1, shared.heads)[0])
        operands = [_Operand(source, scratch, shared.pairs) for source, scratch in zip(sources, work[:4], strict=True)]
        dq, dk, dv, all_p, all_dp, *rest = work[4:]
        all_dropped, mask_work = (rest[0], rest[1:]) if rest else (all_p, [])
        targets = by_heads(outs, attributes)
        launches = [*shared.starting(), *(launch for operand in operands for launch in operand.packing())]
        for block in reversed(shared.blocks):  # the last block writes all of dk and dv, the others add
            start, stop, keys = block.start, block.stop, block.keys
            (pack_q, q), (pack_k, k) = operands[0].rows(start, stop), operands[1].rows(0, keys)
            (pack_v, v), (pack_dy, dy_rows) = operands[2].rows(0, keys), operands[3].rows(start, stop)
            shape = (*q.shape[:2], keys)
            p, dp, dropped = (_shaped(scratch, shape) for scratch in (all_p, all_dp, all_dropped))
            dq_rows = _shaped(dq, (*dq.shape[:2], stop - start, dq.shape[3]))
            dk_rows, dv_rows = dk.flatten(0, 1)[:, :keys], dv.flatten(0, 1)[:, :keys]
            beta = 0 if block is shared.blocks[-1] else 1
            launches += [
                *(*pack_q, *pack_k, *pack_v, *pack_dy),
                *shared.probabilities(block, q, k, p),
                *shared.drop(p, dropped, mask_work),
                partial(torch.baddbmm, dv_rows, dropped.mT, dy_rows, beta=beta, out=dv_rows),
                partial(torch.bmm, dy_rows, v.mT, out=dp),
                *shared.drop(dp, dp, mask_work),
                partial(aten._softmax_backward_data.out, dp, p, -1, p.dtype, grad_input=dp),
                scaled_product(dp, k, shared.scale, dq_rows.view(q.shape)),
                partial(torch.baddbmm, dk_rows, dp.mT, q, beta=beta, alpha=shared.scale, out=dk_rows),
                copying(targets[0][:, :, start:stop], dq_rows),
            ]
        return chain(*launches, copying(targets[1], dk), copying(targets[2], dv))

    def workspace(ins: Given, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        queries, keys, values = specs_by_heads(ins[1:4], attributes)
        gradients = queries.with_shape(*queries.shape[:3], values.shape[3])
        scores, documents = _scores_spec(context, queries, ins[8], attributes)
        masks = [scores, *mask_workspace(context, scores.size, scores.dtype)] if attributes.get("p", 0.0) else []
        return [queries, keys, values, gradients, queries, keys, values, scores, scores, *masks, *documents]

    return Kernel(bind, workspace=workspace)


def scaled_product(a: Tensor, b: Tensor, scale: float, out: Tensor) -> Launch:
    """out <- scale a b."""
    return partial(torch.baddbmm, out, a, b, beta=0, alpha=scale, out=out)
