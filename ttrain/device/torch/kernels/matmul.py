"""Matrix products. On the CPU bf16 goes to oneDNN, which uses AMX or AVX-512 BF16 where the machine has them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ttrain.device.base import Kernel, Launch
from ttrain.device.torch.kernels.common import Attributes, Context, Tensor, chain, into, rows_of
from ttrain.device.torch.kernels.elementwise import activation
from ttrain.device.torch.kernels.product import product


def _matmul(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
    (a, b), c = ins, outs[0]
    a, b = a.mT if attributes["transpose_a"] else a, b.mT if attributes["transpose_b"] else b
    if a.ndim == 2:
        return product(a, b, c)
    return partial(torch.bmm, a.flatten(0, -3), b.flatten(0, -3), out=c.flatten(0, -3))


def _linear(ins: Sequence[Tensor], outs: Sequence[Tensor], attributes: Attributes, work: Sequence[Tensor]) -> Launch:
    x, weight, bias = ins
    rows, y = rows_of(x), rows_of(outs[0])
    linear = product(rows, weight.t(), y, bias)
    name = attributes.get("activation")
    return linear if name is None else chain(linear, activation(name, y, y))


def table(context: Context) -> dict[str, Kernel]:
    return {"matmul": into(_matmul), "linear": into(_linear)}
