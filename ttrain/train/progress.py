"""Loop state: with the tensors of a checkpoint, all that a resumed run needs to continue exactly."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from ttrain.core.errors import CheckpointError
from ttrain.train.blocks import Position, Reading
from ttrain.train.settings import TrainConfig

if TYPE_CHECKING:
    from ttrain.train.checkpoint import Checkpoint


@dataclass
class Progress:
    """How far a run is.

    Dropout masks and learning rates are functions of the seed and `step`; batches of the seed and what was read before.
    """

    step: int = 0  # optimizer steps done
    read_samples: int = 0  # sequences (or examples) of the training data, whatever batches they came in
    read_tokens: int = 0  # of those sequences, with or without a target
    tokens: int = 0  # tokens (or examples) trained on
    seconds: float = 0.0  # time of the loop over all legs, see meter.py
    train_loss: float | None = None  # of the newest step
    val_loss: float | None = None  # of the newest evaluation
    evaluated_at: int | None = None  # step of the newest evaluation
    best_val_loss: float | None = None
    best_step: int | None = None
    stale_evaluations: int = 0  # in a row, without a lower val/loss
    wandb_id: str | None = None
    lr_factor: float = 1.0  # what rollbacks have left of the learning rate
    skipped_steps: int = 0  # whose update was not applied
    rollbacks: int = 0
    compacted: bool = False  # whether rank matrices were compacted afterwards: such parameters are for inference

    def evaluated(self, loss: float, min_improvement: float = 0.0) -> bool:
        """Notes an evaluation after the current step; whether it is the best so far."""
        self.val_loss, self.evaluated_at = loss, self.step
        improved = self.best_val_loss is None or loss < self.best_val_loss - min_improvement
        if improved:
            self.best_val_loss, self.best_step, self.stale_evaluations = loss, self.step, 0
        else:
            self.stale_evaluations += 1
        return improved

    @property
    def read(self) -> Position:
        """Where the next step starts to read."""
        return Position(self.read_samples, self.read_tokens)

    @read.setter
    def read(self, position: Position) -> None:
        self.read_samples, self.read_tokens = position

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Progress:
        """That of a checkpoint. One that does not tell what was read is of a run that never changed its batch size."""
        stored = checkpoint.progress
        progress = cls.from_dict(stored)
        if "read_samples" not in stored:
            progress.read = position_after(progress.step, checkpoint.config)
        return progress

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Progress:
        names = {declared.name for declared in fields(cls)}
        if unknown := sorted(stored.keys() - names):
            raise CheckpointError(f"progress.json holds {unknown[0]!r}, which this version of ttrain does not know.")
        return cls(**stored)


def position_after(step: int, config: dict[str, Any]) -> Position:
    """What so many steps read under a stored config."""
    names = {declared.name for declared in fields(TrainConfig)}
    train = TrainConfig(**{name: value for name, value in config["train"].items() if name in names})
    return Reading.of(train, config["model"].get("context") or 1, 0, Position()).before(step + 1)
