"""The programs that a node of a plan becomes on a Tenstorrent device: what the rows of device/ttnn/kernels launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ttrain.core.spec import DType, TensorSpec
from ttrain.device.ttnn.cost.programs import Product, Program, Scatter, Stream
from ttrain.device.ttnn.tensors.layout import TILE, default_layout, device_shape

Node = Any  # of a graph, which lies above devices
ONE_HOT_UP_TO = 2048  # ids: a larger vocabulary gets its gradient from ttnn's embedding_bw


def node_programs(node: Node) -> list[Program]:
    """Programs of one launch of a node, in order. Reshapes that ttnn gives as views are none."""
    return list(_ROWS.get(node.op.name, _once)(node))


def _streamed(*specs: TensorSpec, wide: bool = False) -> Stream:
    """Every tensor once; with `wide` in fp32, whatever its dtype."""
    layouts = [
        default_layout(spec.with_dtype(DType.FP32) if wide and spec.dtype.is_floating else spec) for spec in specs
    ]
    return Stream(float(sum(layout.nbytes for layout in layouts)), max(layout.tiles for layout in layouts))


def _scattered(*specs: TensorSpec) -> Scatter:
    ordered = _streamed(*specs)
    return Scatter(ordered.nbytes, ordered.tiles)


def _specs(node: Node) -> list[TensorSpec]:
    return [value.spec for value in (*node.values, *node.outputs)]


def _once(node: Node) -> Iterator[Program]:
    yield _streamed(*_specs(node))


def _out_of_order(node: Node) -> Iterator[Program]:
    yield _scattered(*_specs(node))


def _size(spec: TensorSpec) -> tuple[int, int]:
    """All axes but the last as one, and the last."""
    shape = device_shape(spec.shape)
    return math.prod(shape[:-1]), shape[-1]


def _product(m: int, k: int, n: int, dtype: DType, batch: int = 1) -> Product:
    return Product(m, k, n, batch, float(dtype.itemsize))


def _matmul(node: Node) -> Iterator[Program]:
    a, b, y = node.inputs[0], node.inputs[1], node.outputs[0]
    assert a is not None and b is not None
    inner = a.shape[-2] if node.attributes["transpose_a"] else a.shape[-1]
    *lead, m, n = y.shape
    yield _product(m, inner, n, a.spec.dtype, math.prod(lead))


def _linear(node: Node) -> Iterator[Program]:
    rows, columns = _size(node.outputs[0].spec)
    yield _product(rows, node.input("weight").shape[1], columns, node.outputs[0].spec.dtype)
    if node.attributes.get("activation") not in (None, "relu"):
        yield _streamed(node.outputs[0].spec, node.outputs[0].spec)


def _column_sum(spec: TensorSpec) -> Product:
    """A product with a row of ones."""
    rows, columns = _size(spec)
    return _product(1, rows, columns, spec.dtype)


def _reduce_sum(node: Node) -> Iterator[Program]:
    spec, axes = node.input("x").spec, list(node.attributes["axes"])
    if spec.rank >= 2 and axes == list(range(spec.rank - 1)):
        yield _column_sum(spec)
    elif spec.rank == 2 and len(axes) == 2:
        yield _column_sum(spec)
        yield _streamed(spec.with_shape(1, spec.shape[1]))
    else:
        yield _streamed(spec, node.outputs[0].spec)


def _layer_norm(node: Node) -> Iterator[Program]:
    x = node.input("x").spec
    if x.dtype is DType.BF16:
        yield from (_scattered(x), _scattered(x, x), _scattered(x, x), _streamed(x.with_shape(*x.shape[:-1], 1)))
        return
    yield _scattered(x, x)
    yield from (_streamed(x), _streamed(x, x), _streamed(x, x), _streamed(x))
    yield _streamed(x.with_shape(*x.shape[:-1], 1))


def _layer_norm_grad(node: Node) -> Iterator[Program]:
    x, residual = node.input("x").spec, node.inputs[-1]
    if x.dtype is DType.BF16:
        yield from (_scattered(x, x, x), _scattered(x, x))
    else:
        yield from [_streamed(x, x)] * 4 + [_streamed(x, x, x)] * 6
        yield from (_streamed(x), _column_sum(x), _streamed(x))
        if node.attributes["bias"]:
            yield from (_column_sum(x), _streamed(node.outputs[-1].spec))
    if residual is not None:
        yield _streamed(x, x, x)


def _rms_norm(node: Node) -> Iterator[Program]:
    x, wide = node.input("x").spec, node.input("x").spec.with_dtype(DType.FP32)
    yield from (_streamed(x, wide), _streamed(wide), _scattered(x, x))
    yield _streamed(wide.with_shape(*x.shape[:-1], 1))


def _rms_norm_grad(node: Node) -> Iterator[Program]:
    x, wide = node.input("x").spec, node.input("x").spec.with_dtype(DType.FP32)
    yield from (_streamed(x, wide), _streamed(x, wide, wide), _column_sum(wide))
    yield _product(*_size(x), 1, DType.FP32)
    yield from [_streamed(x, x)] + [_streamed(x, wide)] * (x.dtype is not DType.FP32)
    yield from (_streamed(wide, wide, wide), _streamed(wide, x))
    if node.inputs[-1] is not None:
        yield _streamed(wide, x, x)


def _rotary(node: Node) -> Iterator[Program]:
    x, table = node.input("x").spec, node.input("cos").spec
    (rows, features), wide = _size(x), x.with_dtype(DType.FP32)
    places, pairs = _size(table)
    yield from [_product(places, pairs, features, table.dtype)] * 2
    if features > 2 * pairs * node.attributes["heads"]:
        yield _streamed(table.with_shape(places, features), table.with_shape(places, features))
    yield _product(rows, features, features, x.dtype)
    yield from (_streamed(x, wide, wide), _streamed(wide, wide, wide, x))


def _softmax(node: Node) -> Iterator[Program]:
    x = node.input("x").spec
    if not (node.attributes["mask"].is_causal and x.rank == 4 and x.shape[-1] % TILE == 0):
        yield _streamed(x, x)
    yield _scattered(x, x)


def _softmax_grad(node: Node) -> Iterator[Program]:
    y = node.outputs[0].spec
    if y.dtype is DType.BF16:
        yield from (_scattered(y, y, y), _streamed(y, y))
    else:
        yield from (_streamed(y, y, y), _streamed(y), _streamed(y, y), _streamed(y, y, y), _streamed(y, y))


def _split_heads(node: Node) -> Iterator[Program]:
    parts = node.specs[1]
    time, width = parts[0].shape[-2:]
    if len(parts) == 3 and time % TILE == 0 and width % TILE == 0:
        yield _scattered(*_specs(node))
        return
    for part in parts:
        yield from [_scattered(part, part)] * (3 if len(parts) > 1 else 2)


def _merge_heads(node: Node) -> Iterator[Program]:
    parts = [value.spec for value in node.values]
    time, width = parts[0].shape[-2:]
    if time % TILE or width % TILE:
        for part in parts:
            yield from [_scattered(part, part)] * 2
    if len(parts) > 1:
        yield _scattered(*parts, *parts)
    if time % TILE == 0 and width % TILE == 0:
        yield _scattered(*_specs(node))


def _embedding(node: Node) -> Iterator[Program]:
    ids, weight = node.inputs[0], node.inputs[1]
    assert ids is not None and weight is not None
    y = node.outputs[0].spec
    aligned = device_shape(ids.shape)[-1] % TILE == 0
    look_up = (
        [_scattered(y, y)] if aligned else [_scattered(weight.spec, weight.spec), _scattered(y, y), _scattered(y, y)]
    )
    if weight.spec.dtype is DType.BF16:
        yield from look_up
        return
    for part in range(3):  # fp32 goes in three bf16 parts
        yield _streamed(weight.spec)
        yield from look_up
        yield _streamed(y)
        yield from [_streamed(y, y, y)] * (part > 0) + [_streamed(weight.spec, weight.spec)] * (part < 2)


def _embedding_grad(node: Node) -> Iterator[Program]:
    dy, ids, vocabulary = node.input("dy").spec, node.input("ids").spec, node.attributes["vocabulary"]
    if vocabulary > ONE_HOT_UP_TO and dy.dtype is DType.BF16 and ids.shape[-1] % TILE == 0:
        yield _scattered(dy, node.outputs[0].spec)
        return
    yield _streamed(TensorSpec((ids.size, vocabulary), dy.dtype))
    yield _product(vocabulary, ids.size, dy.shape[-1], dy.dtype)


def _softmax_of_logits(logits: TensorSpec) -> Iterator[Program]:
    yield from (_streamed(logits), _streamed(logits, logits), _streamed(logits), _streamed(logits, logits))


def _loss_of_logits(logits: TensorSpec) -> Iterator[Program]:
    """Log-sum-exp, the target's logit, one-hot rows and weights."""
    column = logits.with_shape(logits.shape[0], 1)
    yield from (_streamed(column, column), _streamed(logits), _streamed(logits, logits), _streamed(logits))
    yield from [_streamed(column, column)] * 5


