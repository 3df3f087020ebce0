"""Training on longer sequences as a run goes on: at each notch of the schedule the steps are built anew.

Parameters and optimizer state stay where they are. What a step reads follows from its number alone, so a run that is
resumed, or rolled back, lands in the right notch and at the right token.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ttrain.models.base import Batch, preparation
from ttrain.train.protocols import Inputs, Look, Outputs, Step

if TYPE_CHECKING:
    from ttrain.data.batches import Resizable
    from ttrain.models.base import Model
    from ttrain.train.session import Session
    from ttrain.train.settings import TrainConfig


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

    def before(self, notch: int, rows: int) -> tuple[int, int]:
        """Sequences and tokens that come before a notch, where a step has so many rows."""
        return notch * self.every * rows, sum(self.lengths[:notch]) * self.every * rows

    def text(self) -> str:
        """For people."""
        return f"{', '.join(map(str, self.lengths))} tokens, {self.every} steps each"


class Blocks:
    """The notch that a run is in, and what belongs to it: the built steps and the data."""

    def __init__(
        self,
        schedule: BlockSchedule,
        session: Session,
        dataset: Resizable,
        rows: int,
        shorter: Mapping[int, Model | None],
    ) -> None:
        """`rows` of one step over all ranks; `shorter` has, by length, the model that records such sequences."""
        self.schedule, self.session = schedule, session
        self._whole, self._rows, self._shorter = dataset, rows, shorter
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
        self.dataset = self._whole.at(self.length, *self.schedule.before(notch, self._rows))
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
