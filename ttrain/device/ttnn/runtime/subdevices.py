"""A chip divided into sub-devices: disjoint ranges of cores, each with its own command queue and replica.

With sub-devices loaded, a program has to lie within one of them. Many ops of ttnn 0.81 take the cores that they may
use. The others start at the first core of the chip; here they are made of ops that take cores. Results are exact but
for the order of roundings.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from ttrain.core.errors import ConfigError, DeviceUnavailable
from ttrain.device.ttnn.kernels.common import in_parts
from ttrain.device.ttnn.runtime.environment import reason
from ttrain.device.ttnn.runtime.mesh import Mesh
from ttrain.device.ttnn.tensors.store import TILE, TileLayout

Range = tuple[int, int, int, int]  # first column, first row, last column, last row


def divided(rows: int, columns: int, count: int) -> list[Range]:
    """`count` disjoint ranges of whole columns where they come out equal, else of whole rows where those do."""
    if columns % count and rows % count == 0:
        return [(0, at * rows // count, columns - 1, (at + 1) * rows // count - 1) for at in range(count)]
    return [(at * columns // count, 0, (at + 1) * columns // count - 1, rows - 1) for at in range(count)]


def divide(mesh: Mesh, count: int) -> None:
    """Load a manager of sub-devices, and give the mesh its `parts`. Raises DeviceUnavailable where ttnn can't.

    A mocked board crashes on loading one, and its second queue can't launch: there the manager is only made, and all
    parts launch on queue 0.
    """
    tt, ranges = mesh.tt, divided(*mesh.cores, count)
    cores = [
        tt.CoreRangeSet({tt.CoreRange(tt.CoreCoord(x, y), tt.CoreCoord(last_x, last_y))})
        for x, y, last_x, last_y in ranges
    ]
    try:
        manager = mesh.handle.create_sub_device_manager([tt.SubDevice([part]) for part in cores], 0)
        if not mesh.mocked:
            mesh.handle.load_sub_device_manager(manager)
    except RuntimeError as error:
        raise DeviceUnavailable(f"device.subdevices={count}: {reason(error)}") from error
    mesh.manager = manager
    for index, (x, y, last_x, last_y) in enumerate(ranges):
        grid, part = tt.CoreGrid(y=last_y - y + 1, x=last_x - x + 1), copy.copy(mesh)
        part.part, part.queue = index, 0 if mesh.mocked else index
        sub_device = None if mesh.mocked else tt.SubDeviceId(index)
        exact = mesh.matrix_unit("HiFi4", True)
        part.tt = CoreSubsetRuntime(tt, cores[index], grid, part.queue, sub_device, exact)
        part.grid = part.whole_grid = grid
        part.cores, part.traces, part.parts = (grid.y, grid.x), [], []
        mesh.parts.append(part)


Constant = Callable[[Any, TileLayout, Callable[[], np.ndarray]], Any]

# Ops that take `sub_core_grids`.
_TOLD = (
    "add", "subtract", "multiply", "div", "squared_difference", "eq", "ge", "bitwise_xor", "logical_right_shift", "mac",
    "where", "fill", "typecast", "reshape", "slice", "concat", "identity", "sqrt", "square", "exp", "log",
    "tanh", "relu", "gelu", "silu", "sigmoid", "erf", "neg", "reciprocal", "rsqrt", "sign",
)  # fmt: skip
# Calls that launch nothing.
_HOST = (
    "Shape", "CoreGrid", "from_torch", "allocate_tensor_on_device", "copy_host_to_device_tensor", "get_memory_view",
    "narrow", "record_event", "wait_for_event", "begin_trace_capture", "end_trace_capture", "execute_trace",
    "release_trace", "synchronize_device", "get_device_tensors",
)  # fmt: skip
_JOINED_AT_ONCE = 48  # tensors that ttnn.concat takes in one launch


class CoreSubsetRuntime:
    """Answers like the module ttnn. `constant` (see Context.constant) is set before the first launch.

    What ops return is kept until `let_go`: another queue could get the memory of a tensor that a launch on this queue
    still reads, because ttnn frees memory when the host lets go of it.
    """

    def __init__(self, tt: Any, cores: Any, grid: Any, queue: int, sub_device: Any, exact: Any) -> None:
        """`cores` as a CoreRangeSet, `grid` its size; without a sub-device, None, products start at the first core.

        `exact` is a config of the matrix unit that keeps the bits of bf16 operands.
        """
        self._tt, self._cores, self._grid, self._queue, self._exact = tt, cores, grid, queue, exact
        self._place = {} if sub_device is None else {"sub_device_id": sub_device}
        self.constant: Constant
        self._kept: list[Any] = []
        one, three = (partial(self._split_heads, parts) for parts in (1, 3))
        self.linear = partial(self._product, tt.linear)
        self.sum, self.max = partial(self._reduce, "sum", 0.0), partial(self._reduce, "max", -1e30)
        self.experimental = SimpleNamespace(view=tt.experimental.view, nlp_create_qkv_heads=one)
        heads = {"split_query_key_value_and_split_heads": three, "concatenate_heads": self._merge_heads}
        self.transformer = SimpleNamespace(**heads)

    def __getattr__(self, name: str) -> Any:
        given = getattr(self._tt, name)
        if name in _TOLD:
            given = partial(self._on_cores, given)
        elif callable(given) and not isinstance(given, type) and name not in _HOST:
            given = partial(_refuse, name)
        setattr(self, name, given)
        return given

    def _on_cores(self, op: Callable[..., Any], *arguments: Any, **given: Any) -> Any:
        return self._keep(op(*arguments, **given, sub_core_grids=self._cores, cq_id=self._queue))

    def _keep(self, result: Any) -> Any:
        self._kept.append(result)
        return result

    def let_go(self) -> list[Any]:
        """Forget what ops returned; the caller may keep it longer."""
        kept, self._kept = self._kept, []
        return kept

    def to_torch(self, tensor: Any) -> Any:
        return self._tt.to_torch(tensor, cq_id=self._queue)

    # Products.

    def pick(self, a: Any, b: Any, **options: Any) -> Any:
        """A product of bf16 matrices of which one holds a single 1 in every row or column: no bit is lost."""
        return self.matmul(a, b, compute_kernel_config=self._exact, **options)

    def _product(self, op: Callable[..., Any], a: Any, b: Any, **options: Any) -> Any:
        options |= {"core_grid": self._grid, "cq_id": self._queue, **self._place}
        return self._keep(op(a, b, **options))

    def matmul(self, a: Any, b: Any, **options: Any) -> Any:
        """ttnn places products of two batches at the first core, so every pair of matrices is a launch."""
        batch = math.prod(tuple(b.shape)[:-2])
        if batch == 1:
            return self._product(self._tt.matmul, a, b, **options)
        out, lead = options.pop("optional_output_tensor", None), tuple(a.shape)[:-2]
        pairs = ([self._matrix(whole, index) for whole in (a, b)] for index in range(batch))
        parts = [self._product(self._tt.matmul, *pair, **options) for pair in pairs]
        result = self.reshape(self._join(parts, 0), (*lead, *tuple(parts[0].shape)[-2:]))
        return result if out is None else self.copy(result, out)

    def _matrix(self, whole: Any, index: int) -> Any:
        """One matrix of a batch, [1, R, C]."""
        rows, columns = tuple(whole.shape)[-2:]
        flat = self.reshape(whole, (math.prod(tuple(whole.shape)[:-2]), rows, columns))
        return self.slice(flat, [index, 0, 0], [index + 1, rows, columns])

    def _join(self, parts: Sequence[Any], dim: int) -> Any:
        while len(parts) > 1:
            groups = [parts[at : at + _JOINED_AT_ONCE] for at in range(0, len(parts), _JOINED_AT_ONCE)]
            parts = [self.concat(list(group), dim=dim) if len(group) > 1 else group[0] for group in groups]
        return parts[0]

    # Reductions: told their cores, but where a tensor has padding they clear it at the first core.

    def _reduce(self, name: str, empty: float, x: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
        """Reduce axes, which are kept; the result is [1, 1] where all are reduced."""
        shape = tuple(x.shape)
        axes = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
        reduced = {axis % len(shape) for axis in axes}
        result = tuple(1 if axis in reduced else size for axis, size in enumerate(shape))
        if shape[-1] % TILE or shape[-2] % TILE:
            x = self._filled(x, shape, empty)
        total = self._on_cores(getattr(self._tt, name), x, dim=sorted(reduced), keepdim=True, **options)
        if tuple(total.shape) != result:  # the padding of an axis that stays
            total = self._tt.reshape(total, result, TileLayout(result).padded)
        return self.reshape(total, (1, 1)) if dim is None else total

    def _filled(self, x: Any, shape: tuple[int, ...], empty: float) -> Any:
        """All of a tensor's tiles as one without padding, `empty` where the padding was."""
        padded = TileLayout(shape).padded
        layout = TileLayout(padded[-2:], str(x.dtype).rpartition(".")[2].lower())
        rows, columns = (np.arange(size) for size in layout.shape)
        inside = np.outer(rows < shape[-2], columns < shape[-1]).astype(np.float32)
        mask = self.constant(("inside", shape[-2:]), layout, lambda: inside)
        return self.where(mask.t, self._tt.reshape(x, padded, padded), empty)

    # Ops that can't be told.

    def _wide(self, x: Any) -> Any:
        return x if x.dtype == self._tt.float32 else self.typecast(x, self._tt.float32)

    def copy(self, source: Any, target: Any) -> Any:
        if source.dtype != target.dtype:
            return self.typecast(source, target.dtype, output_tensor=target)
        return self.identity(source, output_tensor=target)

    def addcmul(self, a: Any, b: Any, c: Any, value: float = 1.0, output_tensor: Any = None) -> Any:
        product, out = self.multiply(b, c), {} if output_tensor is None else {"output_tensor": output_tensor}
        if value == -1.0:
            return self.subtract(a, product, **out)
        return self.add(a, product if value == 1.0 else self.multiply(product, value), **out)

    def lerp(self, a: Any, b: Any, weight: float, output_tensor: Any) -> Any:
        step = self.multiply(self.subtract(b, a), weight)
        return self.add(a, step, output_tensor=output_tensor)

    def minimum(self, x: Any, limit: float, output_tensor: Any) -> Any:
        return self.where(self.ge(x, limit), limit, x, output_tensor=output_tensor)

    def maximum(self, x: Any, y: Any, **options: Any) -> Any:
        return self.where(self.ge(x, y), x, y, **options)

    def gelu_bw(self, dy: Any, x: Any, variant: Any, input_grad: Any) -> list[Any]:
        """dy (P + x P') with gelu = x P: P is the normal distribution, or its approximation by tanh."""
        tt, x = self._tt, self._wide(x)
        square = self.multiply(x, x)
        if variant == tt.GeluVariant.Tanh:
            root, cubic = math.sqrt(2 / math.pi), 0.044715
            inner = self.multiply(self.multiply(self.add(self.multiply(square, cubic), 1.0), x), root)
            tanh = self.tanh(inner)
            half = self.multiply(self.add(tanh, 1.0), 0.5)
            slope = self.multiply(self.add(self.multiply(square, 3 * cubic), 1.0), root / 2)
            slope = self.multiply(self.subtract(slope, self.multiply(slope, self.multiply(tanh, tanh))), x)
        else:
            half = self.multiply(self.add(self.erf(self.multiply(x, math.sqrt(0.5))), 1.0), 0.5)
            slope = self.multiply(self.exp(self.multiply(square, -0.5)), 1 / math.sqrt(2 * math.pi))
            slope = self.multiply(slope, x)
        return [self.multiply(self._wide(dy), self.add(half, slope), output_tensor=input_grad)]

    # Head moves, column by column.

    def _columns(self, x: Any, start: int, stop: int) -> Any:
        """[B, T, stop - start] out of [B, T, C]. Columns within a tile are picked by a product."""
        columns = x.shape[2]
        if start % TILE == 0 and (stop % TILE == 0 or stop == columns):
            return self.slice(x, [0, 0, start], [x.shape[0], x.shape[1], stop])
        chosen = self._unit(columns, start, stop)
        return in_parts(self, x, lambda part: self.pick(part, chosen.t))

    def _unit(self, size: int, start: int, stop: int) -> Any:
        """Return columns of the unit matrix of a size."""
        layout = TileLayout((size, stop - start), "bfloat16")
        return self.constant(("columns", start, stop), layout, lambda: np.eye(size, dtype=np.float32)[:, start:stop])

    def permute(self, x: Any, order: Sequence[int]) -> Any:
        """Swap the last two axes, by a product with the unit matrix. Other axes may not change places."""
        axes = list(range(len(order)))
        if list(order) != [*axes[:-2], axes[-1], axes[-2]]:
            _refuse("permute")
        unit = self._unit(x.shape[-2], 0, x.shape[-2])
        return in_parts(self, x, lambda part: self.pick(part, unit.t, transpose_a=True))

    def _split_heads(self, parts: int, x: Any, num_heads: int, **_: Any) -> list[Any]:
        batch, time, columns = x.shape[0], x.shape[-2], x.shape[-1]
        flat, width = self.reshape(x, (batch, time, columns)), columns // parts // num_heads
        pieces = [self._columns(flat, start, start + width) for start in range(0, columns, width)]
        heads = [self.reshape(piece, (batch, 1, time, width)) for piece in pieces]
        return [self._join(heads[at : at + num_heads], 1) for at in range(0, len(heads), num_heads)]

    def _merge_heads(self, x: Any) -> Any:
        batch, heads, time, width = tuple(x.shape)
        pieces = [self.slice(x, [0, at, 0, 0], [batch, at + 1, time, width]) for at in range(heads)]
        return self._join([self.reshape(piece, (batch, time, width)) for piece in pieces], 2)


def _refuse(name: str, *_: Any, **__: Any) -> None:
    raise ConfigError(f"device.subdevices: ttnn.{name} can't be kept on a part of the chip. Give device.subdevices=1.")
