"""The beginning of an attempt: the run that it continues, a checkpoint, values from elsewhere, or nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ttrain.train.checkpoint.adapters import PeftAdapter
from ttrain.train.checkpoint.progress import Progress
from ttrain.train.checkpoint.retention import remove_unfinished
from ttrain.train.logging.metrics import cut_metrics
from ttrain.train.logging.wandb_history import note_earlier_attempts
from ttrain.train.runs.resume import ResumePoint, take_up
from ttrain.train.runs.run_directory import RunDirectory
from ttrain.train.runs.warm_start import WarmStart
from ttrain.train.steps.session import Session


@dataclass
class Origin:
    """Sources of the state, the progress and the files of an attempt."""

    held: RunDirectory | None = None  # the run that this attempt continues
    point: ResumePoint | None = None
    warm: WarmStart | None = None  # where a new run takes its first values from
    adapter: PeftAdapter | None = None  # and those of its adapters
    notes: list[str] = field(default_factory=list)  # to tell when the attempt starts

    def set_values(self, session: Session, seed: int) -> tuple[str, ...]:
        """The state that this attempt begins with, a new run's optimizer tensors are zero; what to tell of it."""
        if self.point is not None:
            return self.point.checkpoint.load(session.state)
        session.initialize(seed)
        if self.warm is not None:
            self.warm.apply(session.state)
        if self.adapter is not None:
            self.adapter.apply(session.state, session.graph.model)
        return ()

    def begin(
        self, run: RunDirectory, session: Session, seed: int, stored: dict[str, Any], data: dict[str, Any]
    ) -> tuple[Progress, dict[str, Any], list[str]]:
        """Sets the state, and makes the run's files go on from it: how far it is, what to record, and what to tell."""
        if not run.leads:
            self.set_values(session, seed)
            return Progress.from_dict({} if self.point is None else self.point.checkpoint.progress), {}, []
        remove_unfinished(run.checkpoints)
        note_earlier_attempts(run.path)
        fitted = self.set_values(session, seed)
        if self.point is not None:
            progress, attempt, notes = take_up(self.point, run, stored, data)
            return progress, attempt, [*notes, *self.notes, *fitted]
        cut_metrics(run.metrics, 0)
        attempt, notes = ({}, []) if self.warm is None else (self.warm.record(), self.warm.lines())
        if self.adapter is not None:
            attempt["adapters_from"] = str(self.adapter.folder)
            notes.append(f"Adapters start as those of {self.adapter.folder}.")
        return Progress(), attempt, [*self.notes, *notes]
