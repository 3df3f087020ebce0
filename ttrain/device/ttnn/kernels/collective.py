"""Sums over the chips of a mesh, over the fabric that joins them."""

from __future__ import annotations

from typing import Any

from ttrain.device.base import Delivery, Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, row
from ttrain.device.ttnn.tensors.device_tensor import Tensors
from ttrain.device.ttnn.tensors.stack import wholes


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
