"""Evaluation of a run on held-out data: the mean loss, and what else the model names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ttrain.core.errors import DataError, NonFiniteError
from ttrain.core.waiting import Waiting
from ttrain.data.batches import Dataset
from ttrain.data.sequences.mixture import Mixture
from ttrain.models.base import LOSS_WEIGHT, Batch, Prepare, loss_weights, means, next_token_entropy, prepare_plain
from ttrain.parallel.world import World
from ttrain.train.protocols import Inputs, Outputs
from ttrain.train.settings import EVALUATION
from ttrain.train.steps.step import joined, micro_batches, summed

_BYTES = "bytes"  # among counts


@dataclass(frozen=True)
class EvaluationResult:
    """The loss, and what else the model names; each the mean over its own targets of the whole split, if it has any.

    Where the targets are text, also bits_per_byte: the sum of the losses of all tokens in bits over the UTF-8 bytes of
    their text, which compares across tokenizers. A token that ends a document has a loss and no byte. Of a mixture also
    loss/<name>, the mean loss of a token of each source.
    """

    loss: float
    metrics: dict[str, float] = field(default_factory=dict)
    further: dict[str, float] = field(default_factory=dict)  # of train.evals, by whole names


@dataclass(eq=False)
class Evaluation:
    """Mean loss over held-out samples: the same ones at every step of the run and for every batch size, each once.

    The ranks of a `world` take turns at the batches, whose sums are added in the order of the batches.
    """

    step: Callable[[Inputs], Outputs]
    dataset: Dataset
    rows: int  # per call, as the step was built for; where rows are coupled, of a slice
    limit: int | None  # samples; None covers the whole split
    prepare: Prepare = prepare_plain
    say: Callable[[str], None] | None = None  # is told how far an evaluation is that takes long
    count_bytes: Callable[[Batch], int] | None = None  # of a batch's targets
    world: World = field(default_factory=World)
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # open while the step runs
    probe: Callable[[Inputs], Outputs] = dict
    coupled: Callable[[Outputs], Inputs] | None = None  # where rows are, see TrainStep
    summary: Callable[[Mapping[str, float]], dict[str, float]] = dict  # of the means
    each: int | None = None  # rows of a call, where a slice has several
    score: Callable[[Batch], dict[str, float]] | None = None  # gives the sums of a batch in the place of the step
    # Measures the entries of train.evals that are due (EVALUATION or END). Raises Interrupted where it was stopped.
    measure: Callable[[str, Callable[[], bool]], dict[str, float]] = lambda due, stopped: {}

    def __post_init__(self) -> None:
        self.samples = min(self.limit or self.dataset.val_samples, self.dataset.val_samples)
        self.tokens = self.bytes = 0  # targets and their bytes, known after an evaluation
        self._counts: dict[str, dict[str, int]] = {}  # of each source, and of all under ""
        whole = {"": (self.dataset, self.samples)}
        parts = self.dataset.divided(self.samples) if isinstance(self.dataset, Mixture) else whole
        self._batches: list[tuple[str, Any, int, int]] = []  # of one source each, with its data, first sample and rows
        self._masked = not self.dataset.fields["targets"].dtype.is_floating
        for name, (data, count) in parts.items():
            while count:
                rows = next(n for n in range(min(self.rows, count), 0, -1) if self._masked or self.rows % n == 0)
                self._batches.append((name, data, parts[name][1] - count, rows))
                count -= rows

    def __call__(self, stopped: Callable[[], bool] = lambda: False) -> EvaluationResult | None:
        """Return the loss per valid target; None if `stopped` became true on the way.

        Raises NonFiniteError, and DataError where there is no target at all.
        """
        with Waiting("Evaluating on held-out data", self.say) as waiting, self.around():
            if not self._counts and (counted := self._totals(stopped, waiting, self._count)) is not None:
                self._counts = {of: {name: int(count) for name, count in each.items()} for of, each in counted.items()}
                self.tokens, self.bytes = self._counts[""][LOSS_WEIGHT], self._counts[""].pop(_BYTES)
                if not self.tokens:
                    none = f"held-out data has no target in {self.samples} sample(s)"
                    raise DataError(f"{none}, so there is no loss of it.")
            if not self._counts:
                return None
            sums = self._totals(stopped, waiting, partial(self._sums, loss_weights(self._counts[""])))
            if sums is None:
                return None
            further = self.measure(EVALUATION, stopped)
        found = {name: value for name, value in means(sums[""], self._counts[""]).items() if value is not None}
        loss = found.pop("loss")
        found = self.summary(found)
        if not math.isfinite(loss):
            raise NonFiniteError(f"the loss on held-out data is {loss}")
        if self.bytes:
            found["bits_per_byte"] = (
                next_token_entropy({**found, "loss": loss}) * self.tokens / math.log(2) / self.bytes
            )
        for name, counts in self._counts.items():
            if name and counts[LOSS_WEIGHT]:
                found[f"loss/{name}"] = next_token_entropy(sums[name]) * self.tokens / counts[LOSS_WEIGHT]
        return EvaluationResult(loss, found, further)

    def _totals(
        self, stopped: Callable[[], bool], waiting: Waiting, of_batch: Callable[[Batch], Mapping[str, float]]
    ) -> dict[str, dict[str, float]] | None:
        """Add up the numbers of all batches, which ranks take turns at; None if `stopped` became true on any rank.

        The sums of all are under "", those of a source under its name.
        """
        totals: dict[str, dict[str, float]] = {}
        ranks, batches = self.world.ranks, self._batches
        for first in range(0, len(batches), ranks.count):
            if self.world.largest({"stopped": float(stopped())})["stopped"] > 0:
                return None
            waiting.at(first * self.rows, self.samples)
            # Samples in their order; the last batch may have fewer rows than the others.
            _, data, start, rows = batches[min(first + ranks.rank, len(batches) - 1)]
            found = self.world.gather([of_batch(data.batch("val", 0, start, rows))])
            for (source, *_), sums in zip(batches[first:], found, strict=False):
                for of in (totals.setdefault(name, {}) for name in dict.fromkeys(("", source))):
                    of.update((name, of.get(name, 0) + value) for name, value in sums.items())
        return totals

    def _count(self, batch: Batch) -> dict[str, float]:
        """Return the targets that each weight averages over, and their bytes."""
        return {**self.prepare(batch)[1], _BYTES: 0 if self.count_bytes is None else self.count_bytes(batch)}

    def _sums(self, weights: Mapping[str, float], batch: Batch) -> dict[str, float]:
        """The step's sums over a batch that may have fewer rows than the step.

        Its rows fill the step again and again. Where targets are ids, all but the first time they count for nothing.
        Others can't be masked: their rows fill the step some whole times, and the sums are divided. So all batches are
        one call of the step, and ranks that gather weights meanwhile stay together.
        """
        if self.score is not None:
            return {name: weights[LOSS_WEIGHT] * value for name, value in self.score(batch).items()}
        rows = len(batch["targets"])
        full = {name: np.resize(array, (self.rows, *array.shape[1:])) for name, array in batch.items()}
        if self._masked:
            full["targets"][rows:] = -1
        parts = micro_batches(self.prepare(full)[0], self.each or self.rows, 1)
        further = {} if self.coupled is None else self.coupled(joined(map(self.probe, parts)))
        sums = summed([self.step({**part, **further, **weights}) for part in parts])
        return sums if self._masked else {name: value * rows / self.rows for name, value in sums.items()}
