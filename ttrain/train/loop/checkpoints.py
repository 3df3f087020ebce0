"""Save checkpoints when they are due, and go back to one."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable

from ttrain.core.errors import NonFiniteError
from ttrain.train.checkpoint.progress import Progress
from ttrain.train.checkpoint.retention import newest_complete
from ttrain.train.checkpoint.save import CheckpointContent
from ttrain.train.loop.context import RunContext
from ttrain.train.loop.saver import Saver
from ttrain.train.runs.record import override
from ttrain.train.settings import GuardConfig

Key = tuple[int, float | None]  # step, and its val/loss where it was evaluated


class Checkpoints:
    """Saves the run unless the disk already has what there is to save."""

    def __init__(
        self,
        context: RunContext,
        content: Callable[[Progress, float | None], CheckpointContent],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`content` returns what a checkpoint says besides tensors, given the progress and the val/loss of its step."""
        self._context, self._content, self._clock = context, content, clock
        self.saver = Saver(context, self.nonfinite)
        self._saved_at = clock()
        self._saved: Key = self._key  # what the disk has
        self._assume_saved()

    def due(self, step: int) -> bool:
        """True if `train.save_every` asks for a save of this step."""
        every = self._context.config.save_every
        return every is not None and step % every == 0

    def due_by_time(self) -> bool:
        """True if the last save is `train.save_minutes` ago."""
        minutes = self._context.config.save_minutes
        return minutes is not None and self._clock() - self._saved_at >= 60 * minutes

    def save(self, *, wait: bool = False) -> None:
        """Start a save unless the disk already has this; with `wait` it is done on return."""
        if wait:
            self.saver.finish()
        if self._saved == self._key and not self._context.world.broadcast(self.saver.failed):
            return
        progress, key = self._context.progress, self._key
        self.saver.save(self._content(progress, key[1]), wait=wait)
        self._saved, self._saved_at = key, self._clock()

    def roll_back(self, step: int, why: str, config: GuardConfig) -> bool:
        """Go back to the newest checkpoint with a lower learning rate. Return False where there is none to go back to.

        `why` is a sentence about the step whose numbers went wrong.
        """
        self.saver.join()
        context, progress = self._context, self._context.progress
        context.world.barrier()
        checkpoint, _ = newest_complete(context.run.checkpoints)
        factor, rollbacks = progress.lr_factor * config.lr_factor, progress.rollbacks + 1
        if checkpoint is None or rollbacks > config.max_rollbacks:
            return False
        checkpoint.load(context.state)
        stored = Progress.from_dict(checkpoint.progress).to_dict()
        stored |= {"lr_factor": factor, "rollbacks": rollbacks, "wandb_id": progress.wandb_id}
        for name, value in stored.items():
            setattr(progress, name, value)
        dropped = context.loggers.file.cut(checkpoint.step, progress.evaluated_at == checkpoint.step)
        note = (
            f"{why} Rolled back to step {checkpoint.step} with {factor:g} times the learning rate; {dropped} lines "
            f"after it were removed from {context.run.metrics.name}."
        )
        context.events.warn("rollback", note, step, to=checkpoint.step, lr_factor=factor)
        context.check_held_out()
        self._assume_saved()
        return True

    def nonfinite(self, what: str, step: int, found: str = "") -> NonFiniteError:
        """Return the error that ends the run: `what` went wrong, and a sentence about the tensor that was `found`."""
        self.saver.join()  # so that the newest checkpoint is there
        good, _ = newest_complete(self._context.run.checkpoints)
        last = "No checkpoint was saved before it."
        fix = "Try a lower optimizer.lr, more schedule.warmup or a lower optimizer.clip_norm."
        if good is not None:
            again = f"{self._context.command} {shlex.quote(override('resume', good.path))}"
            last = f"The last good checkpoint is {good.path} (step {good.step})."
            fix = f"Continue from it with other settings, such as: {again} optimizer.lr=<lower>"
        return NonFiniteError(f"Step {step}: {what}. {found} {last} {fix}", step=step)

    def _assume_saved(self) -> None:
        """Note that the state is that of the run's checkpoint of the current step."""
        self._saved, self.saver.step = self._key, self._context.progress.step or None

    @property
    def _key(self) -> Key:
        progress = self._context.progress
        return progress.step, progress.val_loss if progress.evaluated_at == progress.step else None
