"""The beginning of an attempt: the run that it continues, a checkpoint, values from elsewhere, or nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ttrain.train.checkpoint.adapters import PeftAdapter
from ttrain.train.checkpoint.progress import Progress
from ttrain.train.checkpoint.retention import remove_unfinished
from ttrain.train.logging.metrics import cut_metrics
from ttrain.train.logging.wandb_logger import note_earlier_attempts
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
        """Give the state its first values, a new run's optimizer tensors are zero. Return what to tell of it."""
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
        """Set the state, and make the run's files go on from it. Return how far it is, what to record, what to tell."""
        progress = Progress() if self.point is None else Progress.from_dict(self.point.checkpoint.progress)
        if not run.leads:
            self.set_values(session, seed)
            return progress, {}, []
        remove_unfinished(run.checkpoints)
        note_earlier_attempts(run.path)
        notes = [*self.notes, *self.set_values(session, seed)]
        if self.point is not None:
            attempt, told = take_up(self.point, run, progress.evaluated_at == progress.step, stored, data)
            return progress, attempt, [*told, *notes]
        cut_metrics(run.metrics, 0)
        attempt = {} if self.warm is None else self.warm.record()
        notes += [] if self.warm is None else self.warm.lines()
        if self.adapter is not None:
            attempt["adapters_from"] = str(self.adapter.folder)
            notes.append(f"Adapters start as those of {self.adapter.folder}.")
        return progress, attempt, notes
