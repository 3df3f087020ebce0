"""What verify found, as a table, as JSON and as a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ttrain.core.errors import TtrainError
from ttrain.core.names import listed
from ttrain.verify.compare import Comparison

COLUMNS = ("subject", "quantity", "engine", "cases", "max diff", "mean diff", "ULP", "99 %", "allowed", "cosine", "")


class VerifyError(TtrainError):
    """Results differ from PyTorch, or between engines, by more than is allowed."""


def worst_of_each(found: Iterable[Comparison]) -> list[tuple[Comparison, int]]:
    """Per subject, quantity and engine the comparison that is furthest from passing, and how many there were."""
    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for one in found:
        groups.setdefault((one.subject, one.quantity, one.engine), []).append(one)
    return [(max(group, key=_badness), len(group)) for group in groups.values()]


def _badness(one: Comparison) -> tuple[bool, float]:
    return not one.passed, one.ulp / one.allowed.peak if one.allowed.peak else one.ulp


def rows(found: Iterable[Comparison]) -> list[tuple[str, ...]]:
    """Lines of the table under COLUMNS."""
    return [
        (
            one.subject, one.quantity, one.engine, str(count), _number(one.largest), _number(one.mean),
            _number(one.ulp), _number(one.most), f"{one.allowed.peak:g}",
            "-" if math.isnan(one.cosine) else f"{one.cosine:.9f}",
            "pass" if one.passed else "FAIL",
        )
        for one, count in worst_of_each(found)
    ]  # fmt: skip


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}"


def sentence(one: Comparison) -> str:
    """A failed comparison by name."""
    what = f"{one.subject} {one.quantity}" + (f" ({one.case})" if one.case else "")
    if math.isinf(one.ulp):
        return f"{what} by engine {one.engine}: {one.note or 'NaN or infinite'}"
    tail = f"; {one.note}" if one.note else ""
    return (
        f"{what} by engine {one.engine}: {one.ulp:.3g} ULP of {one.unit} (allowed {one.allowed.peak:g}), "
        f"99 % within {one.most:.3g} (allowed {one.allowed.most:g}), cosine {one.cosine:.6f}{tail}"
    )


def to_dict(found: Sequence[Comparison], head: dict[str, Any]) -> dict[str, Any]:
    """Plain values, for JSON."""
    return {**head, "passed": all(one.passed for one in found), "comparisons": [one.to_dict() for one in found]}


def verdict(found: Sequence[Comparison]) -> None:
    """Raise VerifyError naming what failed."""
    failed = [one for one, _ in worst_of_each(found) if not one.passed]
    if failed:
        shown = listed(map(sentence, failed), 20, "\n  ")
        total = len({(one.subject, one.quantity, one.engine) for one in found})
        raise VerifyError(f"verify: {len(failed)} of {total} quantities differ by more than is allowed:\n  {shown}")
