"""Errors in units in the last place of a dtype."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ttrain.core.spec import DType

MANTISSA_BITS = {DType.FP64: 52, DType.FP32: 23, DType.BF16: 7}


@dataclass(frozen=True)
class Tolerance:
    """Allowed error in ULP: of any element, and of 99 % of them."""

    peak: float
    most: float

    def __mul__(self, factor: float) -> Tolerance:
        return Tolerance(self.peak * factor, self.most * factor)


def ulp_errors(got: np.ndarray, expected: np.ndarray, dtype: DType) -> np.ndarray:
    """|got - expected| in ULP of `dtype` at each element's magnitude, or at the tensor's root mean square if larger.

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
