"""Loss on held-out data."""

from __future__ import annotations

import math
from collections.abc import Callable

from ttrain.core.errors import NonFiniteError
from ttrain.train.protocols import Dataset, Step
from ttrain.train.step import valid_targets


class Evaluation:
    """Mean loss over the held-out split: the same batches at every step of the run, and never any other data."""

    def __init__(self, step: Step, dataset: Dataset, rows: int, batches: int | None, seed: int) -> None:
        """`rows` per call as the step was built for; `batches` None covers the whole split."""
        self._step, self._dataset, self._rows, self._seed = step, dataset, rows, seed
        available = dataset.val_batches(rows)
        self.batches = available if batches is None else min(batches, available)

    def __call__(self, stopped: Callable[[], bool] = lambda: False) -> float | None:
        """The loss per valid target; None if `stopped` became true on the way. Raises NonFiniteError."""
        total, count = 0.0, 0
        for index in range(self.batches):
            if stopped():
                return None
            batch = self._dataset.batch("val", self._seed, index, self._rows)
            valid = valid_targets(batch)
            total += float(self._step({**batch, "loss_weight": 1.0 / max(valid, 1)})["loss"]) * valid
            count += valid
        loss = total / max(count, 1)
        if not math.isfinite(loss):
            raise NonFiniteError(f"val/loss is {loss}")
        return loss