def _cross_entropy(node: Node) -> Iterator[Program]:
    logits = node.input("logits").spec
    wide = logits.with_dtype(DType.FP32)
    if logits.dtype is not DType.FP32:
        yield _streamed(logits, wide)
    yield from _softmax_of_logits(wide)
    yield from _loss_of_logits(wide)


def _cross_entropy_grad(node: Node) -> Iterator[Program]:
    logits = node.input("logits").spec
    wide = logits.with_dtype(DType.FP32)
    if logits.dtype is not DType.FP32:
        yield _streamed(logits, wide)
    yield from _softmax_of_logits(wide)
    column = wide.with_shape(wide.shape[0], 1)
    yield from (_streamed(wide), _streamed(column, column), _streamed(column, column))
    yield from (_streamed(wide, wide, wide), _streamed(wide, wide))


def _head_cross_entropy(node: Node) -> Iterator[Program]:
    hidden, head = node.input("hidden").spec, node.input("head").spec
    rows, width = _size(hidden)
    vocabulary = head.shape[0]
    logits = TensorSpec((rows, vocabulary))
    yield Product(rows, width, vocabulary, 1, float(hidden.dtype.itemsize))
    yield from _softmax_of_logits(logits)
    yield from _loss_of_logits(logits)
    if node.attributes["gradients"]:
        yield from (_streamed(logits, logits, logits), _streamed(logits, logits))
        yield _product(rows, vocabulary, width, hidden.dtype)
        if not node.attributes.get("frozen"):
            yield _product(vocabulary, rows, width, hidden.dtype)


