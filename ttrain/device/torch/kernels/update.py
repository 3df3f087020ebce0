"""Update rows: they overwrite state. A group whose tensors lie side by side in every slot is updated as one vector.

Learning rate, step number and clip factor stay on the device: nothing here turns them into Python numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ttrain.core.spec import DType, TensorSpec, flat_offsets
from ttrain.device.base import Delivery, Launch, chain
from ttrain.device.torch.kernels.common import (
    FLAT_GAP,
    Attributes,
    Context,
    Given,
    Specs,
    Tensor,
    Tensors,
    constant,
    copying,
    flatten,
    row,
)
from ttrain.device.torch.kernels.program import Program
from ttrain.device.torch.kernels.random import counting, keying, mixing

_CPU_BLOCK, _GPU_BLOCK = 2**16, 2**20  # elements at most: all scratch of a block stays in the cache
_LOW, _HIGH = 0xFFFF, -0x10000  # the bits of a fp32 number that a bf16 number lacks, and those that it has
_KEYS = 8  # int32 per list: key, key of the block, and scratch


@row("assign", delivery=Delivery.INPLACE)
def _assign(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    return copying(ins[0], ins[1])


def _accumulate_workspace(context: Context, ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    state, value = ins
    return [] if state.dtype is value.dtype else [state.with_shape(max(min(state.size, context.block), 1))]


@row("accumulate", _accumulate_workspace, delivery=Delivery.INPLACE)
def _accumulate(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    state, value = ins
    if not work:
        return partial(torch.add, state, value, out=state)
    launches: list[Launch] = []
    size = work[0].numel()
    for part, given in zip(state.view(-1).split(size), value.view(-1).split(size), strict=True):
        widened = work[0][: part.numel()]
        launches += [copying(widened, given), partial(torch.add, part, widened, out=part)]
    return chain(*launches)


@row("clip_factor")
def _clip_factor(context: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    norm, factor = ins[0], outs[0]
    number = partial(constant, dtype=norm.dtype, device=norm.device)
    return chain(
        partial(torch.add, norm, number(1e-6), out=factor),
        partial(torch.div, number(attributes["limit"]), factor, out=factor),
        partial(torch.clamp_max, factor, 1.0, out=factor),
    )


def _aligned_slots(slots: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """One vector per slot where the slots allow it, else the tensors as vectors."""
    flat = flatten(*slots)
    return [[view] for view in flat] if flat is not None else [[tensor.view(-1) for tensor in slot] for slot in slots]


def _gradient_workspace(context: Context, count: int, scaled: bool, ins: Specs) -> list[TensorSpec]:
    """Room for a chunk of scaled gradients in the parameters' dtype; none where they are used as they are."""
    parameters, gradients = ins[:count], ins[count : 2 * count]
    if not scaled and all(p.dtype is g.dtype for p, g in zip(parameters, gradients, strict=True)):
        return []
    total = sum(-(-spec.size // FLAT_GAP) * FLAT_GAP for spec in parameters)
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


@dataclass(frozen=True)
class _Call:
    """The inputs of one update, sorted."""

    lists: list[list[Any]]  # parameters, gradients and slots
    copies: list[Any]  # of the parameters; none where there are no copies
    lr: Any
    step: Any
    factor: Any
    seed: Any

    @staticmethod
    def of(ins: Sequence[Any], attributes: Attributes) -> _Call:
        count = attributes["count"]
        lists = [list(ins[start : start + count]) for start in range(0, len(ins) - 4, count)]
        copies = lists.pop() if attributes.get("copies") else []
        return _Call(lists, copies, *ins[-4:])

    @property
    def low_bits(self) -> bool:
        """Return whether the parameters are the low bits of fp32 weights beyond their copies."""
        return self.lists[0][0].dtype in (torch.int16, DType.INT16)

    def widths(self) -> list[list[int]]:
        """Bytes per element of each list's tensors, or of their specs."""
        return [[_itemsize(tensor) for tensor in tensors] for tensors in self.lists]

    def in_one_pass(self, attributes: Attributes) -> bool:
        """Return whether aten has a kernel for the rule, and the state has the dtypes that it computes in."""
        narrow = any(size < 4 for position, sizes in enumerate(self.widths()) if position != 1 for size in sizes)
        return attributes["rule"].name in _FUSED and not narrow


def _itemsize(tensor: Any) -> int:
    return tensor.dtype.itemsize


def _adamw(call: _Call, settings: Mapping[str, float]) -> Update:
    def update(vectors: list[list[Tensor]]) -> Launch:
        return partial(
            torch._fused_adamw_, *vectors, [], [call.step] * len(vectors[0]), lr=call.lr, beta1=settings["beta1"],
            beta2=settings["beta2"], weight_decay=settings["weight_decay"], eps=settings["eps"], amsgrad=False,
            maximize=False,
        )  # fmt: skip

    return update


def _sgd(call: _Call, settings: Mapping[str, float]) -> Update:
    def update(vectors: list[list[Tensor]]) -> Launch:
        return partial(
            torch._fused_sgd_, vectors[0], vectors[1], vectors[2] if vectors[2:] else [], lr=call.lr,
            weight_decay=settings["weight_decay"], momentum=settings.get("momentum", 0.0), dampening=0.0,
            nesterov=bool(settings.get("nesterov")), maximize=False, is_first_step=False,
        )  # fmt: skip

    return update


_FUSED: dict[str, Callable[[_Call, Mapping[str, float]], Update]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "sgd_momentum": _sgd,
}


def _update_workspace(context: Context, ins: Specs, outs: Specs, attributes: Attributes) -> list[TensorSpec]:
    call = _Call.of(ins, attributes)
    if call.in_one_pass(attributes):
        return _gradient_workspace(context, attributes["count"], call.factor is not None, ins)
    return _block_workspace(context, call, attributes)


@row("update", _update_workspace, delivery=Delivery.INPLACE)
def _update(context: Context, ins: Given, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    call, rule = _Call.of(ins, attributes), attributes["rule"]
    if call.in_one_pass(attributes):
        update = _FUSED[rule.name](call, dict(rule.settings))
        launch = _updating(call.lists, call.factor, work, update)
    else:
        launch = _Blocks(context, call, attributes, work).launch()
    copied = call.copies and not call.low_bits
    pairs = zip(*_aligned_slots([call.copies, call.lists[0]]), strict=True) if copied else ()
    return chain(launch, *(copying(copy, parameter) for copy, parameter in pairs))


def _program(attributes: Attributes) -> Program:
    rule = attributes["rule"]
    steps, results = rule.program
    return Program(steps, results, vectors=2 + len(rule.slots), scalars=2)


def _block_workspace(context: Context, call: _Call, attributes: Attributes) -> list[TensorSpec]:
    """Scalars in fp64 and fp32, keys, then a block each: gradient, temporary, slots that are not fp32, and scratch."""
    program = _program(attributes)
    _, total = flat_offsets([spec.size for spec in call.lists[0]])
    most = _CPU_BLOCK if context.on_cpu else _GPU_BLOCK
    block = TensorSpec((max(1, min(total, context.block, most)),), DType.FP32)
    narrow = sum(number != 1 and sizes[0] < 4 for number, sizes in enumerate(call.widths()))
    keys = TensorSpec((_KEYS * (len(call.lists) - 1),), DType.INT32)
    scalars = [TensorSpec((program.scalar_count,), dtype) for dtype in (DType.FP64, DType.FP32)]
    return [*scalars, keys, *[block] * (2 + narrow + program.registers)]


def _joining(x: Tensor, copy: Tensor, low_bits: Tensor) -> list[Launch]:
    """bf16 copies and low bits to fp32 numbers."""
    bits = x.view(torch.int32)
    return [
        copying(bits, copy.view(torch.int16)),
        partial(torch.bitwise_left_shift, bits, 16, out=bits),
        partial(torch.add, bits, low_bits, out=bits),
    ]


class _Blocks:
    """A rule by chains of elementwise launches over blocks, in fp32, with rounding of what is kept in bf16.

    Each launch rounds once, in the order in which the generated kernels compute, so that both give the same bits, but
    for torch.sqrt, whose last bit is a library's. `work` is laid out as `_block_workspace` says.
    """

    def __init__(self, context: Context, call: _Call, attributes: Attributes, work: Sequence[Tensor]) -> None:
        self.call, self.stochastic = call, attributes.get("stochastic", ())
        self.numbers = attributes.get("numbers", ())
        exact, rounded, self.keys, self.g, self.t, *rest = work
        self.program = _program(attributes)
        self.scratch = rest[len(rest) - self.program.registers :]
        self.wides = rest[: len(rest) - self.program.registers]
        self.start, self.scalars = self.program.bind_scalars([call.lr, call.step], exact, rounded)
        for number, keys in enumerate(self.keys.split(_KEYS)):
            if number in self.stochastic:
                self.start.append(keying(context, call.seed, attributes.get("stream", 0) + number, keys))

    def launch(self) -> Launch:
        """All blocks of all vectors."""
        launches = list(self.start)
        for vectors, first in self._vectors():
            for start in range(0, vectors[0].numel(), self.g.numel()):
                parts = [vector[start : start + self.g.numel()] for vector in vectors]
                launches += self._block(parts, first + start)
        return chain(*launches)

    def _vectors(self) -> Iterator[tuple[list[Tensor], int]]:
        """One vector per list with the number of its first element; whole lists where they lie side by side."""
        lists = [*self.call.lists, *([self.call.copies] if self.call.low_bits else [])]
        flat = None if self.numbers else flatten(*lists)
        if flat is not None:
            yield flat, 0
            return
        offsets = self.numbers or flat_offsets([tensor.numel() for tensor in lists[0]])[0]
        for tensors, offset in zip(zip(*lists, strict=True), offsets, strict=True):
            yield [tensor.view(-1) for tensor in tensors], offset

    def _block(self, parts: list[Tensor], first: int) -> list[Launch]:
        parameter, gradient, *slots = parts
        copy = slots.pop() if self.call.low_bits else parameter
        size, wides = parameter.numel(), iter(self.wides)
        g = self.g[:size]
        launches: list[Launch] = [copying(g, gradient)]
        if self.call.factor is not None:
            launches.append(partial(torch.mul, g, self.call.factor, out=g))
        read = []
        for state in (parameter, *slots):
            if state.dtype.itemsize < 4:
                read.append(next(wides)[:size])
                split = self.call.low_bits and state is parameter
                launches += _joining(read[-1], copy, state) if split else [copying(read[-1], state)]
            else:
                read.append(state)
        steps, results = self.program.bind([read[0], g, *read[1:]], self.scalars, [s[:size] for s in self.scratch])
        launches += steps
        for number, (state, result) in enumerate(zip((parameter, *slots), results, strict=True)):
            if number in self.stochastic and state.dtype is torch.bfloat16:
                launches += self._rounding(result, number, first)
            split = self.call.low_bits and state is parameter
            launches += self._splitting(result, copy, state) if split else [copying(state, result)]
        return launches

    def _splitting(self, x: Tensor, copy: Tensor, low_bits: Tensor) -> list[Launch]:
        """fp32 numbers to their bf16 copies and low bits."""
        bits, upper = x.view(torch.int32), self.t[: x.numel()].view(torch.int32)
        return [
            partial(torch.nan_to_num, x, nan=math.nan, posinf=math.inf, neginf=-math.inf, out=x),
            partial(torch.add, bits, 0x8000, out=upper),
            partial(torch.bitwise_right_shift, upper, 16, out=upper),
            copying(copy.view(torch.int16), upper),
            partial(torch.bitwise_left_shift, upper, 16, out=upper),
            partial(torch.sub, bits, upper, out=upper),
            copying(low_bits, upper),
        ]

    def _rounding(self, x: Tensor, number: int, first: int) -> list[Launch]:
        """fp32 numbers to one of the bf16 numbers beside them; a NaN stays one."""
        size = x.numel()
        bits, hashes, temporary = (tensor.view(torch.int32) for tensor in (x, self.g[:size], self.t[:size]))
        keys = self.keys[number * _KEYS : (number + 1) * _KEYS]
        integer = partial(constant, dtype=torch.int32, device=x.device)
        return [
            partial(torch.add, keys[0:1], integer(first), out=keys[1:2]),
            partial(torch.add, counting(self.g.numel(), x.device)[:size], keys[1:2], out=hashes),
            *mixing(hashes, temporary, flip=False),
            partial(torch.bitwise_and, hashes, integer(_LOW), out=hashes),
            partial(torch.nan_to_num, x, nan=math.nan, posinf=math.inf, neginf=-math.inf, out=x),
            partial(torch.add, bits, hashes, out=bits),
            partial(torch.bitwise_and, bits, integer(_HIGH), out=bits),
        ]
