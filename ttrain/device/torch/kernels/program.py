"""Elementwise programs (ttrain/ops/program.py) by chains of aten calls on blocks that stay in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ttrain.device.torch.kernels.common import Emitter, Tensor, constant_like

Function = Callable[..., Any]
FUNCTIONS: dict[str, Function] = {
    "add": torch.add, "subtract": torch.sub, "multiply": torch.mul, "divide": torch.div, "maximum": torch.maximum,
    "greater": torch.gt, "exp": torch.exp, "expm1": torch.expm1, "log": torch.log, "sqrt": torch.sqrt,
    "sin": torch.sin, "cos": torch.cos, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "sign": torch.sign,
    "erf": torch.erf, "relu": partial(torch.clamp_min, min=0),
}  # fmt: skip


class Program:
    """A program on vectors and scalars: the first `vectors` inputs are vectors, the others scalars.

    Steps on scalars alone run in fp64, once a launch; vectors read their results rounded to fp32.
    """

    def __init__(self, steps: Sequence[Any], results: Sequence[int], vectors: int, scalars: int) -> None:
        self.steps, self.results, self.inputs = steps, results, vectors + scalars
        scalar = [index >= vectors for index in range(self.inputs)]
        for name, operands, _ in steps:
            scalar.append(name == "full" or all(scalar[item] for item in operands))
        self.is_scalar = scalar
        self.register, self.registers = self._assign()

    @property
    def scalar_count(self) -> int:
        """Numbers that a launch keeps, in fp64 and in fp32: every scalar input, and every step on scalars."""
        return sum(self.is_scalar)

    def _assign(self) -> tuple[dict[int, int], int]:
        """A scratch vector for each step on vectors, taken again after its last reader; and how many there are."""
        last = {item: number for number, (_, operands, _) in enumerate(self.steps) for item in operands}
        last |= {self.inputs + result: len(self.steps) for result in self.results}
        free: list[int] = []
        chosen: dict[int, int] = {}
        count = 0
        for number, (_, operands, _) in enumerate(self.steps):
            item = self.inputs + number
            if self.is_scalar[item]:
                continue
            free += [chosen[o] for o in dict.fromkeys(operands) if o in chosen and last[o] == number]
            if not free:
                free, count = [count], count + 1
            chosen[item] = free.pop()
        return chosen, count

    def work_out_scalars(
        self, call: Emitter, given: Sequence[Tensor], exact: Tensor, rounded: Tensor
    ) -> dict[int, Tensor]:
        """Emit the steps on scalars, in `exact` fp64, and return where vectors find them: `rounded` to fp32."""
        items = [item for item, scalar in enumerate(self.is_scalar) if scalar]
        places, first = {item: exact[at] for at, item in enumerate(items)}, self.inputs - len(given)
        for at, tensor in enumerate(given):
            call.emit(places[first + at].copy_, tensor)
        for number, step in enumerate(self.steps, start=self.inputs):
            if number in places:
                self._emit(call, step, places, places[number])
        call.emit(rounded.copy_, exact)
        return {item: rounded[at] for at, item in enumerate(items)}

    def work_out(
        self, call: Emitter, vectors: Sequence[Tensor], scalars: dict[int, Tensor], scratch: Sequence[Tensor]
    ) -> list[Tensor]:
        """Emit the steps on vectors of one size, and return the scratch vectors that the results are in."""
        known = {**dict(enumerate(vectors)), **scalars}
        known |= {item: scratch[place] for item, place in self.register.items()}
        for number, step in enumerate(self.steps, start=self.inputs):
            if not self.is_scalar[number]:
                self._emit(call, step, known, known[number])
        return [known[self.inputs + result] for result in self.results]

    def _emit(self, call: Emitter, step: Any, known: dict[int, Tensor], out: Tensor) -> None:
        name, operands, attributes = step
        settings, ins = dict(attributes), [known[item] for item in operands]
        if name in ("full", "cast"):
            call.emit(out.copy_, ins[0] if ins else constant_like(settings["value"], out))
        elif name == "scale":
            call.emit(torch.mul, ins[0], constant_like(settings["factor"], out), out=out)
        else:
            call.emit(FUNCTIONS[name], *ins, out=out)
