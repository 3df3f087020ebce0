"""Ops that treat every element alike: arithmetic with broadcasting, functions of one number, comparison, casts.

Dropout is one: its mask is a pure function of (seed, stream, element), see core/random_bits.py. Backward and
recomputation form the mask again instead of keeping it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ttrain.core.random_bits import keep_threshold, mix, stream_key
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Case, Graph, Node, Op, Value, cases, composite, declare, op, primitive, require

# Odd sizes, a scalar and a size-one axis: what kernels with vector loops and tiles get wrong.
PLAIN_SHAPES = ((4, 8), (2, 3, 32), (1, 1, 33), (257,), ())
BROADCAST_SHAPES = (((4, 8), (4, 8)), ((2, 3, 32), (32,)), ((1, 1, 33), (2, 5, 1)), ((7,), ()), ((), ()))


def broadcast_shape(owner: str, x: TensorSpec, y: TensorSpec) -> tuple[int, ...]:
    """numpy's broadcast of two shapes."""
    rank = max(x.rank, y.rank)
    pairs = list(zip(*((1,) * (rank - spec.rank) + spec.shape for spec in (x, y)), strict=True))
    fits = all(left == right or 1 in (left, right) for left, right in pairs)
    require(fits, owner, f"{x} and {y}", "shapes that broadcast", "Reshape one of them.")
    return tuple(right if left == 1 else left for left, right in pairs)


def sum_to(gradient: Value, target: Value) -> Value:
    """The gradient summed over the axes along which `target` was broadcast, in target's dtype."""
    graph, lead = gradient.graph, gradient.spec.rank - target.spec.rank
    axes = tuple(n for n, size in enumerate(gradient.shape) if n < lead or size != target.shape[n - lead])
    if axes:
        gradient = graph.apply("reduce_sum", gradient, axes=axes)
    if gradient.shape != target.shape:
        gradient = graph.apply("reshape", gradient, shape=target.shape)
    if gradient.spec.dtype is target.spec.dtype:
        return gradient
    return graph.apply("cast", gradient, dtype=target.spec.dtype)


def is_one(value: Value) -> bool:
    """True if a value is the literal constant 1, which multiplication may skip."""
    node = value.producer
    return node is not None and is_full(value) and node.attributes["value"] == 1.0


def is_full(value: Value) -> bool:
    """True if a value is a literal constant."""
    return value.producer is not None and value.producer.op.name == "full"


def free(node: Node) -> int:
    """The operations of an op that moves or looks up, but computes nothing."""
    return 0


class Elementwise(Op):
    """y = f(x), same shape and dtype, or z = f(x, y) with numpy broadcasting, where the result has x's dtype.

    `gradient(dy, y, *inputs)` gives the inputs' gradients, None where an op has none. Inputs named in `positive` are
    drawn above zero by tests; `cost` is in additions. Without a `reference(*tensors)` it is torch's method of the op's
    name.
    """

    family = "elementwise"
    elementwise = True
    cheap = True

    def __init__(
        self,
        name: str,
        doc: str,
        gradient: Callable[..., Sequence[Value | None]] | None = None,
        positive: tuple[str, ...] = (),
        cost: int = 1,
        inputs: str = "x",
        reference: Callable[..., Any] | None = None,
    ) -> None:
        self.name, self.__doc__, self.inputs = name, doc, tuple(inputs)
        self.reference = reference or (lambda x, *y: getattr(x, name)(*y))  # type: ignore[method-assign]
        self._gradient, self._cost, self.differentiable = gradient, cost, gradient is not None
        self.outputs = ("y",) if len(self.inputs) == 1 else ("z",)
        shapes = [(shape,) for shape in PLAIN_SHAPES] if len(self.inputs) == 1 else BROADCAST_SHAPES
        self.cases = [Case(given, positive=positive) for given in shapes]
        declare(self)

    def __call__(self, *inputs: Value) -> Value:
        """Record the op into the graph of its inputs."""
        return self.record(*inputs)

    def infer(self, *specs: TensorSpec) -> TensorSpec:
        expected = "a floating-point tensor" if len(specs) == 1 else "floating-point tensors"
        require(all(x.dtype.is_floating for x in specs), self.name, " and ".join(map(str, specs)), expected)
        return specs[0] if len(specs) == 1 else specs[0].with_shape(*broadcast_shape(self.name, *specs))

    def flops(self, node: Node) -> int:
        return self._cost * node.outputs[0].spec.size

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        if self._gradient is None:
            return super().vjp(node, *gradients)
        found = self._gradient(gradients[0], node.outputs[0], *node.inputs)
        return [None if g is None else sum_to(g, x) for g, x in zip(found, node.values, strict=True)]


