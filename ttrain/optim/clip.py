"""Gradient clipping by global norm (Pascanu et al., 2013), over all gradients or those of a scope."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ttrain import ops
from ttrain.graph import Value


@dataclass(frozen=True)
class Norms:
    """Global norms before clipping, fp32 []: of all gradients, and of those that are clipped."""

    whole: Value
    clipped: Value


def global_norms(gradients: Sequence[Value], clipped: Sequence[bool]) -> Norms:
    """Norms of gradients, of which each is `clipped` or not. Every gradient is read once."""
    inside = [gradient for gradient, counts in zip(gradients, clipped, strict=True) if counts]
    outside = [gradient for gradient, counts in zip(gradients, clipped, strict=True) if not counts]
    norm = ops.global_norm(inside)
    return Norms(ops.global_norm([norm, ops.global_norm(outside)]) if outside else norm, norm)
