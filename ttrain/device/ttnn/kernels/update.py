"""The update stage. State is joined into stacks, so that one launch serves all parameters of a group.

State in bf16 is widened to fp32 a piece at a time, so that what is saved by keeping it in bf16 is not asked for again
during the update. Random bits of rounding come from core/random_bits.py; an element's number is its place in the
stack, which is another than on a CPU, so the bits differ from those drawn there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt, prod
from typing import Any

import numpy as np

from ttrain.device.base import Delivery, Launch, chain, split_update
from ttrain.device.ttnn.kernels.common import Context, row
from ttrain.device.ttnn.kernels.elementwise import CALLS, key_of, mix_into
from ttrain.device.ttnn.tensors.device_tensor import DeviceTensor, Stack, stacked
from ttrain.device.ttnn.tensors.store import TILE, TileLayout

Joined = Any  # a stack, a tensor by itself or a part of a stack: all have `t` and `layout`


@dataclass
class Part:
    """Rows of a stack, or a tensor that exists for the time of one launch."""

    t: Any
    layout: TileLayout


Update = Callable[[Sequence[Joined], Joined], None]  # launches one update of what is written, from gradients
Rounded = Callable[[int, Part], None]  # turns the fp32 numbers of a slot into numbers that bf16 has


def scaled_gradient(c: Context, gradient: Any, factor: DeviceTensor | None) -> Any:
    """Return a new fp32 tensor: the gradient times the clip factor."""
    tt = c.tt
    return tt.typecast(gradient, tt.float32) if factor is None else tt.multiply(gradient, factor.t, dtype=tt.float32)


def on_wide(
    c: Context, slots: Sequence[Joined], gradients: Joined, update: Update, rounding: Rounded | None = None
) -> Launch:
    """Return an update of fp32 tensors on state of which some is bf16: widened before, rounded after."""
    tt = c.tt
    wide = {number: Part(None, slot.layout) for number, slot in enumerate(slots) if slot.layout.dtype != "float32"}
    launch = partial(update, [wide.get(number, slot) for number, slot in enumerate(slots)], gradients)

    def run() -> None:
        for number, part in wide.items():
            part.t = tt.typecast(slots[number].t, tt.float32)
        launch()
        for number, part in wide.items():
            if rounding is not None:
                rounding(number, part)
            tt.typecast(part.t, tt.bfloat16, output_tensor=slots[number].t)
            part.t = None

    return run if wide else launch


PIECE = 2**23  # elements that are widened at a time
_LOW, _HIGH = 0xFFFF, -0x10000  # the bits of a fp32 number that a bf16 number lacks, and those that it has


def pieces(c: Context, tensors: list[Joined]) -> Iterator[tuple[int, list[Joined]]]:
    """Cut stacks alike where they begin a bank anew. Yield the number of the first element, and the parts."""
    if not isinstance(tensors[0], Stack):
        yield 0, tensors
        return
    rows, width = tensors[0].layout.shape
    unit = c.store.banks * TILE
    length = max(1, PIECE // (unit * width)) * unit
    for start in range(0, rows, length):
        count = min(length, rows - start)
        yield (
            start * width,
            [
                Part(c.tt.narrow(whole.t, 0, start, count), TileLayout((count, width), whole.layout.dtype))
                for whole in tensors
            ],
        )


def rounding_of(c: Context, numbers: Sequence[int], stream: int, seed: Any) -> Callable[[TileLayout, int], Rounded]:
    """Return a function of a layout and its first element's number that returns the stochastic rounding of slots."""
    tt = c.tt

    def counter(shape: tuple[int, ...], count: int, stride: int) -> DeviceTensor:
        """0, stride, 2 stride and so on, as int32 that wraps."""

        def values() -> np.ndarray:
            return (np.arange(count, dtype=np.int64) * stride).astype(np.uint32).view(np.int32).reshape(shape)

        return c.constant(("counter", stride), TileLayout(shape, "int32"), values)

    def made(layout: TileLayout, first: int) -> Rounded:
        shape = _seen_as(layout)
        row = counter((*shape[:-1], 1), prod(shape[:-1]), shape[-1])
        column = counter((1,) * (len(shape) - 1) + shape[-1:], shape[-1], 1)

        def run(number: int, slot: Any) -> None:
            if number in numbers:
                key = key_of(c, seed, stream + number, per_chip=False)
                start = tt.add(tt.add(column.t, key), first)
                slot.t = _rounded(tt, slot.t, layout.shape, shape, tt.add(row.t, start))

        return run

    return made


