"""Update rows: they overwrite state. A group whose tensors lie side by side in every slot is updated as one vector.

Learning rate, step number and clip factor stay on the device: nothing here turns them into Python numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from ttrain.core.random_bits import signed
from ttrain.core.spec import flat_offsets
from ttrain.device.base import Delivery, split_update
from ttrain.device.torch.kernels.common import FLAT_GAP, Call, Tensor, constant_like, flatten, row
from ttrain.device.torch.kernels.elementwise import Program
from ttrain.device.torch.kernels.random import counting, emit_key, emit_mix

_CPU_BLOCK, _GPU_BLOCK = 2**16, 2**20  # elements at most: all scratch of a block stays in the cache
_LOW, _HIGH = 0xFFFF, -0x10000  # the bits of a fp32 number that a bf16 number lacks, and those that it has
_KEYS = 8  # int32 per list: key, key of the block, and scratch


@row("assign", delivery=Delivery.INPLACE)
def _assign(call: Call) -> None:
    call.emit(call.ins[0].copy_, call.ins[1])


@row("accumulate", delivery=Delivery.INPLACE)
def _accumulate(call: Call) -> None:
    state, value = call.ins
    if state.dtype is value.dtype:
        call.emit(torch.add, state, value, out=state)
        return
    wide = call.scratch((max(min(state.numel(), call.context.block), 1),), state.dtype)
    for part, given in zip(state.view(-1).split(len(wide)), value.view(-1).split(len(wide)), strict=True):
        call.emit(wide[: len(part)].copy_, given)
        call.emit(torch.add, part, wide[: len(part)], out=part)


@row("clip_factor")
def _clip_factor(call: Call) -> None:
    norm, factor = call.ins[0], call.outs[0]
    call.emit(torch.add, norm, constant_like(1e-6, norm), out=factor)
    call.emit(torch.div, constant_like(call.attributes["limit"], norm), factor, out=factor)
    call.emit(torch.clamp_max, factor, 1.0, out=factor)


def _aligned_slots(slots: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """One vector per slot where the slots allow it, else the tensors as vectors."""
    flat = flatten(*slots)
    return [[view] for view in flat] if flat is not None else [[tensor.view(-1) for tensor in slot] for slot in slots]


class Update:
    """The inputs of one update, sorted: parameters, gradients and slots, and the copies of parameters if there are."""

    def __init__(self, call: Call) -> None:
        self.lists: list[Sequence[Tensor]]
        *self.lists, (self.lr, self.step, self.factor, self.seed) = split_update(call.ins, call.attributes["count"])
        self.copies = self.lists.pop() if call.attributes.get("copies") else []
        self.numbers = call.attributes.get("numbers", ())
        self.low_bits = self.lists[0][0].dtype is torch.int16  # parameters are what fp32 weights have beyond the copies

    @property
    def narrow(self) -> list[bool]:
        """Return whether each list but that of gradients is kept in fewer bits than fp32 has."""
        few = [any(each.dtype.itemsize < 4 for each in given) for given in self.lists]
        return [short and number != 1 for number, short in enumerate(few)]

    def vectors(self, copies: bool) -> Iterator[tuple[Sequence[Tensor], int]]:
        """One vector per list, that of the copies at last, with the number of its first element.

        Whole lists are one vector where they lie side by side.
        """
        lists = [*self.lists, *([self.copies] if copies else [])]
        offsets = self.numbers or flat_offsets([tensor.numel() for tensor in lists[0]])[0]
        vectors = [[tensor.view(-1) for tensor in given] for given in lists] if self.numbers else _aligned_slots(lists)
        return zip(zip(*vectors, strict=True), offsets, strict=False)


def _adamw(call: Call, update: Update, vectors: list[list[Tensor]], settings: Mapping[str, float]) -> None:
    steps = [update.step] * len(vectors[0])
    call.emit(torch._fused_adamw_, *vectors, [], steps, lr=update.lr, amsgrad=False, maximize=False, **settings)


def _sgd(call: Call, update: Update, vectors: list[list[Tensor]], settings: Mapping[str, float]) -> None:
    given = {"momentum": 0.0, **settings, "nesterov": bool(settings.get("nesterov"))}
    call.emit(
        torch._fused_sgd_, *vectors[:2], vectors[2] if vectors[2:] else [], lr=update.lr, dampening=0.0,
        maximize=False, is_first_step=False, **given,
    )  # fmt: skip


_FUSED = {"adamw": _adamw, "sgd": _sgd, "sgd_momentum": _sgd}


@row("update", delivery=Delivery.INPLACE)
def _update(call: Call) -> None:
    update = Update(call)
    rule = call.attributes["rule"]
    if rule.name in _FUSED and "cautious" not in dict(rule.settings) and not any(update.narrow):
        _in_one_pass(call, update)
    else:
        _Blocks(call, update)
    if update.copies and not update.low_bits:
        for copy, parameter in zip(*_aligned_slots([update.copies, update.lists[0]]), strict=True):
            call.emit(copy.copy_, parameter)


def _in_one_pass(call: Call, update: Update) -> None:
    """The update of all slots by aten: in one call, or chunk by chunk through scratch that holds prepared gradients."""
    (parameters, gradients, *_), rule = update.lists, call.attributes["rule"]
    fused, settings, scratch = _FUSED[rule.name], dict(rule.settings), None
    alike = all(p.dtype is g.dtype for p, g in zip(parameters, gradients, strict=True))
    if update.factor is not None or not alike:
        total = sum(-(-x.numel() // FLAT_GAP) * FLAT_GAP for x in parameters)
        scratch = call.scratch((min(total, call.context.block),), parameters[0].dtype)
    vectors = _aligned_slots(update.lists)
    if scratch is None:
        fused(call, update, vectors, settings)
        return
    for tensors in zip(*vectors, strict=True):
        for parts in zip(*(tensor.split(scratch.numel()) for tensor in tensors), strict=True):
            gradient = scratch[: parts[1].numel()]
            source = parts[1]
            if update.factor is None or source.dtype is not gradient.dtype:
                call.emit(gradient.copy_, source)
                source = gradient
            if update.factor is not None:
                call.emit(torch.mul, source, update.factor, out=gradient)
            fused(call, update, [[part] for part in (parts[0], gradient, *parts[2:])], settings)


class _Blocks:
    """A rule by chains of elementwise calls over blocks, in fp32, with rounding of what is kept in bf16.

    Each call rounds once, in the order in which the generated kernels compute, so that both give the same bits, but
    for torch.sqrt, whose last bit is a library's.
    """

    def __init__(self, call: Call, update: Update) -> None:
        self.emit, self.call, self.update = call.emit, call, update
        self.stochastic = call.attributes.get("stochastic", ())
        self.program = Program(call)
        _, total = flat_offsets([tensor.numel() for tensor in update.lists[0]])
        most = _CPU_BLOCK if call.context.on_cpu else _GPU_BLOCK
        block = (max(1, min(total, call.context.block, most)),)
        kept = (sum(self.program.is_scalar),)  # every scalar input, and every step on scalars
        host = None if call.context.fp64 else torch.zeros(kept, dtype=torch.float64)
        exact = call.scratch(kept, torch.float64) if host is None else host
        rounded = call.scratch(kept, torch.float32)
        self.keys = call.scratch((_KEYS * (len(update.lists) - 1),), torch.int32)
        count = sum(update.narrow)
        self.g, self.t, *rest = (call.scratch(block, torch.float32) for _ in range(2 + count + self.program.registers))
        self.wides, self.scratch = rest[:count], rest[count:]
        self.program.work_out_scalars([update.lr, update.step], exact, rounded)
        for number, keys in enumerate(self.keys.split(_KEYS)):
            if number in self.stochastic:
                emit_key(call, update.seed, call.attributes.get("stream", 0) + number, keys)
        for vectors, first in update.vectors(update.low_bits):
            for start in range(0, vectors[0].numel(), self.g.numel()):
                self._block([vector[start : start + self.g.numel()] for vector in vectors], first + start)

    def _block(self, parts: list[Tensor], first: int) -> None:
        parameter, gradient, *slots = parts
        copy = slots.pop() if self.update.low_bits else parameter
        size, wides = parameter.numel(), iter(self.wides)
        g = self.g[:size]
        self.emit(g.copy_, gradient)
        if self.update.factor is not None:
            self.emit(torch.mul, g, self.update.factor, out=g)
        read = []
        for state in (parameter, *slots):
            if state.dtype.itemsize >= 4:
                read.append(state)
                continue
            read.append(next(wides)[:size])
            if self.update.low_bits and state is parameter:
                self._join(read[-1], copy, state)
            else:
                self.emit(read[-1].copy_, state)
        scratch = [each[:size] for each in self.scratch]
        results = self.program.work_out([read[0], g, *read[1:]], scratch)
        for number, (state, result) in enumerate(zip((parameter, *slots), results, strict=True)):
            if number in self.stochastic and state.dtype is torch.bfloat16:
                self._round(result, number, first)
            if self.update.low_bits and state is parameter:
                self._split(result, copy, state)
            else:
                self.emit(state.copy_, result)

    def _join(self, x: Tensor, copy: Tensor, low_bits: Tensor) -> None:
        """bf16 copies and low bits to fp32 numbers."""
        bits = x.view(torch.int32)
        self.emit(bits.copy_, copy.view(torch.int16))
        self.emit(torch.bitwise_left_shift, bits, 16, out=bits)
        self.emit(torch.add, bits, low_bits, out=bits)

    def _split(self, x: Tensor, copy: Tensor, low_bits: Tensor) -> None:
        """fp32 numbers to their bf16 copies and low bits."""
        bits, upper = x.view(torch.int32), self.t[: x.numel()].view(torch.int32)
        self._quiet(x)
        self.emit(torch.add, bits, 0x8000, out=upper)
        self.emit(torch.bitwise_right_shift, upper, 16, out=upper)
        self.emit(copy.view(torch.int16).copy_, upper)
        self.emit(torch.bitwise_left_shift, upper, 16, out=upper)
        self.emit(torch.sub, bits, upper, out=upper)
        self.emit(low_bits.copy_, upper)

    def _round(self, x: Tensor, number: int, first: int) -> None:
        """fp32 numbers to one of the bf16 numbers beside them; a NaN stays one."""
        size = x.numel()
        bits, hashes, temporary = (tensor.view(torch.int32) for tensor in (x, self.g[:size], self.t[:size]))
        keys = self.keys[number * _KEYS : (number + 1) * _KEYS]
        self.emit(torch.add, keys[0:1], constant_like(signed(first & 0xFFFFFFFF), keys), out=keys[1:2])
        self.emit(torch.add, counting(self.g.numel(), x.device)[:size], keys[1:2], out=hashes)
        emit_mix(self.call, hashes, temporary)
        self.emit(torch.bitwise_and, hashes, constant_like(_LOW, hashes), out=hashes)
        self._quiet(x)
        self.emit(torch.add, bits, hashes, out=bits)
        self.emit(torch.bitwise_and, bits, constant_like(_HIGH, bits), out=bits)

    def _quiet(self, x: Tensor) -> None:
        """Every NaN to the one whose other bits are zero."""
        self.emit(torch.nan_to_num, x, nan=math.nan, posinf=math.inf, neginf=-math.inf, out=x)
