"""Gradient clipping by global norm (Pascanu et al., 2013)."""

from __future__ import annotations

from collections.abc import Sequence

from ttrain import ops
from ttrain.graph import Value


def clip_by_global_norm(gradients: Sequence[Value], limit: float | None) -> tuple[Value, Value | None]:
    """(norm of all gradients before clipping, what to multiply them by), both fp32 []; no factor without a limit."""
    norm = ops.global_norm(gradients)
    return norm, None if limit is None else ops.clip_factor(norm, limit)
