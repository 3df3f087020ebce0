"""Kernel tables of the Tenstorrent device, one module a family. An op without a row runs as its decomposition."""

from __future__ import annotations

from ttrain.device.base import Kernel
from ttrain.device.ttnn.kernels import attention, elementwise, experts, layout, loss, norm, products, reduce, update
from ttrain.device.ttnn.kernels.common import ROWS, Context


def kernel_table(context: Context) -> dict[str, Kernel]:
    """All rows, bound to one device."""
    return {op: made(context) for op, made in ROWS.items()}
