"""The batch of each step, and phases with longer sequences or larger batches.

A phase follows from the step's number. Longer sequences have steps of their own, over the same parameters and optimizer
state; a larger batch is more micro-batches through the same steps. The place in the data is counted in samples and
tokens, which a checkpoint holds: so a run that is resumed with other phases, or rolled back, goes on at the very next
sample and token.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ttrain.core.units import counted
from ttrain.models.base import Batch

if TYPE_CHECKING:
    from ttrain.engine.base import Step
    from ttrain.models.base import Model
    from ttrain.train.settings import TrainConfig
    from ttrain.train.steps.session import Session


class Phase(NamedTuple):
    """Size of the batch that a training step reads."""

    length: int  # tokens of a sequence; 1 where examples are read
    rows: int  # sequences or examples

    def text(self) -> str:
        """Return the size as text for people."""
        return counted(self.rows, "row") + (f" of {self.length} tokens" if self.length > 1 else "")


class Position(NamedTuple):
    """A place in the endless stream of training data: samples before it, and tokens (examples count as one).

    Tokens are counted in the stream. What fills sequences of whole documents is not in it.
    """

    samples: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class PhaseSchedule:
    """The phases of a run, each for `every` steps, the last one for the rest."""

    phases: tuple[Phase, ...]
    every: int

    @classmethod
    def of(cls, config: TrainConfig, context: int | None) -> PhaseSchedule:
        """Return the schedule of a config, for a model of this context (None for a model that reads examples)."""
        lengths, rows = config.length_schedule or [context or 1], config.batch_schedule or [config.batch_size]
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
        """Return the samples and tokens that the steps after the first `done` read, up to step number `steps`."""
        samples = tokens = 0
        for number, (length, rows) in enumerate(self.phases):
            end = steps if number + 1 == len(self.phases) else min((number + 1) * self.every, steps)
            count = rows * max(end - max(number * self.every, done), 0)
            samples, tokens = samples + count, tokens + count * length
        return Position(samples, tokens)

    def in_steps_of(self, phase: Phase, done: int, steps: int) -> float:
        """Return how many steps of this phase read as many tokens as the steps from `done` to `steps`."""
        return self.read(done, steps).tokens / (phase.length * phase.rows)

    def text(self) -> str:
        """Return the schedule as text for people."""
        sizes = ", ".join(f"{rows} x {length}" for length, rows in self.phases)
        return f"phases of {self.every} steps with sequences x tokens of {sizes}"


class BatchReader:
    """Training batches of one attempt, by the number of their step: `batch = reader(step)`."""

    def __init__(self, dataset: Any, seed: int, schedule: PhaseSchedule, step: int, start: Position) -> None:
        """The attempt begins after `step` steps, and its first batch with the sample at `start`."""
        self.schedule = schedule
        self._dataset, self._seed, self._step, self._start = dataset, seed, step, start
        self._views: dict[int, Any] = {}  # the data in sequences of a phase's length, by the phase's number
        self._newest: tuple[int, Batch] | None = None  # number of a step, and its batch

    def __call__(self, step: int) -> Batch:
        """Return the batch of a step, counted from 1. The newest one is kept, so that it may be read ahead of time."""
        if self._newest is None or self._newest[0] != step:
            view, rows = self._view(self.schedule.number(step)), self.schedule.at(step).rows
            self._newest = step, view.batch("train", self._seed, self.before(step).samples, rows)
        return self._newest[1]

    def before(self, step: int) -> Position:
        """Return where a step of the attempt, counted from 1, starts to read."""
        return self._position(self.schedule.number(step), step)

    def _position(self, phase: int, step: int) -> Position:
        """Return where a step after one of this phase starts to read. Data that fills sequences up tells its tokens."""
        samples, tokens = self.schedule.read(self._step, step - 1)
        samples, view = self._start.samples + samples, self._view(phase)
        known = hasattr(view, "position")
        return Position(samples, view.position(self._seed, samples) if known else self._start.tokens + tokens)

    def _view(self, phase: int) -> Any:
        """Return the data in sequences of a phase's length, from where the phase before it ended."""
        if phase not in self._views and hasattr(self._dataset, "at"):
            first = phase * self.schedule.every
            start = self._start if first <= self._step else self._position(phase - 1, first + 1)
            self._views[phase] = self._dataset.at(self.schedule.phases[phase].length, *start)
        return self._views.get(phase, self._dataset)  # examples have no length


class Phases:
    """Builds the steps of a phase when the run enters it."""

    def __init__(
        self, schedule: PhaseSchedule, session: Session, shorter: Mapping[int, Model | None], steps: dict[str, Step]
    ) -> None:
        """`shorter` has, by length, the model that records such sequences; `steps` takes what is built for a phase."""
        self.session = session
        self._schedule, self._shorter, self._steps = schedule, shorter, steps
        self._phase: Phase | None = None

    def turn(self, step: int) -> Phase | None:
        """Build what a step, counted from 1, needs. Return its phase where another one was under way before."""
        phase, before = self._schedule.at(step), self._phase
        if phase == before:
            return None
        self._phase, graph = phase, self.session.graph
        micro_batches = phase.rows // (graph.rows * graph.chips * graph.ranks.slices)
        graph = replace(graph, shorter=self._shorter.get(phase.length), micro_batches=micro_batches)
        if before is None or before.length != phase.length or graph.rebuilt_to_grow:
            self._steps.clear()
            if before is not None:
                self.session.engine.close()
                gc.collect()  # the old steps and their memory, before new ones take theirs
            self.session.graph = graph
            self._steps.update(self.session.build_training())
        self.session.graph = graph
        return None if before is None else phase
