"""How far a tensor is from what it should be, and whether that is allowed."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ttrain.core.spec import DType
from ttrain.verify.ulp import Tolerance, ulp_errors


@dataclass(frozen=True)
class Comparison:
    """One tensor against its reference.

    `subject` is an op or a model, `quantity` what of it, such as y or dx. `ulp` is the largest error in units in the
    last place of `unit`, `most` that of 99 % of the elements; `cosine` is of the two tensors as vectors.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values; numbers that JSON does not know become text."""
        values = {**asdict(self), "allowed_ulp": self.allowed.peak, "allowed_most": self.allowed.most}
        del values["allowed"]
        return {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


def compare(
    got: np.ndarray, expected: np.ndarray, unit: DType, allowed: Tolerance, *, subject: str, quantity: str,
    case: str = "", engine: str = "", dtype: DType = DType.FP32, least_cosine: float = -1.0,
) -> Comparison:  # fmt: skip
    """Both tensors are compared as fp64. A wrong shape, NaN and infinity never pass."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    labels = (subject, quantity, case, engine, str(dtype), str(unit))
    if got.shape != expected.shape:
        note = f"shape {list(got.shape)}, expected {list(expected.shape)}"
        return Comparison(*labels, math.inf, math.inf, math.inf, math.inf, math.nan, allowed, False, note)
    errors = ulp_errors(got, expected, unit)
    with np.errstate(invalid="ignore"):
        differences = np.where(np.isfinite(errors), np.abs(got - expected), np.inf)
    ulp = float(errors.max(initial=0))
    most = float(np.quantile(errors, 0.99, method="lower")) if errors.size else 0.0
    angle = cosine(got, expected)
    passed = ulp <= allowed.peak and most <= allowed.most and (math.isnan(angle) or angle >= least_cosine)
    note = "" if passed or math.isnan(angle) or angle > 0 else "points the other way"
    largest = float(differences.max(initial=0))
    mean = float(differences.mean()) if differences.size else 0.0
    return Comparison(*labels, largest, mean, ulp, most, angle, allowed, passed, note)


def failed(subject: str, case: str, engine: str, dtype: DType, note: str) -> Comparison:
    """What could not be computed at all."""
    allowed, lines = Tolerance(0, 0), note.strip().splitlines()
    inf = math.inf
    label = str(dtype)
    return Comparison(
        subject, "-", case, engine, label, label, inf, inf, inf, inf, math.nan, allowed, False, lines[0][:200]
    )


def cosine(got: np.ndarray, expected: np.ndarray) -> float:
    """Of the angle between two tensors as vectors; NaN where one of them is zero or not finite."""
    with np.errstate(all="ignore"):
        scale = float(np.linalg.norm(got)) * float(np.linalg.norm(expected))
        return float(np.sum(got * expected)) / scale if scale and math.isfinite(scale) else math.nan
