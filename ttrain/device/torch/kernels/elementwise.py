"""Elementwise rows, which may write over an input of equal shape, and the rotation of heads, which may not.

Elementwise programs (ttrain/ops/program.py) are chains of aten calls on blocks that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ttrain.device.torch.kernels.common import Call, Tensor, constant_like, row, scalar_like

aten = torch.ops.aten
Function = Callable[..., Any]
FUNCTIONS: dict[str, Function] = {
    "add": torch.add, "subtract": torch.sub, "multiply": torch.mul, "divide": torch.div, "maximum": torch.maximum,
    "greater": torch.gt, "exp": torch.exp, "expm1": torch.expm1, "log": torch.log, "sqrt": torch.sqrt,
    "sin": torch.sin, "cos": torch.cos, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "sign": torch.sign,
    "erf": torch.erf, "relu": partial(torch.clamp_min, min=0),
}  # fmt: skip


def _called(function: Function, call: Call, more: tuple[Any, ...] = (), out: str = "out") -> None:
    """Emit a torch function that takes the inputs in order, perhaps more numbers, and the output by a name."""
    call.emit(function, *call.ins, *more, **{out: call.outs[0]})


for _name, _function in FUNCTIONS.items():
    row(_name)(partial(_called, _function))
row("silu")(partial(_called, aten.silu.out))


@row("gelu")
def _gelu(call: Call) -> None:
    call.emit(torch._C._nn.gelu, call.ins[0], approximate=call.attributes["approximate"], out=call.outs[0])


@row("gelu_grad")
def _gelu_grad(call: Call) -> None:
    form = call.attributes["approximate"]
    call.emit(aten.gelu_backward.grad_input, *call.ins, approximate=form, grad_input=call.outs[0])


@row("scale")
def _scale(call: Call) -> None:
    x = call.ins[0]
    call.emit(torch.mul, x, scalar_like(call.attributes["factor"], x), out=call.outs[0])


row("relu_grad")(partial(_called, aten.threshold_backward.grad_input, more=(0,), out="grad_input"))
row("tanh_grad")(partial(_called, aten.tanh_backward.grad_input, out="grad_input"))
row("silu_grad")(partial(_called, aten.silu_backward.grad_input, out="grad_input"))


@row("full")
def _full(call: Call) -> None:
    value, y = call.attributes["value"], call.outs[0]
    if value == 0:
        call.emit(y.zero_)
    else:
        call.emit(y.copy_, constant_like(value, y).expand(y.shape))


@row("rotary")
def _rotary(call: Call) -> None:
    x, cos, sin = call.ins
    pairs, sign = cos.shape[-1], -1 if call.attributes["inverse"] else 1
    by_head = (*x.shape[:2], call.attributes["heads"], -1)
    (a, b, rest), (y, z, left) = (t.view(by_head).tensor_split((pairs, 2 * pairs), -1) for t in (x, call.outs[0]))
    along, across = cos[..., None, :], sin[..., None, :]
    wide, other = call.scratch(a.shape, cos.dtype), call.scratch(a.shape, cos.dtype)
    for first, second, out, value in ((a, b, y, -sign), (b, a, z, sign)):
        call.emit(wide.copy_, first)
        call.emit(other.copy_, second)
        call.emit(torch.mul, wide, along, out=wide)
        call.emit(torch.addcmul, wide, other, across, value=value, out=wide)
        call.emit(out.copy_, wide)
    if rest.shape[-1]:
        call.emit(left.copy_, rest)


def _move(source: Tensor, target: Tensor) -> None:
    """target <- source; only in fp32 from one device to another, which may have no fp64."""
    target.copy_(source if source.device == target.device else source.float().to(target.device))


class Program:
    """The program of an optimizer's rule as calls, on vectors, and on lr and step as scalars.

    Steps on scalars alone run in fp64, once a launch; vectors read their results rounded to fp32.
    """

    def __init__(self, call: Call) -> None:
        self.emit, rule = call.emit, call.attributes["rule"]
        (self.steps, self.results), self.inputs, self.is_scalar = rule.program, len(rule.slots) + 4, rule.alone
        self.register, self.registers = self._assign()

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

    def work_out_scalars(self, given: Sequence[Tensor], exact: Tensor, rounded: Tensor) -> None:
        """Emit the steps on scalars, in `exact` fp64. Vectors find them `rounded` to fp32.

        Where a device has no fp64, `exact` lies on the host.
        """
        items = [item for item, scalar in enumerate(self.is_scalar) if scalar]
        places, first = {item: exact[at] for at, item in enumerate(items)}, self.inputs - len(given)
        for at, tensor in enumerate(given):
            self.emit(_move, tensor, places[first + at])
        for number, step in enumerate(self.steps, start=self.inputs):
            if number in places:
                self._emit(step, places, places[number])
        self.emit(_move, exact, rounded)
        self.scalars = {item: rounded[at] for at, item in enumerate(items)}

    def work_out(self, vectors: Sequence[Tensor], scratch: Sequence[Tensor]) -> list[Tensor]:
        """Emit the steps on vectors of one size, and return the scratch vectors that the results are in."""
        known = {**dict(enumerate(vectors)), **self.scalars}
        known |= {item: scratch[place] for item, place in self.register.items()}
        for number, step in enumerate(self.steps, start=self.inputs):
            if not self.is_scalar[number]:
                self._emit(step, known, known[number])
        return [known[self.inputs + result] for result in self.results]

    def _emit(self, step: Any, known: dict[int, Tensor], out: Tensor) -> None:
        name, operands, attributes = step
        settings, ins = dict(attributes), [known[item] for item in operands]
        if name in ("full", "cast"):
            self.emit(out.copy_, ins[0] if ins else constant_like(settings["value"], out))
        elif name == "scale":
            self.emit(torch.mul, ins[0], constant_like(settings["factor"], out), out=out)
        else:
            self.emit(FUNCTIONS[name], *ins, out=out)
