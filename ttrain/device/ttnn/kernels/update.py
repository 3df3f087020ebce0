"""The update stage. State is joined into stacks, so that one launch serves all parameters of a group (see stack.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ttrain.core.spec import DType
from ttrain.device.base import Kernel, Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, inplace, into
from ttrain.device.ttnn.tensors.held import Held
from ttrain.device.ttnn.tensors.stack import stacked


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
            scaled = inverse if limit == 1.0 else tt.multiply(inverse, limit)
            tt.minimum(scaled, 1.0, output_tensor=factor.t)

        return run

    return into(build)


Joined = Any  # a stack or a tensor by itself: both have `t` and `form`


@dataclass
class UpdateGroup:
    """What one chain of launches updates: a buffer per written slot, and the gradients in the same arrangement."""

    slots: list[Joined]
    gradients: Joined


def groups_of(c: Context, gradients: Sequence[Held], slots: Sequence[Sequence[Held]]) -> list[UpdateGroup]:
    joined = [stacked(c.store, tensors) for tensors in (gradients, *slots)]
    return [UpdateGroup(list(rest), first) for first, *rest in zip(*joined, strict=True)]


def _adamw(c: Context) -> Kernel:
    """The update of op adamw_update with lr' = lr sqrt(1 - b2^t) / (1 - b1^t) and eps' = eps sqrt(1 - b2^t):

    p <- p (1 - lr weight_decay) - lr' m / (sqrt(v) + eps'), which is the same. Both are step inputs that the host works
    out in double precision.
    """

    def build(ins: Sequence[Any], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        count = attributes["count"]
        p, g, m, v = (list(ins[start : start + count]) for start in range(0, 4 * count, count))
        rates = Rates(c, ins[4 * count], ins[4 * count + 1], attributes)
        factor = ins[4 * count + 2]
        launches = [_adamw_group(c, group, rates, factor, attributes) for group in groups_of(c, g, [p, m, v])]
        return each(launches)

    return inplace(build)


class Rates:
    """Scalars of AdamW as tensors."""

    def __init__(self, c: Context, lr: Held, step: Held, attributes: Attributes) -> None:
        self.lr, self.step = lr, step
        beta1, beta2, eps = attributes["beta1"], attributes["beta2"], attributes["eps"]
        decay = attributes["weight_decay"]

        def root(t: float) -> float:
            return math.sqrt(1 - beta2**t)

        self.rate = c.derived([lr, step], lambda rate, t: rate * root(t) / (1 - beta1**t) if t else 0.0)
        self.eps = c.derived([step], lambda t: eps * root(t))
        self.keep = c.derived([lr], lambda rate: 1 - rate * decay) if decay else None


def _adamw_group(c: Context, group: UpdateGroup, rates: Rates, factor: Held | None, attributes: Attributes) -> Launch:
    """fp32 state in elementwise launches; bf16 state by ttnn's kernel, which takes its rates as numbers."""
    if group.slots[0].form.dtype == "float32":
        return adamw_wide(c, group, rates, factor, attributes)
    if c.fused and not c.replayed:
        return _adamw_fused(c, group, rates, factor, attributes)
    return _adamw_narrow(c, group, rates, factor, attributes)


def _adamw_fused(c: Context, group: UpdateGroup, rates: Rates, factor: Held | None, attributes: Attributes) -> Launch:
    tt, (p, m, v), gradients = c.tt, group.slots, group.gradients
    settings = [attributes[key] for key in ("beta1", "beta2", "eps", "weight_decay")]

    def run() -> None:
        g = gradients.t if factor is None else tt.multiply(gradients.t, factor.t)
        numbers = [rates.lr.value, *settings, int(rates.step.value or 0), False]
        outputs = {"param_out": p.t, "exp_avg_out": m.t, "exp_avg_sq_out": v.t}
        tt.operations.moreh.adamw(p.t, g, m.t, v.t, *numbers, **outputs, **c.exact)

    return run


@dataclass
class _Buffer:
    """A tensor that exists for the time of one launch."""

    t: Any


def _adamw_narrow(c: Context, group: UpdateGroup, rates: Rates, factor: Held | None, attributes: Attributes) -> Launch:
    """bf16 state, computed on in fp32."""
    return on_wide(c, group, lambda wide: adamw_wide(c, wide, rates, factor, attributes))


