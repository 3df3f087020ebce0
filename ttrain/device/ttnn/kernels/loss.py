"""Cross-entropy, from logits or straight from hidden states. Logits and what is made of them are fp32.

Rows whose target is below zero get no loss and no gradient. Columns that pad the vocabulary to a tile never count:
ttnn's reductions leave padding out, and the products read a gradient that is zero there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ttrain.core.attention_mask import HIDDEN
from ttrain.core.spec import DType
from ttrain.device.base import Delivery, Launch
from ttrain.device.ttnn.kernels.common import Context, Tensor, column_sum, row, rows_shape, wide
from ttrain.device.ttnn.kernels.layout import one_hot
from ttrain.device.ttnn.tensors.device_tensor import IntegerInput
from ttrain.device.ttnn.tensors.store import TILE, TileLayout, dtype_name

CHUNK_LOGITS = 2**23  # of how many logits of a head are formed at a time, 32 MiB


SMALLEST = 1e-30  # probability of a target below which its loss no longer grows, at 69 nats


def _targets(c: Context, targets: IntegerInput, vocabulary: int, weight: Tensor) -> tuple[Any, Any]:
    """Return one-hot rows, and the weight of every row: `weight`, or 0 where there is no target."""
    present = targets.in_layout(TileLayout((targets.spec.size, 1), "float32"))
    return one_hot(c, targets, vocabulary, DType.FP32), c.tt.multiply(present, weight.t)


def softmax_parts(c: Context, logits: Any, into: Any = None) -> tuple[Any, Any, Any]:
    """Return (probabilities, sum of exponentials, largest logit) of fp32 logits [N, V]; the first `into` a tensor."""
    tt = c.tt
    largest = tt.max(logits, dim=-1, keepdim=True)
    powers = tt.subtract(logits, largest, activations=[tt.UnaryOpType.EXP])
    total = tt.sum(powers, dim=-1, keepdim=True, **c.exact)
    return tt.div(powers, total, output_tensor=into), total, largest


def log_sum(c: Context, total: Any, largest: Any) -> Any:
    """Return the log-sum-exp of every row, [N, 1]."""
    return c.tt.add(largest, total, input_tensor_b_activations=[c.tt.UnaryOpType.LOG])


def _picked(c: Context, logits: Any, hot: Any) -> Any:
    """Return the logit of every target, [N, 1]."""
    return c.tt.sum(c.tt.multiply(logits, hot), dim=-1, keepdim=True, **c.exact)


def _gradient(c: Context, probabilities: Any, hot: Any, weights: Any, dtype: DType) -> Any:
    """Return weight (softmax - one-hot), rounded to `dtype`."""
    kind = getattr(c.tt, dtype_name(dtype))
    return c.tt.multiply(c.tt.subtract(probabilities, hot), weights, dtype=kind)


@row("cross_entropy", Delivery.RETURNS)
def _cross_entropy(c: Context, logits: Tensor, targets: IntegerInput, weight: Tensor, *_: Tensor) -> list[Any]:
    tt, z = c.tt, wide(c, logits)
    hot, weights = _targets(c, targets, logits.spec.shape[-1], weight)
    _, total, largest = softmax_parts(c, z)
    log_sums = log_sum(c, total, largest)
    rows = tt.multiply(tt.subtract(log_sums, _picked(c, z, hot)), weights)
    loss = tt.reshape(tt.sum(rows, dim=0, keepdim=True, **c.exact), (1, 1))
    return [loss, tt.reshape(log_sums, (1, logits.spec.shape[0]))]


@row("cross_entropy_grad", Delivery.RETURNS)
def _cross_entropy_grad(c: Context, *tensors: Any) -> list[Any]:
    logits, targets, _, weight, _ = tensors
    hot, weights = _targets(c, targets, logits.spec.shape[-1], weight)
    probabilities, _, _ = softmax_parts(c, wide(c, logits))
    return [_gradient(c, probabilities, hot, weights, logits.spec.dtype)]


class _HeadLoss:
    """The launch of one node: forms the logits once; with `gradients` also what backward needs.

    Ids that only pad the vocabulary are hidden from the softmax, and have no part in what smoothing spreads.
    """

    def __init__(
        self, c: Context, *tensors: Any, smoothing: float, live: int, gradients: bool = False, frozen: Any = False
    ) -> None:
        self.c, (self.hidden, self.head, self.targets, self.weight, self.bias, *_) = c, tensors
        (self.rows, self.width), self.vocabulary = self.hidden.spec.shape, self.head.spec.shape[0]
        self.smoothing, self.live, self.gradients, self.frozen = smoothing, live, gradients, frozen
        # The fewest launches, on all rows: without bias, smoothing, weights of rows and ids that pad the vocabulary.
        self.plain = live == self.vocabulary and not (smoothing or self.bias or self.weight.spec.rank)
        step = self.rows if self.plain else max(TILE, CHUNK_LOGITS // self.vocabulary // TILE * TILE)
        self.chunks = [(start, min(start + step, self.rows)) for start in range(0, self.rows, step)]
        self.dtype = getattr(c.tt, dtype_name(self.hidden.spec.dtype))
        self.hiding = self._row("hidden ids", 0.0, HIDDEN) if live < self.vocabulary else None
        self.spread = self._row("smoothing", smoothing / live, 0.0) if smoothing else None

    def _row(self, key: str, live: float, rest: float) -> Tensor:
        """Return a row [1, V]: one number for live ids, another for the others."""

        def values() -> np.ndarray:
            return np.where(np.arange(self.vocabulary) < self.live, live, rest).astype(np.float32)[None]

        return self.c.constant((key, live, self.live), TileLayout((1, self.vocabulary), "float32"), values)

    def __call__(self) -> list[Any]:
        """Return the sums, and with `gradients` dhidden, unless frozen dhead and any dbias."""
        c, tt, count = self.c, self.c.tt, 2 if self.smoothing else 1
        each = tt.permute(self.weight.t, (1, 0)) if self.weight.spec.rank else self.weight.t
        weights = tt.multiply(self.targets.in_layout(TileLayout((self.rows, 1), "float32")), each)
        sums: list[Any] = []
        rows: list[Any] = []
        for chunk in self.chunks:
            hidden, part = (self._cut(x, *chunk) for x in (self.hidden.t, weights))
            hot = one_hot(c, self.targets, self.vocabulary, DType.FP32, *chunk)
            found, dlogits = self._chunk(hidden, part, hot)
            if self.gradients:
                rows.append(tt.matmul(dlogits, self.head.t, **c.product))
                found += [] if self.frozen else self._parameter_sums(dlogits, hidden)
            sums = found if not sums else [tt.add(*pair) for pair in zip(sums, found, strict=True)]
        if not self.gradients:
            return sums
        dhidden = rows[0] if len(rows) == 1 else tt.concat(rows, dim=0)
        narrow = [x if x.dtype == self.dtype else tt.typecast(x, self.dtype) for x in sums[count:]]
        return [*sums[:count], dhidden, *narrow]

    def _cut(self, tensor: Any, start: int, stop: int) -> Any:
        if len(self.chunks) == 1:
            return tensor
        return self.c.tt.slice(tensor, [start, 0], [stop, tensor.shape[1]])

    def _chunk(self, hidden: Any, weights: Any, hot: Any) -> tuple[list[Any], Any]:
        """Return the sums over some rows, each [1, 1], and the gradient of their logits."""
        c, tt, spread = self.c, self.c.tt, self.spread
        logits = tt.matmul(hidden, self.head.t, transpose_b=True, dtype=tt.float32, **c.product)
        if self.bias is not None:
            logits = tt.add(logits, self.bias.t, dtype=tt.float32)
        if self.plain:
            options = {"dim": -1, "numeric_stable": True, **c.exact}
            probabilities = softmax_parts(c, logits)[0] if c.core_subset else tt.softmax(logits, **options)
            ones = c.full(1, (1, self.vocabulary))
            picked = tt.matmul(tt.multiply(probabilities, hot), ones.t, transpose_b=True, **c.product)
            plain = tt.add(picked, SMALLEST, activations=[tt.UnaryOpType.LOG, tt.UnaryOpType.NEG])
        else:
            scores = logits if self.hiding is None else tt.add(logits, self.hiding.t)
            probabilities, total, largest = softmax_parts(c, scores)
            picked = _picked(c, logits, hot)
            plain = tt.subtract(log_sum(c, total, largest), picked)
        entropy = tt.matmul(plain, weights, transpose_a=True, **c.product)
        sums = [entropy]
        if spread is not None:
            # (1 - s) CE + s * (log-sum-exp - mean logit) = CE + s * logit of the target - s * mean logit
            mean = tt.matmul(logits, spread.t, transpose_b=True, **c.product)
            smoothed = tt.add(plain, tt.subtract(tt.multiply(picked, self.smoothing), mean))
            sums = [tt.matmul(smoothed, weights, transpose_a=True, **c.product), entropy]
        if not self.gradients:
            return sums, None
        if spread is not None:
            hot = tt.add(tt.multiply(hot, 1 - self.smoothing), spread.t)
        return sums, _gradient(c, probabilities, hot, weights, self.hidden.spec.dtype)

    def _parameter_sums(self, dlogits: Any, hidden: Any) -> list[Any]:
        """Return the gradients of head and bias from some rows; in fp32 where more are to come."""
        c, tt = self.c, self.c.tt
        kind = self.dtype if len(self.chunks) == 1 else tt.float32
        sums = [tt.matmul(dlogits, hidden, transpose_a=True, dtype=kind, **c.product)]
        if self.bias is not None:
            ones = c.full(1, (1, dlogits.shape[0]), self.hidden.spec.dtype)
            sums.append(tt.matmul(ones.t, dlogits, dtype=kind, **c.product))
        return sums


row("head_cross_entropy", Delivery.RETURNS, bound=True)(_HeadLoss)


@row("squared_error", Delivery.RETURNS, bound=True)
def _squared_error(c: Context, prediction: Tensor, target: Tensor, weight: Tensor, _: Tensor) -> Launch:
    """Columns are summed on the matrix unit, and the weight enters with the sum over what is left."""
    tt, weights = c.tt, c.derived([weight], lambda value: value, rows_shape(prediction.spec.shape)[1])

    def run() -> list[Any]:
        squares = tt.squared_difference(prediction.t, target.t, dtype=tt.float32)
        columns = column_sum(c, squares, prediction.spec.shape, DType.FP32)
        if weights.ready:
            return [tt.matmul(columns, weights.t, transpose_b=True, **c.product)]
        return [tt.multiply(tt.sum(columns, dim=-1, keepdim=True, **c.exact), weight.t)]

    return run


@row("squared_error_grad")
def _squared_error_grad(c: Context, prediction: Tensor, target: Tensor, weight: Tensor, out: Tensor) -> None:
    """2 weight (prediction - target)."""
    difference = c.tt.subtract(prediction.t, target.t, dtype=c.tt.float32)
    c.tt.addcmul(c.full(0, (1, 1)).t, difference, weight.t, value=2.0, output_tensor=out.t)