def _squared_error(node: Node) -> Iterator[Program]:
    prediction = node.inputs[0]
    assert prediction is not None
    wide = prediction.spec.with_dtype(DType.FP32)
    yield _streamed(wide, prediction.spec, prediction.spec)
    yield _column_sum(wide)
    yield _product(1, _size(wide)[1], 1, DType.FP32)


def _two(node: Node) -> Iterator[Program]:
    yield from [_streamed(*_specs(node))] * 2


def _three(node: Node) -> Iterator[Program]:
    yield from [_streamed(*_specs(node))] * 3


def _joined(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Matrices as one tensor and vectors as another, as the device stacks state; what fills no tiles stays single."""
    groups: dict[int, list[TensorSpec]] = {2: [], 1: []}
    single: list[TensorSpec] = []
    for spec in specs:
        fills = spec.rank in groups and all(size % TILE == 0 for size in spec.shape)
        (groups[spec.rank] if fills else single).append(spec)
    stacks = [
        TensorSpec((sum(default_layout(member).tiles for member in group) * TILE, TILE), group[0].dtype)
        for group in groups.values()
        if group
    ]
    return stacks + single


def _global_norm(node: Node) -> Iterator[Program]:
    stacks = _joined([value.spec for value in node.values])
    for spec in stacks:
        wide = spec.with_dtype(DType.FP32)
        yield from (_streamed(spec, wide), _streamed(wide), _streamed(wide.with_shape(1, 1)))
    yield from [_streamed(node.outputs[0].spec)] * (1 if len(stacks) <= 2 else 3)


def _update(node: Node) -> Iterator[Program]:
    """Elementwise programs over all state of a run: see device/ttnn/kernels/update.py."""
    attributes, rule = node.attributes, node.attributes["rule"]
    count, settings = attributes["count"], dict(rule.settings)
    written = [value.spec.dtype for value in node.outputs[: count * (1 + len(rule.slots)) : count]]
    narrow = sum(dtype is not DType.FP32 for dtype in written)
    gradient = node.values[count].spec.dtype
    if rule.name == "adamw":
        programs = 8 if settings["weight_decay"] else 7
    elif rule.name in ("sgd", "sgd_momentum"):
        scaled = node.inputs[-2] is not None or gradient is not DType.FP32
        programs = 1 + bool(scaled) + bool(settings["weight_decay"])
        programs += bool(settings.get("momentum")) * (2 if settings.get("nesterov") else 1)
    else:
        programs = 1 + len(written) + sum(name not in ("full", "cast") for name, *_ in rule.program[0])
    programs += 2 * narrow + 18 * len(attributes.get("stochastic", ()))
    for spec in _joined([value.spec for value in node.values[:count]]):
        yield from [_streamed(*[spec] * 3, wide=True)] * programs
        yield from [_streamed(*[spec] * 2, wide=True)] * bool(attributes.get("copies"))


def _dropout_mask(node: Node) -> Iterator[Program]:
    """A hash of every element in int32: see device/ttnn/kernels/random.py."""
    mask = node.outputs[0].spec
    yield from [_streamed(mask, mask, wide=True)] * 12


_ROWS: dict[str, Callable[[Node], Iterator[Program]]] = {
    "matmul": _matmul, "linear": _linear, "reduce_sum": _reduce_sum, "layer_norm": _layer_norm,
    "layer_norm_grad": _layer_norm_grad, "rms_norm": _rms_norm, "rms_norm_grad": _rms_norm_grad,
    "rotary": _rotary, "silu_grad": _three, "softmax": _softmax, "softmax_grad": _softmax_grad,
    "split_heads": _split_heads, "merge_heads": _merge_heads, "transpose": _out_of_order,
    "copy_reshape": _out_of_order, "embedding": _embedding, "embedding_grad": _embedding_grad,
    "cross_entropy": _cross_entropy, "cross_entropy_grad": _cross_entropy_grad,
    "head_cross_entropy": _head_cross_entropy, "squared_error": _squared_error, "squared_error_grad": _two,
    "expand": _two, "tanh_grad": _two, "global_norm": _global_norm, "update": _update,
    "clip_factor": _three, "dropout_mask": _dropout_mask,
}  # fmt: skip
