"""What each step reads, and training on longer sequences or larger batches as a run goes on.

A phase follows from the step's number. Longer sequences have steps of their own, over the same parameters and optimizer
state; a larger batch is more micro-batches through the same steps. The place in the data is counted in samples and
tokens, which a checkpoint holds: so a run that is resumed with other phases, or rolled back, goes on at the very next
sample and token.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ttrain.core.units import counted
from ttrain.models.base import Batch

if TYPE_CHECKING:
    from ttrain.data.batches import Resizable
    from ttrain.engine.base import Step
    from ttrain.models.base import Model
    from ttrain.train.settings import TrainConfig
    from ttrain.train.steps.session import Session
    from ttrain.train.steps.step_graph import StepGraph


class Phase(NamedTuple):
    """What a training step reads."""

    length: int  # tokens of a sequence; 1 where examples are read
    rows: int  # sequences or examples

    def text(self) -> str:
        """For people."""
        return counted(self.rows, "row") + (f" of {self.length} tokens" if self.length > 1 else "")


class Position(NamedTuple):
    """How much of the endless stream of training data was read: samples, and their tokens (examples count as one)."""

    samples: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class PhaseSchedule:
    """The phases of a run, each for `every` steps, the last one for the rest."""

    phases: tuple[Phase, ...]
    every: int

    @classmethod
    def of(cls, config: TrainConfig, context: int) -> PhaseSchedule:
        """That of a config, for a model of this context (1 for one that reads examples)."""
        lengths, rows = config.length_schedule or [context], config.batch_schedule or [config.batch_size]
        count = max(len(lengths), len(rows))
        lengths, rows = (each + each[-1:] * (count - len(each)) for each in (lengths, rows))
        return cls(tuple(map(Phase, lengths, rows)), config.phase_steps)

    def number(self, step: int) -> int:
        """Index of the phase of a step, counted from 1."""
        return min((step - 1) // self.every, len(self.phases) - 1)

    def at(self, step: int) -> Phase:
        """The phase of a step, counted from 1."""
        return self.phases[self.number(step)]

    def read(self, done: int, steps: int) -> Position:
        """What the steps after the first `done` read, up to the step of number `steps`."""
        samples = tokens = 0
        for number, (length, rows) in enumerate(self.phases):
            end = steps if number + 1 == len(self.phases) else min((number + 1) * self.every, steps)
            count = rows * max(end - max(number * self.every, done), 0)
            samples, tokens = samples + count, tokens + count * length
        return Position(samples, tokens)

    def in_steps_of(self, phase: Phase, done: int, steps: int) -> float:
        """The same as a number of steps of this phase."""
        return self.read(done, steps).tokens / (phase.length * phase.rows)

    def text(self) -> str:
        """For people."""
        sizes = ", ".join(f"{rows} x {length}" for length, rows in self.phases)
        return f"phases of {self.every} steps with sequences x tokens of {sizes}"


@dataclass(frozen=True)
class DataReader:
    """What the steps of one attempt read, a function of their number: an attempt keeps its schedule."""

    step: int  # done when the attempt starts
    start: Position  # of its first sample
    schedule: PhaseSchedule

    @classmethod
    def of(cls, config: TrainConfig, context: int, step: int, start: Position) -> DataReader:
        """See PhaseSchedule.of."""
        return cls(step, start, PhaseSchedule.of(config, context))

    def before(self, step: int) -> Position:
        """Where a step of the attempt, counted from 1, starts to read."""
        samples, tokens = self.schedule.read(self.step, step - 1)
        return Position(self.start.samples + samples, self.start.tokens + tokens)

    def opened(self, dataset: Any, step: int) -> Any:
        """The data in sequences of the length that a step trains on, at the right token."""
        if not hasattr(dataset, "at"):
            return dataset  # all samples are of one kind
        first = max(self.schedule.number(step) * self.schedule.every, self.step) + 1
        return dataset.at(self.schedule.at(step).length, *self.before(first))

    def batch(self, opened: Any, seed: int, step: int) -> Batch:
        """Of a step, counted from 1, from data that was opened for its length."""
        return opened.batch("train", seed, self.before(step).samples, self.schedule.at(step).rows)

    def batches(self, dataset: Any, seed: int) -> Callable[[int], Batch]:
        """What reads a step's batch from data of one length; steps are counted from 1."""
        return partial(self.batch, self.opened(dataset, self.step + 1), seed)


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
        self._reader, self._whole, self._shorter, self._steps = reader, session.training_data(dataset), shorter, steps
        self._phase: Phase | None = None
        self._dataset: Any = self._whole  # as this phase reads it
        self.turned: Callable[[int, Phase], None] = lambda step, phase: None  # told of every step that begins another

    def batches(self, seed: int) -> Callable[[int], Batch]:
        """See DataReader.batches; where a step is of another phase, all is built for it first."""

        def batch(step: int) -> Batch:
            self.turn(step)  # repeated steps may be of an earlier length
            return self._reader.batch(self._dataset, seed, step)

        return batch

    def turn(self, step: int) -> None:
        """Get ready for a step, counted from 1."""
        phase, before = self.schedule.at(step), self._phase
        if phase == before:
            return
        self._phase, graph = phase, self.session.graph
        micro_batches = phase.rows // (graph.rows * graph.chips * graph.ranks.slices)
        graph = replace(graph, shorter=self._shorter.get(phase.length), micro_batches=micro_batches)
        if before is None or before.length != phase.length or graph.rebuilt_to_grow:
            self._build(graph, step, anew=before is not None)
        self.session.graph = graph
        if before is not None:
            self.turned(step, phase)

    def _build(self, graph: StepGraph, step: int, anew: bool) -> None:
        """All steps of a phase, `anew` in place of those of the one before."""
        self._dataset = self._reader.opened(self._whole, step)
        self._steps.clear()
        if anew:
            self.session.engine.close()
            gc.collect()  # the old steps and their memory, before new ones take theirs
        self.session.graph = graph
        self._steps.update(self.session.build_training())
