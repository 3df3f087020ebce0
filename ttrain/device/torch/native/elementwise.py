"""Loop nests for elementwise programs: one pass over memory for any number of ops.

A program is a tuple of steps (op name, operands, attributes). Operands count the inputs first, then the steps' results.
Every result has the shape of the whole loop; inputs are broadcast to it. A lookup of rows (`embedding`) counts as
elementwise over its result. Values between the steps stay fp32; only what is stored is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ttrain.core.random_bits import keep_threshold
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.torch.native.codegen import c_float, c_type

Step = tuple[str, tuple[int, ...], tuple[tuple[str, Any], ...]]

# C++ expression per op, {0} {1} ... its operands; words in braces are attributes. `cost` is relative to an addition.
EXPRESSIONS = {
    "add": "{0} + {1}",
    "subtract": "{0} - {1}",
    "multiply": "{0} * {1}",
    "divide": "{0} / {1}",
    "scale": "{0} * {factor}",
    "exp": "v_exp({0})",
    "log": "v_log({0})",
    "sqrt": "v_sqrt({0})",
    "maximum": "v_max({0}, {1})",
    "greater": "v_greater({0}, {1})",
    "sign": "v_sign({0})",
    "sigmoid": "1.0f / (1.0f + v_exp(-{0}))",
    "relu": "v_relu({0})",
    "relu_grad": "v_relu_grad({0}, {1})",
    "tanh": "v_tanh({0})",
    "tanh_grad": "v_tanh_grad({0}, {1})",
    "silu": "v_silu({0})",
    "silu_grad": "v_silu_grad({0}, {1})",
    "gelu": "v_gelu{form}({0})",
    "gelu_grad": "v_gelu{form}_grad({0}, {1})",
    "cast": "{0}",
    "expand": "{0}",
    "full": "splat({value})",
    "accumulate": "{0} + {1}",
    "assign": "{1}",
    "squared_error_grad": "2.0f * {2} * ({0} - {1})",
    "clip_factor": "v_clip({limit} / ({0} + 1e-6f))",
    "dropout": "mask{step}({0}, {index})",
    "dropout_mask": "mask{step}(splat(1.0f), {index})",
    "embedding": 'known{step} ? load(row{step} + {at}, group.lanes) : splat(__builtin_nanf(""))',
}
_COSTS = {
    "exp": 6, "sigmoid": 8, "log": 8, "tanh": 10, "gelu": 10, "gelu_grad": 14, "sqrt": 3, "divide": 3, "dropout": 5,
    "dropout_mask": 5, "silu": 8, "silu_grad": 10,
}  # fmt: skip
UNSUITED = ("dropout", "dropout_mask", "embedding", "accumulate", "assign", "expand")  # for loops over lists of tensors
_RANDOM = ("dropout", "dropout_mask")  # the last operand is the seed
_UNREAD = {"assign": (0,)}  # operands that an op does not read


def covers(name: str, specs: Sequence[TensorSpec | None]) -> bool:
    """Return whether a step of these specs can be part of a loop nest."""
    integers = {"dropout": (1,), "dropout_mask": (0,), "embedding": (0,)}.get(name, ())
    return name in EXPRESSIONS and all(
        spec is not None and (spec.dtype is DType.INT64) == (position in integers)
        for position, spec in enumerate(specs)
    )


@dataclass(frozen=True)
class _Loops:
    """Sizes of the loops, neighbours joined where all operands allow it, and each operand's stride per loop."""

    sizes: tuple[int, ...]
    strides: dict[int, tuple[int, ...]]

    @property
    def width(self) -> int:
        return self.sizes[-1]

    @property
    def rows(self) -> int:
        return prod(self.sizes[:-1])

    def offset(self, operand: int) -> str:
        """Elements from an operand's start to its part of row i."""
        sizes, strides = self.sizes[:-1], self.strides[operand][:-1]
        terms, inner = [], self.rows
        for size, stride in zip(sizes, strides, strict=True):
            inner //= size
            if stride:
                index = "i" if inner == 1 else f"i / {inner}"
                index = index if size * inner == self.rows else f"{index} % {size}"
                terms.append(f"{index} * {stride}")
        return " + ".join(terms) or "0"


def _strides(shape: Sequence[int], whole: Sequence[int]) -> list[int]:
    """Element strides of a contiguous tensor seen in a larger shape; 0 along broadcast axes."""
    padded = [1] * (len(whole) - len(shape)) + list(shape)
    return [0 if size == 1 else prod(padded[axis + 1 :]) for axis, size in enumerate(padded)]


def _loops(whole: Sequence[int], operands: dict[int, list[int]], per_row: set[int]) -> _Loops:
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
    return _Loops(tuple(size for size, _ in loops), dict(zip(operands, strides, strict=True)))


