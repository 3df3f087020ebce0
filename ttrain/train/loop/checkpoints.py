"""Save checkpoints when they are due, and go back to one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ttrain.core.errors import NonFiniteError
from ttrain.train.checkpoint.progress import Progress
from ttrain.train.checkpoint.retention import newest_complete
from ttrain.train.checkpoint.save import CheckpointContent
from ttrain.train.loop.context import Context
from ttrain.train.loop.nonfinite import nonfinite_message
from ttrain.train.loop.saver import Saver
from ttrain.train.settings import GuardConfig

Key = tuple[int, float | None]  # step, and its val/loss where it was evaluated


class Checkpoints:
    """Saves the run unless the disk already has what there is to save."""

    def __init__(
        self,
        context: Context,
        content: Callable[[Progress, float | None], CheckpointContent],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`content` returns what a checkpoint says besides tensors, given the progress and the val/loss of its step."""
        self._context, self._content, self._clock = context, content, clock
        config, events, say = context.config, context.events, context.loggers.console.say
        self.saver = Saver(context.run, context.state, config, events, say, context.world)
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
            with self._nonfinite():
                self.saver.finish()
        if self._saved == self._key and not self._context.world.broadcast(self.saver.failed):
            return
        progress, key = self._context.progress, self._key
        with self._nonfinite():
            self.saver.save(self._content(progress, key[1]), wait=wait)
        self._saved, self._saved_at = key, self._clock()

    def poll(self) -> None:
        """Report a save that has ended, without waiting."""
        with self._nonfinite():
            self.saver.poll()

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
        stored = Progress.of(checkpoint).to_dict()
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

    def nonfinite(self, what: str, step: int, found: str) -> NonFiniteError:
        """The error that ends the run: `what` went wrong, and a sentence about the tensor that was `found`."""
        self.saver.join()  # so that the newest checkpoint is there
        message = nonfinite_message(what, step, found, self._context.run.checkpoints, self._context.command)
        return NonFiniteError(message, step=step)

    @contextmanager
    def _nonfinite(self) -> Iterator[None]:
        """Report a state that is not finite as a step that is not."""
        try:
            yield
        except NonFiniteError as error:
            step = self._context.progress.step if error.step is None else error.step
            raise self.nonfinite(str(error), step, "") from None

    def _assume_saved(self) -> None:
        """Note that the state is that of the run's checkpoint of the current step."""
        self._saved, self.saver.step = self._key, self._context.progress.step or None

    @property
    def _key(self) -> Key:
        progress = self._context.progress
        return progress.step, progress.val_loss if progress.evaluated_at == progress.step else None
