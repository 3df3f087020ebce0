"""Test cases that an op declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One test case of an op: input shapes (None for an absent input) and attributes.

    `integers` maps an input's name to the exclusive upper bound of its random int64 values; `holes` names those in
    which some values are -1 instead (no target there). `positive` names inputs whose values must be above zero. The
    tensors of a list input are named `<list>.<number>`. `narrow` names tensors that are in the dtype which the case is
    run in although the op keeps such inputs wide.
    """

    shapes: tuple[tuple[int, ...] | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    integers: Mapping[str, int] = field(default_factory=dict)
    positive: tuple[str, ...] = ()
    holes: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()
