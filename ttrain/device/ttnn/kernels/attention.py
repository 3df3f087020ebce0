"""Softmax and its gradient. Attention itself is made of products, softmax and head moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ttrain.core.attention_mask import HIDDEN, AttentionMask
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, is_bf16, row, wide
from ttrain.device.ttnn.kernels.loss import log_sum, softmax_parts
from ttrain.device.ttnn.tensors.device_tensor import DeviceTensor, IntegerInput, Tensors
from ttrain.device.ttnn.tensors.layout import TILE, TileLayout, dtype_name


def mask_bias(c: Context, spec: TensorSpec, mask: AttentionMask, batch: int | None = None) -> DeviceTensor:
    """Return the bias of a mask, HIDDEN where a key is hidden: [T, T] or [1, heads, T, T]; or [batch, 1, T, T]."""
    time, heads = spec.shape[-1], spec.shape[-3] if mask.biased else 1
    shape = (1, heads, time, time) if mask.biased else (time, time)
    shape = shape if batch is None else (batch, 1, time, time)

    def values() -> np.ndarray:
        bias = mask.score_bias(heads, time, HIDDEN)
        return np.broadcast_to(bias if mask.biased else bias[0], shape)

    return c.constant(("bias", mask), TileLayout(shape, dtype_name(spec.dtype)), values)


def _scaled(c: Context, x: DeviceTensor, y: Any, attributes: Attributes) -> Launch:
    """y <- scale x + the bias of the mask."""
    scale, mask = attributes["scale"], attributes["mask"]
    if mask.is_full:
        return lambda: c.tt.multiply(x.t, scale, output_tensor=y.t)
    one, bias = c.ones_row(1, x.spec.dtype), mask_bias(c, x.spec, mask)
    return lambda: c.tt.addcmul(bias.t, x.t, one.t, value=scale, output_tensor=y.t)


@row("softmax", overwrites=(0,))
def _softmax(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """Apply softmax in place, in one launch for causal scores in whole tiles that nobody reads again."""
    (x,), (y,), mask = ins, outs, attributes["mask"]
    rest = {"numeric_stable": True, **c.exact}
    if not c.core_subset and mask.is_causal and x is y and x.spec.rank == 4 and x.spec.shape[-1] % TILE == 0:
        bias, scale = mask_bias(c, x.spec, mask, x.spec.shape[0]), attributes["scale"]
        call = c.tt.scale_mask_softmax_in_place
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


@row("log_sum_exp", workspace=lambda ins, outs, attributes: [ins[0].with_dtype(DType.FP32)])
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

    def starts(shape: tuple[int, ...]) -> Callable[[], Any]:
        """Return a launch that computes the first position of each position's document."""
        layout = TileLayout(shape, "int32")
        numbers = np.broadcast_to(np.arange(time, dtype=np.int32), (batch, time)).reshape(shape)
        every, given = c.constant(("numbers", batch, time), layout, lambda: numbers), positions.in_layout(layout)
        return lambda: tt.subtract(every.t, given())

    of_query, of_key = starts((batch, 1, time, 1)), starts((batch, 1, 1, time))
    return lambda: tt.multiply(tt.ne(of_query(), of_key(), dtype=dtype), HIDDEN, output_tensor=bias.t)
