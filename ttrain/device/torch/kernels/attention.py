"""Softmax, and attention in two ways behind one row.

explicit: batched products over probabilities [B*H, rows, keys] in workspace, a block of query rows at a time; bf16
    products run on the matrix units.
flash: aten's blockwise attention, which never forms the probabilities; causal and without position bias only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from ttrain.core.attention_mask import HIDDEN, AttentionMask
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Kernel, Launch, chain
from ttrain.device.torch.kernels.common import (
    ROWS,
    TORCH_DTYPES,
    Attributes,
    Context,
    Given,
    Specs,
    Tensor,
    Tensors,
    copying,
    row,
    scaling,
)
from ttrain.device.torch.kernels.costs import fastest
from ttrain.device.torch.kernels.explicit import (
    Block,
    Documents,
    ScoreBias,
    by_heads,
    explicit_backward,
    explicit_forward,
    softmax_into,
    specs_by_heads,
)
from ttrain.device.torch.kernels.layout import heads_view

aten = torch.ops.aten


_ROWS = 64  # of scores that a mask is added to at a time


def _softmax_workspace(context: Context, ins: Given, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    plain = attributes["scale"] == 1.0 and attributes["mask"].is_full
    return [] if plain else [*_bias_workspace(ins[0], attributes), *_wide_copy(outs[0])]


def _bias_workspace(x: TensorSpec, attributes: Attributes) -> list[TensorSpec]:
    mask = attributes["mask"]
    return ScoreBias.workspace(mask, _ROWS, x.shape[-1], x.dtype.accumulation) if mask.biased else []


@row("softmax", _softmax_workspace, overwrites=(0,))
def _softmax(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    x, y, factor, mask = ins[0], outs[0], attributes["scale"], attributes["mask"]
    if factor == 1.0 and mask.is_full:
        return softmax_into(x, y)
    wide = y if x.dtype is not torch.bfloat16 else work[-1]
    launches = [copying(wide, x), *_biasing(wide, factor, mask, work), softmax_into(wide, wide)]
    return chain(*launches, *([] if wide is y else [copying(y, wide)]))


def _log_sum_exp_workspace(context: Context, ins: Given, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    return [*_bias_workspace(ins[0], attributes), ins[0].with_dtype(ins[0].dtype.accumulation)]


@row("log_sum_exp", _log_sum_exp_workspace)
def _log_sum_exp(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    scores, factor, mask = work[-1], attributes["scale"], attributes["mask"]
    biased = _biasing(scores, factor, mask, work)
    return chain(copying(scores, ins[0]), *biased, partial(torch.logsumexp, scores, -1, out=outs[0]))


def _biasing(x: Tensor, factor: float, mask: AttentionMask, work: Tensors) -> list[Launch]:
    """x <- factor x + the bias of a mask, for x [..., T, T]."""
    launches, time = scaling(x, factor), x.shape[-1]
    if mask.is_full:
        return launches
    by_heads = x.view(-1, x.shape[-3] if mask.biased else 1, time, time)
    bias = ScoreBias(mask, by_heads.shape[1], _ROWS, time, x, work[: 2 * mask.biased])
    for start in range(0, time, _ROWS):
        block = Block(start, min(start + _ROWS, time), range(time))
        launches += bias.adding(by_heads[:, :, block.start : block.stop], block)
    return launches


def _document_workspace(context: Context, ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    return Documents.workspace(ins[0], ins[0].shape[1])


@row("document_bias", _document_workspace)
def _document_bias(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    documents, bias = Documents(ins[0], work), outs[0]
    whole = Block(0, bias.shape[2], range(bias.shape[2]))
    return chain(*documents.starting(), partial(bias.fill_, 0.0), *documents.hiding(bias, whole, HIDDEN))


def _wide_copy(x: TensorSpec) -> list[TensorSpec]:
    return [] if x.dtype.accumulation is x.dtype else [x.with_dtype(x.dtype.accumulation)]


@row("softmax_grad", overwrites=(0, 1))
def _softmax_grad(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    dy, y = ins
    gradient = partial(aten._softmax_backward_data.out, dy, y, -1, y.dtype, grad_input=outs[0])
    return chain(gradient, *scaling(outs[0], attributes["scale"]))


# On the CPU the explicit way wins by far below, and its probabilities take too much memory above; measured in between.
MEASURED_FROM, MEASURED_UP_TO = 256, 4096


def explicit_is_chosen(context: Context, given: Sequence[TensorSpec | None], attributes: Attributes) -> bool:
    """Return whether attention forms its probabilities explicitly; forward and backward of one node agree.

    Flash attention knows no other mask than the causal one, no dropout, no keys of another width than values, and no
    heads that share keys.
    """
    q, _, v = specs_by_heads(given, attributes)
    if attributes.get("p", 0.0) or not attributes["mask"].is_causal or q != v:
        return True
    bf16, (_, _, time, width) = q.dtype is DType.BF16, q.shape
    if not context.on_cpu:
        return not (bf16 and width % 8 == 0 and width <= 256) or time <= (context.explicit_up_to or 0)
    if context.explicit_up_to is not None:
        return time <= context.explicit_up_to
    if not MEASURED_FROM < time <= MEASURED_UP_TO:
        return time <= MEASURED_FROM
    return _measured_way(context, q.dtype, time, width, torch.get_num_threads()) == "explicit"


@lru_cache(maxsize=64)
def _measured_way(context: Context, dtype: DType, time: int, width: int, threads: int) -> str:
    """The faster way, forward and backward together, by the table of costs; two heads stand for all."""

    def launches(way: str) -> Launch:
        heads, shape = 2, (1, time, 2 * width)
        qkv, y = TensorSpec((1, time, 6 * width), dtype), TensorSpec(shape, dtype)
        statistic = TensorSpec((1, heads, time), DType.FP32)
        attributes = {"heads": heads, "scale": width**-0.5, "mask": AttentionMask()}
        forward, backward = attention_rows(context)[way]

        def tensor(spec: TensorSpec) -> Tensor:
            return torch.full(spec.shape, 0.01, dtype=TORCH_DTYPES[spec.dtype])

        def bound(kernel: Kernel, ins: list[Any], given: list[Any], outs: list[TensorSpec], made: list[Any]) -> Launch:
            work = [tensor(spec) for spec in kernel.workspace_specs(ins, outs, attributes)]
            return kernel.bind(given, made, attributes, work)

        x, out, sums, dy, dx = tensor(qkv), tensor(y), tensor(statistic), tensor(y), tensor(qkv)
        no, rest = [None] * 2, [None] * 3
        first = bound(forward, [qkv, *no, *rest], [x, *no, *rest], [y, statistic], [out, sums])
        back = [y, qkv, *no, y, statistic, *rest], [dy, x, *no, out, sums, *rest]
        return chain(first, bound(backward, *back, [qkv], [dx]))

    ways = {way: partial(launches, way) for way in ("explicit", "flash")}
    return fastest(f"attention {dtype} time={time} width={width}", ways)


def _results(ins: Given, outs: Specs, attributes: Attributes) -> int:
    """Bytes of the tensors that aten returns, before they are copied."""
    return sum(spec.nbytes for spec in outs)


def _flash_forward(context: Context) -> Kernel:
    def bind(ins: Given, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
        q, k, v = by_heads(ins[:3], attributes)
        y, log_sum_exp = heads_view(outs[0], 1, attributes["heads"])[0], outs[1]
        scale = attributes["scale"]
        if context.on_cpu:
            function = aten._scaled_dot_product_flash_attention_for_cpu.default
            run = partial(function, q, k, v, 0.0, True, scale=scale)
        else:
            function = aten._scaled_dot_product_flash_attention.default
            run = partial(function, q, k, v, 0.0, True, False, scale=scale)

        def launch() -> None:
            results = run()
            y.copy_(results[0])
            log_sum_exp.copy_(results[1])

        return launch

    return Kernel(bind, outside=_results)


def _flash_backward(context: Context) -> Kernel:
    def bind(ins: Given, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
        heads, scale = attributes["heads"], attributes["scale"]
        q, k, v = by_heads(ins[1:4], attributes)
        dy, y = heads_view(ins[0], 1, heads)[0], heads_view(ins[4], 1, heads)[0]
        log_sum_exp, time = ins[5], q.shape[2]
        if context.on_cpu:
            function = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            run = partial(function, dy, q, k, v, y, log_sum_exp, 0.0, True, scale=scale)
        else:
            function = aten._scaled_dot_product_flash_attention_backward.default
            state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of the generator: unused without dropout
            empty = (None, None, time, time, 0.0, True, state, state)
            run = partial(function, dy, q, k, v, y, log_sum_exp, *empty, scale=scale)
        targets = by_heads(outs, attributes)

        def launch() -> None:
            for target, result in zip(targets, run(), strict=True):
                target.copy_(result)

        return launch

    return Kernel(bind, outside=_results)


def _choosing(context: Context, explicit: Kernel, flash: Kernel, start: int, bias: int) -> Kernel:
    """A row that goes one of two ways by the specs of queries, keys and values, the inputs from number `start` on.

    Neither way knows a bias, input number `bias`: such attention runs as its body. The explicit way alone knows
    documents and heads that share keys.
    """

    def chosen(ins: Sequence[TensorSpec | None], attributes: Attributes) -> Kernel:
        documents = ins[bias + 2] is not None
        return explicit if documents or explicit_is_chosen(context, ins[start : start + 3], attributes) else flash

    def bind(ins: Given, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
        # The dtype's being bf16 is all that the choice asks of it.
        specs = [
            None if x is None else TensorSpec(tuple(x.shape), DType.BF16 if x.dtype is torch.bfloat16 else DType.FP32)
            for x in ins
        ]
        return chosen(specs, attributes).bind(ins, outs, attributes, work)

    def workspace(ins: Given, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        return chosen(ins, attributes).workspace_specs(ins, outs, attributes)

    def outside(ins: Given, outs: Specs, attributes: Attributes) -> int:
        made = chosen(ins, attributes).outside
        return 0 if made is None else made(ins, outs, attributes)

    def supports(ins: Sequence[TensorSpec | None], attributes: Attributes) -> bool:
        return ins[bias] is None

    return Kernel(bind, workspace=workspace, outside=outside, supports=supports)


def attention_rows(context: Context) -> dict[str, tuple[Kernel, Kernel]]:
    """Both ways, forward and backward, by name."""
    return {
        "explicit": (explicit_forward(context), explicit_backward(context)),
        "flash": (_flash_forward(context), _flash_backward(context)),
    }


def _attention(context: Context) -> Kernel:
    (forward, _), (flash, _) = attention_rows(context).values()
    return _choosing(context, forward, flash, start=0, bias=3)


def _attention_grad(context: Context) -> Kernel:
    (_, backward), (_, flash) = attention_rows(context).values()
    return _choosing(context, backward, flash, start=1, bias=6)


ROWS.update(attention=_attention, attention_grad=_attention_grad)
