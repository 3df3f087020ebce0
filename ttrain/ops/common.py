"""Shape rules and gradient helpers that several op files share."""

from __future__ import annotations

from ttrain.core.spec import TensorSpec
from ttrain.graph import Node, Value, require

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
