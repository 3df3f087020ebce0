"""Helpers that the kernel families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Attributes as Attributes
from ttrain.device.base import Delivery, Kernel, Launch, Layout
from ttrain.device.ttnn.tensors.device_tensor import Derived, DeviceTensor, Tensors
from ttrain.device.ttnn.tensors.store import TILE, Store, TileLayout, device_shape, dtype_name

Specs = Sequence[Any]
Tensor = DeviceTensor
Build = Callable[..., Any]


@dataclass
class Context:
    """The device that rows are built for.

    config: precision of the matrix unit. grid: cores that matrix products may use, None for all. fused: whether to take
    ttnn's fused training kernels (moreh), which compute in bf16, where there are some. replayed: whether steps are
    captured, so that no row may turn an input into a number. core_subset: whether ops are kept on some of the cores,
    see runtime/subdevices.py.
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
            tensor.layout, tensor.tensor = layout, self.store.filled(layout, values)  # it must exist before a capture
            self.constants[key, layout] = tensor
        return self.constants[key, layout]

    def full(self, value: float, shape: tuple[int, ...], dtype: DType = DType.FP32) -> DeviceTensor:
        """Return a constant tensor of one number. A product with a row of ones sums columns."""
        layout = TileLayout(shape, dtype_name(dtype))
        return self.constant(("full", value), layout, lambda: np.full(shape, value, np.float32))

    def numbers(self, count: int, start: int = 0) -> DeviceTensor:
        """Return the constant row of int32 numbers from `start` on."""
        row = np.arange(start, start + count, dtype=np.int32)[None]
        return self.constant(("numbers", start), TileLayout((1, count), "int32"), lambda: row)

    def derived(self, sources: Tensors, function: Callable[..., float], width: int = 1) -> Derived:
        """Return a scalar tensor, or a row of equal numbers, that the host works out from scalar step inputs."""

        def row(*values: float) -> np.ndarray:
            return np.full((1, width), function(*values), np.float32)

        made = Derived(self.store, TileLayout((1, width)), sources, row)
        made.t  # noqa: B018 - it must exist before a capture
        return made


ROWS: dict[str, Callable[[Context], Kernel]] = {}  # by the name of an op, filled by the modules of this folder


def row(
    op: str,
    delivery: Delivery = Delivery.OUT,
    layouts: Callable[..., list[Layout | None]] | None = None,
    bound: bool = False,
    **facts: Any,
) -> Callable[[Build], Build]:
    """Decorator: a function of a context, inputs, outputs and workspace becomes the row of an op.

    Attributes are given by name, and outputs are left out where they share the buffers of inputs (INPLACE). The
    function runs at every launch; with `bound` it runs once, when buffers are known, and returns the launch. The launch
    of a RETURNS row returns tensors of its own, one an output; None for an output that it does not form. `layouts`
    takes the context before what it takes in a Kernel.
    """

    def declare(build: Build) -> Build:
        def made(c: Context) -> Kernel:
            def bind(ins: Specs, outs: Specs, attributes: Attributes, work: Specs) -> Launch:
                written = () if delivery is Delivery.INPLACE else outs
                launch = partial(build, c, *ins, *written, *work, **attributes)
                return launch() if bound else launch

            return Kernel(bind, delivery, layouts=None if layouts is None else partial(layouts, c), **facts)

        ROWS[op] = made
        return build

    return declare


def is_bf16(tensor: DeviceTensor) -> bool:
    """True if the tensor holds bf16 numbers."""
    return tensor.spec.dtype is DType.BF16


def wide(c: Context, tensor: DeviceTensor) -> Any:
    """A tensor in fp32. Ops on operands of two dtypes are avoided: with a row repeated, ttnn 0.81 gets them wrong."""
    return c.tt.typecast(tensor.t, c.tt.float32) if is_bf16(tensor) else tensor.t


def in_parts(tt: Any, x: Any, moves: Callable[[Any], Any]) -> Any:
    """Apply what only moves elements, but not those of fp32, to any tensor: three parts in bf16 hold its 24 bits."""
    if x.dtype != tt.float32:
        return moves(x)
    rest, total = x, None
    for last in (False, False, True):
        part = tt.typecast(rest, tt.bfloat16)
        found = tt.typecast(moves(part), tt.float32)
        total = found if total is None else tt.add(total, found)
        rest = rest if last else tt.subtract(rest, part)
    return total


def rows_shape(shape: Sequence[int]) -> tuple[int, int]:
    """All axes but the last as one."""
    *lead, last = device_shape(tuple(shape))
    return prod(lead), last


def flattens(shape: Sequence[int]) -> bool:
    """True if the rows of a tensor can be seen as one axis for free."""
    shape = device_shape(tuple(shape))
    return all(size == 1 for size in shape[:-2]) or shape[-2] % TILE == 0


def product_into(c: Context, into: DeviceTensor | None, a: Any, b: Any, **options: Any) -> Any:
    """A product; None where it was written into a buffer that keeps its tensor."""
    if into is None or into.adopts:
        return c.tt.matmul(a, b, **options, **c.product)
    c.tt.matmul(a, b, optional_output_tensor=into.t, **options, **c.product)
    return None


def column_sum(c: Context, tensor: Any, shape: Sequence[int], dtype: DType, into: DeviceTensor | None = None) -> Any:
    """The sum over all axes but the last, [1, C]; None where it was written into a buffer that keeps its tensor."""
    rows, columns = rows_shape(shape)
    if not flattens(shape):
        axes = list(range(len(shape) - 1))
        return c.tt.reshape(c.tt.sum(tensor, dim=axes, keepdim=True, **c.exact), (1, columns))
    return product_into(c, into, c.full(1, (1, rows), dtype).t, c.tt.reshape(tensor, (rows, columns)))
