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

if TYPE_CHECKING:
    from ttrain.data.batches import Resizable
    from ttrain.engine.base import Step
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

    def batches(self, dataset: Any, seed: int) -> Callable[[int], Batch]:
        """What reads a step's batch from data of one length; steps are counted from 1."""
        opened = self.opened(dataset, self.step + 1)
        return lambda step: opened.batch("train", seed, self.before(step).samples, self.rows)


class Blocks:
    """The notch that a run is in, and what belongs to it: the built steps and the data."""

    def __init__(
        self,
        reading: Reading,
        session: Session,
        dataset: Resizable,
        shorter: Mapping[int, Model | None],
        steps: dict[str, Step],
    ) -> None:
        """`shorter` has, by length, the model that records such sequences; `steps` takes what is built for a notch."""
        self.schedule, self.session = reading.schedule, session
        self._reading, self._whole, self._shorter, self._steps = reading, dataset, shorter, steps
        self._notch: int | None = None
        self._dataset: Any = dataset  # as this notch reads it
        self.turned: Callable[[int], None] = lambda step: None  # told of every step for which all is built anew

    @property
    def length(self) -> int:
        """Tokens of a training sequence now."""
        assert self._notch is not None
        return self.schedule.lengths[self._notch]

    def prepare(self, batch: Batch) -> tuple[dict[str, Any], dict[str, int]]:
        """See models.base.Prepare: that of the model which records sequences of this length."""
        graph = self.session.graph
        return preparation(graph.shorter or graph.model)(batch)

    def batches(self, seed: int) -> Callable[[int], Batch]:
        """See Reading.batches; where a step is of another notch, all is built for it first."""

        def batch(step: int) -> Batch:
            self.turn(step)  # repeated steps may be of an earlier length
            found: Batch = self._dataset.batch("train", seed, self._reading.before(step).samples, self._reading.rows)
            return found

        return batch

    def turn(self, step: int) -> None:
        """Get ready for a step, counted from 1."""
        notch = self.schedule.notch(step)
        if notch == self._notch:
            return
        first, self._notch = self._notch is None, notch
        self._dataset = self._reading.opened(self._whole, step)
        self._steps.clear()
        graph = replace(self.session.graph, shorter=self._shorter[self.length])
        if first:
            self.session.graph = graph
        else:
            self.session.renew(graph)
            gc.collect()  # the old steps and their memory, before new ones take theirs
        self._steps.update(self.session.build_training())
        if not first:
            self.turned(step)
