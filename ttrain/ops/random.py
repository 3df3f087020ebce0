"""Dropout whose mask is a pure function of (seed, stream, element): nothing hidden, nothing stored.

The keep decision of element i hashes a 32-bit counter: h = mix(i + mix(seed_low ^ mix(seed_high ^ mix(stream)))),
kept iff h >= p 2^32, where mix is the 32-bit finaliser `lowbias32` (C. Wellons, "Prospecting for Hash Functions",
2018, public domain). Integer arithmetic makes the mask the same on every device and engine, and lets backward and
recomputation form it again instead of keeping it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.core.spec import DType, TensorSpec
from ttrain.graph.graph import Node, Value
from ttrain.graph.op import Case, Op, declare, op

MIX_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
MIX_SHIFTS = (16, 15, 16)


def mix(x: int) -> int:
    """lowbias32 of a 32-bit number."""
    x ^= x >> MIX_SHIFTS[0]
    x = x * MIX_MULTIPLIERS[0] & 0xFFFFFFFF
    x ^= x >> MIX_SHIFTS[1]
    x = x * MIX_MULTIPLIERS[1] & 0xFFFFFFFF
    return x ^ x >> MIX_SHIFTS[2]


def mask_key(seed: int, stream: int) -> int:
    """The 32-bit key of one mask: which run, step and rank (seed), and which layer (stream)."""
    return mix((seed & 0xFFFFFFFF) ^ mix((seed >> 32 & 0xFFFFFFFF) ^ mix(stream & 0xFFFFFFFF)))


def keep_threshold(p: float) -> int:
    """Hashes at or above this are kept."""
    return min(round(p * 2**32), 2**32 - 1)


@declare
class Dropout(Op):
    """y = x * mask / (1 - p); the mask depends on `seed` (int64 scalar), `stream` and the element's index."""

    name = "dropout"
    family = "random"
    inputs = ("x", "seed")
    saves = ("seed",)

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

    def cases(self) -> Sequence[Case]:
        return [
            Case((shape, ()), {"p": p, "stream": stream}, integers={"seed": 2**62})
            for shape, p, stream in (((4, 8), 0.5, 0), ((2, 3, 33), 0.1, 7), ((257,), 0.0, 3))
        ]


def dropout(x: Value, seed: Value, p: float, stream: int) -> Value:
    """x with a share p of its elements zeroed and the rest scaled by 1/(1-p); x itself where p is 0."""
    return x if p == 0 else op("dropout").record(x, seed, p=p, stream=stream)
