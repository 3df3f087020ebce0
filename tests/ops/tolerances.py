"""How far a kernel may be from the fp64 reference: the bounds of task=verify."""

from __future__ import annotations

from ttrain.testing.tolerances import tolerance

__all__ = ["tolerance"]
