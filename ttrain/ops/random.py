"""Dropout whose mask is a pure function of (seed, stream, element), see core/random_bits.py.

Backward and recomputation form the mask again instead of keeping it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.core.random_bits import keep_threshold, mix, stream_key
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph.case import Case
from ttrain.graph.composite import cases, composite, require
from ttrain.graph.graph import Node, Op, Value
from ttrain.graph.op import declare, op


@declare
class DropoutMask(Op):
    """What dropout multiplies by: 1 / (1 - p) where an element is kept, else 0."""

    name = "dropout_mask"
    family = "random"
    inputs = ("seed",)
    outputs = ("mask",)
    differentiable = False

    def infer(self, seed: TensorSpec, spec: TensorSpec, p: float, stream: int) -> TensorSpec:
        self.require(seed == TensorSpec((), DType.INT64), f"seed {seed}", "int64[]")
        return spec

    def flops(self, node: Node) -> int:
        return 9 * node.outputs[0].spec.size

    def reference(self, seed: Any, spec: TensorSpec, p: float, stream: int) -> Any:
        import torch

        key, threshold = stream_key(int(seed), stream), keep_threshold(p)
        kept = [mix(index + key & 0xFFFFFFFF) >= threshold for index in range(spec.size)]
        return torch.tensor(kept, dtype=torch.float64).reshape(spec.shape) / (1 - p)

    def cases(self) -> Sequence[Case]:
        return [
            Case(((),), {"spec": TensorSpec(shape), "p": p, "stream": stream}, integers={"seed": 2**62})
            for shape, p, stream in (((4, 8), 0.5, 0), ((2, 3, 33), 0.1, 7))
        ]


@composite(name="dropout")
def _dropout(x: Value, seed: Value, p: float, stream: int) -> Value:
    """y = x * mask / (1 - p); the mask depends on `seed` (int64 scalar), `stream` and the element's index."""
    require(x.spec.dtype.is_floating, "dropout", x.spec, "a floating-point tensor")
    require(seed.spec == TensorSpec((), DType.INT64), "dropout", f"seed {seed.spec}", "int64[]")
    require(0 <= p < 1, "dropout", f"p={p}", "a probability of at least 0 and below 1")
    return x * op("dropout_mask").record(seed, spec=x.spec, p=p, stream=stream)


@_dropout.gradient
def _(node: Node, dy: Value) -> Sequence[Value | None]:
    return [_dropout(dy, node.input("seed"), **node.attributes), None]


for _shape, _p, _stream in (((4, 8), 0.5, 0), ((2, 3, 33), 0.1, 7), ((257,), 0.0, 3)):
    cases(_dropout, Case((_shape, ()), {"p": _p, "stream": _stream}, integers={"seed": 2**62}))


def dropout(x: Value, seed: Value, p: float, stream: int) -> Value:
    """x with a share p of its elements zeroed and the rest scaled by 1/(1-p); x itself where p is 0."""
    return x if p == 0 else _dropout(x, seed, p, stream)
