"""The table of checks over several fields; a function enters it by `@check`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature

Check = Callable[..., Iterator[str]]
CHECKS: list[tuple[tuple[str, ...], Check]] = []


def check(function: Check) -> Check:
    """Register a check of the sections that its parameters name; it runs only if all of them hold valid values."""
    CHECKS.append((tuple(signature(function).parameters), function))
    return function
