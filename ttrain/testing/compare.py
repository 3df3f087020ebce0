"""Errors of a tensor in units in the last place of a dtype, and whether they are allowed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ttrain.core.errors import TtrainError
from ttrain.core.names import listed
from ttrain.core.spec import DType

MANTISSA_BITS = {DType.FP64: 52, DType.FP32: 23, DType.BF16: 7}


class VerifyError(TtrainError):
    """Results differ from PyTorch, or between engines, by more than is allowed."""


@dataclass(frozen=True)
class Tolerance:
    """Allowed error in ULP: of any element, and of 99 % of them."""

    peak: float
    most: float

    def __mul__(self, factor: float) -> Tolerance:
        return Tolerance(self.peak * factor, self.most * factor)


@dataclass(frozen=True)
class Comparison:
    """One tensor against its reference.

    `subject` is an op or a model, `quantity` a tensor of it, such as y or dx. `ulp` is the largest error in units in
    the last place of `unit`, `most` that of 99 % of the elements; `cosine` is of the two tensors as vectors.
    """

    subject: str
    quantity: str
    case: str
    engine: str
    dtype: str
    unit: str
    largest: float
    mean: float
    ulp: float
    most: float
    cosine: float
    allowed: Tolerance
    passed: bool
    note: str = ""

    @property
    def badness(self) -> tuple[bool, float]:
        """Order by failed or passed, then by the share of the allowed error."""
        return not self.passed, self.ulp / self.allowed.peak if self.allowed.peak else self.ulp

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; numbers that JSON does not know become text."""
        values = {**asdict(self), "allowed_ulp": self.allowed.peak, "allowed_most": self.allowed.most}
        del values["allowed"]
        return {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}

    def __str__(self) -> str:
        name = (
            f"{self.subject} {self.quantity}" + (f" ({self.case})" if self.case else "") + f" by engine {self.engine}"
        )
        if math.isinf(self.ulp):
            return f"{name}: {self.note or 'NaN or infinite'}"
        return (
            f"{name}: {self.ulp:.3g} ULP of {self.unit} (allowed {self.allowed.peak:g}), 99 % within {self.most:.3g} "
            f"(allowed {self.allowed.most:g}), cosine {self.cosine:.6f}" + (f"; {self.note}" if self.note else "")
        )


def ulp_errors(got: np.ndarray, expected: np.ndarray, dtype: DType) -> np.ndarray:
    """Return |got - expected| in ULP of `dtype` at each element's magnitude, or at the root mean square if larger.

    An element near zero in a tensor of large ones is a difference of large numbers; its own ULP would ask for digits
    that its terms don't have. Infinite where either number is NaN or infinite.
    """
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    if expected.size == 0:
        return np.zeros_like(expected)
    with np.errstate(invalid="ignore", over="ignore"):
        typical = float(np.sqrt(np.mean(np.square(expected))))
        magnitude = np.maximum(np.maximum(np.abs(expected), typical), np.finfo(np.float32).tiny)
        unit = np.exp2(np.floor(np.log2(magnitude)) - MANTISSA_BITS[dtype])
        errors = np.abs(got - expected) / unit
    return np.where(np.isfinite(got) & np.isfinite(expected), errors, np.inf)


def compare(
    got: Any, expected: np.ndarray, unit: DType, allowed: Tolerance, *, subject: str, quantity: str,
    case: str = "", engine: str = "", dtype: DType = DType.FP32, least_cosine: float = -1.0,
) -> Comparison:  # fmt: skip
    """Compare two tensors as fp64. A wrong shape, NaN, infinity and an exception in place of a tensor never pass."""
    labels = (subject, quantity, case, engine, str(dtype), str(unit))
    expected = np.asarray(expected, np.float64)
    wrong = f"{type(got).__name__}: {got}".strip().splitlines()[0][:200] if isinstance(got, Exception) else ""
    if not wrong:
        got = np.asarray(got, np.float64)
        wrong = "" if got.shape == expected.shape else f"shape {list(got.shape)}, expected {list(expected.shape)}"
    if wrong:
        inf = math.inf
        return Comparison(*labels, inf, inf, inf, inf, math.nan, allowed, False, wrong)
    errors = ulp_errors(got, expected, unit)
    with np.errstate(invalid="ignore"):
        differences = np.where(np.isfinite(errors), np.abs(got - expected), np.inf)
    ulp = float(errors.max(initial=0))
    most = float(np.quantile(errors, 0.99, method="lower")) if errors.size else 0.0
    angle = cosine(got, expected)
    passed = ulp <= allowed.peak and most <= allowed.most and (math.isnan(angle) or angle >= least_cosine)
    note = "" if passed or math.isnan(angle) or angle > 0 else "points the other way"
    largest, mean = float(differences.max(initial=0)), float(differences.mean()) if differences.size else 0.0
    return Comparison(*labels, largest, mean, ulp, most, angle, allowed, passed, note)


def cosine(got: np.ndarray, expected: np.ndarray) -> float:
    """Return the cosine of two tensors as vectors; NaN where one of them is zero or not finite."""
    with np.errstate(all="ignore"):
        scale = float(np.linalg.norm(got)) * float(np.linalg.norm(expected))
        return float(np.sum(got * expected)) / scale if scale and math.isfinite(scale) else math.nan


def worst_of_each(found: Iterable[Comparison]) -> list[tuple[Comparison, int]]:
    """Return per subject, quantity and engine the comparison that is furthest from passing, and how many there were."""
    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for one in found:
        groups.setdefault((one.subject, one.quantity, one.engine), []).append(one)
    return [(max(group, key=lambda one: one.badness), len(group)) for group in groups.values()]


def verdict(found: Sequence[Comparison]) -> None:
    """Raise VerifyError naming what failed."""
    worst = worst_of_each(found)
    if failed := [str(one) for one, _ in worst if not one.passed]:
        text = f"{len(failed)} of {len(worst)} quantities differ by more than is allowed"
        raise VerifyError(f"verify: {text}:\n  {listed(failed, 20, chr(10) + '  ')}")
