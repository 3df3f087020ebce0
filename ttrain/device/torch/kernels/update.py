"""Update rows: they overwrite state. A group whose tensors lie side by side in every slot is updated as one vector.

Learning rate, step number and clip factor stay on the device: nothing here turns them into Python numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ttrain.core.spec import TensorSpec
from ttrain.device.base import Kernel, Launch
from ttrain.device.torch.kernels.common import (
    RUN_GAP,
    Attributes,
    Context,
    Specs,
    Tensor,
    chain,
    constant,
    copying,
    flatten,
    inplace,
    into,
)


def _assign(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
    return copying(ins[0], ins[1])


def _accumulate(context: Context) -> Kernel:
    def bind(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        state, value = ins
        if not work:
            return partial(torch.add, state, value, out=state)
        launches: list[Launch] = []
        size = work[0].numel()
        for part, given in zip(state.view(-1).split(size), value.view(-1).split(size), strict=True):
            widened = work[0][: part.numel()]
            launches += [copying(widened, given), partial(torch.add, part, widened, out=part)]
        return chain(*launches)

    def workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        state, value = ins
        return [] if state.dtype is value.dtype else [state.with_shape(max(min(state.size, context.block), 1))]

    return inplace(bind, workspace)


def _clip_factor(
    ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]
) -> Launch:
    norm, factor = ins[0], outs[0]
    number = partial(constant, dtype=norm.dtype, device=norm.device)
    return chain(
        partial(torch.add, norm, number(1e-6), out=factor),
        partial(torch.div, number(attributes["limit"]), factor, out=factor),
        partial(torch.clamp_max, factor, 1.0, out=factor),
    )


def _split(ins: Sequence[Any], count: int, scalars: int) -> tuple[list[list[Tensor]], list[Any]]:
    """Inputs of an optimizer: one list of `count` tensors per slot, then the scalars."""
    end = len(ins) - scalars
    return [list(ins[start : start + count]) for start in range(0, end, count)], list(ins[end:])


def _aligned_slots(slots: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """One vector per slot where the slots allow it, else the tensors as vectors."""
    flat = flatten(*slots)
    return [[view] for view in flat] if flat is not None else [[tensor.view(-1) for tensor in slot] for slot in slots]


def _gradient_workspace(context: Context, count: int, scaled: bool, ins: Specs) -> list[TensorSpec]:
    """Room for a chunk of scaled gradients in the parameters' dtype; none where they are used as they are."""
    parameters, gradients = ins[:count], ins[count : 2 * count]
    if not scaled and all(p.dtype is g.dtype for p, g in zip(parameters, gradients, strict=True)):
        return []
    total = sum(-(-spec.size // RUN_GAP) * RUN_GAP for spec in parameters)
    return [TensorSpec((min(total, context.block),), parameters[0].dtype)]


def _prepared(gradient: Tensor, factor: Tensor | None, scratch: Tensor) -> tuple[list[Launch], Tensor]:
    """The gradient in the scratch's dtype, multiplied by `factor`."""
    scratch = scratch[: gradient.numel()]
    if factor is None:
        return [copying(scratch, gradient)], scratch
    if gradient.dtype is scratch.dtype:
        return [partial(torch.mul, gradient, factor, out=scratch)], scratch
    return [copying(scratch, gradient), partial(torch.mul, scratch, factor, out=scratch)], scratch


Update = Callable[[list[list[Tensor]]], Launch]  # slots of vectors -> one launch that updates them


def _updating(
    slots: Sequence[Sequence[Tensor]], factor: Tensor | None, work: Sequence[Tensor], update: Update
) -> Launch:
    """The update of all slots, slot 1 holding the gradients: in one call, or chunk by chunk through scratch."""
    vectors = _aligned_slots(slots)
    if not work:
        return update(vectors)
    launches: list[Launch] = []
    for tensors in zip(*vectors, strict=True):
        for parts in zip(*(tensor.split(work[0].numel()) for tensor in tensors), strict=True):
            preparing, gradient = _prepared(parts[1], factor, work[0])
            launches += [*preparing, update([[parts[0]], [gradient], *([part] for part in parts[2:])])]
    return chain(*launches)


def _adamw(context: Context) -> Kernel:
    def bind(ins: Sequence[Any], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        slots, (lr, step, factor) = _split(ins, attributes["count"], 3)

        def update(vectors: list[list[Tensor]]) -> Launch:
            return partial(
                torch._fused_adamw_,
                *vectors,
                [],
                [step] * len(vectors[0]),
                lr=lr,
                beta1=attributes["beta1"],
                beta2=attributes["beta2"],
                weight_decay=attributes["weight_decay"],
                eps=attributes["eps"],
                amsgrad=False,
                maximize=False,
            )

        return _updating(slots, factor, work, update)

    def workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        return _gradient_workspace(context, attributes["count"], ins[-1] is not None, ins)

    return inplace(bind, workspace)


def _sgd(context: Context) -> Kernel:
    def bind(ins: Sequence[Any], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        slots, (lr, factor) = _split(ins, attributes["count"], 2)
        momentum = attributes["momentum"] if len(slots) == 3 else 0.0

        def update(vectors: list[list[Tensor]]) -> Launch:
            return partial(
                torch._fused_sgd_,
                vectors[0],
                vectors[1],
                vectors[2] if momentum else [],
                weight_decay=attributes["weight_decay"],
                momentum=momentum,
                lr=lr,
                dampening=0.0,
                nesterov=attributes["nesterov"],
                maximize=False,
                is_first_step=False,
            )

        return _updating(slots, factor, work, update)

    def workspace(ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
        return _gradient_workspace(context, attributes["count"], ins[-1] is not None, ins)

    return inplace(bind, workspace)


def _refresh(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
    count = attributes["count"]
    copies, parameters = _aligned_slots([ins[:count], ins[count:]])
    return chain(*(copying(copy, parameter) for copy, parameter in zip(copies, parameters, strict=True)))


def table(context: Context) -> dict[str, Kernel]:
    return {
        "assign": inplace(_assign),
        "accumulate": _accumulate(context),
        "clip_factor": into(_clip_factor),
        "adamw_update": _adamw(context),
        "sgd_update": _sgd(context),
        "refresh": inplace(_refresh),
    }
