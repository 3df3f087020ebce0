"""Sums over axes, and the global norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.device.base import Kernel, Launch
from ttrain.device.ttnn.form import device_shape
from ttrain.device.ttnn.kernels.common import Attributes, Context, column_sum, fresh, into
from ttrain.device.ttnn.stack import CONCAT_LIMIT, stackable
from ttrain.device.ttnn.tensors import Held


def _reduce_sum(c: Context) -> Kernel:
    def build(ins: Sequence[Held], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        (x,), (y,), axes = ins, outs, list(attributes["axes"])
        shape, rank = device_shape(y.spec.shape), x.spec.rank
        if rank >= 2 and axes == list(range(rank - 1)):
            return lambda: [column_sum(c, x.t, x.spec.shape, x.spec.dtype)]
        shifted = [axis + len(device_shape(x.spec.shape)) - rank for axis in axes]
        return lambda: [c.tt.reshape(c.tt.sum(x.t, dim=shifted, keepdim=True, **c.exact), shape)]

    return fresh(build)


def gather(c: Context, tensors: Sequence[Held], groups: Sequence[Sequence[int]]) -> list[Launch]:
    """Per group a launch that returns its tensors as one."""

    def one(members: list[Held]) -> Launch:
        if len(members) == 1:
            return lambda: members[0].t
        axis = 1 if len(members[0].spec.shape) <= 1 else 0
        return lambda: c.tt.concat([member.t for member in members], dim=axis)

    return [one([tensors[position] for position in group]) for group in groups]


def _global_norm(c: Context) -> Kernel:
    """The root of the sum of squares: tensors of like shape are joined first, then squared and summed together."""

    def build(ins: Sequence[Held], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        (norm,) = outs
        joins: list[Launch] = []
        for dtype in dict.fromkeys(held.spec.dtype for held in ins):
            same = [held for held in ins if held.spec.dtype is dtype]
            joins += gather(c, same, stackable([held.spec.shape for held in same], least=2))

        def square_sum(join: Launch) -> Any:
            tensor = join()
            total = c.tt.sum(c.tt.multiply(tensor, tensor, dtype=c.tt.float32), **c.exact)
            return c.tt.reshape(total, (1, 1))

        def run() -> None:
            sums = [square_sum(join) for join in joins]
            while len(sums) > 1:
                parts = [sums[i : i + CONCAT_LIMIT] for i in range(0, len(sums), CONCAT_LIMIT)]
                sums = [_total(c, part) for part in parts]
            c.tt.sqrt(sums[0], output_tensor=norm.t)

        return run

    return into(build)


def _total(c: Context, sums: Sequence[Any]) -> Any:
    """[1, 1] out of several."""
    if len(sums) == 2:
        return c.tt.add(sums[0], sums[1])
    return c.tt.sum(c.tt.concat(list(sums), dim=1), dim=1, keepdim=True, **c.exact) if len(sums) > 1 else sums[0]


def table(c: Context) -> dict[str, Kernel]:
    return {"reduce_sum": _reduce_sum(c), "global_norm": _global_norm(c)}
