"""Cross-entropy of an output head with bias and label smoothing, a chunk of rows at a time.

Ids that only pad the vocabulary are hidden from the softmax, and have no part in what smoothing spreads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ttrain.core.mask import HIDDEN
from ttrain.core.spec import DType
from ttrain.device.base import Kernel, Launch
from ttrain.device.ttnn.kernels.common import Attributes, Context, fresh
from ttrain.device.ttnn.kernels.embedding import one_hot
from ttrain.device.ttnn.kernels.loss import log_sum, softmax_parts
from ttrain.device.ttnn.tensors.form import TILE, TileForm, dtype_name
from ttrain.device.ttnn.tensors.held import Held


class _HeadLoss:
    """One node: what all its chunks share."""

    def __init__(self, c: Context, ins: Sequence[Any], attributes: Attributes) -> None:
        self.c, (self.hidden, self.head, targets, self.weights, self.bias) = c, ins
        (self.rows, self.width), self.vocabulary = self.hidden.spec.shape, self.head.spec.shape[0]
        self.smoothing, self.live = attributes["smoothing"], attributes["live"]
        step = max(TILE, attributes["chunk"] // TILE * TILE)
        self.chunks = [(start, min(start + step, self.rows)) for start in range(0, self.rows, step)]
        self.hot = [one_hot(c, targets, self.vocabulary, DType.FP32, *chunk) for chunk in self.chunks]
        self.present = targets.in_form(TileForm((self.rows, 1), "float32"))
        self.dtype = getattr(c.tt, dtype_name(self.hidden.spec.dtype))

    def _row(self, key: str, live: float, rest: float) -> Held:
        """[1, V]: one number for live ids, another for the others."""

        def values() -> np.ndarray:
            return np.where(np.arange(self.vocabulary) < self.live, live, rest).astype(np.float32)[None]

        return self.c.constant((key, live, self.live), TileForm((1, self.vocabulary), "float32"), values)

    def launch(self, gradients: bool) -> Launch:
        """A launch that returns the sums loss and cross_entropy, and with `gradients` dhidden, dhead and any dbias."""
        c, tt = self.c, self.c.tt
        hiding = self._row("hidden ids", 0.0, HIDDEN) if self.live < self.vocabulary else None
        spread = self._row("smoothing", self.smoothing / self.live, 0.0) if self.smoothing else None

        def run() -> list[Any]:
            weights = tt.multiply(self.present(), tt.permute(self.weights.t, (1, 0)))
            sums: list[Any] = []
            rows: list[Any] = []
            for (start, stop), hot in zip(self.chunks, self.hot, strict=True):
                part = [self._cut(x, start, stop) for x in (self.hidden.t, weights)]
                found, dlogits = self._chunk(part, hot(), hiding, spread, gradients)
                if gradients:
                    rows.append(tt.matmul(dlogits, self.head.t, **c.product))
                    found += self._parameter_sums(dlogits, part[0])
                sums = found if not sums else [tt.add(*pair) for pair in zip(sums, found, strict=True)]
            if not gradients:
                return sums
            dhidden = rows[0] if len(rows) == 1 else tt.concat(rows, dim=0)
            narrow = [x if x.dtype == self.dtype else tt.typecast(x, self.dtype) for x in sums[2:]]
            return [*sums[:2], dhidden, *narrow]

        return run

    def _cut(self, tensor: Any, start: int, stop: int) -> Any:
        if len(self.chunks) == 1:
            return tensor
        return self.c.tt.slice(tensor, [start, 0], [stop, tensor.shape[1]])

    def _chunk(
        self, part: Sequence[Any], hot: Any, hiding: Held | None, spread: Held | None, gradients: bool
    ) -> tuple[list[Any], Any]:
        """[loss, cross_entropy] of some rows, each [1, 1], and the gradient of their logits."""
        c, tt = self.c, self.c.tt
        hidden, weights = part
        logits = tt.matmul(hidden, self.head.t, transpose_b=True, dtype=tt.float32, **c.product)
        if self.bias is not None:
            logits = tt.add(logits, self.bias.t, dtype=tt.float32)
        scores = logits if hiding is None else tt.add(logits, hiding.t)
        probabilities, total, largest = softmax_parts(c, scores)
        picked = tt.sum(tt.multiply(logits, hot), dim=-1, keepdim=True, **c.exact)
        plain = tt.subtract(log_sum(c, total, largest), picked)
        entropy = tt.matmul(plain, weights, transpose_a=True, **c.product)
        loss = entropy
        if spread is not None:
            # (1 - s) CE + s * (log-sum-exp - mean logit) = CE + s * logit of the target - s * mean logit
            mean = tt.matmul(logits, spread.t, transpose_b=True, **c.product)
            smoothed = tt.add(plain, tt.subtract(tt.multiply(picked, self.smoothing), mean))
            loss = tt.matmul(smoothed, weights, transpose_a=True, **c.product)
        if not gradients:
            return [loss, entropy], None
        if spread is not None:
            hot = tt.add(tt.multiply(hot, 1 - self.smoothing), spread.t)
        return [loss, entropy], tt.multiply(tt.subtract(probabilities, hot), weights, dtype=self.dtype)

    def _parameter_sums(self, dlogits: Any, hidden: Any) -> list[Any]:
        """Gradients of head and bias from some rows; in fp32 where more are to come."""
        c, tt = self.c, self.c.tt
        kind = self.dtype if len(self.chunks) == 1 else tt.float32
        sums = [tt.matmul(dlogits, hidden, transpose_a=True, dtype=kind, **c.product)]
        if self.bias is not None:
            ones = c.ones_row(dlogits.shape[0], self.hidden.spec.dtype)
            sums.append(tt.matmul(ones.t, dlogits, dtype=kind, **c.product))
        return sums


def _head_cross_entropy(c: Context) -> Kernel:
    def build(ins: Sequence[Any], outs: Sequence[Held], attributes: Attributes, work: Sequence[Held]) -> Launch:
        return _HeadLoss(c, ins, attributes).launch(attributes["gradients"])

    return fresh(build)


def table(c: Context) -> dict[str, Kernel]:
    return {"head_cross_entropy": _head_cross_entropy(c)}
