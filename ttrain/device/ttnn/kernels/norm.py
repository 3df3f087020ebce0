"""Norms over the last axis: fused kernels where tensors are bf16, sums in fp32 otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ttrain.core.spec import DType
from ttrain.device.base import Delivery, Launch
from ttrain.device.ttnn.kernels.common import Context, Tensor, column_sum, is_bf16, row, wide
from ttrain.device.ttnn.tensors.store import TileLayout, device_shape


def _fuses(c: Context, x: Any) -> bool:
    return c.fused and x.dtype is DType.BF16


def _column(shape: Sequence[int], dtype: str = "float32") -> TileLayout:
    """[..., T, 1]: a number a row."""
    return TileLayout((*device_shape(tuple(shape))[:-1], 1), dtype)


def _statistics(c: Context, x: Any) -> list[TileLayout]:
    """Layouts of mean and rstd, which are columns. Where the gradient is fused, normalised x stands for mean."""
    if _fuses(c, x):
        return [TileLayout(device_shape(x.shape), "bfloat16"), _column(x.shape, "bfloat16")]
    return [_column(x.shape)] * 2


def _hold(c: Context, x: Tensor, *statistics: Tensor) -> None:
    for tensor, layout in zip(statistics, _statistics(c, x.spec), strict=True):
        tensor.hold_as(layout)


@row("layer_norm", Delivery.RETURNS, bound=True, layouts=lambda c, ins, outs, _: [None, *_statistics(c, ins[0])])
def _layer_norm(c: Context, *tensors: Any, eps: float) -> Launch:
    (x, weight, bias, _, mean, rstd), tt, root = tensors, c.tt, [c.tt.UnaryOpType.RSQRT]
    _hold(c, x, mean, rstd)

    def normed() -> Any:
        return tt.layer_norm(x.t, epsilon=eps, weight=weight.t, bias=None if bias is None else bias.t, **c.exact)

    def fused() -> list[Any]:
        variance = tt.var(x.t, dim=-1, keepdim=True, correction=False, **c.exact)
        return [normed(), tt.layer_norm(x.t, epsilon=eps, **c.exact), tt.add(variance, eps, activations=root)]

    def plain() -> list[Any]:
        given = wide(c, x)
        mu = _mean(c, given)
        centred = tt.subtract(given, mu)
        inverse = tt.add(_mean(c, tt.multiply(centred, centred)), eps, activations=root)
        return [_scaled(c, x, tt.multiply(centred, inverse), weight, bias) if c.core_subset else normed(), mu, inverse]

    return fused if _fuses(c, x.spec) else plain


def _mean(c: Context, x: Any) -> Any:
    """Return the mean over the last axis, [..., 1]."""
    return c.tt.sum(x, dim=-1, keepdim=True, scalar=1 / x.shape[-1], **c.exact)


def _scaled(c: Context, x: Tensor, normal: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    """normal * weight + bias in the dtype of x, where ttnn's own norm can't be kept on a part of the chip."""
    y = c.tt.multiply(normal, wide(c, weight))
    y = y if bias is None else c.tt.add(y, wide(c, bias))
    return c.tt.typecast(y, c.tt.bfloat16) if is_bf16(x) else y


@row("layer_norm_grad", bound=True)
def _layer_norm_grad(c: Context, *tensors: Any, bias: bool) -> Launch:
    """Gradients of a norm by ttnn's fused kernel, on normalised rows.

    The kernel reads mean and rstd as rows, but the statistics that its forward kernel writes are wrong in ttnn 0.81 (it
    stores columns as rows). So it is given normalised rows, whose mean is 0 and rstd 1, and the true rstd enters
    afterwards: dx is linear in it.
    """
    tt, (dy, x, mean, rstd, weight, residual, *outs) = c.tt, tensors
    _hold(c, x, mean, rstd)
    if not _fuses(c, x.spec):
        return partial(_plain_grad, c, *tensors)
    shape = (1,) * (3 - x.spec.rank) + x.spec.shape
    zeros, ones = (c.full(value, shape[:-1], DType.BF16) for value in (0, 1))

    def fused() -> None:
        dx = outs[0].t
        grads = {"input_grad": tt.reshape(dx, shape), "gamma_grad": outs[1].t}
        grads |= {"beta_grad": outs[2].t} if bias else {}
        given = [tt.reshape(tensor.t, shape) for tensor in (dy, mean)]
        tt.operations.moreh.layer_norm_backward(*given, zeros.t, ones.t, 1, gamma=weight.t, **grads, **c.exact)
        if residual is None:
            tt.multiply(dx, rstd.t, output_tensor=dx)
        else:
            tt.addcmul(residual.t, dx, rstd.t, value=1.0, output_tensor=dx)

    return fused


def _plain_grad(c: Context, *tensors: Any) -> None:
    """dx = rstd (s - mean(s) - n mean(s n)) with s = dy weight and n the normalised x; all in fp32."""
    dy, x, mean, rstd, weight, residual, dx, dweight, *dbias = tensors
    tt, gradient = c.tt, wide(c, dy)
    normal = tt.multiply(tt.subtract(wide(c, x), mean.t), rstd.t)
    scaled = tt.multiply(gradient, wide(c, weight))
    projected = tt.multiply(normal, _mean(c, tt.multiply(scaled, normal)))
    rest = tt.subtract(tt.subtract(scaled, _mean(c, scaled)), projected)
    products = tt.multiply(gradient, normal)
    tt.copy(column_sum(c, products, x.spec.shape, DType.FP32), dweight.t)
    for each in dbias:
        tt.copy(column_sum(c, dy.t, x.spec.shape, dy.spec.dtype), each.t)
    tt.multiply(rest, rstd.t, output_tensor=dx.t)
    if residual is not None:
        tt.add(dx.t, residual.t, output_tensor=dx.t)


@row("rms_norm", Delivery.RETURNS, bound=True, layouts=lambda c, ins, outs, _: [None, _column(ins[0].shape)])
def _rms_norm(c: Context, x: Tensor, weight: Tensor, y: Tensor, rstd: Tensor, eps: float) -> Launch:
    tt, root = c.tt, [c.tt.UnaryOpType.RSQRT]
    rstd.hold_as(_column(x.spec.shape))

    def run() -> list[Any]:
        inverse = tt.add(_mean(c, tt.multiply(x.t, x.t, dtype=tt.float32)), eps, activations=root)
        if c.core_subset:
            return [_scaled(c, x, tt.multiply(x.t, inverse, dtype=tt.float32), weight), inverse]
        return [tt.rms_norm(x.t, epsilon=eps, weight=weight.t, **c.exact), inverse]

    return run


@row("rms_norm_grad", bound=True)
def _rms_norm_grad(c: Context, *tensors: Any) -> Launch:
    """dx = rstd (s - n mean(s n)) with s = dy weight and n the normalised x; in fp32 but for s."""
    tt, (dy, x, rstd, weight, residual, dx, dweight) = c.tt, tensors
    rstd.hold_as(_column(x.spec.shape))

    def run() -> None:
        normal = tt.multiply(x.t, rstd.t, dtype=tt.float32)
        product = tt.multiply(dy.t, normal, dtype=tt.float32)
        total = column_sum(c, product, x.spec.shape, DType.FP32, dweight)
        if total is not None:
            tt.copy(total, dweight.t)
        projected = tt.matmul(product, weight.t, transpose_b=True, dtype=tt.float32, **c.product)
        scaled = tt.multiply(dy.t, weight.t)
        if is_bf16(dy):
            scaled = tt.typecast(scaled, tt.float32)
        rest = tt.addcmul(scaled, normal, projected, value=-1 / x.spec.shape[-1])
        if residual is None:
            tt.multiply(rest, rstd.t, output_tensor=dx.t)
        else:
            tt.add(tt.multiply(rest, rstd.t), residual.t, output_tensor=dx.t)

    return run