def _divide_gradient(dz: Value, z: Value, x: Value, y: Value) -> Sequence[Value]:
    dx = dz / y
    return [dx, -(dx * z)]


def _maximum_gradient(dz: Value, z: Value, x: Value, y: Value) -> Sequence[Value]:
    to_y = dz * greater(y, x)
    return [dz - to_y, to_y]


def _erf_gradient(dy: Value, y: Value, x: Value) -> Sequence[Value]:
    return [dy * exp(-(x * x)) * (2 / math.sqrt(math.pi))]


add = Elementwise("add", "z = x + y.", lambda dz, z, x, y: [dz, dz], inputs="xy")
subtract = Elementwise("subtract", "z = x - y.", lambda dz, z, x, y: [dz, -dz], inputs="xy")
_multiply = Elementwise("multiply", "z = x * y.", lambda dz, z, x, y: [multiply(dz, y), multiply(dz, x)], inputs="xy")
divide = Elementwise("divide", "z = x / y.", _divide_gradient, ("y",), inputs="xy")
maximum = Elementwise("maximum", "z = the larger one; a tie counts for x.", _maximum_gradient, inputs="xy")
greater = Elementwise("greater", "z = 1 where x > y, else 0.", inputs="xy", reference=lambda x, y: (x > y).to(x.dtype))
exp = Elementwise("exp", "y = e^x.", lambda dy, y, x: [dy * y], cost=4)
expm1 = Elementwise("expm1", "y = e^x - 1, exact near 0.", lambda dy, y, x: [dy * (y + 1.0)], cost=4)
log = Elementwise("log", "y = ln x, x > 0.", lambda dy, y, x: [dy / x], ("x",), cost=4)
sqrt = Elementwise("sqrt", "y = the square root of x > 0.", lambda dy, y, x: [dy / y * 0.5], ("x",))
sin = Elementwise("sin", "y = sin x.", lambda dy, y, x: [dy * cos(x)], cost=8)
cos: Elementwise = Elementwise("cos", "y = cos x.", lambda dy, y, x: [-(dy * sin(x))], cost=8)
sigmoid = Elementwise("sigmoid", "y = 1 / (1 + e^-x).", lambda dy, y, x: [dy * (y - y * y)], cost=8)
tanh = Elementwise("tanh", "y = tanh x.", lambda dy, y, x: [op("tanh_grad").record(dy, y)], cost=8)
relu = Elementwise("relu", "y = max(x, 0).", lambda dy, y, x: [op("relu_grad").record(dy, y)])
erf = Elementwise("erf", "y = the error function of x.", _erf_gradient, cost=8)
sign = Elementwise("sign", "y = 1, 0 or -1 as x is above, at or below 0.")


def multiply(x: Value, y: Value) -> Value:
    """x * y, broadcast. A literal one on the right costs nothing."""
    return x if is_one(y) and broadcast_shape("multiply", x.spec, y.spec) == x.shape else _multiply(x, y)


def scale(x: Value, factor: float) -> Value:
    """factor * x for a factor that is fixed for the whole run."""
    return x if factor == 1.0 else _scale(x, factor)


