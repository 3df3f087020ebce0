"""Softmax, and causal self-attention in two ways behind one row.

explicit: batched products over [B*H, T, T] probabilities in workspace; bf16 products run on the matrix units.
flash: aten's blockwise attention, which never forms the probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Kernel, Launch
from ttrain.device.torch.kernels.common import (
    Attributes,
    Context,
    Specs,
    Tensor,
    causal_mask,
    chain,
    copying,
    into,
    scaling,
)
from ttrain.device.torch.kernels.layout import heads_view
from ttrain.device.torch.kernels.random import mask_workspace, masking

aten = torch.ops.aten


def softmax_into(x: Tensor, y: Tensor) -> Launch:
    """y <- softmax over the last axis of x; y may be x."""
    return partial(aten._softmax.out, x, -1, False, out=y)


def _softmax(context: Context) -> Kernel:
    def bind(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        x, y, factor = ins[0], outs[0], attributes["scale"]
        if attributes["causal"]:
            return chain(*_masked_softmax(x.view(-1, *x.shape[-2:]), y.view(-1, *x.shape[-2:]), factor, work))
        if x.dtype is not torch.bfloat16 or factor == 1.0:
            if factor == 1.0:
                return softmax_into(x, y)
            return chain(copying(y, x), *scaling(y, factor), softmax_into(y, y))
        return chain(copying(work[0], x), *scaling(work[0], factor), softmax_into(work[0], work[0]), copying(y, work[0]))

    def workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        x = outs[0]
        plain = attributes["scale"] == 1.0 and not attributes["causal"]
        return [] if x.dtype.wide is x.dtype or plain else [x.with_dtype(x.dtype.wide)]

    return into(bind, workspace)


def _masked_softmax(x: Tensor, y: Tensor, factor: float, work: Sequence[Tensor]) -> list[Launch]:
    """y <- softmax(factor x + mask) for x [N, T, T], through a wide copy where there is one."""
    if not work:
        mask = causal_mask(x.shape[-1], x.dtype, x.device)
        return [partial(torch.add, mask, x, alpha=factor, out=y), softmax_into(y, y)]
    copy = work[0].view(x.shape)
    mask = causal_mask(x.shape[-1], copy.dtype, x.device)
    add = partial(torch.add, mask, copy, alpha=factor, out=copy)
    return [copying(copy, x), add, softmax_into(copy, copy), copying(y, copy)]


def _softmax_grad(
    ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]
) -> Launch:
    dy, y = ins
    gradient = partial(aten._softmax_backward_data.out, dy, y, -1, y.dtype, grad_input=outs[0])
    return chain(gradient, *scaling(outs[0], attributes["scale"]))


def explicit_is_chosen(context: Context, qkv: TensorSpec, attributes: Attributes) -> bool:
    """Which way a shape goes; forward and backward of one node agree."""
    if attributes.get("p", 0.0) or qkv.shape[1] <= context.explicit_up_to:
        return True
    return not context.on_cpu and qkv.dtype is not DType.BF16


class _Explicit:
    """Buffers and launches that forward and backward share."""

    def __init__(self, context: Context, qkv: Tensor, seed: Tensor | None, attributes: Attributes) -> None:
        self.context, self.seed, self.attributes = context, seed, attributes
        self.source = heads_view(qkv, 3, attributes["heads"])  # [3, B, H, T, D]
        self.scale = self.source.shape[-1] ** -0.5

    def probabilities(self, packed: Tensor, scores: Tensor) -> list[Launch]:
        """scores <- softmax(mask + scale q k^T), after q, k, v were packed as [3, B, H, T, D]."""
        q, k, _ = packed.flatten(1, 2)
        mask = causal_mask(scores.shape[-1], scores.dtype, scores.device)
        return [
            copying(packed, self.source),
            partial(torch.baddbmm, mask, q, k.mT, beta=1, alpha=self.scale, out=scores),
            softmax_into(scores, scores),
        ]

    def drop(self, x: Tensor, y: Tensor, work: Sequence[Tensor]) -> list[Launch]:
        p, stream = self.attributes.get("p", 0.0), self.attributes.get("stream", 0)
        if not p:
            return []
        assert self.seed is not None
        return [masking(self.context, x, y, self.seed, p, stream, work)]


def _explicit_forward(context: Context) -> Kernel:
    def bind(ins: Sequence[Any], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        qkv, seed = ins
        y, log_sum_exp = outs
        shared = _Explicit(context, qkv, seed, attributes)
        packed, scores, results, diagonal, *mask_work = work
        q, k, v = packed.flatten(1, 2)
        mask = causal_mask(scores.shape[-1], scores.dtype, scores.device)
        statistic = log_sum_exp.view(-1, log_sum_exp.shape[-1])
        return chain(
            copying(packed, shared.source),
            partial(torch.baddbmm, mask, q, k.mT, beta=1, alpha=shared.scale, out=scores),
            # log sum exp of a row = any of its scores less the log of that score's probability; the maximum's never
            # underflows.
            partial(torch.amax, scores, -1, out=diagonal[0]),
            softmax_into(scores, scores),
            partial(torch.amax, scores, -1, out=diagonal[1]),
            copying(statistic, diagonal[1]),
            partial(torch.log, statistic, out=statistic),
            partial(torch.sub, diagonal[0], statistic, out=statistic),
            *shared.drop(scores, scores, mask_work),
            partial(torch.bmm, scores, v, out=results.flatten(0, 1)),
            copying(heads_view(y, 1, attributes["heads"])[0], results),
        )

    def workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        packed, scores, results = _explicit_shapes(ins[0], attributes["heads"])
        row = scores.with_shape(2, *scores.shape[:2])
        masks = mask_workspace(context, scores.size, scores.dtype) if attributes.get("p", 0.0) else []
        return [packed, scores, results, row, *masks]

    return into(bind, workspace)


def _explicit_shapes(qkv: TensorSpec, heads: int) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    """Specs of q, k, v packed; of the scores; of one tensor by heads."""
    batch, time, packed = qkv.shape
    by_heads = (batch, heads, time, packed // (3 * heads))
    return qkv.with_shape(3, *by_heads), qkv.with_shape(batch * heads, time, time), qkv.with_shape(*by_heads)


def _explicit_backward(context: Context) -> Kernel:
    def bind(ins: Sequence[Any], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        dy, qkv, _, _, seed = ins
        shared = _Explicit(context, qkv, seed, attributes)
        packed, gradients, dy_heads, p, dp, *rest = work
        dropped, mask_work = (rest[0], rest[1:]) if rest else (p, [])
        (q, k, v), (dq, dk, dv) = packed.flatten(1, 2), gradients.flatten(1, 2)
        dy_flat = dy_heads.flatten(0, 1)
        product = partial(torch.baddbmm, beta=0, alpha=shared.scale)
        return chain(
            *shared.probabilities(packed, p),
            copying(dy_heads, heads_view(dy, 1, attributes["heads"])[0]),
            *shared.drop(p, dropped, mask_work),
            partial(torch.bmm, dropped.mT, dy_flat, out=dv),
            partial(torch.bmm, dy_flat, v.mT, out=dp),
            *shared.drop(dp, dp, mask_work),
            partial(aten._softmax_backward_data.out, dp, p, -1, p.dtype, grad_input=dp),
            partial(product, dq, dp, k, out=dq),
            partial(product, dk, dp.mT, q, out=dk),
            copying(heads_view(outs[0], 3, attributes["heads"]), gradients),
        )

    def workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        packed, scores, by_heads = _explicit_shapes(ins[1], attributes["heads"])
        masks = [scores, *mask_workspace(context, scores.size, scores.dtype)] if attributes.get("p", 0.0) else []
        return [packed, packed, by_heads, scores, scores, *masks]

    return into(bind, workspace)


def _flash_forward(context: Context) -> Kernel:
    def bind(ins: Sequence[Any], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        q, k, v = heads_view(ins[0], 3, attributes["heads"])
        y, log_sum_exp = heads_view(outs[0], 1, attributes["heads"])[0], outs[1]
        if context.on_cpu:
            function = aten._scaled_dot_product_flash_attention_for_cpu.default
            run = partial(function, q, k, v, 0.0, True, scale=q.shape[-1] ** -0.5)
        else:
            function = aten._scaled_dot_product_flash_attention.default
            run = partial(function, q, k, v, 0.0, True, False, scale=q.shape[-1] ** -0.5)

        def launch() -> None:
            results = run()
            y.copy_(results[0])
            log_sum_exp.copy_(results[1])

        return launch

    return into(bind)


def _flash_backward(context: Context) -> Kernel:
    def bind(ins: Sequence[Any], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        dy, qkv, y, log_sum_exp, _ = ins
        heads = attributes["heads"]
        q, k, v = heads_view(qkv, 3, heads)
        dy, y = heads_view(dy, 1, heads)[0], heads_view(y, 1, heads)[0]
        scale, time = q.shape[-1] ** -0.5, q.shape[2]
        if context.on_cpu:
            function = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            run = partial(function, dy, q, k, v, y, log_sum_exp, 0.0, True, scale=scale)
        else:
            function = aten._scaled_dot_product_flash_attention_backward.default
            state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of the generator: unused without dropout
            empty = (None, None, time, time, 0.0, True, state, state)
            run = partial(function, dy, q, k, v, y, log_sum_exp, *empty, scale=scale)
        targets = heads_view(outs[0], 3, heads).unbind(0)

        def launch() -> None:
            for target, result in zip(targets, run(), strict=True):
                target.copy_(result)

        return launch

    return into(bind)


def _choosing(context: Context, explicit: Kernel, flash: Kernel, position: int) -> Kernel:
    """A row that goes one of two ways by the spec of qkv, input number `position`."""

    def chosen(qkv: TensorSpec, attributes: Attributes) -> Kernel:
        return explicit if explicit_is_chosen(context, qkv, attributes) else flash

    def bind(ins: Sequence[Any], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        qkv = ins[position]
        dtype = DType.BF16 if qkv.dtype is torch.bfloat16 else DType.FP32
        return chosen(TensorSpec(tuple(qkv.shape), dtype), attributes).bind(ins, outs, attributes, work)

    def workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        return chosen(ins[position], attributes).workspace_specs(ins, outs, attributes)

    return into(bind, workspace)


def attention_rows(context: Context) -> dict[str, tuple[Kernel, Kernel]]:
    """Both ways, forward and backward, by name."""
    return {
        "explicit": (_explicit_forward(context), _explicit_backward(context)),
        "flash": (_flash_forward(context), _flash_backward(context)),
    }


def table(context: Context) -> dict[str, Kernel]:
    ways = attention_rows(context)
    return {
        "softmax": _softmax(context),
        "softmax_grad": into(_softmax_grad),
        "self_attention": _choosing(context, ways["explicit"][0], ways["flash"][0], 0),
        "self_attention_grad": _choosing(context, ways["explicit"][1], ways["flash"][1], 1),
    }
