"""Allowed errors of kernels against the fp64 reference, per dtype, op and output."""

from __future__ import annotations

from ttrain.core.spec import DType
from ttrain.testing.compare import Tolerance

# The reference itself is fp64, so fp64 kernels differ from it by rounding of the same order.
DEFAULT = {DType.FP64: Tolerance(512, 128), DType.FP32: Tolerance(16, 8), DType.BF16: Tolerance(1.5, 1.0)}
EXACT = Tolerance(0, 0)  # of integers, in any unit

# Of gradients: a backward is several kernels, each with an input that is rounded already.
GRADIENT = {DType.FP64: Tolerance(4096, 1024), DType.FP32: Tolerance(64, 24), DType.BF16: Tolerance(6, 4)}

# Of the gradients of a whole model, and the least cosine with those of PyTorch.
MODEL = {DType.FP32: Tolerance(512, 128), DType.BF16: Tolerance(64, 24)}
MODEL_COSINE = {DType.FP32: 1 - 1e-9, DType.BF16: 0.9995}

# (op, output or *) -> tolerance in ULP of bf16, where an intermediate is rounded to bf16 on the way.
BF16 = {
    ("attention", "*"): Tolerance(3, 2),  # scores and probabilities
    ("attention_grad", "*"): Tolerance(16, 10),  # and gradients of scores, one at a time, some of them sums that cancel
    ("cached_attention", "*"): Tolerance(3, 2),
    ("head_cross_entropy", "*"): Tolerance(5, 3),  # logits
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
    if computed_in is DType.BF16:
        own = BF16.get((op, output), BF16.get((op, "*")))
        if uniform:
            own = UNIFORM_BF16.get((op, output), own if own is not None and own.peak > UNIFORM.peak else UNIFORM)
        if own is not None:
            return DType.BF16, own
    if dtype is DType.FP32 and (op, output) in FP32:
        return dtype, FP32[op, output]
    if dtype is DType.FP64 and op in FP32_INSIDE:
        return DType.FP32, DEFAULT[DType.FP32]
    return dtype, DEFAULT[dtype]
