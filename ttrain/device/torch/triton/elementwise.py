"""Triton of elementwise programs: one kernel that visits every element once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from ttrain.core.random_bits import keep_threshold, mix
from ttrain.device.torch import loops
from ttrain.device.torch.loops import LoopNest, Step, expressions

EXPRESSIONS = expressions("triton", "both")
BLOCK = 1024  # elements of a program


class TritonNest(LoopNest):
    """The text of one program's kernel, on inputs x0, x1 ... and outputs y0, y1 ..."""

    def source(self) -> str:
        """Return the text of a function `generated`. Value v0 is the first input's, e the numbers of elements."""
        size, count = self.loops.rows * self.loops.width, len(self.inputs)
        names = [*(f"x{item}" for item in self.read), *(f"y{item}" for item in range(len(self.outputs))), "SIZE"]
        start = "tl.program_id(0)" if size + BLOCK < 2**31 else "tl.program_id(0).to(tl.int64)"
        lines = [f"e = {start} * {BLOCK} + tl.arange(0, {BLOCK})", "inside = e < SIZE", *self._loads()]
        for number, made in enumerate(self.program):
            words = {}
            if number in self.seeds:
                attributes = dict(made[2])
                p, stream = attributes["p"], mix(attributes["stream"] & 0xFFFFFFFF)
                words["random"] = f"{stream}, {keep_threshold(p)}, {1 / (1 - p)}"
            lines.append(f"v{count + number} = {spelled(made, EXPRESSIONS, step=number, **words)}")
        for item, step in enumerate(self.results):
            lines.append(f"tl.store(y{item} + e, v{count + step}, inside)")
        return generated(names, lines)

    @property
    def read(self) -> list[int]:
        """The inputs that it reads, in order."""
        special = {operands[1] for operands in self.lookups.values()} | set(self.seeds.values())
        return sorted({item for item in self.loops.strides if item >= 0} | special)

    def _loads(self) -> list[str]:
        lines = []
        for item in self.loops.strides:
            if item >= 0 and item not in self.ids:
                at = self.loops.offset(item, "e", "//")
                lines.append(f"v{item} = tl.load(x{item} + {at if at == '0' else f'({at}), inside'}).to(tl.float32)")
        for step, seed in self.seeds.items():
            lines.append(f"seed{step} = tl.load(x{seed})")
        for step, (ids, weight, *_) in self.lookups.items():
            count, width = self.inputs[weight].shape
            lines.append(f"id{step} = tl.load(x{ids} + ({self.loops.offset(ids, 'e', '//')}) + e * 0, inside, 0)")
            lines.append(f"known{step} = inside & (id{step} >= 0) & (id{step} < {count})  # else NaN")
            place = f"x{weight} + id{step} * {width} + e % {width}"
            lines.append(f"row{step} = tl.load({place}, known{step}, float('nan')).to(tl.float32)")
        return lines


def generated(names: Iterable[str], lines: Iterable[str]) -> str:
    """Return the text of a kernel with arguments of these names."""
    return "\n    ".join([f"def generated({', '.join(names)}):", *lines, ""])


def spelled(made: Step, table: Mapping[str, str], **words: Any) -> str:
    """Return the expression of a step on values v0, v1 ..., by its op's in a table."""
    return loops.spelled(made, table, _number, (f"v{item}" for item in made[1]), **words)


def _number(value: float) -> str:
    return repr(value) if isfinite(value) else f"float('{value}')"
