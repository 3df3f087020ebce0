"""Softmax and its gradient, and caches of keys and values. Attention is made of products, softmax and head moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ttrain.core.attention_mask import HIDDEN, AttentionMask, alibi_slopes
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Delivery, Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, Tensor, is_bf16, row, wide
from ttrain.device.ttnn.kernels.layout import one_hot
from ttrain.device.ttnn.kernels.loss import log_sum, softmax_parts
from ttrain.device.ttnn.tensors.device_tensor import IntegerInput
from ttrain.device.ttnn.tensors.store import TILE, TileLayout, dtype_name


def _in_one_launch(spec: TensorSpec, mask: AttentionMask) -> bool:
    """True if ttnn has one launch for scale, mask and softmax: for causal scores in whole tiles."""
    return mask.is_causal and spec.rank == 4 and spec.shape[-1] % TILE == 0


def _mask_layout(spec: TensorSpec, mask: AttentionMask, whole: bool) -> TileLayout:
    """Return the layout of a mask's bias: [T, T] or [1, heads, T, T]; with `whole` [batch, 1, T, T]."""
    time = spec.shape[-1]
    lead = (spec.shape[0], 1) if whole else (1, spec.shape[-3]) if mask.biased else ()
    return TileLayout((*lead, time, time), dtype_name(spec.dtype))


def _mask_bytes(ins: Sequence[TensorSpec], outs: Sequence[TensorSpec], attributes: Attributes) -> int:
    """Return the bytes of the bias of the mask, which is made once and lies outside the plan."""
    mask = attributes["mask"]
    return 0 if mask.is_full else _mask_layout(ins[0], mask, _in_one_launch(ins[0], mask)).nbytes


def mask_bias(c: Context, spec: TensorSpec, mask: AttentionMask, whole: bool = False) -> Tensor:
    """Return the bias of a mask, HIDDEN where a key is hidden."""
    layout = _mask_layout(spec, mask, whole)

    def values() -> np.ndarray:
        bias = mask.score_bias(layout.shape[1] if mask.biased else 1, spec.shape[-1], HIDDEN)
        return np.broadcast_to(bias if mask.biased else bias[0], layout.shape)

    return c.constant(("bias", mask), layout, values)


def _scaled(c: Context, x: Tensor, y: Tensor, mask: AttentionMask, scale: float) -> Launch:
    """y <- scale x + the bias of the mask."""
    if mask.is_full:
        return lambda: c.tt.multiply(x.t, scale, output_tensor=y.t)
    one, bias = c.full(1, (1, 1), x.spec.dtype), mask_bias(c, x.spec, mask)
    return lambda: c.tt.addcmul(bias.t, x.t, one.t, value=scale, output_tensor=y.t)


@row("softmax", bound=True, overwrites=(0,), outside=_mask_bytes)
def _softmax(c: Context, x: Tensor, y: Tensor, mask: AttentionMask, scale: float) -> Launch:
    """Apply softmax in place, in one launch for causal scores in whole tiles that nobody reads again."""
    rest = {"numeric_stable": True, **c.exact}
    if not c.core_subset and x is y and _in_one_launch(x.spec, mask):
        bias, call = mask_bias(c, x.spec, mask, True), c.tt.scale_mask_softmax_in_place
        return lambda: call(y.t, scale, bias.t, is_causal_mask=True, **rest)
    shape, scaled = (1,) * (4 - x.spec.rank) + x.spec.shape, _scaled(c, x, y, mask, scale)

    def run() -> None:
        scaled()
        if c.core_subset:
            softmax_parts(c, wide(c, y), into=y.t)
        else:
            c.tt.softmax_in_place(c.tt.reshape(y.t, shape), **rest)  # wants rank 4

    return run


@row("softmax_grad", overwrites=(0,))
def _softmax_grad(c: Context, dy: Tensor, y: Tensor, dx: Tensor, scale: float) -> None:
    tt = c.tt
    if c.fused and is_bf16(y):
        backward = tt.operations.moreh.softmax_backward
        backward(y.t, dy.t, y.spec.rank - 1, input_grad_tensor=dx.t, **c.exact)
        tt.multiply(dx.t, scale, output_tensor=dx.t)
        return
    total = tt.sum(tt.multiply(dy.t, y.t, dtype=tt.float32), dim=-1, keepdim=True, **c.exact)
    difference = tt.subtract(dy.t, total, dtype=tt.float32)
    tt.multiply(tt.multiply(difference, y.t), scale, output_tensor=dx.t)


