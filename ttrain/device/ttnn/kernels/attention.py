"""Softmax and its gradient, and caches of keys and values. Attention is made of products, softmax and head moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ttrain.core.attention_mask import HIDDEN, AttentionMask, alibi_slopes
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Delivery, Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, is_bf16, row, wide
from ttrain.device.ttnn.kernels.layout import one_hot
from ttrain.device.ttnn.kernels.loss import log_sum, softmax_parts
from ttrain.device.ttnn.tensors.device_tensor import DeviceTensor, IntegerInput, Tensors
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


def mask_bias(c: Context, spec: TensorSpec, mask: AttentionMask, whole: bool = False) -> DeviceTensor:
    """Return the bias of a mask, HIDDEN where a key is hidden."""
    layout = _mask_layout(spec, mask, whole)

    def values() -> np.ndarray:
        bias = mask.score_bias(layout.shape[1] if mask.biased else 1, spec.shape[-1], HIDDEN)
        return np.broadcast_to(bias if mask.biased else bias[0], layout.shape)

    return c.constant(("bias", mask), layout, values)


def _scaled(c: Context, x: DeviceTensor, y: Any, attributes: Attributes) -> Launch:
    """y <- scale x + the bias of the mask."""
    scale, mask = attributes["scale"], attributes["mask"]
    if mask.is_full:
        return lambda: c.tt.multiply(x.t, scale, output_tensor=y.t)
    one, bias = c.full(1, (1, 1), x.spec.dtype), mask_bias(c, x.spec, mask)
    return lambda: c.tt.addcmul(bias.t, x.t, one.t, value=scale, output_tensor=y.t)


@row("softmax", overwrites=(0,), outside=_mask_bytes)
def _softmax(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """Apply softmax in place, in one launch for causal scores in whole tiles that nobody reads again."""
    (x,), (y,), mask = ins, outs, attributes["mask"]
    rest = {"numeric_stable": True, **c.exact}
    if not c.core_subset and x is y and _in_one_launch(x.spec, mask):
        bias, scale, call = mask_bias(c, x.spec, mask, True), attributes["scale"], c.tt.scale_mask_softmax_in_place
        return lambda: call(y.t, scale, bias.t, is_causal_mask=True, **rest)
    shape, scaled = (1,) * (4 - x.spec.rank) + x.spec.shape, _scaled(c, x, y, attributes)

    def run() -> None:
        scaled()
        if c.core_subset:
            softmax_parts(c, wide(c, y), into=y.t)
        else:
            c.tt.softmax_in_place(c.tt.reshape(y.t, shape), **rest)  # wants rank 4

    return run


@row("softmax_grad", overwrites=(0,))
def _softmax_grad(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    backward = c.tt.operations.moreh.softmax_backward
    (dy, y), (dx,), scale = ins, outs, attributes["scale"]
    last = y.spec.rank - 1

    def fused() -> None:
        backward(y.t, dy.t, last, input_grad_tensor=dx.t, **c.exact)
        c.tt.multiply(dx.t, scale, output_tensor=dx.t)

    def plain() -> None:
        product = c.tt.multiply(dy.t, y.t, dtype=c.tt.float32)
        total: Any = c.tt.sum(product, dim=-1, keepdim=True, **c.exact)
        difference = c.tt.subtract(dy.t, total, dtype=c.tt.float32)
        c.tt.multiply(c.tt.multiply(difference, y.t), scale, output_tensor=dx.t)

    return fused if c.fused and is_bf16(y) else plain


@row("log_sum_exp", outside=_mask_bytes, workspace=lambda ins, outs, attributes: [ins[0].with_dtype(DType.FP32)])
def _log_sum_exp(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (y,), (scores,) = outs, work
    scaled = _scaled(c, ins[0], scores, attributes)

    def run() -> None:
        scaled()
        _, total, largest = softmax_parts(c, scores.t)
        c.tt.copy(c.tt.reshape(log_sum(c, total, largest), y.t.shape), y.t)

    return run


@row("document_bias")
def _document_bias(c: Context, ins: Sequence[IntegerInput], outs: Tensors, attributes: Attributes, work: Any) -> Launch:
    (positions,), (bias,), tt = ins, outs, c.tt
    batch, time = positions.spec.shape
    dtype = getattr(tt, dtype_name(bias.spec.dtype))
    numbers = np.broadcast_to(np.arange(time, dtype=np.int32), (batch, time))

    def starts(shape: tuple[int, ...]) -> Callable[[], Any]:
        """Return a launch that computes the first position of each position's document."""
        layout = TileLayout(shape, "int32")
        every = c.constant(("numbers of", batch), layout, lambda: numbers.reshape(shape))
        given = positions.in_layout(layout)
        return lambda: tt.subtract(every.t, given())

    of_query, of_key = starts((batch, 1, time, 1)), starts((batch, 1, 1, time))
    return lambda: tt.multiply(tt.ne(of_query(), of_key(), dtype=dtype), HIDDEN, output_tensor=bias.t)


