"""Loop state: with the tensors of a checkpoint, all that a resumed run needs to continue exactly."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any, get_args, get_type_hints

import numpy as np

from ttrain.core.errors import CheckpointError
from ttrain.train.protocols import Dataset

_ROWS = 64  # of held-out data, read at a time


@dataclass
class Progress:
    """Progress of a run.

    Dropout masks and learning rates are functions of the seed and `step`; batches of the seed and what was read before.
    """

    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens (or examples) trained on
    seconds: float = 0.0  # time of the loop over all attempts, see meter.py
    train_loss: float | None = None  # of the newest step
    val_loss: float | None = None  # of the newest evaluation
    evaluated_at: int | None = None  # step of the newest evaluation
    best_val_loss: float | None = None
    best_step: int | None = None
    stale_evaluations: int = 0  # in a row, without a lower val/loss
    held_out: str | None = None  # SHA-256 of the data that all of these are of
    wandb_id: str | None = None
    lr_factor: float = 1.0  # what rollbacks have left of the learning rate
    skipped_steps: int = 0  # whose update was not applied
    rollbacks: int = 0
    compacted: bool = False  # whether rank matrices were compacted afterwards: such parameters are for inference
    read_samples: int = 0  # sequences (or examples) of the training data, whatever batches they came in
    read_tokens: int = 0  # position in the stream of tokens, see steps.phases.Position

    def evaluated(self, loss: float, min_improvement: float = 0.0) -> bool:
        """Notes an evaluation after the current step; whether it is the best so far."""
        self.val_loss, self.evaluated_at = loss, self.step
        improved = self.best_val_loss is None or loss < self.best_val_loss - min_improvement
        if improved:
            self.best_val_loss, self.best_step, self.stale_evaluations = loss, self.step, 0
        else:
            self.stale_evaluations += 1
        return improved

    def measure_on(self, held_out: str) -> str | None:
        """Take this as the held-out data of val/loss; return a note where earlier losses do not compare with it."""
        other, self.held_out = self.held_out != held_out, held_out
        if not other or self.best_val_loss is None:
            return None
        note = (
            f"The held-out data is not what it was: the best val/loss {self.best_val_loss:.4f} (step {self.best_step}) "
            f"and {self.stale_evaluations} evaluations without a lower one do not count any more."
        )
        self.val_loss = self.evaluated_at = self.best_val_loss = self.best_step = None
        self.stale_evaluations = 0
        return note

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Progress:
        """Raises CheckpointError where it is none of this version's."""
        hints = get_type_hints(cls)
        for name, value in stored.items():
            if name not in hints:
                raise CheckpointError(f"the progress holds {name!r}, which this version of ttrain does not know.")
            kind = hints[name] if float not in (hints[name], *get_args(hints[name])) else hints[name] | int
            if not isinstance(value, kind) or (isinstance(value, int) and value < 0):
                expected = getattr(hints[name], "__name__", hints[name])
                raise CheckpointError(f"the progress holds {name}={value!r}, expected {expected}. It was changed.")
        return cls(**stored)


def held_out_hash(dataset: Dataset, samples: int) -> str:
    """SHA-256 of the first so many held-out samples: of what is read, wherever it lies and however it is batched."""
    digests: dict[str, hashlib._Hash] = {}
    for first in range(0, samples, _ROWS):
        for name, array in dataset.batch("val", 0, first, min(_ROWS, samples - first)).items():
            digest = digests.setdefault(name, hashlib.sha256(f"{array.dtype} {array.shape[1:]}".encode()))
            digest.update(np.ascontiguousarray(array).data)
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(f"{name} {digests[name].hexdigest()}\n".encode())
    return whole.hexdigest()
