"""Rows of the optimizers on state that is rounded (ops/rounded.py): chains of elementwise launches over blocks.

Each launch rounds once, in the order in which the generated kernels compute, so that both give the same bits, but for
torch.sqrt, whose last bit is a library's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ttrain.core.spec import DType, TensorSpec, run_offsets
from ttrain.device.base import Kernel, Launch
from ttrain.device.torch.kernels.common import (
    Attributes,
    Context,
    Specs,
    Tensor,
    chain,
    constant,
    copying,
    flatten,
    inplace,
)
from ttrain.device.torch.kernels.random import counting, keying, mixing

_BLOCK = {True: 2**16, False: 2**20}  # elements at most, on the CPU or not: all scratch of a block stays in its cache
_LOW, _HIGH = 0xFFFF, -0x10000  # the bits of a fp32 number that a bf16 number lacks, and those that it has
_SCALARS = 4  # fp32 numbers that the launches of one update read
_KEYS = 8  # int32 per slot: key, key of the block, and scratch


@dataclass
class _Slot:
    """A written slot within one block, and what is computed on in fp32: the state itself or scratch."""

    state: Tensor
    wide: Tensor

    def load(self) -> list[Launch]:
        return [] if self.wide is self.state else [copying(self.wide, self.state)]


@dataclass
class _Block:
    """What one block is updated with: scratch `g` holds the scaled gradient, `t` is free."""

    g: Tensor
    t: Tensor
    slots: list[_Slot]  # written ones: parameters first


Arithmetic = Callable[[_Block], list[Launch]]


def _mul(x: Tensor, y: Tensor, out: Tensor) -> Launch:
    return partial(torch.mul, x, y, out=out)


def _add(x: Tensor, y: Tensor, out: Tensor) -> Launch:
    return partial(torch.add, x, y, out=out)


class _Update:
    """One update op on its buffers. `work` is laid out as `_workspace` says."""

    def __init__(
        self, context: Context, lists: Sequence[Sequence[Tensor]], seed: Tensor | None, attributes: Attributes,
        names: Sequence[str], work: Sequence[Tensor],
    ) -> None:  # fmt: skip
        self.lists = lists
        self.exact, self.scalars, self.keys, self.g, self.t, *self.wides = work
        written = [name for name in names[: len(lists)] if name != "gradients"]
        self.stochastic = [name in attributes["stochastic"] for name in written]
        self.one = constant(1.0, torch.float64, self.exact.device)
        self.start: list[Launch] = []
        if seed is not None:
            for number, keys in enumerate(self.keys.split(_KEYS)):
                self.start.append(keying(context, seed, attributes["stream"] + number, keys))

    def number(self, value: float) -> Tensor:
        return constant(value, torch.float32, self.g.device)

    def launch(self, arithmetic: Arithmetic, factor: Tensor | None) -> Launch:
        """All blocks of all vectors."""
        launches = list(self.start)
        for vectors, first in self._vectors():
            for start in range(0, vectors[0].numel(), self.g.numel()):
                parts = [vector[start : start + self.g.numel()] for vector in vectors]
                launches += self._block(parts, first + start, arithmetic, factor)
        return chain(*launches)

    def _vectors(self) -> Iterator[tuple[list[Tensor], int]]:
        """One vector per slot with the number of its first element; whole lists where they lie side by side."""
        flat = flatten(*self.lists)
        if flat is not None:
            yield flat, 0
            return
        offsets, _ = run_offsets([tensor.numel() for tensor in self.lists[0]])
        for tensors, offset in zip(zip(*self.lists, strict=True), offsets, strict=True):
            yield [tensor.view(-1) for tensor in tensors], offset

    def _block(self, parts: list[Tensor], first: int, arithmetic: Arithmetic, factor: Tensor | None) -> list[Launch]:
        parameters, gradient, *others = parts
        size = parameters.numel()
        scratch = [wide[:size] for wide in self.wides]
        slots = [_Slot(s, s if s.dtype is torch.float32 else scratch.pop(0)) for s in (parameters, *others)]
        block = _Block(self.g[:size], self.t[:size], slots)
        launches = [copying(block.g, gradient)]
        if factor is not None:
            launches.append(_mul(block.g, factor, block.g))
        for slot in slots:
            launches += slot.load()
        launches += arithmetic(block)
        for number, slot in enumerate(slots):
            if slot.wide is not slot.state:
                stochastic = self.stochastic[number] and slot.state.dtype is torch.bfloat16
                launches += self._rounding(block, number, first) if stochastic else []
                launches.append(copying(slot.state, slot.wide))
        return launches

    def _rounding(self, block: _Block, number: int, first: int) -> list[Launch]:
        """A slot's fp32 numbers to one of the bf16 numbers beside them; a NaN stays one."""
        x = block.slots[number].wide
        bits, hashes, temporary = (tensor.view(torch.int32) for tensor in (x, block.g, block.t))
        keys = self.keys[number * _KEYS : (number + 1) * _KEYS]
        integer = partial(constant, dtype=torch.int32, device=x.device)
        return [
            partial(torch.add, keys[0:1], integer(first), out=keys[1:2]),
            partial(torch.add, counting(self.g.numel(), x.device)[: x.numel()], keys[1:2], out=hashes),
            *mixing(hashes, temporary, flip=False),
            partial(torch.bitwise_and, hashes, integer(_LOW), out=hashes),
            partial(torch.nan_to_num, x, nan=math.nan, posinf=math.inf, neginf=-math.inf, out=x),
            partial(torch.add, bits, hashes, out=bits),
            partial(torch.bitwise_and, bits, integer(_HIGH), out=bits),
        ]


