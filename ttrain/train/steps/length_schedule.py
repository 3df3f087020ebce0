"""What each step reads, and training on longer sequences as a run goes on: in every phase steps of their own.

Parameters and optimizer state stay where they are. A phase follows from the step's number. The place in the data is
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
class LengthSchedule:
    """Lengths of training sequences in tokens, each for `every` steps, the last one for the rest of the run."""

    lengths: tuple[int, ...]
    every: int

    @classmethod
    def of(cls, config: TrainConfig) -> LengthSchedule | None:
        """The schedule of a config, None where sequences keep the model's context."""
        return cls(tuple(config.length_schedule), config.phase_steps) if config.length_schedule else None

    def phase(self, step: int) -> int:
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
class DataReader:
    """What the steps of one attempt read, a function of their number: an attempt keeps batch size and schedule."""

    step: int  # done when the attempt starts
    start: Position  # of its first sample
    rows: int  # of one step
    schedule: LengthSchedule

    @classmethod
    def of(cls, config: TrainConfig, context: int, step: int, start: Position) -> DataReader:
        """That of a config, for a model of this context (1 for one that reads examples)."""
        schedule = LengthSchedule.of(config) or LengthSchedule((context,), 1)
        return cls(step, start, config.batch_size, schedule)

    def before(self, step: int) -> Position:
        """Where a step of the attempt, counted from 1, starts to read."""
        tokens = self.schedule.tokens(step - 1) - self.schedule.tokens(self.step)
        return Position(self.start.samples + self.rows * (step - 1 - self.step), self.start.tokens + self.rows * tokens)

    def opened(self, dataset: Any, step: int) -> Any:
        """The data in sequences of the length that a step trains on, at the right token."""
        if not hasattr(dataset, "at"):
            return dataset  # all samples are of one kind
        phase = self.schedule.phase(step)
        first = max(phase * self.schedule.every, self.step) + 1
        return dataset.at(self.schedule.lengths[phase], *self.before(first))

    def batches(self, dataset: Any, seed: int) -> Callable[[int], Batch]:
        """What reads a step's batch from data of one length; steps are counted from 1."""
        opened = self.opened(dataset, self.step + 1)
        return lambda step: opened.batch("train", seed, self.before(step).samples, self.rows)


class Phases:
    """The phase that a run is in, and what belongs to it: the built steps and the data."""

    def __init__(
        self,
        reader: DataReader,
        session: Session,
        dataset: Resizable,
        shorter: Mapping[int, Model | None],
        steps: dict[str, Step],
    ) -> None:
        """`shorter` has, by length, the model that records such sequences; `steps` takes what is built for a phase."""
        self.schedule, self.session = reader.schedule, session
        self._reader, self._whole, self._shorter, self._steps = reader, dataset, shorter, steps
        self._phase: int | None = None
        self._dataset: Any = dataset  # as this phase reads it
        self.turned: Callable[[int], None] = lambda step: None  # told of every step for which all is built anew

    @property
    def length(self) -> int:
        """Tokens of a training sequence now."""
        assert self._phase is not None
        return self.schedule.lengths[self._phase]

    def prepare(self, batch: Batch) -> tuple[dict[str, Any], dict[str, int]]:
        """See models.base.Prepare: that of the model which records sequences of this length."""
        graph = self.session.graph
        return preparation(graph.shorter or graph.model)(batch)

    def batches(self, seed: int) -> Callable[[int], Batch]:
        """See DataReader.batches; where a step is of another phase, all is built for it first."""

        def batch(step: int) -> Batch:
            self.turn(step)  # repeated steps may be of an earlier length
            return self._dataset.batch("train", seed, self._reader.before(step).samples, self._reader.rows)

        return batch

    def turn(self, step: int) -> None:
        """Get ready for a step, counted from 1."""
        phase = self.schedule.phase(step)
        if phase == self._phase:
            return
        first, self._phase = self._phase is None, phase
        self._dataset = self._reader.opened(self._whole, step)
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
