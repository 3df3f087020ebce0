"""Elementwise programs (ttrain/ops/program.py) by chains of aten calls on blocks that stay in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ttrain.device.base import Launch
from ttrain.device.torch.kernels.common import Tensor, constant, copying

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

    def bind_scalars(
        self, given: Sequence[Tensor], exact: Tensor, rounded: Tensor
    ) -> tuple[list[Launch], dict[int, Tensor]]:
        """Launches that work out the scalars, and where vectors find them: `exact` fp64, `rounded` fp32
        [scalar_count].
        """
        items = [item for item, scalar in enumerate(self.is_scalar) if scalar]
        places, first = {item: exact[at] for at, item in enumerate(items)}, self.inputs - len(given)
        launches: list[Launch] = [copying(places[first + at], tensor) for at, tensor in enumerate(given)]
        for number, step in enumerate(self.steps):
            if self.inputs + number in places:
                launches.append(self._launch(step, places, places[self.inputs + number]))
        launches.append(copying(rounded, exact))
        return launches, {item: rounded[at] for at, item in enumerate(items)}

    def bind(
        self, vectors: Sequence[Tensor], scalars: dict[int, Tensor], scratch: Sequence[Tensor]
    ) -> tuple[list[Launch], list[Tensor]]:
        """Launches on vectors of one size, and the scratch vectors that the results are in."""
        known = {**dict(enumerate(vectors)), **scalars}
        known |= {item: scratch[place] for item, place in self.register.items()}
        steps = enumerate(self.steps)
        launches = [
            self._launch(step, known, known[self.inputs + number])
            for number, step in steps
            if not self.is_scalar[self.inputs + number]
        ]
        return launches, [known[self.inputs + result] for result in self.results]

    def _launch(self, step: Any, known: dict[int, Tensor], out: Tensor) -> Launch:
        name, operands, attributes = step
        settings = dict(attributes)
        ins = [known[item] for item in operands]
        if name == "full":
            return copying(out, constant(settings["value"], out.dtype, out.device))
        if name == "cast":
            return copying(out, ins[0])
        if name == "scale":
            return partial(torch.mul, ins[0], constant(settings["factor"], out.dtype, out.device), out=out)
        return partial(FUNCTIONS[name], *ins, out=out)