def _rounded(tt: Any, x: Any, given: tuple[int, ...], shape: tuple[int, ...], hashes: Any) -> Any:
    mix_into(tt, hashes)
    tt.bitwise_and(hashes, _LOW, output_tensor=hashes)
    seen = x if shape == given else tt.experimental.view(x, shape)
    bits = tt.bitcast(tt.bitcast(seen, tt.uint32), tt.int32)
    tt.add(bits, hashes, output_tensor=bits)
    tt.bitwise_and(bits, _HIGH, output_tensor=bits)
    cut = tt.bitcast(tt.bitcast(bits, tt.uint32), tt.float32)
    return cut if shape == given else tt.experimental.view(cut, given)


def _seen_as(layout: TileLayout) -> tuple[int, ...]:
    """A shape of the same tiles in which the numbers of rows and of columns take little memory."""
    if layout.shape[-1] != TILE or layout.padded != layout.shape or len(layout.shape) != 2:
        return layout.shape
    tiles = layout.tiles
    across = next(count for count in range(isqrt(tiles), 0, -1) if tiles % count == 0)
    return tiles // across * TILE, across * TILE


@row("assign", Delivery.INPLACE)
def _assign(c: Context, state: DeviceTensor, value: DeviceTensor) -> None:
    c.tt.copy(value.t, state.t)


@row("accumulate", Delivery.INPLACE)
def _accumulate(c: Context, state: DeviceTensor, value: DeviceTensor) -> None:
    c.tt.add(state.t, value.t, output_tensor=state.t)


@row("clip_factor")
def _clip_factor(c: Context, norm: DeviceTensor, factor: DeviceTensor, limit: float) -> None:
    inverse = c.tt.add(norm.t, 1e-6, activations=[c.tt.UnaryOpType.RECIP])
    scaled = inverse if limit == 1.0 else c.tt.multiply(inverse, limit)
    c.tt.minimum(scaled, 1.0, output_tensor=factor.t)


def _adamw(c: Context, rule: Any, lr: DeviceTensor, step: DeviceTensor, factor: DeviceTensor | None) -> Update:
    """Rule adamw with lr' = lr sqrt(1 - b2^t) / (1 - b1^t) and eps' = eps sqrt(1 - b2^t).

    p <- p (1 - lr weight_decay) - lr' m / (sqrt(v) + eps'), which is the same. Both are step inputs that the host works
    out in double precision.
    """
    beta1, beta2, eps, decay = (value for _, value in rule.settings)

    def root(t: float) -> float:
        return math.sqrt(1 - beta2**t)

    rate = c.derived([lr, step], lambda lr, t: lr * root(t) / (1 - beta1**t) if t else 0.0)
    small = c.derived([step], lambda t: eps * root(t))
    keep = c.derived([lr], lambda lr: 1 - lr * decay) if decay else None
    tt, sqrt = c.tt, [c.tt.UnaryOpType.SQRT]

    def update(slots: Sequence[Joined], gradients: Joined) -> None:
        p, m, v = (slot.t for slot in slots)
        scaled = scaled_gradient(c, gradients.t, factor)
        tt.lerp(m, scaled, 1 - beta1, output_tensor=m)
        tt.square(scaled, output_tensor=scaled)
        tt.lerp(v, scaled, 1 - beta2, output_tensor=v)
        tt.add(v, small.t, input_tensor_a_activations=sqrt, output_tensor=scaled)
        tt.div(m, scaled, output_tensor=scaled)
        if keep is not None:
            tt.multiply(p, keep.t, output_tensor=p)
        tt.addcmul(p, scaled, rate.t, value=-1.0, output_tensor=p)

    return update


def _adamw_fused(c: Context, slots: Sequence[Joined], gradients: Joined, rule: Any, *scalars: Any) -> None:
    """Launch ttnn's kernel on bf16 state. It takes its rates as numbers: not for a step that is replayed."""
    tt, (p, m, v), g, (lr, step, factor) = c.tt, (slot.t for slot in slots), gradients.t, scalars
    g = g if factor is None else tt.multiply(g, factor.t)
    numbers = [lr.value, *(value for _, value in rule.settings), int(step.value or 0), False]
    outputs = {"param_out": p, "exp_avg_out": m, "exp_avg_sq_out": v}
    tt.operations.moreh.adamw(p, g, m, v, *numbers, **outputs, **c.exact)


