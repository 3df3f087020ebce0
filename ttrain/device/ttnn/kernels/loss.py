"""Cross-entropy, from logits or straight from hidden states. Logits and what is made of them are fp32.

Rows whose target is below zero get no loss and no gradient. Columns that pad the vocabulary to a tile never count:
ttnn's reductions leave padding out, and the products read a gradient that is zero there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ttrain.core.spec import DType
from ttrain.device.base import Kernel, Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, column_sum, fresh, into, rows_shape
from ttrain.device.ttnn.kernels.embedding import one_hot
from ttrain.device.ttnn.tensors.form import TileForm, dtype_name
from ttrain.device.ttnn.tensors.held import Held, IntegerInput


@dataclass
class _Targets:
    """Targets as one-hot rows, and the weight of every row: `weight`, or 0 where there is no target."""

    hot: Launch
    weights: Launch

    @classmethod
    def of(cls, c: Context, targets: IntegerInput, vocabulary: int, weight: Held) -> _Targets:
        present = targets.in_form(TileForm((targets.spec.size, 1), "float32"))

        def weights() -> Any:
            return c.tt.multiply(present(), weight.t)

        return cls(one_hot(c, targets, vocabulary, DType.FP32), weights)


def softmax_parts(c: Context, logits: Any) -> tuple[Any, Any, Any]:
    """(probabilities, sum of exponentials, largest logit) of fp32 logits [N, V]."""
    tt = c.tt
    largest = tt.max(logits, dim=-1, keepdim=True)
    powers = tt.subtract(logits, largest, activations=[tt.UnaryOpType.EXP])
    total = tt.sum(powers, dim=-1, keepdim=True, **c.exact)
    return tt.div(powers, total), total, largest


def log_sum(c: Context, total: Any, largest: Any) -> Any:
    """log-sum-exp of every row, [N, 1]."""
    return c.tt.add(largest, total, input_tensor_b_activations=[c.tt.UnaryOpType.LOG])


def _loss(c: Context, logits: Any, log_sums: Any, hot: Any, weights: Any) -> Any:
    """[1, 1]: the weighted sum of log-sum-exp minus the target's logit."""
    tt = c.tt
    picked = tt.sum(tt.multiply(logits, hot), dim=-1, keepdim=True, **c.exact)
    rows = tt.multiply(tt.subtract(log_sums, picked), weights)
    return tt.reshape(tt.sum(rows, dim=0, keepdim=True, **c.exact), (1, 1))


SMALLEST = 1e-30  # probability of a target below which its loss no longer grows, at 69 nats


def _picked_loss(c: Context, probabilities: Any, hot: Any, weights: Any, vocabulary: int) -> Any:
    """[1, 1]: the weighted sum of -log of the target's probability, which the matrix unit picks."""
    tt = c.tt
    ones = c.ones_row(vocabulary, DType.FP32)
    picked = tt.matmul(tt.multiply(probabilities, hot), ones.t, transpose_b=True, **c.product)
    losses = tt.add(picked, SMALLEST, activations=[tt.UnaryOpType.LOG, tt.UnaryOpType.NEG])
    return tt.matmul(losses, weights, transpose_a=True, **c.product)


def _gradient(c: Context, probabilities: Any, hot: Any, weights: Any, dtype: DType) -> Any:
    """weight (softmax - one-hot), rounded to `dtype`."""
    kind = getattr(c.tt, dtype_name(dtype))
    return c.tt.multiply(c.tt.subtract(probabilities, hot), weights, dtype=kind)


def _wide(c: Context, held: Held) -> Callable[[], Any]:
    if held.spec.dtype is DType.FP32:
        return lambda: held.t
    return lambda: c.tt.typecast(held.t, c.tt.float32)


def _cross_entropy(c: Context) -> Kernel:
    def build(ins: Sequence[Any], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        logits, targets, weight = ins
        given = _Targets.of(c, targets, logits.spec.shape[-1], weight)
        scores = _wide(c, logits)

        def run() -> list[Any]:
            z = scores()
            _, total, largest = softmax_parts(c, z)
            log_sums = log_sum(c, total, largest)
            loss = _loss(c, z, log_sums, given.hot(), given.weights())
            return [loss, c.tt.reshape(log_sums, (1, logits.spec.shape[0]))]

        return run

    return fresh(build)


def _cross_entropy_grad(c: Context) -> Kernel:
    def build(ins: Sequence[Any], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        logits, targets, _, weight = ins
        given = _Targets.of(c, targets, logits.spec.shape[-1], weight)
        scores = _wide(c, logits)

        def run() -> list[Any]:
            probabilities, _, _ = softmax_parts(c, scores())
            return [_gradient(c, probabilities, given.hot(), given.weights(), logits.spec.dtype)]

        return run

    return fresh(build)


def _linear_cross_entropy(c: Context) -> Kernel:
    """Forms the logits once; with `gradients` also what backward needs."""

    def build(ins: Sequence[Any], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        hidden, head, targets, weight = ins
        tt, dtype = c.tt, hidden.spec.dtype
        given = _Targets.of(c, targets, head.spec.shape[0], weight)

        def run() -> list[Any]:
            logits = tt.matmul(hidden.t, head.t, transpose_b=True, dtype=tt.float32, **c.product)
            probabilities = tt.softmax(logits, dim=-1, numeric_stable=True, **c.exact)
            hot, weights = given.hot(), given.weights()
            loss = _picked_loss(c, probabilities, hot, weights, head.spec.shape[0])
            if not attributes["gradients"]:
                return [loss]
            dlogits = _gradient(c, probabilities, hot, weights, dtype)
            dhidden = tt.matmul(dlogits, head.t, **c.product)
            return [loss, dhidden, tt.matmul(dlogits, hidden.t, transpose_a=True, **c.product)]

        return run

    return fresh(build)


def _squared_error(c: Context) -> Kernel:
    """Columns are summed on the matrix unit, and the weight enters with the sum over what is left."""

    def build(ins: Sequence[Any], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        (prediction, target, weight), tt = ins, c.tt
        width = rows_shape(prediction.spec.shape)[1]
        weights = c.derived([weight], lambda value: value, width)

        def run() -> list[Any]:
            squares = tt.squared_difference(prediction.t, target.t, dtype=tt.float32)
            columns = column_sum(c, squares, prediction.spec.shape, DType.FP32, None)
            if weights.ready:
                return [tt.matmul(columns, weights.t, transpose_b=True, **c.product)]
            return [tt.multiply(tt.sum(columns, dim=-1, keepdim=True, **c.exact), weight.t)]

        return run

    return fresh(build)


def _squared_error_grad(c: Context) -> Kernel:
    """2 weight (prediction - target)."""

    def build(ins: Sequence[Any], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        (prediction, target, weight), (out,), tt = ins, outs, c.tt
        zero = c.constant("zero", TileForm((1, 1), "float32"), lambda: np.zeros((1, 1), np.float32))

        def run() -> None:
            difference = tt.subtract(prediction.t, target.t, dtype=tt.float32)
            tt.addcmul(zero.t, difference, weight.t, value=2.0, output_tensor=out.t)

        return run

    return into(build)


def table(c: Context) -> dict[str, Kernel]:
    return {
        "squared_error": _squared_error(c),
        "squared_error_grad": _squared_error_grad(c),
        "cross_entropy": _cross_entropy(c),
        "cross_entropy_grad": _cross_entropy_grad(c),
        "linear_cross_entropy": _linear_cross_entropy(c),
    }
