"""The batch of each step, and phases with longer sequences or larger batches.

A phase follows from the step's number. Longer sequences have steps of their own, over the same parameters and optimizer
state; a larger batch is more micro-batches through the same steps. The place in the data is counted in samples and
tokens, which a checkpoint holds: so a run that is resumed with other phases, or rolled back, goes on at the very next
sample and token.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ttrain.core.units import counted
from ttrain.data.sequences.mixture import ReadCounts
from ttrain.models.base import Batch

if TYPE_CHECKING:
    from ttrain.engine.base import Step
    from ttrain.models.base import Model
    from ttrain.train.settings import TrainConfig
    from ttrain.train.steps.session import Session


class Phase(NamedTuple):
    """Size of the batch that a training step reads, and where it is from."""

    length: int  # tokens of a sequence; 1 where examples are read
    rows: int  # sequences or examples
    weights: tuple[float, ...] = ()  # of the sources, where sequences are drawn by weights

    def text(self) -> str:
        """Return the size as text for people."""
        drawn = f" by the weights {', '.join(f'{weight:g}' for weight in self.weights)}" if self.weights else ""
        return counted(self.rows, "row") + (f" of {self.length} tokens" if self.length > 1 else "") + drawn


class Position(NamedTuple):
    """A place in the endless stream of training data: samples before it, and tokens (examples count as one).

    Tokens are counted in the stream. What fills sequences of whole documents is not in it.
    """

    samples: int = 0
    tokens: int = 0
    sources: ReadCounts = MappingProxyType({})  # where sequences are drawn by weights
    rollout: str = ""  # completions that further steps train on, see sampling.rollouts


@dataclass(frozen=True)
class PhaseSchedule:
    """The phases of a run, each for `every` steps, the last one for the rest."""

    phases: tuple[Phase, ...]
    every: int

    @classmethod
    def of(cls, config: TrainConfig, context: int | None, weights: Sequence[tuple[float, ...]] = ()) -> PhaseSchedule:
        """Return the schedule of a config, for a model of this context (None for a model that reads examples).

        `weights` are those of Mixture.
        """
        lengths, rows = config.length_schedule or [context or 1], config.batch_schedule or [config.batch_size]
        parts: tuple[Sequence[Any], ...] = lengths, rows, weights or [()]
        count = max(map(len, parts))
        phases = (Phase(*(each[min(number, len(each) - 1)] for each in parts)) for number in range(count))
        return cls(tuple(phases), config.phase_steps)

    def number(self, step: int) -> int:
        """Index of the phase of a step, counted from 1."""
        return min((step - 1) // self.every, len(self.phases) - 1)

    def at(self, step: int) -> Phase:
        """The phase of a step, counted from 1."""
        return self.phases[self.number(step)]

    def read(self, done: int, steps: int) -> Position:
        """Return the samples and tokens that the steps after the first `done` read, up to step number `steps`."""
        counts = self.rows(done, steps)
        return Position(sum(counts), sum(count * each.length for count, each in zip(counts, self.phases, strict=True)))

    def rows(self, done: int, steps: int) -> list[int]:
        """Return how many rows those steps read in each phase."""
        ends = [*((number + 1) * self.every for number in range(len(self.phases) - 1)), steps]
        steps_of = (max(min(end, steps) - max(number * self.every, done), 0) for number, end in enumerate(ends))
        return [phase.rows * count for phase, count in zip(self.phases, steps_of, strict=True)]

    def steps_for(self, tokens: int) -> int:
        """Return how many steps read at least so many tokens."""
        return 1 + bisect_left(range(1, tokens), tokens, key=lambda steps: self.read(0, steps).tokens)

    def in_steps_of(self, phase: Phase, done: int, steps: int) -> float:
        """Return how many steps of this phase read as many tokens as the steps from `done` to `steps`."""
        return self.read(done, steps).tokens / (phase.length * phase.rows)

    def text(self) -> str:
        """Return the schedule as text for people."""
        sizes = ", ".join(f"{phase.rows} x {phase.length}" for phase in self.phases)
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

    def metrics(self, step: int) -> dict[str, float]:
        """Return what the steps up to this one have read of each source, where sequences are drawn by weights."""
        read = self.before(step + 1).sources
        return self._dataset.metrics(read) if read else {}

    def _position(self, phase: int, step: int) -> Position:
        """Return where a step after one of this phase starts to read. Data that fills sequences up tells its tokens."""
        samples, tokens, *_ = self.schedule.read(self._step, step - 1)
        samples, view = self._start.samples + samples, self._view(phase)
        tokens = view.position(self._seed, samples) if hasattr(view, "position") else self._start.tokens + tokens
        mixed = bool(self.schedule.phases[phase].weights)
        return Position(samples, tokens, view.read_before(self._seed, samples) if mixed else {})

    def _view(self, phase: int) -> Any:
        """Return the data in sequences of a phase's length, from where the phase before it ended."""
        if phase not in self._views and hasattr(self._dataset, "at"):
            first = phase * self.schedule.every
            start = self._start if first <= self._step else self._position(phase - 1, first + 1)
            chosen = self.schedule.phases[phase]
            mixed = (start.sources, chosen.weights) if chosen.weights else ()
            self._views[phase] = self._dataset.at(chosen.length, start.samples, start.tokens, *mixed)
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
