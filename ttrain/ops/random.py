"""Dropout whose mask is a pure function of (seed, stream, element), see core/mask.py.

Backward and recomputation form the mask again instead of keeping it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.core.mask import keep_threshold, mask_key, mix
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph.graph import Node, Value
from ttrain.graph.op import Case, Op, declare, op
from ttrain.ops.elementwise import multiply


@declare
class Dropout(Op):
    """y = x * mask / (1 - p); the mask depends on `seed` (int64 scalar), `stream` and the element's index."""

    name = "dropout"
    family = "random"
    inputs = ("x", "seed")

    def infer(self, x: TensorSpec, seed: TensorSpec, p: float, stream: int) -> TensorSpec:
        self.require(x.dtype.is_floating, str(x), "a floating-point tensor")
        self.require(seed == TensorSpec((), DType.INT64), f"seed {seed}", "int64[]")
        self.require(0 <= p < 1, f"p={p}", "a probability of at least 0 and below 1")
        return x

    def flops(self, node: Node) -> int:
        return 10 * node.input("x").spec.size

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        (dy,) = gradients
        assert dy is not None
        return [op("dropout").record(dy, node.input("seed"), **node.attributes), None]

    def reference(self, x: Any, seed: Any, p: float, stream: int) -> Any:
        import torch

        key, threshold = mask_key(int(seed), stream), keep_threshold(p)
        kept = [mix(index + key & 0xFFFFFFFF) >= threshold for index in range(x.numel())]
        return x * torch.tensor(kept, dtype=x.dtype).reshape(x.shape) / (1 - p)

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        x, seed = inputs
        assert x is not None and seed is not None
        return [multiply(x, op("dropout_mask").record(seed, spec=x.spec, **node.attributes))]

    def cases(self) -> Sequence[Case]:
        return [
            Case((shape, ()), {"p": p, "stream": stream}, integers={"seed": 2**62})
            for shape, p, stream in (((4, 8), 0.5, 0), ((2, 3, 33), 0.1, 7), ((257,), 0.0, 3))
        ]


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

        return op("dropout").reference(torch.ones(spec.shape, dtype=torch.float64), seed, p, stream)

    def cases(self) -> Sequence[Case]:
        return [
            Case(((),), {"spec": TensorSpec(shape), "p": p, "stream": stream}, integers={"seed": 2**62})
            for shape, p, stream in (((4, 8), 0.5, 0), ((2, 3, 33), 0.1, 7))
        ]


def dropout(x: Value, seed: Value, p: float, stream: int) -> Value:
    """x with a share p of its elements zeroed and the rest scaled by 1/(1-p); x itself where p is 0."""
    return x if p == 0 else op("dropout").record(x, seed, p=p, stream=stream)