def on_wide(
    c: Context,
    group: UpdateGroup,
    update: Callable[[UpdateGroup], Launch],
    rounding: Callable[[int, Any], None] | None = None,
) -> Launch:
    """An update of fp32 tensors on state of which some is bf16: widened before, rounded after.

    `rounding` turns the fp32 numbers of a slot into numbers that bf16 has.
    """
    tt = c.tt
    narrow = [slot.form.dtype != "float32" for slot in group.slots]
    wide = UpdateGroup(
        [_Buffer(None) if cut else slot for cut, slot in zip(narrow, group.slots, strict=True)], group.gradients
    )
    launch = update(wide)

    def run() -> None:
        for slot, temporary, cut in zip(group.slots, wide.slots, narrow, strict=True):
            if cut:
                temporary.t = tt.typecast(slot.t, tt.float32)
        launch()
        for number, (slot, temporary) in enumerate(zip(group.slots, wide.slots, strict=True)):
            if narrow[number]:
                if rounding is not None:
                    rounding(number, temporary)
                tt.typecast(temporary.t, tt.bfloat16, output_tensor=slot.t)
                temporary.t = None

    return run


def adamw_wide(c: Context, group: UpdateGroup, rates: Rates, factor: Held | None, attributes: Attributes) -> Launch:
    tt, (p, m, v), gradients = c.tt, group.slots, group.gradients
    beta1, beta2 = attributes["beta1"], attributes["beta2"]
    root = [tt.UnaryOpType.SQRT]
    wide = tt.float32

    def run() -> None:
        g = gradients.t
        scaled = tt.typecast(g, wide) if factor is None else tt.multiply(g, factor.t, dtype=wide)
        tt.lerp(m.t, scaled, 1 - beta1, output_tensor=m.t)
        tt.square(scaled, output_tensor=scaled)
        tt.lerp(v.t, scaled, 1 - beta2, output_tensor=v.t)
        tt.add(v.t, rates.eps.t, input_tensor_a_activations=root, output_tensor=scaled)
        tt.div(m.t, scaled, output_tensor=scaled)
        if rates.keep is not None:
            tt.multiply(p.t, rates.keep.t, output_tensor=p.t)
        tt.addcmul(p.t, scaled, rates.rate.t, value=-1.0, output_tensor=p.t)

    return run


def _sgd(c: Context) -> Kernel:
    def build(ins: Sequence[Any], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        count, momentum = attributes["count"], bool(attributes["momentum"])
        lists = [list(ins[start : start + count]) for start in range(0, (3 if momentum else 2) * count, count)]
        lr, factor = ins[len(lists) * count :]
        groups = groups_of(c, lists[1], [lists[0], *lists[2:]])
        return each([_sgd_group(c, group, lr, factor, attributes) for group in groups])

    return inplace(build)


def _sgd_group(c: Context, group: UpdateGroup, lr: Held, factor: Held | None, attributes: Attributes) -> Launch:
    if group.slots[0].form.dtype == "float32":
        return sgd_wide(c, group, lr, factor, attributes)
    return on_wide(c, group, lambda wide: sgd_wide(c, wide, lr, factor, attributes))


def sgd_wide(c: Context, group: UpdateGroup, lr: Held, factor: Held | None, attributes: Attributes) -> Launch:
    tt, p, gradients = c.tt, group.slots[0], group.gradients
    velocity = group.slots[1] if len(group.slots) > 1 else None
    momentum, decay, nesterov = attributes["momentum"], attributes["weight_decay"], attributes["nesterov"]
    one = c.ones_row(1, DType.FP32)

    def run() -> None:
        g = gradients.t
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

    return run


def _refresh(c: Context) -> Kernel:
    """The copies that layers read lie as their masters do: one rounding for a whole stack."""

    def build(ins: Sequence[Held], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        count = attributes["count"]
        pairs = zip(stacked(c.store, ins[:count]), stacked(c.store, ins[count:]), strict=True)
        return each([_rounded(c, copy, master) for copy, master in pairs])

    return inplace(build)


def _rounded(c: Context, copy: Joined, master: Joined) -> Launch:
    dtype = getattr(c.tt, copy.form.dtype)
    return lambda: c.tt.typecast(master.t, dtype, output_tensor=copy.t)


def each(launches: Sequence[Launch]) -> Launch:
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
