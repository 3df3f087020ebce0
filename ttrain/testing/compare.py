"""Errors of a tensor in units in the last place of a dtype, and the allowed errors by dtype, op and output."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ttrain.core.errors import TtrainError
from ttrain.core.names import listed
from ttrain.core.spec import DType

MANTISSA_BITS = {DType.FP64: 52, DType.FP32: 23, DType.BF16: 7, DType.FP16: 10}


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
        case = f" ({self.case})" if self.case else ""
        name = f"{self.subject} {self.quantity}{case} by engine {self.engine}"
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
        least = np.finfo(np.float16 if dtype is DType.FP16 else np.float32).tiny
        magnitude = np.maximum(np.maximum(np.abs(expected), typical), float(least))
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


# The reference itself is fp64, so fp64 kernels differ from it by rounding of the same order.
DEFAULT = {DType.FP64: Tolerance(512, 128), DType.FP32: Tolerance(16, 8), DType.BF16: Tolerance(1.5, 1.0)}
DEFAULT[DType.FP16] = DEFAULT[DType.BF16]
EXACT = Tolerance(0, 0)  # of integers, in any unit

# Of gradients: a backward is several kernels, each with an input that is rounded already.
GRADIENT = {DType.FP64: Tolerance(4096, 1024), DType.FP32: Tolerance(64, 24), DType.BF16: Tolerance(6, 4)}
GRADIENT[DType.FP16] = GRADIENT[DType.BF16]

# Of the gradients of a whole model, and the least cosine with those of PyTorch.
MODEL = {DType.FP32: (Tolerance(512, 128), 1 - 1e-9)}
MODEL |= dict.fromkeys((DType.BF16, DType.FP16), (Tolerance(64, 24), 0.9995))

# (op, output or *) -> tolerance in ULP of bf16, where an intermediate is rounded to bf16 on the way.
BF16 = {
    ("attention", "*"): Tolerance(3, 2),  # scores and probabilities
    ("attention_grad", "*"): Tolerance(16, 10),  # and gradients of scores, one at a time, some of them sums that cancel
    ("cached_attention", "*"): Tolerance(3, 2),
    **{(f"head_{kind}", "*"): Tolerance(5, 3) for kind in ("cross_entropy", "log_probs")},  # logits
    **{(f"{code}_matmul", "*"): Tolerance(3, 2) for code in ("int8", "nf4")},  # the weight
    ("tanh_grad", "*"): Tolerance(2, 1.5),  # CUDA rounds 1 - y^2
    ("softmax_grad", "*"): Tolerance(2, 1.5),  # and the sum of dy y
    ("add_layer_norm", "mean"): Tolerance(1, 1),  # statistics are those of the rounded total
    **{(f"add_{kind}_norm", "rstd"): Tolerance(1, 1) for kind in ("layer", "rms")},
    **{(f"add_{kind}_norm", "y"): Tolerance(2, 2) for kind in ("layer", "rms")},
}
# Of five iterations of Newton-Schulz, s <- f(s) = a s + b s^3 + c s^5. Where each of the three terms is rounded once,
# an error e of a singular value becomes |f'(s)| e + |a s| + |b s^3| + |c s^5| roundings, of terms near 10 that cancel
# to 0.7: at most 147 after all five from any s in (0, 1], 70 as a root mean square. A rounding is half an ULP or one.
NEWTON_SCHULZ = Tolerance(147, 70)
# The same in ULP of fp32. CUDA's fused AdamW divides by the root of v in another order.
FP32 = {
    ("update", "written"): Tolerance(16, 12),
    **{(rule, "parameter"): NEWTON_SCHULZ for rule in ("muon", "normuon")},
    **{("head_cross_entropy", name): Tolerance(24, 12) for name in ("dhidden", "dhead")},  # sums that cancel
    **{("attention_grad", name): Tolerance(32, 16) for name in ("dq", "dk", "dv")},  # of small values
}
# Ops whose fp64 run is fp32 in places: they hold fp32 state, so fp64 only serves other tests.
FP32_INSIDE = {"update"}


# On devices that compute in bf16 throughout, fp32 results too.
UNIFORM = Tolerance(4, 3)
# There a decomposed attention rounds its scores again where a mask is added. In fp32 the same nodes are within 16 ULP.
UNIFORM_BF16 = {("attention", "y"): Tolerance(6, 2)}


def tolerance(op: str, output: str, dtype: DType, computed_in: DType, uniform: bool = False) -> tuple[DType, Tolerance]:
    """(dtype whose ULP count, tolerance) for an output of `dtype` of an op that runs in `computed_in`.

    `uniform` is the device's `uniform_compute`.
    """
    if not dtype.is_floating:
        return DType.FP64, EXACT
    if computed_in in (DType.BF16, DType.FP16):
        own = BF16.get((op, output), BF16.get((op, "*")))
        if uniform:
            own = UNIFORM_BF16.get((op, output), own if own is not None and own.peak > UNIFORM.peak else UNIFORM)
        if own is not None:
            return computed_in, own if computed_in is DType.BF16 else own * 2
    if dtype is DType.FP32 and (op, output) in FP32:
        return dtype, FP32[op, output]
    if dtype is DType.FP64 and op in FP32_INSIDE:
        return DType.FP32, DEFAULT[DType.FP32]
    return dtype, DEFAULT[dtype]
