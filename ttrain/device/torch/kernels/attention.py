"""Softmax, and attention in two ways behind one row.

explicit: batched products over [B*H, T, T] probabilities in workspace; bf16 products run on the matrix units.
flash: aten's blockwise attention, which never forms the probabilities; causal and without position bias only.
"""

from __future__ import annotations

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
from ttrain.device.torch.kernels.explicit import (
    PACKED,
    SEPARATE,
    Form,
    bias_tensor,
    explicit_backward,
    explicit_forward,
    softmax_into,
)
from ttrain.device.torch.kernels.layout import heads_view

aten = torch.ops.aten


def _softmax(context: Context) -> Kernel:
    def bind(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        x, y, factor = ins[0], outs[0], attributes["scale"]
        if attributes["causal"]:
            shape = (-1, *x.shape[-2:])
            mask = causal_mask(x.shape[-1], work[0].dtype if work else x.dtype, x.device)
            return chain(*_biased_softmax(x.view(shape), y.view(shape), factor, mask, work))
        if x.dtype is not torch.bfloat16 or factor == 1.0:
            if factor == 1.0:
                return softmax_into(x, y)
            return chain(copying(y, x), *scaling(y, factor), softmax_into(y, y))
        return chain(
            copying(work[0], x), *scaling(work[0], factor), softmax_into(work[0], work[0]), copying(y, work[0])
        )

    def workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        plain = attributes["scale"] == 1.0 and not attributes["causal"]
        return [] if plain else _wide_copy(outs[0])

    return into(bind, workspace, overwrites=(0,))


def _masked_softmax(context: Context) -> Kernel:
    def bind(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        x, y, rules = ins[0], outs[0], (attributes["mask"], attributes["position_bias"])
        bias = bias_tensor(*rules, *x.shape[1:3], work[0].dtype if work else x.dtype, x.device)
        return chain(*_biased_softmax(x, y, attributes["scale"], bias, work))

    def workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        return _wide_copy(outs[0])

    return into(bind, workspace, overwrites=(0,))


def _wide_copy(x: TensorSpec) -> list[TensorSpec]:
    return [] if x.dtype.wide is x.dtype else [x.with_dtype(x.dtype.wide)]


def _biased_softmax(x: Tensor, y: Tensor, factor: float, bias: Tensor, work: Sequence[Tensor]) -> list[Launch]:
    """y <- softmax(factor x + bias) for x [..., T, T], through a wide copy where there is one."""
    if not work:
        return [partial(torch.add, bias, x, alpha=factor, out=y), softmax_into(y, y)]
    copy = work[0].view(x.shape)
    add = partial(torch.add, bias, copy, alpha=factor, out=copy)
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


def _flash_forward(context: Context, form: Form) -> Kernel:
    def bind(ins: Sequence[Any], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        q, k, v = form.views(ins[: form.count], attributes["heads"])
        y, log_sum_exp = heads_view(outs[0], 1, attributes["heads"])[0], outs[1]
        scale = attributes.get("scale", q.shape[-1] ** -0.5)
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

    return into(bind)


def _flash_backward(context: Context, form: Form) -> Kernel:
    def bind(ins: Sequence[Any], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        dy, given, (y, log_sum_exp) = ins[0], ins[1 : 1 + form.count], ins[1 + form.count : 3 + form.count]
        heads = attributes["heads"]
        q, k, v = form.views(given, heads)
        dy, y = heads_view(dy, 1, heads)[0], heads_view(y, 1, heads)[0]
        scale, time = attributes.get("scale", q.shape[-1] ** -0.5), q.shape[2]
        if context.on_cpu:
            function = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            run = partial(function, dy, q, k, v, y, log_sum_exp, 0.0, True, scale=scale)
        else:
            function = aten._scaled_dot_product_flash_attention_backward.default
            state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of the generator: unused without dropout
            empty = (None, None, time, time, 0.0, True, state, state)
            run = partial(function, dy, q, k, v, y, log_sum_exp, *empty, scale=scale)
        targets = form.views(outs, heads)

        def launch() -> None:
            for target, result in zip(targets, run(), strict=True):
                target.copy_(result)

        return launch

    return into(bind)


def _packed_is_explicit(context: Context, tensors: Specs, attributes: Attributes) -> bool:
    return explicit_is_chosen(context, tensors[0], attributes)


def _separate_is_explicit(context: Context, tensors: Specs, attributes: Attributes) -> bool:
    """Flash attention knows neither the pairs' mask nor a position bias, nor keys of another width than values."""
    q, _, v = tensors
    plain = attributes["mask"] == "causal" and attributes["position_bias"] != "distance" and q.shape == v.shape
    packed = q.with_shape(*q.shape[:2], 3 * q.shape[2])
    return not plain or explicit_is_chosen(context, packed, attributes)


def _choosing(context: Context, form: Form, explicit: Kernel, flash: Kernel, start: int) -> Kernel:
    """A row that goes one of two ways by the specs of queries, keys and values, the inputs from number `start` on."""
    is_explicit = _packed_is_explicit if form is PACKED else _separate_is_explicit

    def chosen(tensors: Specs, attributes: Attributes) -> Kernel:
        return explicit if is_explicit(context, tensors, attributes) else flash

    def bind(ins: Sequence[Any], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        # The dtype's being bf16 is all that the choice asks of it.
        specs = [
            TensorSpec(tuple(x.shape), DType.BF16 if x.dtype is torch.bfloat16 else DType.FP32)
            for x in ins[start : start + form.count]
        ]
        return chosen(specs, attributes).bind(ins, outs, attributes, work)

    def workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        return chosen(ins[start : start + form.count], attributes).workspace_specs(ins, outs, attributes)

    return into(bind, workspace)


def attention_rows(context: Context, form: Form = PACKED) -> dict[str, tuple[Kernel, Kernel]]:
    """Both ways, forward and backward, by name."""
    return {
        "explicit": (explicit_forward(context, form), explicit_backward(context, form)),
        "flash": (_flash_forward(context, form), _flash_backward(context, form)),
    }


def table(context: Context) -> dict[str, Kernel]:
    rows = {
        "softmax": _softmax(context),
        "softmax_grad": into(_softmax_grad, overwrites=(0, 1)),
        "masked_softmax": _masked_softmax(context),
    }
    for name, form in (("self_attention", PACKED), ("attention", SEPARATE)):
        ways = attention_rows(context, form)
        for direction, suffix in enumerate(("", "_grad")):
            explicit, flash = ways["explicit"][direction], ways["flash"][direction]
            rows[name + suffix] = _choosing(context, form, explicit, flash, direction)
    return rows
