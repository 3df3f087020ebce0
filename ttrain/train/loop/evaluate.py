"""Loss on held-out data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ttrain.core.errors import DataError, NonFiniteError
from ttrain.core.waiting import Waiting
from ttrain.data.batches import Dataset
from ttrain.models.base import LOSS_WEIGHT, Batch, Prepare, loss_weights, means, prepare_plain
from ttrain.parallel.world import World
from ttrain.train.protocols import Inputs, Outputs

BITS_PER_BYTE = "bits_per_byte"
_BYTES = "bytes"  # among counts


@dataclass(frozen=True)
class EvaluationResult:
    """The loss, and what else the model names; each the mean over its own targets of the whole split, if it has any.

    Where the targets are text, also bits_per_byte: the sum of the losses of all tokens in bits over the UTF-8 bytes of
    their text, which compares across tokenizers. A token that ends a document has a loss and no byte.
    """

    loss: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class Evaluation:
    """Mean loss over held-out samples: the same ones at every step of the run and for every batch size, each once.

    The ranks of a `world` take turns at the batches, whose sums are added in the order of the batches.
    """

    step: Callable[[Inputs], Outputs]
    dataset: Dataset
    rows: int  # per call, as the step was built for
    limit: int | None  # samples; None covers the whole split
    prepare: Prepare = prepare_plain
    say: Callable[[str], None] | None = None  # is told how far an evaluation is that takes long
    count_bytes: Callable[[Batch], int] | None = None  # of a batch's targets
    world: World = field(default_factory=World)
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # open while the step runs

    def __post_init__(self) -> None:
        self.samples = min(self.limit or self.dataset.val_samples, self.dataset.val_samples)
        self.tokens = self.bytes = 0  # targets and their bytes, known after an evaluation
        self._counts: Counter[str] | None = None

    def __call__(self, stopped: Callable[[], bool] = lambda: False) -> EvaluationResult | None:
        """Return the loss per valid target; None if `stopped` became true on the way.

        Raises NonFiniteError, and DataError where there is no target at all.
        """
        with Waiting("Evaluating on held-out data", self.say) as waiting, self.around():
            return self._evaluated(stopped, waiting)

    def _evaluated(self, stopped: Callable[[], bool], waiting: Waiting) -> EvaluationResult | None:
        if self._counts is None and (counted := self._totals(stopped, waiting, self._count)) is not None:
            self._counts = Counter({name: int(count) for name, count in counted.items()})
            self.tokens, self.bytes = self._counts[LOSS_WEIGHT], self._counts.pop(_BYTES)
            if not self.tokens:
                raise DataError(f"held-out data has no target in {self.samples} sample(s), so there is no loss of it.")
        if self._counts is None:
            return None
        sums = self._totals(stopped, waiting, partial(self._sums, loss_weights(self._counts)))
        if sums is None:
            return None
        found = {name: value for name, value in means(sums, self._counts).items() if value is not None}
        loss = found.pop("loss")
        if not math.isfinite(loss):
            raise NonFiniteError(f"the loss on held-out data is {loss}")
        if self.bytes:
            entropy = next((value for name, value in found.items() if name.endswith("/ce")), loss)
            found[BITS_PER_BYTE] = entropy * self.tokens / math.log(2) / self.bytes
        return EvaluationResult(loss, found)

    def _totals(
        self, stopped: Callable[[], bool], waiting: Waiting, of_batch: Callable[[Batch], Mapping[str, float]]
    ) -> dict[str, float] | None:
        """Add up the numbers of all batches, which ranks take turns at; None if `stopped` became true on any rank."""
        totals: dict[str, float] = {}
        ranks, batches = self.world.ranks, -(-self.samples // self.rows)
        for first in range(0, batches, ranks.count):
            if self.world.largest({"stopped": float(stopped())})["stopped"] > 0:
                return None
            waiting.at(first * self.rows, self.samples)
            # Samples in their order; the last batch may have fewer rows than the others.
            start = self.rows * min(first + ranks.rank, batches - 1)
            batch = self.dataset.batch("val", 0, start, min(self.rows, self.samples - start))
            for found in self.world.gather([of_batch(batch)])[: batches - first]:
                for name, value in found.items():
                    totals[name] = totals.get(name, 0) + value
        return totals

    def _count(self, batch: Batch) -> dict[str, float]:
        """Return the targets that each weight averages over, and their bytes."""
        return {**self.prepare(batch)[1], _BYTES: 0 if self.count_bytes is None else self.count_bytes(batch)}

    def _sums(self, weights: Mapping[str, float], batch: Batch) -> dict[str, float]:
        """The step's sums over a batch that may have fewer rows than the step.

        Its rows fill the step again and again. Where targets are ids, all but the first time they count for nothing;
        others can't be masked, so what counted several times is divided, once the rest is taken away.
        """
        rows = len(batch["targets"])
        full = {name: np.resize(array, (self.rows, *array.shape[1:])) for name, array in batch.items()}
        if masked := full["targets"].dtype.kind == "i":
            full["targets"][rows:] = -1
        outputs = self.step({**self.prepare(full)[0], **weights})
        sums = {name: float(value) for name, value in outputs.items() if name == "loss" or "/" in name}
        if masked or rows == self.rows:
            return sums
        times, rest = divmod(self.rows, rows)
        extra = self._sums(weights, {name: array[:rest] for name, array in batch.items()}) if rest else {}
        return {name: (value - extra.get(name, 0.0)) / times for name, value in sums.items()}
