"""Sums and maxima over axes, the global norm, and sums over the chips of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from ttrain.device.base import Delivery, Launch
from ttrain.device.ttnn.kernels.common import Context, Tensor, column_sum, row
from ttrain.device.ttnn.tensors.device_tensor import wholes
from ttrain.device.ttnn.tensors.store import device_shape

CONCAT_LIMIT = 48  # tensors that ttnn.concat takes in one launch


@row("reduce_sum", Delivery.RETURNS)
def _reduce_sum(c: Context, x: Tensor, y: Tensor, axes: Sequence[int]) -> list[Any]:
    rank, lead = x.spec.rank, len(device_shape(x.spec.shape)) - x.spec.rank
    if rank >= 2 and list(axes) == list(range(rank - 1)):
        return [column_sum(c, x.t, x.spec.shape, x.spec.dtype, y)]
    if rank == 2 and len(axes) == 2:  # columns first, on the matrix unit
        columns = column_sum(c, x.t, x.spec.shape, x.spec.dtype)
        return [c.tt.sum(columns, dim=-1, keepdim=True, **c.exact)]
    total = c.tt.sum(x.t, dim=[axis + lead for axis in axes], keepdim=True, **c.exact)
    return [c.tt.reshape(total, device_shape(y.spec.shape))]


@row("reduce_max", Delivery.RETURNS)
def _reduce_max(c: Context, x: Tensor, y: Tensor, axes: Sequence[int]) -> list[Any]:
    lead, found = len(device_shape(x.spec.shape)) - x.spec.rank, x.t
    for axis in axes:
        found = c.tt.max(found, dim=axis + lead, keepdim=True)
    return [c.tt.reshape(found, device_shape(y.spec.shape))]


@row("global_norm", bound=True)
def _global_norm(c: Context, *tensors: Tensor) -> Launch:
    """The root of the sum of squares, stack by stack where gradients lie in stacks."""
    tt, (*ins, norm), root = c.tt, tensors, [c.tt.UnaryOpType.SQRT]
    parts = cache(partial(wholes, ins))  # stacks are made after this row was bound

    def run() -> None:
        sums = [tt.reshape(tt.sum(tt.multiply(x.t, x.t, dtype=tt.float32), **c.exact), (1, 1)) for x in parts()]
        if 2 <= len(sums) <= 4:
            while len(sums) > 2:
                sums = [tt.add(sums[0], sums[1]), *sums[2:]]
            tt.add(*sums, activations=root, output_tensor=norm.t)
        else:
            tt.sqrt(_total(c, sums), output_tensor=norm.t)

    return run


def joined(tt: Any, parts: Sequence[Any], dim: int) -> Any:
    """Tensors one after the other, in as few launches as ttnn's limit allows."""
    while len(parts) > 1:
        runs = [list(parts[start : start + CONCAT_LIMIT]) for start in range(0, len(parts), CONCAT_LIMIT)]
        parts = [tt.concat(run, dim=dim) if run[1:] else run[0] for run in runs]
    return parts[0]


def _total(c: Context, sums: Sequence[Any]) -> Any:
    """[1, 1] out of several."""
    return c.tt.sum(joined(c.tt, sums, 1), dim=1, keepdim=True, **c.exact) if sums[1:] else sums[0]


@row("all_reduce", Delivery.RETURNS)
def _all_reduce(c: Context, x: Tensor, y: Tensor) -> list[Any]:
    return [c.tt.all_reduce(x.t) if c.store.chips > 1 else c.tt.add(x.t, 0.0)]


@row("all_reduce_state", Delivery.INPLACE, bound=True)
def _all_reduce_state(c: Context, *tensors: Tensor) -> Launch:
    """Stack by stack where tensors lie in stacks, so that few messages carry all of them."""
    parts = cache(partial(wholes, tensors))  # stacks are made after this row was bound

    def run() -> None:
        for part in parts() if c.store.chips > 1 else ():
            c.tt.copy(c.tt.all_reduce(part.t), part.t)

    return run
