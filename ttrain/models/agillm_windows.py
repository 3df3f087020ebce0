"""Predictions of AGILLM's SAT pass: its hidden rows, their tokens, and how often each counts.

A window is two neighbouring positions s, s + 1; its rows predict the tokens s + 2 and s + 3. So row p predicts token
p + 2 whichever of its two windows asks, and counts as often as it is asked: one product with the head serves both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain.core.spec import DType, TensorSpec
from ttrain.models.settings import AGILLMConfig

SAT_WEIGHT, GATE_WEIGHT = "sat_loss_weight", "gate_loss_weight"  # step inputs fp32 []: one over what they average
EMIT_TWO = 1  # the gate's class
_MOSTLY = 0.75  # share of the rows from which all are taken rather than some picked


def window_starts(context: int, stride: int, most: int) -> list[int]:
    """0, stride, 2 stride, ... up to context - 4; of these `most` evenly spaced ones, or all where `most` is 0."""
    starts = list(range(0, context - 3, stride))
    if most and len(starts) > most:
        starts = [starts[round(index)] for index in np.linspace(0, len(starts) - 1, most)]
    return starts


@dataclass(frozen=True)
class Windows:
    """Rows of a sequence that the SAT head reads, in order, what each predicts and how often that counts.

    starts: first row of every window, which the gate reads. rows[i] predicts the token at ids[i] of the sequence,
    counted from 0, and counts times[i] times. A sequence too short for a window keeps a row that counts for nothing.
    """

    starts: tuple[int, ...]
    rows: tuple[int, ...]
    ids: tuple[int, ...]
    times: tuple[int, ...]

    @staticmethod
    def of(config: AGILLMConfig, context: int) -> Windows:
        """Return the windows of sequences of that many tokens."""
        if context < 4:
            return Windows((0,), (0,), (0,), (0,))
        if config.sat_target == "legacy":
            return Windows((context - 2,), (context - 2, context - 1), (1, 2), (1, 1))
        starts = window_starts(context, config.sat_stride, config.sat_max_windows)
        times = np.zeros(context, np.int64)
        for offset in (0, 1):
            np.add.at(times, np.asarray(starts) + offset, 1)
        used = np.flatnonzero(times)
        rows = range(context) if len(used) > _MOSTLY * context else used.tolist()
        ids = [min(row + 2, context - 1) for row in rows]
        return Windows(tuple(starts), tuple(rows), tuple(ids), tuple(int(times[row]) for row in rows))

    def specs(self, rows: int) -> dict[str, TensorSpec]:
        """Return the fields of a batch of `rows` sequences."""
        many = (rows, len(self.rows))
        return {
            "sat_targets": TensorSpec(many, DType.INT64),
            "sat_times": TensorSpec(many, DType.FP32),
            "gate_targets": TensorSpec((rows, len(self.starts)), DType.INT64),
        }

    def fields(self, targets: NDArray[np.int64]) -> tuple[dict[str, Any], dict[str, int]]:
        """The fields from `targets` [rows, context], where place i holds token i + 1; and what each weight averages.

        A masked token is predicted by nobody, and a window with one does not train the gate.
        """
        token = targets[:, np.asarray(self.ids) - 1]  # a row that counts for nothing may look anywhere
        times = np.broadcast_to(np.asarray(self.times), token.shape)
        sat = np.where(times > 0, token, -1)
        place = {row: index for index, row in enumerate(self.rows)}
        pairs = [[place[start], place.get(start + 1, place[start])] for start in self.starts]
        whole = (sat[:, np.asarray(pairs)] >= 0).all(-1)
        gate = np.where(whole, EMIT_TWO, -1)
        fields = {"sat_targets": sat, "sat_times": times.astype(np.float32), "gate_targets": gate}
        return fields, {SAT_WEIGHT: int((times * (sat >= 0)).sum()), GATE_WEIGHT: int(whole.sum())}
