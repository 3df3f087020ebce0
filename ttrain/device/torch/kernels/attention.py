"""Softmax, and causal self-attention in two ways behind one row.

explicit: batched products over [B*H, T, T] probabilities in workspace; bf16 products run on the matrix units.
flash: aten's blockwise attention, which never forms the probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Kernel, Launch
from ttrain.device.torch.kernels.common import (
    TORCH_DTYPES,
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
from ttrain.device.torch.kernels.costs import fastest
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
        return chain(
            copying(work[0], x), *scaling(work[0], factor), softmax_into(work[0], work[0]), copying(y, work[0])
        )

    def workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        x = outs[0]
        plain = attributes["scale"] == 1.0 and not attributes["causal"]
        return [] if x.dtype.wide is x.dtype or plain else [x.with_dtype(x.dtype.wide)]

    return into(bind, workspace, overwrites=(0,))


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


# On the CPU the explicit way wins by far below, and its probabilities take too much memory above; measured in between.
MEASURED_FROM, MEASURED_UP_TO = 256, 4096


def explicit_is_chosen(context: Context, qkv: TensorSpec, attributes: Attributes) -> bool:
    """Which way a shape goes; forward and backward of one node agree."""
    bf16, time = qkv.dtype is DType.BF16, qkv.shape[1]
    if attributes.get("p", 0.0):
        return True
    if not context.on_cpu:
        width = qkv.shape[2] // (3 * attributes["heads"])
        return not (bf16 and width % 8 == 0 and width <= 256) or time <= (context.explicit_up_to or 0)
    if context.explicit_up_to is not None:
        return time <= context.explicit_up_to
    if not MEASURED_FROM < time <= MEASURED_UP_TO:
        return time <= MEASURED_FROM
    width = qkv.shape[2] // (3 * attributes["heads"])
    return _measured_way(context, qkv.dtype, time, width, torch.get_num_threads()) == "explicit"


@lru_cache(maxsize=64)
def _measured_way(context: Context, dtype: DType, time: int, width: int, threads: int) -> str:
    """The faster way, forward and backward together, by the table of costs; two heads stand for all."""

    def launches(way: str) -> Launch:
        heads, shape = 2, (1, time, 2 * width)
        qkv, y = TensorSpec((1, time, 6 * width), dtype), TensorSpec(shape, dtype)
        statistic, attributes = TensorSpec((1, heads, time), DType.FP32), {"heads": heads}
        forward, backward = attention_rows(context)[way]

        def tensor(spec: TensorSpec) -> Tensor:
            return torch.full(spec.shape, 0.01, dtype=TORCH_DTYPES[spec.dtype])

        def bound(kernel: Kernel, ins: list[TensorSpec], given: list[Tensor], outs: list[TensorSpec]) -> Launch:
            work = [tensor(spec) for spec in kernel.workspace_specs([*ins, None], outs, attributes)]
            made = given[len(ins) :]
            return kernel.bind([*given[: len(ins)], None], made, attributes, work)

        x, out, sums, dy, dx = tensor(qkv), tensor(y), tensor(statistic), tensor(y), tensor(qkv)
        first = bound(forward, [qkv], [x, out, sums], [y, statistic])
        return chain(first, bound(backward, [y, qkv, y, statistic], [dy, x, out, sums, dx], [qkv]))

    ways = {way: partial(launches, way) for way in ("explicit", "flash")}
    return fastest(f"self_attention {dtype} time={time} width={width}", ways)


class _Operand:
    """Queries, keys, values or output gradients as bmm takes them: [B*H, rows, D].

    oneDNN copies an operand that isn't contiguous, into memory of its own, so in bf16 every range of rows is packed by
    itself. Other products take slices of one packed tensor.
    """

    def __init__(self, source: Tensor, scratch: Tensor) -> None:
        self.source, self.scratch = source, scratch  # [B, H, T, D], strided and packed
        self.sliced = source.dtype is not torch.bfloat16

    def packing(self) -> list[Launch]:
        """Once, before the first range."""
        return [copying(self.scratch, self.source)] if self.sliced else []

    def rows(self, start: int, stop: int) -> tuple[list[Launch], Tensor]:
        """Launches that make the rows ready, and the rows."""
        if self.sliced:
            return [], self.scratch.flatten(0, 1)[:, start:stop]
        shape = (*self.scratch.shape[:2], stop - start, self.scratch.shape[3])
        packed = _shaped(self.scratch, shape)
        return [copying(packed, self.source[:, :, start:stop])], packed.flatten(0, 1)


def _shaped(scratch: Tensor, shape: Sequence[int]) -> Tensor:
    """The first elements of a scratch buffer under another shape."""
    return scratch.view(-1)[: math.prod(shape)].view(shape)


class _Explicit:
    """What forward and backward share: blocks of query rows, each with the keys up to its last row."""

    def __init__(self, context: Context, qkv: Tensor, seed: Tensor | None, attributes: Attributes) -> None:
        self.context, self.seed, self.heads = context, seed, attributes["heads"]
        self.p, self.stream = attributes.get("p", 0.0), attributes.get("stream", 0)
        self.parts = heads_view(qkv, 3, self.heads)  # [3, B, H, T, D]
        self.time, width = self.parts.shape[3:]
        self.scale = width**-0.5
        step = _query_rows(context, self.time, qkv.dtype is torch.bfloat16, self.p)
        self.blocks = [(start, min(start + step, self.time)) for start in range(0, self.time, step)]

    def probabilities(self, q: Tensor, k: Tensor, scores: Tensor) -> list[Launch]:
        """scores <- mask + scale q k^T, then their softmax in place: two launches."""
        rows, columns = scores.shape[1:]
        mask = causal_mask(self.time, scores.dtype, scores.device)[columns - rows : columns, :columns]
        product = partial(torch.baddbmm, mask, q, k.mT, beta=1, alpha=self.scale, out=scores)
        return [product, softmax_into(scores, scores)]

    def drop(self, x: Tensor, y: Tensor, work: Sequence[Tensor]) -> list[Launch]:
        """y <- x with dropout; nothing without. Only where one block holds all rows, whose index the mask hashes."""
        if not self.p:
            return []
        assert self.seed is not None
        return [masking(self.context, x, y, self.seed, self.p, self.stream, work)]


def _query_rows(context: Context, time: int, bf16: bool, p: float) -> int:
    """Few rows skip more of what the mask hides, many make larger products. Dropout hashes indices of whole rows."""
    if p or not (context.on_cpu or context.query_rows):
        return time
    short, long = (64, 128) if bf16 else (32, 64)
    return min(time, context.query_rows or (short if time < 512 else long))


def _explicit_specs(context: Context, qkv: TensorSpec, attributes: Attributes) -> tuple[TensorSpec, TensorSpec]:
    """Specs of one tensor by heads and of one block's scores."""
    heads, (batch, time, packed) = attributes["heads"], qkv.shape
    rows = _query_rows(context, time, qkv.dtype is DType.BF16, attributes.get("p", 0.0))
    by_heads = qkv.with_shape(batch, heads, time, packed // (3 * heads))
    return by_heads, qkv.with_shape(batch * heads, rows, time)


def _explicit_forward(context: Context) -> Kernel:
    def bind(ins: Sequence[Any], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        shared = _Explicit(context, ins[0], ins[1], attributes)
        operands = [_Operand(part, scratch) for part, scratch in zip(shared.parts, work[:3], strict=True)]
        results, all_scores, diagonal, *mask_work = work[3:]
        y, log_sum_exp = heads_view(outs[0], 1, shared.heads)[0], outs[1].flatten(0, 1)
        launches = [launch for operand in operands for launch in operand.packing()]
        for start, stop in shared.blocks:
            (pack_q, q), (pack_k, k) = operands[0].rows(start, stop), operands[1].rows(0, stop)
            pack_v, v = operands[2].rows(0, stop)
            scores = _shaped(all_scores, (q.shape[0], stop - start, stop))
            result = _shaped(results, (*y.shape[:2], stop - start, y.shape[3]))
            product, softmax = shared.probabilities(q, k, scores)
            own = scores.diagonal(start, 1, 2)
            picked, statistic = _shaped(diagonal, own.shape), log_sum_exp[:, start:stop]
            launches += [*pack_q, *pack_k, *pack_v, product, copying(statistic, own), softmax]
            launches += _log_sum_exp(own, picked, statistic)
            launches += [
                *shared.drop(scores, scores, mask_work),
                partial(torch.bmm, scores, v, out=result.flatten(0, 1)),
                copying(y[:, :, start:stop], result),
            ]
        return chain(*launches)

    def workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        by_heads, scores = _explicit_specs(context, ins[0], attributes)
        diagonal = scores.with_shape(scores.shape[0] * scores.shape[1]).with_dtype(scores.dtype.wide)
        masks = mask_workspace(context, scores.size, scores.dtype) if attributes.get("p", 0.0) else []
        return [by_heads] * 4 + [scores, diagonal, *masks]

    return into(bind, workspace)


def _log_sum_exp(own: Tensor, picked: Tensor, statistic: Tensor) -> list[Launch]:
    """statistic <- log sum exp of a row, which is any score of it less the log of that score's probability.

    The score of a row's own time step is at hand. A probability that underflows is taken as the smallest normal one;
    backward on this way doesn't read the statistic.
    """
    return [
        copying(picked, own),
        partial(torch.clamp_min, picked, torch.finfo(picked.dtype).tiny, out=picked),
        partial(torch.log, picked, out=picked),
        partial(torch.sub, statistic, picked, out=statistic),
    ]


def _explicit_backward(context: Context) -> Kernel:
    def bind(ins: Sequence[Any], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        dy, qkv, _, _, seed = ins
        shared = _Explicit(context, qkv, seed, attributes)
        sources = (*shared.parts, heads_view(dy, 1, shared.heads)[0])
        operands = [_Operand(source, scratch) for source, scratch in zip(sources, work[:4], strict=True)]
        dq, dk, dv, all_p, all_dp, *rest = work[4:]
        all_dropped, mask_work = (rest[0], rest[1:]) if rest else (all_p, [])
        targets = heads_view(outs[0], 3, shared.heads)
        launches = [launch for operand in operands for launch in operand.packing()]
        for start, stop in reversed(shared.blocks):  # the last block writes all of dk and dv, the others add
            (pack_q, q), (pack_k, k) = operands[0].rows(start, stop), operands[1].rows(0, stop)
            (pack_v, v), (pack_dy, dy_rows) = operands[2].rows(0, stop), operands[3].rows(start, stop)
            shape = (q.shape[0], stop - start, stop)
            p, dp, dropped = (_shaped(scratch, shape) for scratch in (all_p, all_dp, all_dropped))
            dq_rows = _shaped(dq, (*dq.shape[:2], stop - start, dq.shape[3]))
            dk_rows, dv_rows = dk.flatten(0, 1)[:, :stop], dv.flatten(0, 1)[:, :stop]
            beta = 0 if stop == shared.time else 1
            launches += [
                *(*pack_q, *pack_k, *pack_v, *pack_dy),
                *shared.probabilities(q, k, p),
                *shared.drop(p, dropped, mask_work),
                partial(torch.baddbmm, dv_rows, dropped.mT, dy_rows, beta=beta, out=dv_rows),
                partial(torch.bmm, dy_rows, v.mT, out=dp),
                *shared.drop(dp, dp, mask_work),
                partial(aten._softmax_backward_data.out, dp, p, -1, p.dtype, grad_input=dp),
                _scaled_product(dp, k, shared.scale, dq_rows.flatten(0, 1)),
                partial(torch.baddbmm, dk_rows, dp.mT, q, beta=beta, alpha=shared.scale, out=dk_rows),
                copying(targets[0][:, :, start:stop], dq_rows),
            ]
        return chain(*launches, copying(targets[1], dk), copying(targets[2], dv))

    def workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        by_heads, scores = _explicit_specs(context, ins[1], attributes)
        masks = [scores, *mask_workspace(context, scores.size, scores.dtype)] if attributes.get("p", 0.0) else []
        return [by_heads] * 7 + [scores, scores, *masks]

    return into(bind, workspace)


def _scaled_product(a: Tensor, b: Tensor, scale: float, out: Tensor) -> Launch:
    """out <- scale a b."""
    return partial(torch.baddbmm, out, a, b, beta=0, alpha=scale, out=out)


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
        dtype = DType.BF16 if qkv.dtype is torch.bfloat16 else DType.FP32  # all that the choice asks
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
        "softmax_grad": into(_softmax_grad, overwrites=(0, 1)),
        "self_attention": _choosing(context, ways["explicit"][0], ways["flash"][0], 0),
        "self_attention_grad": _choosing(context, ways["explicit"][1], ways["flash"][1], 1),
    }
