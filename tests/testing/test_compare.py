"""One comparison: what it measures, and what never passes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ttrain.core.spec import DType
from ttrain.testing.compare import Tolerance, VerifyError, compare, cosine, verdict, worst_of_each

LOOSE = Tolerance(1e9, 1e9)


def one(got: object, expected: object, allowed: Tolerance = LOOSE, **given: object):  # type: ignore[no-untyped-def]
    labels = {"subject": "gelu", "quantity": "dx", "case": "gelu-0", "engine": "static", **given}
    return compare(np.asarray(got), np.asarray(expected), DType.FP32, allowed, **labels)  # type: ignore[arg-type]


def test_differences_are_measured() -> None:
    found = one([1.0, 2.0 + 2**-22], [1.0, 2.0], Tolerance(1, 1))
    assert found.largest == 2**-22 and found.mean == 2**-23 and found.ulp == 1 and found.most == 0 and found.passed
    assert found.cosine == pytest.approx(1)
    assert not one([1.0, 2.0 + 2**-21], [1.0, 2.0], Tolerance(1, 1)).passed


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_never_passes(bad: float) -> None:
    found = one([1.0, bad], [1.0, 2.0])
    assert not found.passed and math.isinf(found.ulp)
    assert found.to_dict()["ulp"] == "inf"


def test_another_shape_never_passes() -> None:
    found = one([1.0, 2.0], [[1.0, 2.0]])
    assert not found.passed and "shape [2], expected [1, 2]" in str(found)


def test_the_other_direction_is_told() -> None:
    found = one([-1.0, -2.0], [1.0, 2.0], Tolerance(4, 4))
    assert found.cosine == pytest.approx(-1) and found.note == "points the other way"
    assert not one([1.0, 0.9], [1.0, 1.0], least_cosine=0.9999).passed


def test_of_several_cases_the_worst_is_shown_and_named() -> None:
    good, bad = one([1.0], [1.0], Tolerance(1, 1)), one([3.0], [1.0], Tolerance(1, 1), case="gelu-7")
    assert [(worst.case, count) for worst, count in worst_of_each([good, bad, good])] == [("gelu-7", 3)]
    verdict([good])
    with pytest.raises(VerifyError, match=r"1 of 1 quantities.*\n  gelu dx \(gelu-7\) by engine static"):
        verdict([good, bad])


def test_cosine_of_nothing_is_not_a_number() -> None:
    assert math.isnan(cosine(np.zeros(3), np.ones(3))) and cosine(np.ones(3), 2 * np.ones(3)) == pytest.approx(1)
