"""Rows that write caches and attend over them. On the CPU no key is read that no query sees."""

from __future__ import annotations

from functools import partial

import torch

from ttrain.core.attention_mask import EVERY_KEY, HIDDEN, AttentionMask, alibi_slopes
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Delivery, Launch
from ttrain.device.torch.kernels.common import Attributes, Context, Specs, Tensor, Tensors, row, shaped
from ttrain.device.torch.kernels.explicit import softmax_into


@row("cache_write", delivery=Delivery.INPLACE)
def _cache_write(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    cache, rows, positions = ins
    return partial(cache.index_copy_, 2, positions, rows)


class _Bias:
    """The terms of op cache_bias, one after the other, on [.., N, C] or its first columns."""

    def __init__(
        self, positions: Tensor, visible: Tensor, context: int, heads: int, like: Tensor, attributes: Attributes
    ) -> None:
        self.keys = torch.arange(context, device=like.device)
        self.places, self.limits = positions.view(-1, 1), visible.view(-1, 1)
        self.mask: AttentionMask = attributes.get("mask", EVERY_KEY)
        window = self.mask.window
        self.far = None if window is None else self.keys + window  # hidden from a query at this place or later
        slopes = torch.from_numpy(alibi_slopes(heads)).to(device=like.device, dtype=like.dtype)
        self.slopes = slopes.view(-1, 1, 1) if self.mask.biased else None

    def add(self, scores: Tensor, distance: Tensor | None, whole: Tensor | None) -> None:
        """scores [B, H, N, c] += -slope * distance, where there are slopes; two buffers of [N, c] help."""
        if self.slopes is None or distance is None or whole is None:
            return
        torch.sub(self.keys[: scores.shape[-1]], self.places, out=whole)
        distance.copy_(whole)
        if self.mask.position_bias == "future":
            distance.clamp_(min=0)
        else:
            distance.abs_()
        torch.addcmul(scores, self.slopes, distance, value=-1, out=scores)

    def hide(self, scores: Tensor, hidden: Tensor) -> None:
        """Scores of keys that a query does not see become HIDDEN; a buffer bool [N, c] helps."""
        torch.ge(self.keys[: scores.shape[-1]], self.limits, out=hidden)
        scores.masked_fill_(hidden, HIDDEN)
        if self.far is not None:
            torch.le(self.far[: scores.shape[-1]], self.places, out=hidden)
            scores.masked_fill_(hidden, HIDDEN)


def _scratch(rows: int, context: int, dtype: DType, slopes: bool) -> list[TensorSpec]:
    """Return specs for the hidden keys and, where there are slopes, for the distance as a number and as an integer."""
    shape = (rows, context)
    distances = [TensorSpec(shape, dtype), TensorSpec(shape, DType.INT64)] if slopes else []
    return [TensorSpec(shape, DType.BOOL), *distances]


def _bias_workspace(context: Context, ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    rows, keys = outs[0].shape[2:]
    return _scratch(rows, keys, outs[0].dtype, attributes.get("mask", EVERY_KEY).biased)


@row("cache_bias", _bias_workspace)
def _cache_bias(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    bias = _Bias(ins[0], ins[1], attributes["context"], attributes["heads"], outs[0], attributes)
    distance, whole = work[1:] or (None, None)

    def launch() -> None:
        outs[0].zero_()
        bias.add(outs[0], distance, whole)
        bias.hide(outs[0], work[0])

    return launch


def _columns(scratch: Tensor | None, count: int) -> Tensor | None:
    """[N, count] out of a buffer [N, C], packed."""
    return None if scratch is None else shaped(scratch, (scratch.shape[0], count))


def _cached_attention_workspace(context: Context, ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    q, keys = ins[0], ins[1]
    scores = q.with_shape(q.shape[0] * q.shape[1] * q.shape[2], keys.shape[2])
    return [scores, *_scratch(q.shape[2], keys.shape[2], q.dtype, attributes.get("mask", EVERY_KEY).biased)]


@row("cached_attention", _cached_attention_workspace)
def _cached_attention(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    q, keys, values, positions, visible = ins
    batch, heads, rows, _ = q.shape
    bias = _Bias(positions, visible, keys.shape[2], heads, work[0], attributes)
    scale, pairs = attributes["scale"], batch * keys.shape[1]
    together = batch * heads // pairs * rows
    queries, y = q.view(pairs, together, -1), outs[0].view(pairs, together, -1)
    all_keys, all_values = keys.view(pairs, keys.shape[2], -1), values.view(pairs, values.shape[2], -1)

    def attend(seen: int) -> None:
        hidden, distance, whole = (_columns(part, seen) for part in (*work[1:], None, None)[:3])
        assert hidden is not None
        scores = shaped(work[0], (pairs, together, seen))
        torch.baddbmm(scores, queries, all_keys[:, :seen].mT, beta=0, alpha=scale, out=scores)
        by_head = scores.view(batch, heads, rows, seen)
        bias.add(by_head, distance, whole)
        bias.hide(by_head, hidden)
        softmax_into(scores, scores)()
        torch.bmm(scores, all_values[:, :seen], out=y)

    if not context.on_cpu:
        return partial(attend, keys.shape[2])
    return lambda: attend(max(visible.tolist()))
