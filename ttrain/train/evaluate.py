"""Loss on held-out data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ttrain.core.errors import NonFiniteError
from ttrain.core.waiting import Waiting
from ttrain.models.base import Prepare, loss_weights, prepare_plain
from ttrain.train.protocols import Array, Dataset, Step
from ttrain.train.step import summed_metrics


@dataclass(frozen=True)
class EvaluationResult:
    """The loss, and what else the model names; each the mean over its own targets of the whole split."""

    loss: float
    metrics: dict[str, float] = field(default_factory=dict)


class Evaluation:
    """Mean loss over the held-out split: the same batches at every step of the run, and never any other data."""

    def __init__(
        self,
        step: Step,
        dataset: Dataset,
        rows: int,
        batches: int | None,
        seed: int,
        prepare: Prepare = prepare_plain,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`rows` per call as the step was built for; `batches` None covers the whole split.

        `say` is told how far an evaluation is that takes long.
        """
        self._say = say
        self._step, self._dataset, self._rows, self._seed = step, dataset, rows, seed
        self._prepare = prepare
        available = dataset.val_batches(rows)
        self.batches = available if batches is None else min(batches, available)
        self._counts: Counter[str] | None = None

    def __call__(self, stopped: Callable[[], bool] = lambda: False) -> EvaluationResult | None:
        """The loss per valid target; None if `stopped` became true on the way. Raises NonFiniteError."""
        with Waiting("Evaluating on held-out data", self._say) as waiting:
            return self._evaluated(stopped, waiting)

    def _evaluated(self, stopped: Callable[[], bool], waiting: Waiting) -> EvaluationResult | None:
        if self._counts is None:
            self._counts = self._counted(stopped)
        if self._counts is None:
            return None
        weights = loss_weights(self._counts)
        loss, metrics = 0.0, dict[str, float]()
        for index in range(self.batches):
            if stopped():
                return None
            waiting.at(index, self.batches)
            outputs = self._step({**self._fields(index)[0], **weights})
            loss, metrics = loss + float(outputs["loss"]), summed_metrics(metrics, outputs)
        if not math.isfinite(loss):
            raise NonFiniteError(f"val/loss is {loss}")
        return EvaluationResult(loss, metrics)

    def _counted(self, stopped: Callable[[], bool]) -> Counter[str] | None:
        """What each weight averages over the whole split, which stays the same; None if `stopped` became true."""
        total: Counter[str] = Counter()
        for index in range(self.batches):
            if stopped():
                return None
            total.update(self._fields(index)[1])
        return total

    def _fields(self, index: int) -> tuple[dict[str, Array], dict[str, int]]:
        return self._prepare(self._dataset.batch("val", self._seed, index * self._rows, self._rows))
