"""Softmax, and attention in two ways behind one row.

explicit: batched products over probabilities [B*H, rows, keys] in workspace, a block of query rows at a time; bf16
    products run on the matrix units.
flash: aten's blockwise attention, which never forms the probabilities; causal and without position bias only.

The last rows write caches and attend over them. On the CPU no key is read that no query sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ttrain.core.attention_mask import EVERY_KEY, HIDDEN, AttentionMask, alibi_slopes
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Attributes, Delivery, GivenSpecs, Kernel, Specs
from ttrain.device.torch.kernels import explicit
from ttrain.device.torch.kernels.common import ROWS, Call, Context, Tensor, kernel, row, scalar_like, shaped
from ttrain.device.torch.kernels.explicit import Block, Documents, ScoreBias, by_heads, softmax_into, specs_by_heads
from ttrain.device.torch.kernels.layout import heads_view

aten = torch.ops.aten


_BF16 = (torch.bfloat16, DType.BF16)
_ROWS = 64  # of scores that a mask is added to at a time


def _softmax_workspace(call: Call) -> list[TensorSpec]:
    plain = call.attributes["scale"] == 1.0 and call.attributes["mask"].is_full
    y = call.outs[0]
    wide = [] if y.dtype.accumulation is y.dtype else [y.with_dtype(y.dtype.accumulation)]
    return [] if plain else [*_bias_workspace(call), *wide]


def _bias_workspace(call: Call) -> list[TensorSpec]:
    x = call.ins[0]
    return ScoreBias.workspace(call.attributes["mask"], _ROWS, x.shape[-1], x.dtype.accumulation)


@row("softmax", _softmax_workspace, overwrites=(0,))
def _softmax(call: Call) -> None:
    x, y = call.ins[0], call.outs[0]
    if call.attributes["scale"] == 1.0 and call.attributes["mask"].is_full:
        call.emit(softmax_into(x, y))
        return
    wide = y if x.dtype is not torch.bfloat16 else call.work[-1]
    call.emit(wide.copy_, x)
    _add_bias(call, wide)
    call.emit(softmax_into(wide, wide))
    if wide is not y:
        call.emit(y.copy_, wide)


def _log_sum_exp_workspace(call: Call) -> list[TensorSpec]:
    return [*_bias_workspace(call), call.ins[0].with_dtype(call.ins[0].dtype.accumulation)]


@row("log_sum_exp", _log_sum_exp_workspace)
def _log_sum_exp(call: Call) -> None:
    scores = call.work[-1]
    call.emit(scores.copy_, call.ins[0])
    _add_bias(call, scores)
    call.emit(torch.logsumexp, scores, -1, out=call.outs[0])


def _scale(call: Call, x: Tensor) -> None:
    if (factor := call.attributes["scale"]) != 1.0:
        call.emit(torch.mul, x, scalar_like(factor, x), out=x)


def _add_bias(call: Call, x: Tensor) -> None:
    """x <- scale x + the bias of the mask, for x [..., T, T]."""
    time, mask = x.shape[-1], call.attributes["mask"]
    _scale(call, x)
    if mask.is_full:
        return
    by_heads = x.view(-1, x.shape[-3] if mask.biased else 1, time, time)
    bias = ScoreBias(mask, by_heads.shape[1], _ROWS, time, x, call.work[: 2 * mask.biased])
    for start in range(0, time, _ROWS):
        block = Block(start, min(start + _ROWS, time), range(time))
        bias.add(call, by_heads[:, :, block.start : block.stop], block)


@row("document_bias", lambda call: Documents.workspace(call.ins[0], call.ins[0].shape[1]))
def _document_bias(call: Call) -> None:
    bias = call.outs[0]
    documents = Documents(call, call.ins[0], call.work)
    call.emit(bias.fill_, 0.0)
    documents.hide(call, bias, Block(0, bias.shape[2], range(bias.shape[2])), HIDDEN)


@row("softmax_grad", overwrites=(0, 1))
def _softmax_grad(call: Call) -> None:
    dy, y = call.ins
    call.emit(aten._softmax_backward_data.out, dy, y, -1, y.dtype, grad_input=call.outs[0])
    _scale(call, call.outs[0])


# Time steps up to which the explicit way was measured to be as fast on CPUs: bf16 products run on the matrix units, and
# beyond the probabilities take too much memory.
EXPLICIT_UP_TO = {DType.BF16: 4096}
OTHERS_UP_TO = 256


def explicit_is_chosen(context: Context, given: Sequence[TensorSpec | None], attributes: Attributes) -> bool:
    """Return whether attention forms its probabilities explicitly; forward and backward of one node agree.

    Flash attention knows no other mask than the causal one, no dropout, no keys of another width than values, and no
    heads that share keys.
    """
    q, _, v = specs_by_heads(given, attributes)
    if attributes.get("p", 0.0) or not attributes["mask"].is_causal or q != v:
        return True
    (_, _, time, width), limit = q.shape, context.explicit_up_to
    if not context.on_cpu and not (q.dtype is DType.BF16 and width % 8 == 0 and width <= 256):
        return True
    return time <= (EXPLICIT_UP_TO.get(q.dtype, OTHERS_UP_TO) if limit is None else limit)


def _flash_forward(call: Call) -> None:
    q, k, v = by_heads(call.ins[:3], call.attributes)
    y, log_sum_exp = heads_view(call.outs[0], 1, call.attributes["heads"])[0], call.outs[1]
    scale = call.attributes["scale"]
    if call.context.on_cpu:
        run = partial(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, True)
    else:
        run = partial(aten._scaled_dot_product_flash_attention.default, q, k, v, 0.0, True, False)

    def launch() -> None:
        results = run(scale=scale)
        y.copy_(results[0])
        log_sum_exp.copy_(results[1])

    call.emit(launch)


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
    targets = by_heads(call.outs, call.attributes)

    def launch() -> None:
        for target, result in zip(targets, run(), strict=True):
            target.copy_(result)

    call.emit(launch)


_WAYS = (
    (explicit.forward, explicit.forward_workspace, _flash_forward),
    (explicit.backward, explicit.backward_workspace, _flash_backward),
)


def _row(backward: bool, context: Context) -> Kernel:
    """A row that goes one of two ways, by the specs of queries, keys and values.

    The last inputs are a bias, a seed and positions. Neither way knows a bias: such attention runs as its body. The
    explicit way alone knows documents and heads that share keys.
    """
    bind, workspace, bind_flash = _WAYS[backward]
    formed, flash = kernel(context, bind, workspace), kernel(context, bind_flash)

    def chosen(ins: Sequence[Any], attributes: Attributes) -> Kernel:
        """`ins` are tensors or specs. Their dtype's being bf16 is all that the choice asks of it."""
        specs = [
            None if x is None else TensorSpec(tuple(x.shape), DType.BF16 if x.dtype in _BF16 else DType.FP32)
            for x in ins[backward : backward + 3]
        ]
        return formed if ins[-1] is not None or explicit_is_chosen(context, specs, attributes) else flash

    def outside(ins: GivenSpecs, outs: Specs, attributes: Attributes) -> int:
        """Bytes of the tensors that aten returns, before they are copied."""
        return sum(spec.nbytes for spec in outs) if chosen(ins, attributes) is flash else 0

    return Kernel(
        lambda ins, outs, attributes, work: chosen(ins, attributes).bind(ins, outs, attributes, work),
        workspace=lambda ins, outs, attributes: chosen(ins, attributes).workspace_specs(ins, outs, attributes),
        outside=outside,
        supports=lambda ins, attributes: ins[-3] is None,
    )