class LoopNest:
    """C++ of one program over inputs of known specs. `results` tells which steps' values are stored, in order."""

    def __init__(
        self,
        inputs: Sequence[TensorSpec | None],
        program: Sequence[Step],
        results: Sequence[int],
        outputs: Sequence[TensorSpec],
    ) -> None:
        self.inputs = [spec or TensorSpec(()) for spec in inputs]  # no step reads an absent one
        self.program, self.results, self.outputs = program, results, outputs
        self.shape = outputs[0].shape
        self.lookups = {step: operands for step, (name, operands, _) in enumerate(program) if name == "embedding"}
        self.seeds = {step: operands[-1] for step, (name, operands, _) in enumerate(program) if name in _RANDOM}
        self.ids = {operands[0] for operands in self.lookups.values()}
        self.loops = _loops(self.shape, self._operand_strides(), self.ids)

    @property
    def cost(self) -> float:
        """Work, in additions of one element."""
        each = 1 + sum(_COSTS.get(name, 1) for name, _, _ in self.program)
        return each * prod(self.shape)

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

    def source(self, threads: int) -> str:
        """The body of a function that takes the addresses of inputs and outputs."""
        loops = self.loops
        step = "\n".join(self._step())
        if loops.rows == 1:
            opening = f"over_columns<{loops.width}, {threads}>([&](i64 j, auto group) {{"
            body = [*self._row(), "const i64 i = 0; (void)i;", opening, step, "});"]
        else:
            body = [
                f"over_rows<{loops.rows}, {threads}>([&](i64 i) {{",
                *self._row(),
                f"over_groups<{loops.width}>(0, {loops.width}, [&](i64 j, auto group) {{",
                step,
                "});",
                "});",
            ]
        return "\n".join([*self._pointers(), *body])

    def _pointers(self) -> list[str]:
        lines = []
        read = {operand for operand in self.loops.strides if operand >= 0}
        read |= {operands[1] for operands in self.lookups.values()}
        for item in sorted(read):
            kind = c_type(self.inputs[item])
            lines.append(f"const {kind}* x{item} = in<{kind}>(a, {item});")
        for position, spec in enumerate(self.outputs):
            at = len(self.inputs) + position
            lines.append(f"{c_type(spec)}* y{position} = out<{c_type(spec)}>(a, {at});")
        for step, seed in self.seeds.items():
            settings = dict(self.program[step][2])
            made = mask(f"*in<i64>(a, {seed})", settings["p"], settings["stream"])
            lines.append(f"const Mask mask{step} = {made};")
        return lines

    def _row(self) -> list[str]:
        """List the lines for values that stay the same along a row."""
        lines = []
        for item, strides in self.loops.strides.items():
            offset = self.loops.offset(item) if self.loops.rows > 1 else "0"
            if item < 0 or item in self.ids:
                continue
            if strides[-1] == 0:
                lines.append(f"const vf v{item} = splat(get(x{item} + ({offset})));")
            else:
                lines.append(f"const i64 at{item} = {offset};")
        for step, (ids, weight, *_) in self.lookups.items():
            spec = self.inputs[weight]
            offset = self.loops.offset(ids) if self.loops.rows > 1 else "0"
            count, width = spec.shape
            lines.append(f"const i64 id{step} = x{ids}[{offset}];")
            lines.append(f"const bool known{step} = u64(id{step}) < {count};  // else NaN, not other memory")
            lines.append(f"const {c_type(spec)}* row{step} = x{weight} + (known{step} ? id{step} * {width} : 0);")
        return lines

    def _step(self) -> list[str]:
        """A group of vectors: loads, the program, stores. Value 0 of vector u is v0[u]."""
        count, at = len(self.inputs), "j + u * W"
        index = f"i * {self.loops.width} + {at}"
        moving = [item for item, strides in self.loops.strides.items() if item >= 0 and strides[-1]]
        loaded = [item for item in moving if item not in self.ids]
        lines = [_each(item, f"load(x{item} + at{item} + {at}, group.lanes)") for item in loaded]
        for number, (name, operands, attributes) in enumerate(self.program):
            words = {key: c_float(value) for key, value in attributes if isinstance(value, float)}
            words["form"] = "_tanh" if dict(attributes).get("approximate") == "tanh" else ""
            values = [f"v{item}[u]" if item in loaded or item >= count else f"v{item}" for item in operands]
            expression = EXPRESSIONS[name].format(*values, **words, step=number, index=index, at=at)
            lines.append(_each(count + number, expression))
        for position, step in enumerate(self.results):
            lines.append(f"EACH_VECTOR store(y{position} + {index}, v{count + step}[u], group.lanes);")
        return lines


def _each(value: int, expression: str) -> str:
    """C++ that makes a value of every vector u of a group."""
    return f"vf v{value}[group.vectors]; EACH_VECTOR v{value}[u] = {expression};"


def mask(seed: str, p: float, stream: int) -> str:
    """C++ of a dropout mask (see core/random_bits.py for its definition)."""
    key = f"stream_key({seed}, {stream & 0xFFFFFFFF}u)"
    return f"Mask{{{key}, {keep_threshold(p)}u, {c_float(1 / (1 - p))}}}"


NO_MASK = "Mask{}"  # where nothing is dropped
