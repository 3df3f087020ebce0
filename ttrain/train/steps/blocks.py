"""What each step reads, and training on longer sequences as a run goes on: at each notch the steps are built anew.

Parameters and optimizer state stay where they are. A notch follows from the step's number. The place in the data is
counted in samples and tokens, which a checkpoint holds: so a run that is resumed with another batch size or other
lengths, or rolled back, goes on at the very next sample and token.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ttrain.models.base import Batch, preparation
from ttrain.train.protocols import Inputs, Look, Outputs, Step

if TYPE_CHECKING:
    from ttrain.data.batches import Resizable
    from ttrain.models.base import Model
    from ttrain.train.settings import TrainConfig
    from ttrain.train.steps.session import Session


@dataclass(frozen=True)
class BlockSchedule:
    """Lengths of training sequences in tokens, each for `every` steps, the last one for the rest of the run."""

    lengths: tuple[int, ...]
    every: int

    @classmethod
    def of(cls, config: TrainConfig) -> BlockSchedule | None:
        """The schedule of a config, None where sequences keep the model's context."""
        return cls(tuple(config.block_schedule), config.block_steps) if config.block_schedule else None

    def notch(self, step: int) -> int:
        """Index of the length that a step, counted from 1, trains on."""
        return min((step - 1) // self.every, len(self.lengths) - 1)

    def tokens(self, steps: int) -> int:
        """Tokens of the first so many steps, where each reads one sequence."""
        passed = min(steps // self.every, len(self.lengths) - 1)
        return sum(self.lengths[:passed]) * self.every + (steps - passed * self.every) * self.lengths[passed]

    def text(self) -> str:
        """For people."""
        return f"{', '.join(map(str, self.lengths))} tokens, {self.every} steps each"


class Position(NamedTuple):
    """How much of the endless stream of training data was read: samples, and their tokens (examples count as one)."""

    samples: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Reading:
    """What the steps of one leg read, which is a function of their number: a leg keeps batch size and schedule."""

    step: int  # done when the leg starts
    start: Position  # of its first sample
    rows: int  # of one step
    schedule: BlockSchedule

    @classmethod
    def of(cls, config: TrainConfig, context: int, step: int, start: Position) -> Reading:
        """That of a config, for a model of this context (1 for one that reads examples)."""
        schedule = BlockSchedule.of(config) or BlockSchedule((context,), 1)
        return cls(step, start, config.batch_size, schedule)

    def before(self, step: int) -> Position:
        """Where a step of the leg, counted from 1, starts to read."""
        tokens = self.schedule.tokens(step - 1) - self.schedule.tokens(self.step)
        return Position(self.start.samples + self.rows * (step - 1 - self.step), self.start.tokens + self.rows * tokens)

    def opened(self, dataset: Any, step: int) -> Any:
        """The data in sequences of the length that a step trains on, at the right token."""
        if not hasattr(dataset, "at"):
            return dataset  # all samples are of one kind
        notch = self.schedule.notch(step)
        first = max(notch * self.schedule.every, self.step) + 1
        return dataset.at(self.schedule.lengths[notch], *self.before(first))


class Blocks:
    """The notch that a run is in, and what belongs to it: the built steps and the data."""

    def __init__(
        self,
        reading: Reading,
        session: Session,
        dataset: Resizable,
        shorter: Mapping[int, Model | None],
    ) -> None:
        """`shorter` has, by length, the model that records such sequences."""
        self.schedule, self.session = reading.schedule, session
        self._reading, self._whole, self._shorter = reading, dataset, shorter
        self._notch: int | None = None
        self.dataset: Any = dataset
        self.steps: dict[str, Any] = {}  # the same mapping at every notch

    @property
    def length(self) -> int:
        """Tokens of a training sequence now."""
        assert self._notch is not None
        return self.schedule.lengths[self._notch]

    def prepare(self, batch: Batch) -> tuple[dict[str, Any], dict[str, int]]:
        """See models.base.Prepare: that of the model which records sequences of this length."""
        graph = self.session.graph
        return preparation(graph.shorter or graph.model)(batch)

    def turn(self, step: int) -> bool:
        """Get ready for a step, counted from 1; whether anything had to be built for it."""
        notch = self.schedule.notch(step)
        if notch == self._notch:
            return False
        first, self._notch = self._notch is None, notch
        self.dataset = self._reading.opened(self._whole, step)
        self.steps.clear()
        graph = replace(self.session.graph, shorter=self._shorter[self.length])
        if first:
            self.session.graph = graph
        else:
            self.session.renew(graph)
            gc.collect()  # the old steps and their memory, before new ones take theirs
        self.steps.update(self.session.build_training())
        return True


class Newest:
    """The step of a name as it was built last."""

    def __init__(self, steps: Mapping[str, Step], name: str) -> None:
        self._steps, self._name = steps, name

    @property
    def inputs(self) -> Any:
        return self._steps[self._name].inputs

    def __call__(self, inputs: Inputs) -> Outputs:
        return self._steps[self._name](inputs)

    def start(self, inputs: Inputs) -> Callable[[], Outputs]:
        """See engine.base.Step, as for the next two."""
        return self._steps[self._name].start(inputs)

    def write_ahead(self, inputs: Inputs) -> None:
        self._steps[self._name].write_ahead(inputs)

    def inspect(self, inputs: Inputs, look: Look) -> bool:
        return self._steps[self._name].inspect(inputs, look)