@row("log_sum_exp", outside=_mask_bytes, workspace=lambda ins, outs, attributes: [ins[0].with_dtype(DType.FP32)])
def _log_sum_exp(c: Context, x: Tensor, y: Tensor, scores: Tensor, mask: AttentionMask, scale: float) -> None:
    _scaled(c, x, scores, mask, scale)()
    _, total, largest = softmax_parts(c, scores.t)
    c.tt.copy(c.tt.reshape(log_sum(c, total, largest), y.t.shape), y.t)


@row("document_bias")
def _document_bias(c: Context, positions: IntegerInput, bias: Tensor, **_: Any) -> None:
    tt, (batch, time), dtype = c.tt, positions.spec.shape, getattr(c.tt, dtype_name(bias.spec.dtype))

    def starts(shape: tuple[int, ...]) -> Any:
        """Return the first position of each position's document."""
        layout = TileLayout(shape, "int32")
        row = np.arange(time, dtype=np.int32)
        every = c.constant(("numbers of", batch), layout, lambda: np.broadcast_to(row, (batch, time)).reshape(shape))
        return tt.subtract(every.t, positions.in_layout(layout))

    of_query, of_key = starts((batch, 1, time, 1)), starts((batch, 1, 1, time))
    tt.multiply(tt.ne(of_query, of_key, dtype=dtype), HIDDEN, output_tensor=bias.t)


@row("cache_write", Delivery.INPLACE)
def _cache_write(c: Context, cache: Tensor, rows: Tensor, positions: IntegerInput) -> None:
    """cache <- cache (1 - written) + rows spread over their places by a product with one-hot columns."""
    tt, (batch, heads, context, _), dtype = c.tt, cache.spec.shape, cache.spec.dtype
    places = one_hot(c, positions, context, dtype)  # [N, C]
    written = tt.sum(places, dim=0, keepdim=True, **c.exact)
    kept = tt.reshape(tt.permute(tt.rsub(written, 1.0), (1, 0)), (1, 1, context, 1))
    spread = c.full(1, (batch, heads, 1, 1), dtype)
    whole = tt.multiply(tt.reshape(places, (1, 1, rows.spec.shape[2], context)), spread.t)
    tt.multiply(cache.t, kept, output_tensor=cache.t)
    tt.add(cache.t, tt.matmul(whole, rows.t, transpose_a=True, **c.product), output_tensor=cache.t)


def _ends(context: int, own: int) -> np.ndarray:
    """Return the place behind the text of each place, where each text has `own` of them: int32 [1, context]."""
    return (np.arange(context, dtype=np.int32)[None] // own + 1) * own


@row("cache_bias")
def _cache_bias(c: Context, positions: IntegerInput, visible: IntegerInput, bias: Tensor, **given: Any) -> None:
    tt, dtype, mask, context = c.tt, getattr(c.tt, dtype_name(bias.spec.dtype)), given["mask"], given["context"]
    shape, column = (1, 1, positions.spec.size, context), TileLayout((positions.spec.size, 1), "int32")
    hidden = tt.multiply(tt.ge(c.numbers(context).t, visible.in_layout(column), dtype=dtype), HIDDEN)
    if mask.window and not mask.is_full:
        far = tt.le(c.numbers(context, mask.window).t, positions.in_layout(column), dtype=dtype)
        hidden = tt.minimum(hidden, tt.multiply(far, HIDDEN))
    if (texts := given["texts"]) > 1:
        own = context // texts
        ends = c.constant(("ends of", texts), TileLayout((1, context), "int32"), lambda: _ends(context, own))
        hidden = tt.minimum(hidden, tt.multiply(tt.le(ends.t, positions.in_layout(column), dtype=dtype), HIDDEN))
    if not mask.biased or mask.is_full:
        tt.copy(tt.reshape(hidden, shape), bias.t)
        return
    keys = c.constant("keys", TileLayout((1, context)), lambda: np.arange(context, dtype=np.float32)[None])
    slopes = -np.asarray(alibi_slopes(given["heads"]), np.float32).reshape(1, -1, 1, 1)
    rates = c.constant("alibi", TileLayout(slopes.shape), lambda: slopes)
    distance = tt.subtract(keys.t, tt.typecast(positions.in_layout(column), tt.float32))
    distance = tt.reshape(tt.relu(distance) if mask.position_bias == "future" else tt.abs(distance), shape)
    tt.add(tt.multiply(distance, rates.t), tt.reshape(hidden, shape), output_tensor=bias.t)
