"""Dropout whose mask is a pure function of (seed, stream, element), see core/random_bits.py.

Backward and recomputation form the mask again instead of keeping it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.core.random_bits import keep_threshold, mix, stream_key
from ttrain.core.spec import TensorSpec
from ttrain.graph import Case, Node, Value, cases, composite, primitive, require


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


@composite(name="dropout")
def _dropout(x: Value, seed: Value, p: float, stream: int) -> Value:
    """y = x * mask / (1 - p); the mask depends on `seed` (int64 scalar), `stream` and the element's index."""
    require(x.spec.dtype.is_floating, "dropout", x.spec, "a floating-point tensor")
    require(0 <= p < 1, "dropout", f"p={p}", "a probability of at least 0 and below 1")
    return x * dropout_mask(seed, x.spec, p, stream)


@_dropout.gradient
def _(node: Node, dy: Value) -> Sequence[Value | None]:
    return [_dropout(dy, node.input("seed"), **node.attributes), None]


for _shape, _p, _stream in (((4, 8), 0.5, 0), ((2, 3, 33), 0.1, 7), ((257,), 0.0, 3)):
    cases(_dropout, Case((_shape, ()), {"p": _p, "stream": _stream}, {"seed": 2**62}))


def dropout(x: Value, seed: Value, p: float, stream: int) -> Value:
    """x with a share p of its elements zeroed and the rest scaled by 1/(1-p); x itself where p is 0."""
    return x if p == 0 else _dropout(x, seed, p, stream)