ROWS.update(attention=partial(_row, False), attention_grad=partial(_row, True))


@row("cache_write", delivery=Delivery.INPLACE)
def _cache_write(call: Call) -> None:
    cache, rows, positions = call.ins
    call.emit(cache.index_copy_, 2, positions, rows)


class _CacheBias:
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


def _cache_bias_workspace(call: Call) -> list[TensorSpec]:
    rows, keys = call.outs[0].shape[2:]
    return _CacheBias.workspace(rows, keys, call.outs[0].dtype, call)


@row("cache_bias", _cache_bias_workspace)
def _cache_bias(call: Call) -> None:
    (positions, visible), y = call.ins, call.outs[0]
    bias = _CacheBias(call, positions, visible, call.attributes["context"], call.attributes["heads"], y, 0)
    call.emit(lambda: bias.add(y.zero_()))


def _cached_attention_workspace(call: Call) -> list[TensorSpec]:
    q, keys = call.ins[:2]
    scores = q.with_shape(q.shape[0] * q.shape[1] * q.shape[2], keys.shape[2])
    return [scores, *_CacheBias.workspace(q.shape[2], keys.shape[2], q.dtype, call)]


@row("cached_attention", _cached_attention_workspace)
def _cached_attention(call: Call) -> None:
    q, keys, values, positions, visible = call.ins
    all_scores, scale = call.work[0], call.attributes["scale"]
    batch, heads, rows, _ = q.shape
    bias = _CacheBias(call, positions, visible, keys.shape[2], heads, all_scores, 1)
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
