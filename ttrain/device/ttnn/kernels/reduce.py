"""Sums and maxima over axes, the global norm, and sums over the chips of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.device.base import Delivery, Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, column_sum, row
from ttrain.device.ttnn.tensors.device_tensor import Tensors, wholes
from ttrain.device.ttnn.tensors.store import device_shape

CONCAT_LIMIT = 48  # tensors that ttnn.concat takes in one launch


@row("reduce_sum", Delivery.RETURNS)
def _reduce_sum(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (x,), (y,), axes = ins, outs, list(attributes["axes"])
    shape, rank = device_shape(y.spec.shape), x.spec.rank
    facts = x.spec.shape, x.spec.dtype
    if rank >= 2 and axes == list(range(rank - 1)):
        return lambda: [column_sum(c, x.t, *facts, y)]
    if rank == 2 and len(axes) == 2:  # columns first, on the matrix unit
        return lambda: [c.tt.sum(column_sum(c, x.t, *facts, None), dim=-1, keepdim=True, **c.exact)]
    shifted = [axis + len(device_shape(x.spec.shape)) - rank for axis in axes]
    return lambda: [c.tt.reshape(c.tt.sum(x.t, dim=shifted, keepdim=True, **c.exact), shape)]


@row("reduce_max", Delivery.RETURNS)
def _reduce_max(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (x,), (y,), tt = ins, outs, c.tt
    lead = len(device_shape(x.spec.shape)) - x.spec.rank

    def run() -> list[Any]:
        found = x.t
        for axis in attributes["axes"]:
            found = tt.max(found, dim=axis + lead, keepdim=True)
        return [tt.reshape(found, device_shape(y.spec.shape))]

    return run


@row("global_norm")
def _global_norm(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """The root of the sum of squares, stack by stack where gradients lie in stacks."""
    (norm,), tt = outs, c.tt
    parts: list[Any] = []
    root = [tt.UnaryOpType.SQRT]

    def run() -> None:
        if not parts:
            parts.extend(wholes(ins))  # stacks are made after this row was bound
        sums = [tt.reshape(tt.sum(tt.multiply(x.t, x.t, dtype=tt.float32), **c.exact), (1, 1)) for x in parts]
        if 2 <= len(sums) <= 4:
            while len(sums) > 2:
                sums = [tt.add(sums[0], sums[1]), *sums[2:]]
            tt.add(*sums, activations=root, output_tensor=norm.t)
        else:
            tt.sqrt(_total(c, sums), output_tensor=norm.t)

    return run


def _total(c: Context, sums: Sequence[Any]) -> Any:
    """[1, 1] out of several."""
    while len(sums) > 1:
        parts = [list(sums[start : start + CONCAT_LIMIT]) for start in range(0, len(sums), CONCAT_LIMIT)]
        sums = [
            c.tt.sum(c.tt.concat(part, dim=1), dim=1, keepdim=True, **c.exact) if part[1:] else part[0]
            for part in parts
        ]
    return sums[0]


@row("all_reduce", Delivery.RETURNS)
def _all_reduce(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    (x,) = ins
    return lambda: [c.tt.all_reduce(x.t) if c.store.chips > 1 else c.tt.add(x.t, 0.0)]


@row("all_reduce_state", Delivery.INPLACE)
def _all_reduce_state(c: Context, ins: Tensors, outs: Tensors, attributes: Attributes, work: Tensors) -> Launch:
    """Stack by stack where tensors lie in stacks, so that few messages carry all of them."""
    parts: list[Any] = []

    def run() -> None:
        if not parts:
            parts.extend(wholes(ins))  # stacks are made after this row was bound
        if c.store.chips > 1:
            for part in parts:
                c.tt.copy(c.tt.all_reduce(part.t), part.t)

    return run
