"""Failing where errors in units in the last place exceed a tolerance."""

from __future__ import annotations

import numpy as np

from ttrain.core.spec import DType
from ttrain.testing.compare import Tolerance, ulp_errors

__all__ = ["Tolerance", "assert_within", "ulp_errors"]


def assert_within(got: np.ndarray, expected: np.ndarray, dtype: DType, allowed: Tolerance, what: str) -> None:
    """Fail with the worst element where an error exceeds the tolerance; NaN and infinity always do."""
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    if not expected.size:
        return
    errors = ulp_errors(got, expected, dtype)
    worst = int(np.argmax(errors))
    most = float(np.quantile(errors, 0.99, method="lower"))
    assert errors.flat[worst] <= allowed.peak and most <= allowed.most, (
        f"{what}: {errors.flat[worst]:.1f} ULP of {dtype} at {np.unravel_index(worst, got.shape)} "
        f"(got {got.flat[worst]!r}, expected {expected.flat[worst]!r}; allowed {allowed.peak}), "
        f"99 % within {most:.1f} (allowed {allowed.most})"
    )
