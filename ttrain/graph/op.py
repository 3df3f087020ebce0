"""Declaring ops, and finding them by name."""

from __future__ import annotations

from ttrain.graph.case import Case
from ttrain.graph.graph import REGISTRY, Op

__all__ = ["REGISTRY", "Case", "Op", "declare", "op"]


def declare(cls: type[Op]) -> type[Op]:
    """Class decorator: put one instance of an op into the registry."""
    REGISTRY.add(cls())
    return cls


def op(name: str) -> Op:
    """A declared op by name."""
    return REGISTRY[name]