@row("cache_write", Delivery.INPLACE)
def _cache_write(c: Context, ins: Sequence[Any], outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """cache <- cache (1 - written) + rows spread over their places by a product with one-hot columns."""
    (cache, rows, positions), tt = ins, c.tt
    batch, heads, context, _ = cache.spec.shape
    count, dtype = rows.spec.shape[2], cache.spec.dtype
    hot = one_hot(c, positions, context, dtype)
    lead = (batch, heads, 1, 1)
    spread = c.full(1, lead, dtype)

    def run() -> None:
        places = hot()  # [N, C]
        written: Any = tt.sum(places, dim=0, keepdim=True, **c.exact)
        kept = tt.reshape(tt.transpose(tt.rsub(written, 1.0), -2, -1), (1, 1, context, 1))
        whole = tt.multiply(tt.reshape(places, (1, 1, count, context)), spread.t)
        tt.multiply(cache.t, kept, output_tensor=cache.t)
        tt.add(cache.t, tt.matmul(whole, rows.t, transpose_a=True, **c.product), output_tensor=cache.t)

    return run


@row("cache_bias")
def _cache_bias(c: Context, ins: Sequence[IntegerInput], outs: Tensors, attributes: Attributes, work: Any) -> Launch:
    (positions, visible), (bias,), tt = ins, outs, c.tt
    context, mask = attributes["context"], attributes["mask"]
    dtype = getattr(tt, dtype_name(bias.spec.dtype))
    column = TileLayout((positions.spec.size, 1), "int32")
    shape = (1, 1, positions.spec.size, context)
    limits, places = visible.in_layout(column), None if mask.is_full else positions.in_layout(column)
    numbers, far = c.numbers(context), c.numbers(context, mask.window) if mask.window else None

    def hidden() -> Any:
        found = tt.multiply(tt.ge(numbers.t, limits(), dtype=dtype), HIDDEN)
        if far is None or places is None:
            return found
        return tt.minimum(found, tt.multiply(tt.le(far.t, places(), dtype=dtype), HIDDEN))

    def plain() -> None:
        tt.copy(tt.reshape(hidden(), shape), bias.t)

    if not mask.biased or places is None:
        return plain
    keys = c.constant("keys", TileLayout((1, context)), lambda: np.arange(context, dtype=np.float32)[None])
    slopes = -np.asarray(alibi_slopes(attributes["heads"]), np.float32).reshape(1, -1, 1, 1)
    rates = c.constant("alibi", TileLayout(slopes.shape), lambda: slopes)

    def sloped() -> None:
        distance = tt.subtract(keys.t, tt.typecast(places(), tt.float32))
        distance = tt.reshape(tt.relu(distance) if mask.position_bias == "future" else tt.abs(distance), shape)
        tt.add(tt.multiply(distance, rates.t), tt.reshape(hidden(), shape), output_tensor=bias.t)

    return sloped
