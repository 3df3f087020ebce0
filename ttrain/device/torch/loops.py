"""Elementwise programs as loop nests: what generators of code for a CPU and for a GPU share.

A program is a tuple of steps (op name, operands, attributes). Operands count the inputs first, then the steps' results.
Every result has the shape of the whole loop; inputs are broadcast to it. A lookup of rows (`embedding`) counts as
elementwise over its result. Values between the steps stay fp32; only what is stored is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ttrain.core.files import read_table
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import GivenSpecs, Specs

Step = tuple[str, tuple[int, ...], tuple[tuple[str, Any], ...]]
Spell = Callable[[float], str]  # of a number in the language of a generator

_EXPRESSIONS: dict[str, dict[str, Any]] = read_table(Path(__file__).with_suffix(".yaml"))  # by op and language
COSTS: dict[str, int] = {op: told["cost"] for op, told in _EXPRESSIONS.items() if "cost" in told}


def expressions(*languages: str) -> dict[str, str]:
    """Return the expression of each op that has one in these languages, in the first of them."""
    found = {op: [told[each] for each in languages if each in told] for op, told in _EXPRESSIONS.items()}
    return {op: texts[0] for op, texts in found.items() if texts}


def spelled(made: Step, table: Mapping[str, str], number: Spell, operands: Iterable[str], **words: Any) -> str:
    """Return the expression of a step by its op's in a table, on operands, with attributes spelled by `number`."""
    name, _, attributes = made
    words |= {key: number(value) for key, value in attributes if isinstance(value, float)}
    words["form"] = "_tanh" if dict(attributes).get("approximate") == "tanh" else ""
    return table[name].format(*operands, **words)


_RANDOM = ("dropout", "dropout_mask")  # the last operand is the seed
_INTEGERS = {"dropout": 1, "dropout_mask": 0, "embedding": 0}  # the operand of int64 numbers
_UNREAD = {"assign": (0,)}  # operands that an op does not read


def program_of(
    op: str, inputs: GivenSpecs, attributes: Mapping[str, Any], table: Collection[str]
) -> tuple[Sequence[Step], Sequence[int]] | None:
    """Return the steps of op fused, or of another op as the only step, and which of them are results.

    None where a step is not in the table, or reads another kind of numbers than it can.
    """
    alone: Step = (op, tuple(range(len(inputs))), tuple(attributes.items()))
    program, results = attributes.get("program", (alone,)), attributes.get("results", (0,))
    known = list(inputs)
    for name, operands, _ in program:
        if name not in table or not _takes(name, [known[item] for item in operands]):
            return None
        known.append(TensorSpec((), DType.FP32))
    return program, results


def _takes(name: str, specs: GivenSpecs) -> bool:
    wanted = [position == _INTEGERS.get(name) for position in range(len(specs))]
    return [spec and spec.dtype is DType.INT64 for spec in specs] == wanted


@dataclass(frozen=True)
class Loops:
    """Sizes of the loops, neighbours joined where all operands allow it, and each operand's stride per loop."""

    sizes: tuple[int, ...]
    strides: dict[int, tuple[int, ...]]

    @property
    def width(self) -> int:
        return self.sizes[-1]

    @property
    def rows(self) -> int:
        return prod(self.sizes[:-1])

    def offset(self, operand: int, row: str = "i", over: str = "/") -> str:
        """Elements from an operand's start to its part of a row; `over` divides integers.

        Where `row` is the number of an element of the whole, so is the part.
        """
        count = len(self.sizes) - (row == "i")
        sizes, strides = self.sizes[:count], self.strides[operand][:count]
        terms, whole = [], prod(sizes)
        inner = whole
        for size, stride in zip(sizes, strides, strict=True):
            inner //= size
            if stride:
                index = row if inner == 1 else f"{row} {over} {inner}"
                index = index if size * inner == whole else f"{index} % {size}"
                terms.append(f"{index} * {stride}")
        return " + ".join(terms) or "0"


def _strides(shape: Sequence[int], whole: Sequence[int]) -> list[int]:
    """Element strides of a contiguous tensor seen in a larger shape; 0 along broadcast axes."""
    padded = [1] * (len(whole) - len(shape)) + list(shape)
    return [0 if size == 1 else prod(padded[axis + 1 :]) for axis, size in enumerate(padded)]


def _loops(whole: Sequence[int], operands: dict[int, list[int]], per_row: set[int]) -> Loops:
    """Drop axes of size one and join neighbouring axes along which every operand runs on.

    Operands `per_row` hold one element for each row, so they must not advance along the innermost loop.
    """
    loops: list[tuple[int, list[int]]] = []
    for size, *steps in zip(whole, *operands.values(), strict=True):
        if size != 1:
            if loops and all(outer == step * size for outer, step in zip(loops[-1][1], steps, strict=True)):
                size *= loops.pop()[0]
            loops.append((size, steps))
    if not loops or any(step for operand, step in zip(operands, loops[-1][1], strict=True) if operand in per_row):
        loops.append((1, [0] * len(operands)))  # scalars, and lookups of rows of one element
    strides = zip(*(steps for _, steps in loops), strict=True)
    return Loops(tuple(size for size, _ in loops), dict(zip(operands, strides, strict=True)))


class LoopNest:
    """One program over inputs of known specs. `results` tells which steps' values are stored, in order."""

    def __init__(self, inputs: GivenSpecs, program: Sequence[Step], results: Sequence[int], outputs: Specs) -> None:
        self.inputs = [spec or TensorSpec(()) for spec in inputs]  # no step reads an absent one
        self.program, self.results, self.outputs = program, results, outputs
        self.shape = outputs[0].shape
        self.lookups = {step: operands for step, (name, operands, _) in enumerate(program) if name == "embedding"}
        self.seeds = {step: operands[-1] for step, (name, operands, _) in enumerate(program) if name in _RANDOM}
        self.ids = {operands[0] for operands in self.lookups.values()}
        self.loops = _loops(self.shape, self._operand_strides(), self.ids)

    def _operand_strides(self) -> dict[int, list[int]]:
        count, found = len(self.inputs), {-1: _strides(self.shape, self.shape)}  # -1 stands for the results
        special = self.ids | {operands[1] for operands in self.lookups.values()} | set(self.seeds.values())
        for name, operands, _ in self.program:
            read = [item for place, item in enumerate(operands) if place not in _UNREAD.get(name, ())]
            for item in read:
                if item < count and item not in special:
                    found[item] = _strides(self.inputs[item].shape, self.shape)
        for item in self.ids:  # one id per row: no stride along the last axis
            found[item] = _strides((*self.inputs[item].shape, 1), self.shape)
        return found
