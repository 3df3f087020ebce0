"""One optimizer step on the host's side: the inputs of every micro-batch, and the calls into the built steps.

An engine builds `train` (forward, backward and update in one) where a step is a single micro-batch, and otherwise
`accumulate_first` (gradients are overwritten), `accumulate_next` (gradients are added to) and `update`.

A guarded step is built in parts too, with `norm` before `update`: the host looks at the loss and at the gradient norm,
and does not run the update where one of them is not finite. Parameters and optimizer tensors are untouched then, on
every engine and device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ttrain.models.base import Batch, Prepare, loss_weights, prepare_plain, valid_targets
from ttrain.train.protocols import Array, Inputs, Look, Outputs, Step
from ttrain.train.steps.seeds import ROUNDING, step_seed

Returned = TypeVar("Returned")
Turns = Generator[None, None, Returned]  # yields while a device computes
Call = tuple[str, Inputs]  # name of a built step, and all its inputs
Following = Callable[[], tuple[Batch, Mapping[str, float]]]


@dataclass(frozen=True)
class StepResult:
    """Numbers of one optimizer step. `loss` is the mean over the valid targets of the whole step."""

    loss: float
    grad_norm: float
    tokens: int
    applied: bool = True  # whether the parameters were updated
    activation_norm: float | None = None  # largest of the micro-batches, where it is watched
    metrics: dict[str, float] = field(default_factory=dict)  # further numbers that the model names, by name

    @property
    def finite(self) -> bool:
        return self.bad is None

    @property
    def bad(self) -> str | None:
        """The first number that is not finite, in words; None where all are."""
        numbers = {"train/loss": self.loss, "grad_norm": self.grad_norm, "activation_norm": self.activation_norm}
        bad = ((key, value) for key, value in numbers.items() if value is not None and not math.isfinite(value))
        return next((f"{key} is {value}" for key, value in bad), None)


class TrainStep:
    """Runs one optimizer step over a batch in `accumulation` micro-batches of equal rows.

    Losses are sums weighted by `loss_weight` = 1 / valid targets of the whole step, so micro-batches weigh by their
    count of valid targets, and the gradient is that of the mean over the step however it is split. The same holds for
    every further weight that the model has.
    """

    def __init__(
        self,
        steps: Mapping[str, Step],
        accumulation: int,
        seed: int,
        rank: int = 0,
        prepare: Prepare = prepare_plain,
        overlaps: bool = False,
    ) -> None:
        """`steps` holds those of `names`; a step `norm` among them makes the update guarded.

        `overlaps` tells that the device can take in inputs, or launch others' steps, while a step computes.
        """
        self._steps, self._accumulation, self._seed, self._rank = steps, accumulation, seed, rank
        self._prepare, self._overlaps = prepare, overlaps
        self._guarded = "norm" in steps

    @staticmethod
    def names(accumulation: int, guarded: bool = False) -> tuple[str, ...]:
        """Names of the steps that have to be built."""
        if accumulation == 1 and not guarded:
            return ("train",)
        later = ("accumulate_next",) if accumulation > 1 else ()
        return ("accumulate_first", *later, *(("norm",) if guarded else ()), "update")

    def __call__(self, batch: Batch, rates: Mapping[str, float], step: int) -> StepResult:
        """`batch` fields have the rows of the whole step; `rates` are the lr inputs; `step` counts from 1."""
        return last_value(self.turns(batch, rates, step))

    def turns(
        self, batch: Batch, rates: Mapping[str, float], step: int, following: Following | None = None
    ) -> Turns[StepResult]:
        """The same, with a yield wherever the device was given work and the host is about to wait for it.

        `following` returns the batch and rates of the next step, whose inputs a device that can takes in meanwhile.
        """
        valid, calls, results = valid_targets(batch), self._calls(batch, rates, step), list[Outputs]()
        for index, (name, inputs) in enumerate(calls):
            later = calls[index + 1 : index + 2]
            last = following if not later and not self._guarded else None
            results.append((yield from self._run(name, inputs, later, last, step)))
        norms = {name: float(results[-1][name]) for name in ("grad_norm", "clipped_norm") if name in results[-1]}
        loss, activation, norm = 0.0, None, norms["grad_norm"]
        metrics: dict[str, float] = {}
        for result in results[: self._accumulation]:
            loss, activation = loss + float(result["loss"]), _activation(activation, result)
            metrics = summed_metrics(metrics, result)
        metrics |= {name: value for name, value in norms.items() if name != "grad_norm"}
        if not self._guarded:
            return StepResult(loss, norm, valid, True, activation, metrics)
        finite = StepResult(loss, norm, valid, activation_norm=activation).finite
        if finite:
            given = {name: value for name, value in norms.items() if name in self._steps["update"].inputs}
            update = self._whole("update", {**rates, **given}, step, 0)
            yield from self._run("update", update, [], following, step)
        return StepResult(loss, norm, valid, finite, activation, metrics)

    def inspect(self, batch: Batch, rates: Mapping[str, float], step: int, look: Look) -> bool:
        """The step node by node, until `look` says True; whether it did. A guarded step's update is left out."""
        return any(self._steps[name].inspect(inputs, look) for name, inputs in self._calls(batch, rates, step))

    def _calls(self, batch: Batch, rates: Mapping[str, float], step: int) -> list[Call]:
        """Built steps with their inputs, in order; not the update of a guarded step, which hangs on the others."""
        fields, counts = self._prepare(batch)
        weights = loss_weights(counts)
        if self._accumulation == 1 and not self._guarded:
            return [("train", self._whole("train", {**fields, **rates, **weights}, step, 0))]
        calls: list[Call] = []
        for number, part in enumerate(micro_batches(fields, self._accumulation)):
            name = "accumulate_next" if number else "accumulate_first"
            calls.append((name, self._whole(name, {**part, **weights}, step, number)))
        name, inputs = ("norm", {}) if self._guarded else ("update", rates)
        return [*calls, (name, self._whole(name, inputs, step, 0))]

    def _run(
        self, name: str, inputs: Inputs, later: Sequence[Call], following: Following | None, step: int
    ) -> Turns[Outputs]:
        """Runs a built step; while it computes, the inputs of the call after it are written."""
        if not self._overlaps:
            return self._steps[name](inputs)
        read = self._steps[name].start(inputs)
        if not later and following is not None:
            later = self._calls(*following(), step + 1)
        for other, ahead in later[:1]:
            self._steps[other].write_ahead(ahead)
        yield
        return read()

    def _whole(self, name: str, inputs: Inputs, step: int, micro_batch: int) -> Inputs:
        """With the seed and the step's number where the built step has such an input."""
        declared = self._steps[name].inputs
        added: dict[str, int] = {}
        if "seed" in declared:
            added["seed"] = step_seed(self._seed, step, micro_batch, self._rank)
        if "rounding_seed" in declared:  # the same on all replicas, whose parameters stay equal
            added["rounding_seed"] = step_seed(self._seed, step, ROUNDING)
        if "step" in declared:
            added["step"] = step
        return {**inputs, **added}


def last_value(turns: Turns[Returned]) -> Returned:
    """What a generator returns, without pausing where it yields."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value


def _activation(largest: float | None, outputs: Outputs) -> float | None:
    """The larger of the norm so far and that of a micro-batch; a NaN stays."""
    if "activation_norm" not in outputs:
        return largest
    norm = float(outputs["activation_norm"])
    return norm if largest is None or norm > largest or norm != norm else largest


def summed_metrics(so_far: Mapping[str, float], outputs: Outputs) -> dict[str, float]:
    """The model's metrics, which have a slash in their names, with those of one more part of the batch."""
    named = {name: float(value) for name, value in outputs.items() if "/" in name}
    return {name: so_far.get(name, 0.0) + value for name, value in named.items()}


def micro_batches(batch: Batch, count: int) -> list[dict[str, Array]]:
    """The batch's rows in `count` equal parts."""
    rows = len(next(iter(batch.values())))
    assert rows % count == 0, f"{rows} rows do not divide into {count} micro-batches"
    size = rows // count
    return [{name: array[i * size : (i + 1) * size] for name, array in batch.items()} for i in range(count)]
