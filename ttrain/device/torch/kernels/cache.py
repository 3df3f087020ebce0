"""Rows that write caches and attend over them. On the CPU no key is read that no query sees."""

from __future__ import annotations

from functools import partial

import torch

from ttrain.core.attention_mask import EVERY_KEY, HIDDEN, AttentionMask, alibi_slopes
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Delivery
from ttrain.device.torch.kernels.common import Call, Tensor, row, shaped
from ttrain.device.torch.kernels.explicit import softmax_into


@row("cache_write", delivery=Delivery.INPLACE)
def _cache_write(call: Call) -> None:
    cache, rows, positions = call.ins
    call.emit(cache.index_copy_, 2, positions, rows)


class _Bias:
    """The terms of op cache_bias, one after the other, on [.., N, C] or its first columns.

    `work` holds the hidden keys and, where there are slopes, distances as numbers and as integers, each [N, C].
    """

    def __init__(
        self, call: Call, positions: Tensor, visible: Tensor, context: int, heads: int, like: Tensor, first: int
    ) -> None:
        self.mask: AttentionMask = call.attributes.get("mask", EVERY_KEY)
        self.work = call.work[first:]
        self.keys = torch.arange(context, device=like.device)
        self.places, self.limits = positions.view(-1, 1), visible.view(-1, 1)
        slopes = torch.from_numpy(alibi_slopes(heads)).to(device=like.device, dtype=like.dtype)
        self.slopes = slopes.view(-1, 1, 1)
        self.far = self.keys + (self.mask.window or 0)  # hidden from a query at this place or later

    @staticmethod
    def workspace(rows: int, context: int, dtype: DType, call: Call) -> list[TensorSpec]:
        biased = call.attributes.get("mask", EVERY_KEY).biased
        return [TensorSpec((rows, context), each) for each in (DType.BOOL, dtype, DType.INT64)[: 3 if biased else 1]]

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


def _bias_workspace(call: Call) -> list[TensorSpec]:
    rows, keys = call.outs[0].shape[2:]
    return _Bias.workspace(rows, keys, call.outs[0].dtype, call)


@row("cache_bias", _bias_workspace)
def _cache_bias(call: Call) -> None:
    (positions, visible), y = call.ins, call.outs[0]
    bias = _Bias(call, positions, visible, call.attributes["context"], call.attributes["heads"], y, 0)
    call.emit(lambda: bias.add(y.zero_()))


def _cached_attention_workspace(call: Call) -> list[TensorSpec]:
    q, keys = call.ins[:2]
    scores = q.with_shape(q.shape[0] * q.shape[1] * q.shape[2], keys.shape[2])
    return [scores, *_Bias.workspace(q.shape[2], keys.shape[2], q.dtype, call)]


@row("cached_attention", _cached_attention_workspace)
def _cached_attention(call: Call) -> None:
    q, keys, values, positions, visible = call.ins
    all_scores, scale = call.work[0], call.attributes["scale"]
    batch, heads, rows, _ = q.shape
    bias = _Bias(call, positions, visible, keys.shape[2], heads, all_scores, 1)
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