def _adamw_rates(update: _Update, lr: Tensor, step: Tensor, attributes: Attributes) -> list[Launch]:
    """scalars <- lr / (1 - b1^t), 1 / sqrt(1 - b2^t), 1 - lr weight_decay, formed in fp64."""
    a, b = update.exact[0], update.exact[1]
    rate, scale, keep = update.scalars[:3]
    double = partial(constant, dtype=torch.float64, device=a.device)

    def correction(beta: float) -> list[Launch]:
        return [
            copying(b, step),
            partial(torch.pow, double(beta), b, out=b),
            partial(torch.sub, update.one, b, out=b),
        ]

    return [
        copying(a, lr),
        *correction(attributes["beta1"]),
        partial(torch.div, a, b, out=b),
        copying(rate, b),
        *correction(attributes["beta2"]),
        partial(torch.sqrt, b, out=b),
        partial(torch.reciprocal, b, out=b),
        copying(scale, b),
        partial(torch.mul, a, double(attributes["weight_decay"]), out=b),
        partial(torch.sub, update.one, b, out=b),
        copying(keep, b),
    ]


def _adamw(context: Context) -> Kernel:
    names = ("parameters", "gradients", "first_moments", "second_moments")

    def bind(ins: Sequence[Any], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        lists, (lr, step, factor, seed) = _lists(ins, attributes["count"], 4)
        update = _Update(context, lists, seed, attributes, names, work)
        update.start += _adamw_rates(update, lr, step, attributes)
        beta1, beta2, eps = (attributes[key] for key in ("beta1", "beta2", "eps"))
        rate, scale, keep = update.scalars[:3]
        number = update.number

        def arithmetic(block: _Block) -> list[Launch]:
            (p, m, v), g, t = (slot.wide for slot in block.slots), block.g, block.t
            return [
                _mul(g, number(1 - beta1), t), _mul(m, number(beta1), m), _add(m, t, m),
                _mul(g, g, t), _mul(t, number(1 - beta2), t), _mul(v, number(beta2), v), _add(v, t, v),
                partial(torch.sqrt, v, out=t), _mul(t, scale, t), _add(t, number(eps), t),
                _mul(m, rate, g), partial(torch.div, g, t, out=g),
                _mul(p, keep, p), partial(torch.sub, p, g, out=p),
            ]  # fmt: skip

        return update.launch(arithmetic, factor)

    return inplace(bind, partial(_workspace, context, 4))


def _sgd(context: Context) -> Kernel:
    names = ("parameters", "gradients", "velocities")

    def bind(ins: Sequence[Any], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
        lists, (lr, factor, seed) = _lists(ins, attributes["count"], 3)
        update = _Update(context, lists, seed, attributes, names, work)
        momentum, decay = update.number(attributes["momentum"]), attributes["weight_decay"]

        def arithmetic(block: _Block) -> list[Launch]:
            (p, *velocity), g, t = (slot.wide for slot in block.slots), block.g, block.t
            launches: list[Launch] = [_mul(p, update.number(decay), t), _add(g, t, g)] if decay else []
            change = g
            for u in velocity:
                launches += [_mul(u, momentum, u), _add(u, g, u)]
                change = u
                if attributes["nesterov"]:
                    launches += [_mul(u, momentum, t), _add(g, t, g)]
                    change = g
            return [*launches, _mul(change, lr, t), partial(torch.sub, p, t, out=p)]

        return update.launch(arithmetic, factor)

    return inplace(bind, partial(_workspace, context, 3))


def _lists(ins: Sequence[Any], count: int, scalars: int) -> tuple[list[list[Tensor]], list[Any]]:
    end = len(ins) - scalars
    return [list(ins[start : start + count]) for start in range(0, end, count)], list(ins[end:])


def _workspace(context: Context, scalars: int, ins: Sequence[Any], outs: Specs, attributes: Attributes) -> list[Any]:
    """fp64 and fp32 scalars, keys, then a block each: gradient, temporary, and every written slot that is not fp32."""
    end, count = len(ins) - scalars, attributes["count"]
    lists: list[Specs] = [ins[start : start + count] for start in range(0, end, count)]
    _, total = run_offsets([spec.size for spec in lists[0]])
    block = TensorSpec((max(1, min(total, context.block, _BLOCK[context.on_cpu])),), DType.FP32)
    scratch = 2 + sum(number != 1 and slot[0].dtype is not DType.FP32 for number, slot in enumerate(lists))
    keys = TensorSpec((_KEYS * (len(lists) - 1),), DType.INT32)
    return [TensorSpec((2,), DType.FP64), TensorSpec((_SCALARS,), DType.FP32), keys, *[block] * scratch]


def table(context: Context) -> dict[str, Kernel]:
    return {"adamw_rounded": _adamw(context), "sgd_rounded": _sgd(context)}
