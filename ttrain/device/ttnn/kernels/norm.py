"""Norms over the last axis: fused kernels where tensors are bf16, sums in fp32 otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ttrain.core.spec import DType
from ttrain.device.base import Delivery, Launch, Layout
from ttrain.device.ttnn.kernels.common import Attributes, Context, column_sum, is_bf16, row, wide
from ttrain.device.ttnn.tensors.device_tensor import DeviceTensor, Tensors
from ttrain.device.ttnn.tensors.layout import TileLayout, device_shape


def _fuses(c: Context, x: Any) -> bool:
    return c.fused and x.dtype is DType.BF16


def _column(shape: Sequence[int], dtype: str) -> TileLayout:
    """[..., T, 1]: a number a row."""
    return TileLayout((*device_shape(tuple(shape))[:-1], 1), dtype)


def _statistics(c: Context, x: Any) -> list[Layout | None]:
    """Layouts of mean and rstd, which are columns. Where the gradient is fused, normalised x stands for mean."""
    if _fuses(c, x):
        return [TileLayout(device_shape(x.shape), "bfloat16"), _column(x.shape, "bfloat16")]
    return [_column(x.shape, "float32")] * 2


def _hold(c: Context, x: DeviceTensor, mean: DeviceTensor, rstd: DeviceTensor) -> None:
    for tensor, layout in zip((mean, rstd), _statistics(c, x.spec), strict=True):
        assert isinstance(layout, TileLayout)
        tensor.hold_as(layout)


@row("layer_norm", Delivery.RETURNS, layouts=lambda c, ins, outs, _: [None, *_statistics(c, ins[0])])
def _layer_norm(c: Context, ins: Sequence[Any], outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    tt = c.tt
    (x, weight, bias), (_, mean, rstd), eps = ins, outs, attributes["eps"]
    _hold(c, x, mean, rstd)
    root = [tt.UnaryOpType.RSQRT]

    def normed(*scales: Any) -> Any:
        given = dict(zip(("weight", "bias"), scales, strict=False))
        return tt.layer_norm(x.t, epsilon=eps, **given, **c.exact)

    def fused() -> list[Any]:
        variance = tt.var(x.t, dim=-1, keepdim=True, correction=False, **c.exact)
        y = normed(weight.t, None if bias is None else bias.t)
        return [y, normed(), tt.add(variance, eps, activations=root)]

    def plain() -> list[Any]:
        centred, mu = _centred(c, x)
        variance = tt.sum(tt.multiply(centred, centred), dim=-1, keepdim=True, scalar=1 / x.spec.shape[-1], **c.exact)
        inverse = tt.add(variance, eps, activations=root)
        if c.core_subset:
            return [_scaled(c, x, tt.multiply(centred, inverse), weight, bias), mu, inverse]
        return [normed(weight.t, None if bias is None else bias.t), mu, inverse]

    return fused if _fuses(c, x.spec) else plain


def _scaled(c: Context, x: DeviceTensor, normal: Any, weight: DeviceTensor, bias: DeviceTensor | None) -> Any:
    """normal * weight + bias in the dtype of x, where ttnn's own norm can't be kept on a part of the chip."""
    y = c.tt.multiply(normal, wide(c, weight))
    y = y if bias is None else c.tt.add(y, wide(c, bias))
    return c.tt.typecast(y, c.tt.bfloat16) if is_bf16(x) else y


def _centred(c: Context, x: DeviceTensor) -> tuple[Any, Any]:
    """x minus its mean, and the mean, in fp32."""
    given = wide(c, x)
    mean = c.tt.sum(given, dim=-1, keepdim=True, scalar=1 / x.spec.shape[-1], **c.exact)
    return c.tt.subtract(given, mean), mean


@row("layer_norm_grad")
def _layer_norm_grad(c: Context, ins: Sequence[Any], outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """The fused kernel reads mean and rstd as rows, but the statistics that its forward kernel writes are wrong in
    ttnn 0.81 (it stores columns as rows). So it is given normalised rows, whose mean is 0 and rstd 1, and the true rstd
    enters afterwards: dx is linear in it.
    """
    tt, moreh = c.tt, c.tt.operations.moreh
    dy, x, mean, rstd, weight, residual = ins
    _hold(c, x, mean, rstd)
    if not _fuses(c, x.spec):
        return lambda: _plain_grad(c, ins, outs, attributes["bias"])
    shape = (1,) * (3 - x.spec.rank) + x.spec.shape
    row = TileLayout(shape[:-1], "bfloat16")
    zeros = c.constant("zeros", row, lambda: np.zeros(row.shape, np.float32))
    ones = c.constant("ones", row, lambda: np.ones(row.shape, np.float32))

    def fused() -> None:
        dx = outs[0].t
        grads = {"input_grad": tt.reshape(dx, shape), "gamma_grad": outs[1].t}
        grads |= {"beta_grad": outs[2].t} if attributes["bias"] else {}
        given = [tt.reshape(tensor.t, shape) for tensor in (dy, mean)]
        moreh.layer_norm_backward(*given, zeros.t, ones.t, 1, gamma=weight.t, **grads, **c.exact)
        if residual is None:
            tt.multiply(dx, rstd.t, output_tensor=dx)
        else:
            tt.addcmul(residual.t, dx, rstd.t, value=1.0, output_tensor=dx)

    return fused


def _plain_grad(c: Context, ins: Sequence[Any], outs: Tensors, bias: bool) -> None:
    """dx = rstd (s - mean(s) - n mean(s n)) with s = dy weight and n the normalised x; all in fp32."""
    tt = c.tt
    dy, x, mean, rstd, weight, residual = ins
    means = {"dim": -1, "keepdim": True, "scalar": 1 / x.spec.shape[-1], **c.exact}
    gradient = wide(c, dy)
    normal = tt.multiply(tt.subtract(wide(c, x), mean.t), rstd.t)
    scaled = tt.multiply(gradient, wide(c, weight))
    projected = tt.multiply(normal, tt.sum(tt.multiply(scaled, normal), **means))
    rest = tt.subtract(tt.subtract(scaled, tt.sum(scaled, **means)), projected)
    products = tt.multiply(gradient, normal)
    tt.copy(column_sum(c, products, x.spec.shape, DType.FP32, None), outs[1].t)
    if bias:
        total = column_sum(c, dy.t, x.spec.shape, dy.spec.dtype, None)
        tt.copy(total, outs[2].t)
    tt.multiply(rest, rstd.t, output_tensor=outs[0].t)
    if residual is not None:
        tt.add(outs[0].t, residual.t, output_tensor=outs[0].t)


@row("rms_norm", Delivery.RETURNS, layouts=lambda c, ins, outs, _: [None, _column(ins[0].shape, "float32")])
def _rms_norm(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    tt, (x, weight), eps, root = c.tt, ins, attributes["eps"], [c.tt.UnaryOpType.RSQRT]
    outs[1].hold_as(_column(x.spec.shape, "float32"))

    def run() -> list[Any]:
        square = tt.multiply(x.t, x.t, dtype=tt.float32)
        mean = tt.sum(square, dim=-1, keepdim=True, scalar=1 / x.spec.shape[-1], **c.exact)
        inverse = tt.add(mean, eps, activations=root)
        if c.core_subset:
            return [_scaled(c, x, tt.multiply(x.t, inverse, dtype=tt.float32), weight, None), inverse]
        return [tt.rms_norm(x.t, epsilon=eps, weight=weight.t, **c.exact), inverse]

    return run


@row("rms_norm_grad")
def _rms_norm_grad(c: Context, ins: Sequence[Any], outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """dx = rstd (s - n mean(s n)) with s = dy weight and n the normalised x; in fp32 but for s."""
    tt, (dy, x, rstd, weight, residual), (dx, dweight) = c.tt, ins, outs
    rstd.hold_as(_column(x.spec.shape, "float32"))

    def run() -> None:
        normal = tt.multiply(x.t, rstd.t, dtype=tt.float32)
        product = tt.multiply(dy.t, normal, dtype=tt.float32)
        total = column_sum(c, product, x.spec.shape, DType.FP32, dweight)
        if total is not None:
            tt.copy(total, dweight.t)
        projected = tt.matmul(product, weight.t, transpose_b=True, dtype=tt.float32, **c.product)
        scaled = tt.multiply(dy.t, weight.t)
        scaled = tt.typecast(scaled, tt.float32) if is_bf16(dy) else scaled
        rest = tt.addcmul(scaled, normal, projected, value=-1 / x.spec.shape[-1])
        if residual is None:
            tt.multiply(rest, rstd.t, output_tensor=dx.t)
        else:
            tt.add(tt.multiply(rest, rstd.t), residual.t, output_tensor=dx.t)

    return run
