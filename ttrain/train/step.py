"""One optimizer step on the host's side: the inputs of every micro-batch, and the calls into the built steps.

An engine builds `train` (forward, backward and update in one) where a step is a single micro-batch, and otherwise
`accumulate_first` (gradients are overwritten), `accumulate_next` (gradients are added to) and `update`.

A guarded step is built in parts too, with `norm` before `update`: the host looks at the loss and at the gradient norm,
and does not run the update where one of them is not finite. Parameters and optimizer tensors are untouched then, on
every engine and device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ttrain.train.protocols import Array, Inputs, Look, Outputs, Step
from ttrain.train.seeds import step_seed

Batch = Mapping[str, Array]


@dataclass(frozen=True)
class StepResult:
    """Numbers of one optimizer step. `loss` is the mean over the valid targets of the whole step."""

    loss: float
    grad_norm: float
    tokens: int
    applied: bool = True  # whether the parameters were updated
    activation_norm: float | None = None  # largest of the micro-batches, where it is watched

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
    count of valid targets, and the gradient is that of the mean over the step however it is split.
    """

    def __init__(self, steps: Mapping[str, Step], accumulation: int, seed: int, rank: int = 0) -> None:
        """`steps` holds those of `names`; a step `norm` among them makes the update guarded."""
        self._steps, self._accumulation, self._seed, self._rank = steps, accumulation, seed, rank
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
        valid = valid_targets(batch)
        weight = 1.0 / max(valid, 1)
        if self._accumulation == 1 and not self._guarded:
            result = self._run("train", {**batch, **rates, "loss_weight": weight}, step)
            norm, activation = float(result["grad_norm"]), _activation(None, result)
            return StepResult(float(result["loss"]), norm, valid, activation_norm=activation)
        loss, activation = 0.0, None
        for number, part in enumerate(micro_batches(batch, self._accumulation)):
            name = "accumulate_next" if number else "accumulate_first"
            result = self._run(name, {**part, "loss_weight": weight}, step, number)
            loss, activation = loss + float(result["loss"]), _activation(activation, result)
        if not self._guarded:
            norm = float(self._run("update", rates, step)["grad_norm"])
            return StepResult(loss, norm, valid, activation_norm=activation)
        norm = float(self._run("norm", {}, step)["grad_norm"])
        finite = StepResult(loss, norm, valid, activation_norm=activation).finite
        if finite:
            self._run("update", {**rates, "grad_norm": norm}, step)
        return StepResult(loss, norm, valid, finite, activation)

    def inspect(self, batch: Batch, rates: Mapping[str, float], step: int, look: Look) -> bool:
        """The step node by node, until `look` says True; whether it did. A guarded step's update is left out."""
        weight = 1.0 / max(valid_targets(batch), 1)
        calls: list[tuple[str, Inputs, int]] = []
        if self._accumulation == 1 and not self._guarded:
            calls.append(("train", {**batch, **rates, "loss_weight": weight}, 0))
        else:
            for number, part in enumerate(micro_batches(batch, self._accumulation)):
                name = "accumulate_next" if number else "accumulate_first"
                calls.append((name, {**part, "loss_weight": weight}, number))
            calls.append(("norm", {}, 0) if self._guarded else ("update", rates, 0))
        return any(
            self._steps[name].inspect(self._whole(name, given, step, micro), look) for name, given, micro in calls
        )

    def _run(self, name: str, inputs: Inputs, step: int, micro_batch: int = 0) -> Outputs:
        return self._steps[name](self._whole(name, inputs, step, micro_batch))

    def _whole(self, name: str, inputs: Inputs, step: int, micro_batch: int) -> Inputs:
        """With the seed and the step's number where the built step has such an input."""
        declared = self._steps[name].inputs
        added: dict[str, int] = {}
        if "seed" in declared:
            added["seed"] = step_seed(self._seed, step, micro_batch, self._rank)
        if "step" in declared:
            added["step"] = step
        return {**inputs, **added}


def _activation(largest: float | None, outputs: Outputs) -> float | None:
    """The larger of the norm so far and that of a micro-batch; a NaN stays."""
    if "activation_norm" not in outputs:
        return largest
    norm = float(outputs["activation_norm"])
    return norm if largest is None or norm > largest or norm != norm else largest


def micro_batches(batch: Batch, count: int) -> list[dict[str, Array]]:
    """The batch's rows in `count` equal parts."""
    rows = len(next(iter(batch.values())))
    assert rows % count == 0, f"{rows} rows do not divide into {count} micro-batches"
    size = rows // count
    return [{name: array[i * size : (i + 1) * size] for name, array in batch.items()} for i in range(count)]


def valid_targets(batch: Batch) -> int:
    """Targets that count: token ids below zero mark positions without a target; real-valued targets all count."""
    targets = batch["targets"]
    return int((targets >= 0).sum()) if targets.dtype.kind == "i" else int(targets.size)