@primitive(
    elementwise=True,
    cheap=True,
    reference=lambda x, factor: factor * x,
    vjp=lambda node, dy: [scale(dy, node.attributes["factor"])],
)
def _scale(x: Value, factor: float) -> TensorSpec:
    """y = factor * x for a factor that never changes during a run."""
    require(x.spec.dtype.is_floating, "scale", x.spec, "a floating-point tensor")
    return x.spec


def cast(x: Value, dtype: DType) -> Value:
    """x in another floating-point dtype; x itself where it has it already. A literal constant is made anew."""
    if x.spec.dtype is dtype:
        return x
    if x.producer is not None and is_full(x):
        return full(x.graph, x.spec.with_dtype(dtype), x.producer.attributes["value"])
    return _cast(x, dtype)


@primitive(cheap=True, reference=lambda x, dtype: x, vjp=lambda node, dy: [cast(dy, node.input("x").spec.dtype)])
def _cast(x: Value, dtype: DType) -> TensorSpec:
    """y = x in another floating-point dtype, rounded to nearest even."""
    require(x.spec.dtype.is_floating and dtype.is_floating, "cast", f"{x.spec} to {dtype}", "floating-point dtypes")
    return x.spec.with_dtype(dtype)


def full(graph: Graph, spec: TensorSpec, value: float) -> Value:
    """A constant tensor."""
    return graph.apply("full", spec=spec, value=float(value))


def at_least(x: Value, least: float) -> Value:
    """max(x, least)."""
    return maximum(x, full(x.graph, x.spec.with_shape(), least))


def _full_in_torch(spec: TensorSpec, value: float) -> Any:
    import torch

    return torch.full(spec.shape, value, dtype=torch.float64)


@primitive(flops=free, reference=_full_in_torch)
def _full(spec: TensorSpec, value: float) -> TensorSpec:
    """A tensor that holds one number everywhere."""
    return spec


for _shape in PLAIN_SHAPES:
    cases(_scale, *(Case((_shape,), {"factor": factor}) for factor in (-1.0, 0.125)))
    cases(_cast, Case((_shape,), {"dtype": DType.FP32}))
    cases(_full, Case((), {"spec": TensorSpec(_shape), "value": 0.5}))


def _mask_in_torch(seed: Any, spec: TensorSpec, p: float, stream: int) -> Any:
    import torch

    key, threshold = stream_key(int(seed), stream), keep_threshold(p)
    kept = [mix(index + key & 0xFFFFFFFF) >= threshold for index in range(spec.size)]
    return torch.tensor(kept, dtype=torch.float64).reshape(spec.shape) / (1 - p)


@primitive(
    "seed int64 []", outputs=("mask",), flops=lambda node: 9 * node.outputs[0].spec.size, reference=_mask_in_torch
)
def dropout_mask(seed: Value, spec: TensorSpec, p: float, stream: int) -> TensorSpec:
    """The factors of dropout: 1 / (1 - p) where an element is kept, else 0."""
    return spec


@composite(name="dropout", vjp=lambda node, dy: [node.op.record(dy, node.input("seed"), **node.attributes), None])
def _dropout(x: Value, seed: Value, p: float, stream: int) -> Value:
    """y = x * mask / (1 - p); the mask depends on `seed` (int64 scalar), `stream` and the element's index."""
    require(x.spec.dtype.is_floating, "dropout", x.spec, "a floating-point tensor")
    require(0 <= p < 1, "dropout", f"p={p}", "a probability of at least 0 and below 1")
    return x * dropout_mask(seed, x.spec, p, stream)


for _shape, _p, _stream in (((4, 8), 0.5, 0), ((2, 3, 33), 0.1, 7), ((257,), 0.0, 3)):
    cases(_dropout, Case((_shape, ()), {"p": _p, "stream": _stream}, {"seed": 2**62}))


def dropout(x: Value, seed: Value, p: float, stream: int) -> Value:
    """x with a share p of its elements zeroed and the rest scaled by 1/(1-p); x itself where p is 0."""
    return x if p == 0 else _dropout(x, seed, p, stream)
