"""Layer normalisation: fused kernels where tensors are bf16, sums in fp32 otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.core.spec import DType
from ttrain.device.base import Delivery, Kernel, Launch
from ttrain.device.ttnn.form import TileForm, device_shape
from ttrain.device.ttnn.kernels.common import Attributes, Context, column_sum, is_bf16
from ttrain.device.ttnn.tensors import Held


def _fuses(c: Context, x: Any) -> bool:
    return c.fused and x.dtype is DType.BF16


def _stack_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """At least [1, N, C], so that the statistics have rank 2."""
    return (1,) * (3 - len(shape)) + tuple(shape)


def _statistics(c: Context, x: Any) -> TileForm:
    """The fused kernels hold mean and rstd as rows [..., T] in bf16, the others as columns [..., T, 1] in fp32."""
    if _fuses(c, x):
        return TileForm(_stack_shape(x.shape)[:-1], "bfloat16")
    return TileForm((*device_shape(x.shape)[:-1], 1), "float32")


def _layer_norm(c: Context) -> Kernel:
    moreh = c.tt.operations.moreh

    def build(ins: Sequence[Any], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        (x, weight, bias), (_, mean, rstd), eps = ins, outs, attributes["eps"]
        for held in (mean, rstd):
            held.hold_as(_statistics(c, x.spec))
        shape = _stack_shape(x.spec.shape)

        def fused() -> list[Any]:
            shift = None if bias is None else bias.t
            given = c.tt.reshape(x.t, shape)
            y, *_ = moreh.layer_norm(given, 1, eps, weight.t, shift, mean=mean.t, rstd=rstd.t, **c.exact)
            return [c.tt.reshape(y, device_shape(x.spec.shape)), None, None]

        def plain() -> list[Any]:
            shift = None if bias is None else bias.t
            y = c.tt.layer_norm(x.t, epsilon=eps, weight=weight.t, bias=shift, **c.exact)
            centred, mu = _centred(c, x)
            variance = c.tt.sum(c.tt.multiply(centred, centred), dim=-1, keepdim=True, scalar=1 / shape[-1], **c.exact)
            return [y, mu, c.tt.add(variance, eps, activations=[c.tt.UnaryOpType.RSQRT])]

        return fused if _fuses(c, x.spec) else plain

    return Kernel(build, Delivery.FRESH, forms=lambda ins, outs, _: [None, *[_statistics(c, ins[0])] * 2])


def _wide(c: Context, held: Held) -> Any:
    """A tensor in fp32. Ops on operands of two dtypes are avoided: with a row repeated, ttnn 0.81 gets them wrong."""
    return c.tt.typecast(held.t, c.tt.float32) if is_bf16(held) else held.t


def _centred(c: Context, x: Held) -> tuple[Any, Any]:
    """x minus its mean, and the mean, in fp32."""
    wide = _wide(c, x)
    mean = c.tt.sum(wide, dim=-1, keepdim=True, scalar=1 / x.spec.shape[-1], **c.exact)
    return c.tt.subtract(wide, mean), mean


def _layer_norm_grad(c: Context) -> Kernel:
    moreh = c.tt.operations.moreh

    def build(ins: Sequence[Any], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        dy, x, mean, rstd, weight, residual = ins
        for held in (mean, rstd):
            held.hold_as(_statistics(c, x.spec))
        shape = _stack_shape(x.spec.shape)

        def fused() -> None:
            dx = outs[0].t
            grads = {"input_grad": c.tt.reshape(dx, shape), "gamma_grad": outs[1].t}
            grads |= {"beta_grad": outs[2].t} if attributes["bias"] else {}
            given = [c.tt.reshape(held.t, shape) for held in (dy, x)]
            moreh.layer_norm_backward(*given, mean.t, rstd.t, 1, gamma=weight.t, **grads, **c.exact)
            if residual is not None:
                c.tt.add(dx, residual.t, output_tensor=dx)

        def plain() -> None:
            _plain_grad(c, ins, outs, attributes["bias"])

        return fused if _fuses(c, x.spec) else plain

    return Kernel(build, Delivery.INTO)


def _plain_grad(c: Context, ins: Sequence[Any], outs: Sequence[Held], bias: bool) -> None:
    """dx = rstd (s - mean(s) - n mean(s n)) with s = dy weight and n the normalised x; all in fp32."""
    tt = c.tt
    dy, x, mean, rstd, weight, residual = ins
    means = {"dim": -1, "keepdim": True, "scalar": 1 / x.spec.shape[-1], **c.exact}
    gradient = _wide(c, dy)
    normal = tt.multiply(tt.subtract(_wide(c, x), mean.t), rstd.t)
    scaled = tt.multiply(gradient, _wide(c, weight))
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




def table(c: Context) -> dict[str, Kernel]:
    return {"layer_norm": _layer_norm(c), "layer_norm_grad": _layer_norm_grad(c)}
