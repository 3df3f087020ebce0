"""Softmax and its gradient. Attention itself is made of products, softmax and head moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ttrain.core.mask import HIDDEN
from ttrain.core.spec import TensorSpec
from ttrain.core.visibility import score_bias
from ttrain.device.base import Kernel, Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, into, is_bf16
from ttrain.device.ttnn.tensors.form import TILE, TileForm, dtype_name
from ttrain.device.ttnn.tensors.held import Held


def causal_mask(c: Context, spec: TensorSpec, batch: int | None = None) -> Held:
    """0 on and below the diagonal, HIDDEN above it: [T, T], or [batch, 1, T, T]."""
    time = spec.shape[-1]
    shape = (time, time) if batch is None else (batch, 1, time, time)

    def values() -> np.ndarray:
        return np.broadcast_to(np.triu(np.full((time, time), HIDDEN, np.float32), 1), shape)

    return c.constant("causal", TileForm(shape, dtype_name(spec.dtype)), values)


def _softmax(c: Context) -> Kernel:
    """With whole tiles and scores that nobody reads again, one launch in place; else mask, then softmax in place."""

    def build(ins: Sequence[Held], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        (x,), (y,), scale, causal = ins, outs, attributes["scale"], attributes["causal"]
        rest = {"numeric_stable": True, **c.exact}
        if causal and x is y and x.spec.rank == 4 and x.spec.shape[-1] % TILE == 0:
            mask = causal_mask(c, x.spec, x.spec.shape[0])
            call = c.tt.scale_mask_softmax_in_place
            return lambda: call(y.t, scale, mask.t, is_causal_mask=True, **rest)
        one = c.ones_row(1, x.spec.dtype)
        shape = (1,) * (4 - x.spec.rank) + x.spec.shape
        hiding = causal_mask(c, x.spec) if causal else None

        def run() -> None:
            if hiding is not None:
                c.tt.addcmul(hiding.t, x.t, one.t, value=scale, output_tensor=y.t)
            else:
                c.tt.multiply(x.t, scale, output_tensor=y.t)
            c.tt.softmax_in_place(c.tt.reshape(y.t, shape), **rest)  # wants rank 4

        return run

    return into(build, overwrites=(0,))


def _masked_softmax(c: Context) -> Kernel:
    """Scaled scores plus what hides keys and prefers near ones, then softmax in place."""

    def build(ins: Sequence[Held], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        (x,), (y,), scale = ins, outs, attributes["scale"]
        _, heads, time, _ = x.spec.shape
        rules = (attributes["mask"], attributes["position_bias"])
        values = score_bias(*rules, heads, time, HIDDEN)
        bias = c.constant(
            ("bias", *rules), TileForm((1, *values.shape), dtype_name(x.spec.dtype)), lambda: values[None]
        )
        one = c.ones_row(1, x.spec.dtype)

        def run() -> None:
            c.tt.addcmul(bias.t, x.t, one.t, value=scale, output_tensor=y.t)
            c.tt.softmax_in_place(y.t, numeric_stable=True, **c.exact)

        return run

    return into(build, overwrites=(0,))


def _softmax_grad(c: Context) -> Kernel:
    backward = c.tt.operations.moreh.softmax_backward

    def build(ins: Sequence[Held], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
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

    return into(build, overwrites=(0,))


def table(c: Context) -> dict[str, Kernel]:
    return {"softmax": _softmax(c), "masked_softmax": _masked_softmax(c), "softmax_grad": _softmax_grad(c)}
