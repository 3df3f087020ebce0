"""Kernel tables of the Tenstorrent device, one module a family. An op without a row runs as its decomposition."""

from __future__ import annotations

from ttrain.device.base import Kernel
from ttrain.device.ttnn.kernels import (
    attention,
    cache,
    collective,
    elementwise,
    embedding,
    heads,
    layout,
    loss,
    matmul,
    norm,
    random,
    reduce,
)
from ttrain.device.ttnn.kernels import update as update_family
from ttrain.device.ttnn.kernels.common import Context

FAMILIES = (
    elementwise, layout, reduce, matmul, norm, attention, cache, random, embedding, loss, heads,
    update_family, collective,
)  # fmt: skip


def kernel_table(context: Context) -> dict[str, Kernel]:
    """All rows, bound to one device."""
    table: dict[str, Kernel] = {}
    for family in FAMILIES:
        table.update(family.table(context))
    return table
