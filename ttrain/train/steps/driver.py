"""What drives optimizer steps by their number: the batch, the learning rates and the built steps come together here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ttrain.models.base import Batch
from ttrain.train.steps.step import Following, StepResult, StepUnderWay, TrainStep

Inputs = tuple[Batch, dict[str, float]]


@dataclass
class Driver:
    """Runs steps, counted from 1, whose inputs are functions of their number."""

    step: TrainStep
    batch: Callable[[int], Batch]
    rates: Callable[[int], Mapping[str, float]]  # the lr inputs by name
    last: int = 0  # up to which step the inputs may be made one step ahead of time, while the device computes
    lr_factor: float = 1.0
    _early: dict[int, Batch] = field(default_factory=dict)  # the batch of the next step, where it was made ahead

    def __call__(self, number: int) -> StepResult:
        return self.start(number).finish()

    def start(self, number: int) -> StepUnderWay:
        """The step, to go on with bit by bit."""
        return self.step.start(*self.inputs(number), number, self._following(number + 1))

    def inputs(self, number: int) -> Inputs:
        """Batch and learning rates of a step."""
        early = self._early.pop(number, None)
        return self.batch(number) if early is None else early, self.rates_of(number)

    def rates_of(self, number: int) -> dict[str, float]:
        """Learning rates of a step, by their inputs."""
        return {name: rate * self.lr_factor for name, rate in self.rates(number).items()}

    def _following(self, number: int) -> Following | None:
        if number > self.last:
            return None

        def inputs() -> Inputs:
            batch, rates = self.inputs(number)
            self._early = {number: batch}
            return batch, rates

        return inputs