def _sgd(c: Context, rule: Any, lr: DeviceTensor, step: DeviceTensor, factor: DeviceTensor | None) -> Update:
    settings = dict(rule.settings)
    decay, momentum, nesterov = settings["weight_decay"], settings.get("momentum"), settings.get("nesterov")
    tt, one = c.tt, c.full(1, (1, 1))

    def update(slots: Sequence[Joined], gradients: Joined) -> None:
        (p, *velocity), g = (slot.t for slot in slots), gradients.t
        if factor is not None or g.dtype != tt.float32:
            g = scaled_gradient(c, g, factor)
        if decay:
            g = tt.addcmul(g, p, one.t, value=decay)
        for u in velocity:
            tt.addcmul(g, u, one.t, value=momentum, output_tensor=u)
            g = tt.addcmul(g, u, one.t, value=momentum) if nesterov else u
        tt.addcmul(p, g, lr.t, value=-1.0, output_tensor=p)

    return update


_RULES: dict[str, Callable[..., Update]] = {"adamw": _adamw, "sgd": _sgd, "sgd_momentum": _sgd}


_ON_HOST: dict[str, Callable[..., float]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv,
    "maximum": max, "exp": math.exp, "expm1": math.expm1, "log": math.log, "sqrt": math.sqrt,
    "scale": lambda x, factor: x * factor, "full": lambda value, **_: value, "cast": lambda x, **_: float(x),
}  # fmt: skip


def stepwise(c: Context, rule: Any, lr: DeviceTensor, step: DeviceTensor, factor: DeviceTensor | None) -> Update:
    """Steps on lr and step alone are worked out by the host, as step inputs; the others run on the card in fp32."""
    steps, results = rule.program
    vectors, alone = 2 + len(rule.slots), rule.alone

    def number(item: int, given: Sequence[float]) -> float:
        if item < vectors + 2:
            return given[item - vectors]
        name, operands, attributes = steps[item - vectors - 2]
        return _ON_HOST[name](*(number(operand, given) for operand in operands), **dict(attributes))

    def scalar(item: int) -> Any:
        def value(*given: float) -> float:
            try:
                return number(item, given)
            except (ArithmeticError, ValueError):
                return 0.0  # before the first step there is no number of it

        return c.derived([lr, step], value).t

    on_card = [(item, *made) for item, made in enumerate(steps, start=vectors + 2) if not alone[item]]
    scalars = {item: scalar(item) for _, _, operands, _ in on_card for item in operands if alone[item]}

    def update(slots: Sequence[Joined], gradients: Joined) -> None:
        parameter, *others = (slot.t for slot in slots)
        vector = (parameter, scaled_gradient(c, gradients.t, factor), *others)
        known = {**dict(enumerate(vector)), **scalars}
        for item, name, operands, attributes in on_card:
            ins = [known[operand] for operand in operands]
            known[item] = ins[0] if name == "cast" else CALLS[name](c.tt, dict(attributes))(*ins)
        for slot, result in zip((parameter, *others), results, strict=True):
            c.tt.copy(known[vectors + 2 + result], slot)

    return update


@row("update", Delivery.INPLACE, bound=True)
def _update(
    c: Context, *ins: Any, rule: Any, count: int, stochastic: Sequence[int] = (), stream: int = 0, copies: bool = False
) -> Launch:
    """Any rule: by a chain made for it, else step by step. State that is kept in bf16 is widened a piece at a time.

    The compute copies lie as their masters do, so one rounding serves a whole stack.
    """
    *lists, (*scalars, seed) = split_update(ins, count)  # scalars: lr, step and the clip factor
    rounded = lists.pop() if copies else []
    chain_of: Callable[..., Update] = (
        stepwise if dict(rule.settings).get("cautious") else _RULES.get(rule.name, stepwise)
    )
    update = chain_of(c, rule, *scalars)
    rounding = rounding_of(c, stochastic, stream, seed) if stochastic else None
    launches, numbered = [], 0
    joined = [stacked(c.store, tensors) for tensors in lists]
    for p, gradients, *others in zip(*joined, strict=True):
        slots = [p, *others]
        narrow = all(slot.layout.dtype != "float32" for slot in slots)
        if rounding is not None:
            for first, (part, *parts) in pieces(c, [gradients, *slots]):
                launches.append(on_wide(c, parts, part, update, rounding(parts[0].layout, numbered + first)))
        elif narrow and chain_of is _adamw and c.fused and not c.replayed:
            launches.append(partial(_adamw_fused, c, slots, gradients, rule, *scalars))
        else:
            launches.append(on_wide(c, slots, gradients, update))
        numbered += prod(p.layout.shape)
    if rounded:
        pairs = zip(stacked(c.store, rounded), stacked(c.store, lists[0]), strict=True)
        launches += [partial(_round, c.tt, copy, master) for copy, master in pairs]
    return chain(*launches)


def _round(tt: Any, copy: Joined, master: Joined) -> None:
    tt.typecast(master.t, getattr(tt, copy.layout.dtype), output_tensor=copy.t)
