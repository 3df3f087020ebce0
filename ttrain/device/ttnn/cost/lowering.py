"""Programs of a node of a plan on a card: its kernel row, run on tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np

from ttrain.core.spec import TensorSpec
from ttrain.device.base import Delivery
from ttrain.device.ttnn.cost.wormhole import Product, Program, Scatter, Stream
from ttrain.device.ttnn.kernels import kernel_table
from ttrain.device.ttnn.kernels.common import Context
from ttrain.device.ttnn.tensors.device_tensor import DeviceTensor, IntegerInput, deliver, stacked
from ttrain.device.ttnn.tensors.store import ROWS, TILES, Store, TileLayout, default_layout, shares_memory

Node = Any  # of a graph, which lies above devices
BANKS = 12  # of a Wormhole chip's DRAM
JOINED = ("global_norm", "all_reduce_state")  # ops on state that an optimizer has joined into stacks


class _Names:
    """An enum whose members nobody looks at."""

    def __getattr__(self, name: str) -> str:
        return name


class ShapeRuntime:
    """Answers like the module ttnn. `programs` collects what a chip would run.

    A `TileLayout` stands for a tensor, and its name for a dtype. A call without a method here is elementwise.
    """

    float32, bfloat16, bfloat8_b, int32, uint32 = "float32", "bfloat16", "bfloat8_b", "int32", "uint32"
    TILE_LAYOUT, ROW_MAJOR_LAYOUT, DRAM_MEMORY_CONFIG, Shape = TILES, ROWS, None, tuple
    UnaryOpType = GeluVariant = _Names()

    def __init__(self) -> None:
        self.programs: list[Program] = []
        one, three = (partial(self._parts, count) for count in (1, 3))
        self.experimental = SimpleNamespace(view=self._seen_as, nlp_create_qkv_heads=one)
        heads = {"split_query_key_value_and_split_heads": three, "concatenate_heads": self._joined_heads}
        self.transformer = SimpleNamespace(**heads)
        moreh = {"adamw": self._adamw, "softmax_backward": self._softmax_backward}
        self.operations = SimpleNamespace(moreh=SimpleNamespace(layer_norm_backward=self._norm_backward, **moreh))

    def _ran(self, kind: type[Stream] | type[Scatter], read: Sequence[TileLayout], *made: TileLayout) -> Any:
        tensors = (*read, *made)
        self.programs.append(kind(float(sum(x.nbytes for x in tensors)), max(1, *(x.tiles for x in tensors))))
        return made[0]

    def __getattr__(self, name: str) -> Callable[..., TileLayout]:
        return self._elementwise

    def _elementwise(
        self, *operands: Any, dtype: str | None = None, output_tensor: Any = None, input_grad: Any = None, **_: Any
    ) -> Any:
        tensors = [x for x in operands if isinstance(x, TileLayout)]
        dtype = next((x for x in operands if isinstance(x, str)), dtype) or tensors[0].dtype
        made = output_tensor or input_grad
        made = made or TileLayout(np.broadcast_shapes(*(x.shape for x in tensors)), dtype)
        return self._ran(Stream, tensors, made)

    def fill(self, x: TileLayout, value: float, output_tensor: TileLayout) -> Any:
        return self._ran(Stream, [], output_tensor)

    def _reduced(self, x: TileLayout, dim: Any = None, kind: Any = Stream, **_: Any) -> Any:
        rank = len(x.shape)
        axes = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
        gone = {axis % rank for axis in axes}
        return self._ran(kind, [x], replace(x, shape=tuple(1 if a in gone else n for a, n in enumerate(x.shape))))

    sum, max = _reduced, _reduced

    def var(self, x: TileLayout, dim: int, **_: Any) -> Any:
        return self._reduced(x, dim, Scatter)

    def matmul(
        self, a: TileLayout, b: TileLayout, transpose_a: bool = False, transpose_b: bool = False, **options: Any
    ) -> Any:
        m, k = a.shape[-2:][::-1] if transpose_a else a.shape[-2:]
        n, lead = b.shape[-2 if transpose_b else -1], np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        rows, batch = (m, prod(lead)) if transpose_a or prod(b.shape[:-2]) > 1 else (prod(lead) * m, 1)
        self.programs.append(Product(rows, k, n, batch, a.bytes_per_element))
        made = TileLayout((*lead, m, n), options.get("dtype") or a.dtype)
        return options.get("optional_output_tensor") or made

    linear = matmul

    # Views, and moves of elements.

    def allocate_tensor_on_device(self, shape: Sequence[int], dtype: str, order: str, *_: Any) -> TileLayout:
        return TileLayout(tuple(shape), dtype, order)

    def narrow(self, x: TileLayout, axis: int, start: int, length: int) -> TileLayout:
        return replace(x, shape=(length, *x.shape[1:]))

    def _seen_as(self, x: TileLayout, shape: Sequence[int]) -> TileLayout:
        return replace(x, shape=tuple(shape))

    def reshape(self, x: TileLayout, shape: Sequence[int], padded: Sequence[int] | None = None) -> Any:
        made = self._seen_as(x, shape)
        free = padded is not None or shares_memory(TensorSpec(x.shape), TensorSpec(made.shape))
        return made if free else self._ran(Scatter, [x], made)

    def permute(self, x: TileLayout, order: Sequence[int]) -> Any:
        return self._ran(Scatter, [x], replace(x, shape=tuple(x.shape[axis] for axis in order)))

    def concat(self, parts: Sequence[TileLayout], dim: int) -> Any:
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        return self._ran(Scatter, parts, replace(parts[0], shape=tuple(shape)))

    def slice(self, x: TileLayout, starts: Sequence[int], ends: Sequence[int]) -> Any:
        made = replace(x, shape=tuple(end - start for start, end in zip(starts, ends, strict=True)))
        return self._ran(Scatter, [made], made)

    def to_layout(self, x: TileLayout, order: str) -> Any:
        return self._ran(Scatter, [x], replace(x, order=order))

    def embedding(self, ids: TileLayout, table: TileLayout, layout: str) -> Any:
        made = TileLayout((*ids.shape, table.shape[-1]), table.dtype, layout)
        return self._ran(Scatter, [made], made)

    def embedding_bw(self, ids: TileLayout, table: TileLayout, dy: TileLayout) -> Any:
        return self._ran(Scatter, [dy], replace(dy, shape=(1, 1, *table.shape)))

    def _parts(self, count: int, x: TileLayout, num_heads: int, **_: Any) -> list[TileLayout]:
        made = [replace(x, shape=(x.shape[0], num_heads, x.shape[-2], x.shape[-1] // count // num_heads))] * count
        self._ran(Scatter, [x], *made)
        return made

    def _joined_heads(self, x: TileLayout) -> Any:
        batch, heads, time, width = x.shape
        return self._ran(Scatter, [x], replace(x, shape=(batch, time, heads * width)))

    def sort(self, x: TileLayout, dim: int) -> list[Any]:
        numbers = replace(x, dtype=self.uint32)
        self._ran(Scatter, [x], x, numbers)
        return [x, numbers]

    def gather(self, x: TileLayout, dim: int, numbers: TileLayout) -> Any:
        return self._ran(Scatter, [x, numbers], replace(x, shape=numbers.shape))

    # Kernels that read rows of tiles several times.

    def _by_rows(self, x: TileLayout, *_: Any, **options: Any) -> Any:
        return self._ran(Scatter, [x], x)

    layer_norm = rms_norm = softmax = softmax_in_place = scale_mask_softmax_in_place = _by_rows

    def _softmax_backward(self, y: TileLayout, dy: TileLayout, *_: Any, input_grad_tensor: Any, **options: Any) -> None:
        self._ran(Scatter, [y, dy], input_grad_tensor)

    def _norm_backward(self, dy: TileLayout, x: TileLayout, *_: Any, input_grad: Any, **options: Any) -> None:
        """Two programs: one of the input, one of weight and bias."""
        self._ran(Scatter, [dy, x], input_grad)
        self._ran(Scatter, [dy], x)

    def _adamw(self, *operands: Any, **_: Any) -> None:
        p, g, m, v = operands[:4]
        self._ran(Stream, [p, g, m, v], p, m, v)


class ShapeStore(Store):
    """Makes tensors without values, and takes none."""

    def __init__(self, chips: int = 1) -> None:
        super().__init__(ShapeRuntime(), None, chips, BANKS, lambda nbytes: None)

    def filled(self, layout: TileLayout, values: Callable[[], np.ndarray] | None = None) -> Any:
        return self.blank(layout)

    empty = filled


class Lowering:
    """Programs of nodes on a card. `fused` and `chips` are those of the kernels' `Context`."""

    def __init__(self, fused: bool = True, chips: int = 1) -> None:
        self.context = Context(ShapeStore(chips), fused=fused)
        self.kernels = kernel_table(self.context)

    def programs(self, node: Node) -> list[Program]:
        """Return the programs of one launch of a node, in order."""
        kernel, (given, made), ran = self.kernels.get(node.op.name), node.specs, self.context.tt.programs
        if kernel is None:  # of another device's plan
            layouts = [default_layout(spec) for spec in (*given, *made) if spec is not None]
            return [Stream(float(sum(x.nbytes for x in layouts)), max(x.tiles for x in layouts))]
        ins: list[Any] = [None if spec is None else self._tensor(spec) for spec in given]
        outs = [self._tensor(spec) for spec in made]
        for number in kernel.overwrites:
            if given[number] == made[0]:
                outs[0] = ins[number]
        if node.op.name in JOINED:
            stacked(self.context.store, ins)
        work = [self._tensor(spec) for spec in kernel.workspace(given, made, node.attributes)]
        launch = kernel.bind(ins, outs, node.attributes, work)
        ran.clear()
        results = launch()
        if kernel.delivery is Delivery.RETURNS:
            deliver(results, outs)
        return list(ran)

    def _tensor(self, spec: TensorSpec) -> Any:
        if not spec.dtype.is_floating:
            return IntegerInput(self.context.store, spec)
        tensor = DeviceTensor(self.context.store, spec)
        if not spec.rank:
            tensor.upload(np.ones(()))  # kernels work numbers out of scalars
        return tensor
