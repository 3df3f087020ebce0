"""Helpers that the kernel families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Attributes as Attributes
from ttrain.device.base import Delivery, Kernel, Launch, Layout
from ttrain.device.ttnn.tensors.device_tensor import Derived, DeviceTensor, Tensors
from ttrain.device.ttnn.tensors.layout import TILE, TileLayout, device_shape, dtype_name
from ttrain.device.ttnn.tensors.store import Store

Specs = Sequence[Any]
Build = Callable[..., Launch]  # (Context, inputs, outputs, attributes, workspace)


@dataclass
class Context:
    """The device that rows are built for.

    config: precision of the matrix unit. grid: cores that matrix products may use, None for all. fused: whether to take
    ttnn's fused training kernels (moreh), which compute in bf16, where there are some. replayed: whether steps are
    captured, so that no row may turn an input into a number. core_subset: whether ops are kept on some of the cores,
    see core_subset.py.
    """

    store: Store
    config: Any = None
    grid: Any = None
    whole_grid: Any = None
    fused: bool = True
    replayed: bool = False
    core_subset: bool = False
    constants: dict[Any, DeviceTensor] = field(default_factory=dict)

    @property
    def tt(self) -> Any:
        return self.store.tt

    @property
    def exact(self) -> dict[str, Any]:
        """Keywords of reductions and fused kernels."""
        return {"compute_kernel_config": self.config}

    @property
    def product(self) -> dict[str, Any]:
        """Keywords of matrix products."""
        return {"compute_kernel_config": self.config, **({} if self.grid is None else {"core_grid": self.grid})}

    def constant(self, key: Any, layout: TileLayout, values: Callable[[], np.ndarray]) -> DeviceTensor:
        """A tensor of fixed values, made once."""
        if (key, layout) not in self.constants:
            tensor = DeviceTensor(self.store, TensorSpec(layout.shape, DType.FP32))
            tensor.layout, tensor.pending = layout, values()
            tensor.t  # noqa: B018 - it must exist before a capture
            self.constants[key, layout] = tensor
        return self.constants[key, layout]

    def ones_row(self, length: int, dtype: DType) -> DeviceTensor:
        """[1, length] of ones: a product with it sums columns."""
        return self.constant(
            "ones", TileLayout((1, length), dtype_name(dtype)), lambda: np.ones((1, length), np.float32)
        )

    def derived(self, sources: Tensors, function: Callable[..., float], width: int = 1) -> Derived:
        """A scalar tensor, or a row of equal numbers, that the host works out from scalar step inputs."""
        scalar = Derived(self.store, TensorSpec((1, width), DType.FP32), sources, function)
        scalar.t  # noqa: B018 - it must exist before a capture
        scalar.refresh()
        return scalar


ROWS: dict[str, Callable[[Context], Kernel]] = {}  # by the name of an op, filled by the modules of this folder


def row(
    op: str, delivery: Delivery = Delivery.OUT, layouts: Callable[..., list[Layout | None]] | None = None, **facts: Any
) -> Callable[[Build], Build]:
    """Decorator: a function of what rows are made for and of what a launch is bound to becomes the row of an op.

    A RETURNS row's launch returns tensors of its own, one an output; None for an output that it does not form.
    `layouts` takes the context before what it takes in a Kernel.
    """

    def declare(build: Build) -> Build:
        def made(c: Context) -> Kernel:
            told = None if layouts is None else partial(layouts, c)
            return Kernel(partial(build, c), delivery, layouts=told, **facts)

        ROWS[op] = made
        return build

    return declare


def is_bf16(tensor: DeviceTensor) -> bool:
    return tensor.spec.dtype is DType.BF16


def wide(c: Context, tensor: DeviceTensor) -> Any:
    """A tensor in fp32. Ops on operands of two dtypes are avoided: with a row repeated, ttnn 0.81 gets them wrong."""
    return c.tt.typecast(tensor.t, c.tt.float32) if is_bf16(tensor) else tensor.t


def rows_shape(shape: Sequence[int]) -> tuple[int, int]:
    """All axes but the last as one."""
    shape = device_shape(tuple(shape))
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1]


def flattens(shape: Sequence[int]) -> bool:
    """True if the rows of a tensor can be seen as one axis for free."""
    shape = device_shape(tuple(shape))
    return all(size == 1 for size in shape[:-2]) or shape[-2] % TILE == 0


def column_sum(c: Context, tensor: Any, shape: Sequence[int], dtype: DType, into_: DeviceTensor | None) -> Any:
    """The sum over all axes but the last, [1, C]; None where it was written into a buffer that keeps its tensor."""
    rows, columns = rows_shape(shape)
    if flattens(shape):
        flat = c.tt.reshape(tensor, (rows, columns))
        if into_ is None or into_.adopts:
            return c.tt.matmul(c.ones_row(rows, dtype).t, flat, **c.product)
        c.tt.matmul(c.ones_row(rows, dtype).t, flat, optional_output_tensor=into_.t, **c.product)
        return None
    axes = list(range(len(shape) - 1))
    return c.tt.reshape(c.tt.sum(tensor, dim=axes, keepdim=True, **c.exact), (1, columns))
