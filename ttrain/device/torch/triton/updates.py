"""Triton of optimizer rules: one launch reads and writes each element of all tensors that lie side by side once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ttrain.core.random_bits import mix, signed
from ttrain.device.torch.kernels.common import Call, Tensor
from ttrain.device.torch.kernels.update import Update
from ttrain.device.torch.triton.elementwise import BLOCK, EXPRESSIONS, generated, spelled
from ttrain.device.torch.triton.launch import emit

_VECTOR = {**EXPRESSIONS, "full": "{value}"}
_SCALAR = {**_VECTOR, "full": "tl.full((), {value}, tl.float64)", "expm1": "(tl.exp({0}) - 1.0)"}
_READ = (torch.float32, torch.bfloat16, torch.float16, torch.int16)


def emit_update(call: Call) -> bool:
    """Emit what is made of lr and step alone, in fp64, then the rule on all vectors.

    Return False, with nothing taken, where a step or a dtype has no Triton.
    """
    update, rule = Update(call), call.attributes["rule"]
    steps = zip(rule.program[0], rule.alone[4 + len(rule.slots) :], strict=True)
    served = all(name in (_SCALAR if alone else _VECTOR) for (name, *_), alone in steps)
    if not served or not all(x.dtype in _READ for given in update.lists for x in given):
        return False
    scalars, given = call.scratch((len(rule.alone),), torch.float32), {"lr": update.lr, "step": update.step}
    if _worked_out(rule):
        emit(call, _scalars(rule), given, {"scalars": scalars}, [1], 1)
    for vectors, first in update.vectors(bool(update.copies)):
        if size := vectors[0].numel():
            names = [f"x{number}" for number in range(len(vectors))]
            written = dict(zip(names, vectors, strict=True))
            read = {"x1": written.pop("x1"), **given, "scalars": scalars, "factor": update.factor, "seed": update.seed}
            kernel, start = _rule(call, update, names, vectors), signed(first & 0xFFFFFFFF)
            emit(call, kernel, read, written, [-(-size // BLOCK)], SIZE=size, START=start)
    return True


def _worked_out(rule: Any) -> list[int]:
    """Return the numbers of the steps on lr and step alone, but for constants."""
    steps = enumerate(rule.program[0], start=4 + len(rule.slots))
    return [number for number, (name, *_) in steps if rule.alone[number] and name != "full"]


def _scalars(rule: Any) -> str:
    """The kernel of one thread that stores what is worked out of lr and step, each value at its number."""
    first = 2 + len(rule.slots)
    lines = [f"v{first} = tl.load(lr).to(tl.float64)", f"v{first + 1} = tl.load(step).to(tl.float64)"]
    for number, step in enumerate(rule.program[0], start=first + 2):
        lines += [f"v{number} = {spelled(step, _SCALAR)}"] if rule.alone[number] else []
    lines += [f"tl.store(scalars + {number}, v{number})" for number in _worked_out(rule)]
    return generated(["lr", "step", "scalars"], lines)


def _rule(call: Call, update: Update, names: Sequence[str], vectors: Sequence[Tensor]) -> str:
    """The kernel of a rule on vectors x0 (parameter), x1 (gradient), x2 ... (slots) and perhaps the copy."""
    settings, rule = call.attributes, call.attributes["rule"]
    (steps, results), first = rule.program, 2 + len(rule.slots)
    block = f"tl.program_id(0).to(tl.int64) * {BLOCK} + tl.arange(0, {BLOCK})"
    lines, whole = [f"e = {block}", "inside = e < SIZE"], range(update.low_bits, first)
    lines += [f"v{number} = tl.load(x{number} + e, inside, 0).to(tl.float32)" for number in whole]
    if update.low_bits:
        lines.append(f"v0 = joined(tl.load(x{first} + e, inside, 0.0), tl.load(x0 + e, inside, 0))")
    if update.factor is not None:
        lines.append("v1 = v1 * tl.load(factor)")
    lines += [f"v{first} = tl.load(lr)", f"v{first + 1} = tl.load(step)"]
    worked_out = _worked_out(rule)
    for number, step in enumerate(steps, start=first + 2):
        value = f"tl.load(scalars + {number})" if number in worked_out else spelled(step, _VECTOR)
        lines.append(f"v{number} = {value}")
    positions = (0, *range(2, first))
    for number, (position, result) in enumerate(zip(positions, results, strict=True)):
        value, stream = f"v{first + 2 + result}", mix(settings.get("stream", 0) + number & 0xFFFFFFFF)
        if vectors[position].dtype is torch.bfloat16 and number in settings.get("stochastic", ()):
            value = f"rounded({value}, tl.load(seed), START + e, {stream})"
        lines.append(f"new{position} = {value}")
    stored = [(position, f"new{position}") for position in positions]
    if update.low_bits:
        lines += ["bits = bits_of(new0)", "upper = (bits + 0x8000) >> 16"]
        stored[0] = (0, "(bits - (upper << 16)).to(tl.int16)")
    if update.copies:
        stored.append((first, "upper.to(tl.int16).to(tl.bfloat16, bitcast=True)" if update.low_bits else "new0"))
    lines += [f"tl.store(x{position} + e, {value}, inside)" for position, value in stored]
    return generated([*names, "lr", "step", "scalars", "factor", "seed", "SIZE", "START"], lines)
