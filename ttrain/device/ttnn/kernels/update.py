"""The update stage. Optimizer state is joined into stacks, so that a launch serves many parameters (see stack.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ttrain.core.spec import DType
from ttrain.device.base import Kernel, Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, inplace, into
from ttrain.device.ttnn.kernels.reduce import gather
from ttrain.device.ttnn.stack import Stack, stackable
from ttrain.device.ttnn.tensors import Held


def _assign(c: Context) -> Kernel:
    def build(ins: Sequence[Held], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        state, value = ins
        return lambda: c.tt.copy(value.t, state.t)

    return inplace(build)


def _accumulate(c: Context) -> Kernel:
    def build(ins: Sequence[Held], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        state, value = ins
        return lambda: c.tt.add(state.t, value.t, output_tensor=state.t)

    return inplace(build)


def _clip_factor(c: Context) -> Kernel:
    def build(ins: Sequence[Held], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        (norm,), (factor,), limit, tt = ins, outs, attributes["limit"], c.tt

        def run() -> None:
            inverse = tt.add(norm.t, 1e-6, activations=[tt.UnaryOpType.RECIP])
            tt.minimum(tt.multiply(inverse, limit), 1.0, output_tensor=factor.t)

        return run

    return into(build)


def stack_of(c: Context, members: Sequence[Held]) -> Stack:
    """The stack of these buffers; made at the first call, when their values are still on the host."""
    stack = members[0].stack
    return Stack(c.store, members) if stack is None or stack.members != list(members) else stack


@dataclass
class _Group:
    """One stack per written slot, and the launch that returns their gradients as one tensor."""

    slots: list[Stack]
    gradients: Launch


def _groups(c: Context, gradients: Sequence[Held], slots: Sequence[Sequence[Held]], least: int) -> list[_Group]:
    groups = stackable([held.spec.shape for held in slots[0]], least)
    joins = gather(c, gradients, groups)
    return [
        _Group([stack_of(c, [slot[i] for i in group]) for slot in slots], join)
        for group, join in zip(groups, joins, strict=True)
    ]


def _adamw(c: Context) -> Kernel:
    """The update of op adamw_update with lr' = lr sqrt(1 - b2^t) / (1 - b1^t) and eps' = eps sqrt(1 - b2^t):

    p <- p (1 - lr weight_decay) - lr' m / (sqrt(v) + eps'), which is the same. Both are step inputs that the host works
    out in double precision.
    """

    def build(ins: Sequence[Any], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        count = attributes["count"]
        p, g, m, v = (list(ins[start : start + count]) for start in range(0, 4 * count, count))
        rates = _Rates(c, ins[4 * count], ins[4 * count + 1], attributes)
        factor = ins[4 * count + 2]
        launches = [_adamw_group(c, group, rates, factor, attributes) for group in _groups(c, g, [p, m, v], least=3)]
        return _each(launches)

    return inplace(build)


class _Rates:
    """Scalars of AdamW as tensors."""

    def __init__(self, c: Context, lr: Held, step: Held, attributes: Attributes) -> None:
        beta1, beta2, eps = attributes["beta1"], attributes["beta2"], attributes["eps"]
        decay = attributes["weight_decay"]

        def root(t: float) -> float:
            return math.sqrt(1 - beta2**t)

        self.rate = c.derived([lr, step], lambda rate, t: rate * root(t) / (1 - beta1**t) if t else 0.0)
        self.eps = c.derived([step], lambda t: eps * root(t))
        self.keep = c.derived([lr], lambda rate: 1 - rate * decay) if decay else None


def _adamw_group(c: Context, group: _Group, rates: _Rates, factor: Held | None, attributes: Attributes) -> Launch:
    tt, (p, m, v), gradients = c.tt, group.slots, group.gradients
    beta1, beta2 = attributes["beta1"], attributes["beta2"]
    root = [tt.UnaryOpType.SQRT]
    wide = tt.float32

    def run() -> None:
        g = gradients()
        scaled = tt.typecast(g, wide) if factor is None else tt.multiply(g, factor.t, dtype=wide)
        tt.lerp(m.t, scaled, 1 - beta1, output_tensor=m.t)
        tt.square(scaled, output_tensor=scaled)
        tt.lerp(v.t, scaled, 1 - beta2, output_tensor=v.t)
        tt.add(v.t, rates.eps.t, input_tensor_a_activations=root, output_tensor=scaled)
        tt.div(m.t, scaled, output_tensor=scaled)
        if rates.keep is not None:
            tt.multiply(p.t, rates.keep.t, output_tensor=p.t)
        tt.addcmul(p.t, scaled, rates.rate.t, value=-1.0, output_tensor=p.t)
        p.publish()

    return run


def _sgd(c: Context) -> Kernel:
    def build(ins: Sequence[Any], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        count, momentum = attributes["count"], bool(attributes["momentum"])
        lists = [list(ins[start : start + count]) for start in range(0, (3 if momentum else 2) * count, count)]
        lr, factor = ins[len(lists) * count :]
        slots = [lists[0], *lists[2:]]
        groups = _groups(c, lists[1], slots, least=4 if momentum or attributes["weight_decay"] else 1 << 30)
        return _each([_sgd_group(c, group, lr, factor, attributes) for group in groups])

    return inplace(build)


def _sgd_group(c: Context, group: _Group, lr: Held, factor: Held | None, attributes: Attributes) -> Launch:
    tt, p, gradients = c.tt, group.slots[0], group.gradients
    velocity = group.slots[1] if len(group.slots) > 1 else None
    momentum, decay, nesterov = attributes["momentum"], attributes["weight_decay"], attributes["nesterov"]
    one = c.ones_row(1, DType.FP32)

    def run() -> None:
        g = gradients()
        if factor is not None:
            g = tt.multiply(g, factor.t, dtype=tt.float32)
        elif g.dtype != tt.float32:
            g = tt.typecast(g, tt.float32)
        if decay:
            g = tt.addcmul(g, p.t, one.t, value=decay)
        if velocity is not None:
            tt.addcmul(g, velocity.t, one.t, value=momentum, output_tensor=velocity.t)
            g = tt.addcmul(g, velocity.t, one.t, value=momentum) if nesterov else velocity.t
        tt.addcmul(p.t, g, lr.t, value=-1.0, output_tensor=p.t)
        p.publish()

    return run


def _refresh(c: Context) -> Kernel:
    """Every stack is rounded once, then cut into the copies that layers read."""

    def build(ins: Sequence[Held], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        count = attributes["count"]
        copies, parameters = list(ins[:count]), list(ins[count:])
        by_stack: dict[int, tuple[Stack | None, list[Held], list[Held]]] = {}
        for copy, parameter in zip(copies, parameters, strict=True):
            stack = parameter.stack
            entry = by_stack.setdefault(id(stack or parameter), (stack, [], []))
            entry[1].append(parameter)
            entry[2].append(copy)
        return _each([_refresh_group(c, *entry) for entry in by_stack.values()])

    return inplace(build)


def _refresh_group(c: Context, stack: Stack | None, parameters: list[Held], copies: list[Held]) -> Launch:
    tt = c.tt
    dtype = getattr(tt, copies[0].form.dtype)
    if stack is None or len(stack.members) == 1:
        source: Callable[[], Any] = (lambda: parameters[0].t) if stack is None else (lambda: stack.t)
        return lambda: tt.typecast(source(), dtype, output_tensor=copies[0].t)
    order = [copies[parameters.index(member)] for member in stack.members]
    return lambda: stack.spread(tt.typecast(stack.t, dtype), order)


def _each(launches: Sequence[Launch]) -> Launch:
    def run() -> None:
        for launch in launches:
            launch()

    return run


def table(c: Context) -> dict[str, Kernel]:
    return {
        "assign": _assign(c),
        "accumulate": _accumulate(c),
        "clip_factor": _clip_factor(c),
        "adamw_update": _adamw(c),
        "sgd_update": _sgd(c),
        "refresh": _refresh(c),
    }
