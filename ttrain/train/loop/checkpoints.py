"""Save while training continues, and roll back. A step waits for the copy to host memory; a thread does the rest.

One save is written at a time. A save that fails is reported and tried again when the next one is due; the second
failure in a row ends the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ttrain.core.errors import CheckpointError, NonFiniteError, RankFailed, TtrainError
from ttrain.core.files import sync_file
from ttrain.core.waiting import Waiting
from ttrain.engine.state import State
from ttrain.parallel.world import World
from ttrain.train.checkpoint import retention, save
from ttrain.train.checkpoint.checkpoint import Checkpoint, Progress, step_name
from ttrain.train.checkpoint.save import CheckpointContent, Files
from ttrain.train.logging.loggers import Loggers
from ttrain.train.logging.metrics import Events
from ttrain.train.protocols import StateValues
from ttrain.train.runs.record import START, override
from ttrain.train.runs.run_directory import RunDirectory
from ttrain.train.settings import GuardConfig, TrainConfig


@dataclass
class RunContext:
    """The config, the files and the progress of one attempt."""

    config: TrainConfig
    state: State
    run: RunDirectory
    loggers: Loggers
    events: Events  # whose notes are shown on the console and passed on to the loggers too
    progress: Progress = field(default_factory=Progress)
    world: World = field(default_factory=World)
    held_out: str = ""  # SHA-256 of the data that evaluations read
    command: str = START  # starts every command that continues the run

    def check_held_out(self) -> None:
        """Drop the losses that were measured on other held-out data, with a warning."""
        note = self.progress.measure_on(self.held_out)
        if note is not None:
            self.events.warn("held_out", note, self.progress.step)


_MOST_FAILURES = 2  # in a row
_NICENESS = 10  # of the thread that saves: a tenth of a processor that a step wants as well
_LOWER = "Try a lower optimizer.lr, more schedule.warmup or a lower optimizer.clip_norm."


@dataclass(frozen=True)
class _Work:
    """One save. Without a state the newest save, which is of the same step, gets the content besides tensors.

    An `earlier` checkpoint holds what is frozen.
    """

    content: CheckpointContent
    state: StateValues | None
    earlier: Checkpoint | None
    number: int  # of the save in this process; the same on all ranks


class Checkpoints:
    """Saves the run unless the disk already has what there is to save, and lets old checkpoints go after that."""

    def __init__(
        self,
        context: RunContext,
        content: Callable[[Progress, float | None], CheckpointContent],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`content` returns what a checkpoint says besides tensors, given the progress and the val/loss of its step.

        All ranks of a world call `save`, since each writes its shard of the state.
        """
        self._context, self._world, self._run, self._content = context, context.world, context.run, content
        self._clock, self._saved_at = clock, clock()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._failures = self._saves = 0
        self.step: int | None  # whose state the newest save holds, done or under way; None where it failed
        self._saved: tuple[int, float | None]  # what the disk has: a step, and its val/loss
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
        """Start a save unless the disk already has this, or with `wait` finish it; then a failed one is tried again.

        Where the newest save is of the same step, the tensors stay, and the rest of the content takes its place there.
        Raises NonFiniteError where the state holds NaN or Inf, TtrainError where saves failed repeatedly.
        """
        key = self._key
        if wait or key[0] != self.step:
            self.finish()
        if self._saved == key and not self._world.broadcast(self.failed):
            return
        beside = self._context.config.async_save and not wait
        content = self._content(self._context.progress, key[1])
        work = self._work(content, beside)
        self._saved, self._saved_at = key, self._clock()
        if beside:
            before, self.step = self._thread, content.step
            self._thread = threading.Thread(target=self._write_beside, args=(work, before), name="save")
            self._thread.start()
            return
        with Waiting(f"Saving the checkpoint of step {content.step}", self._context.loggers.console.say):
            self._write(work)
        lost = isinstance(self._error, TtrainError) and not isinstance(self._error, NonFiniteError)
        if wait and self._world.broadcast(lost):
            self._report()
            self._write(self._work(content, beside))
        self._report()

    def _work(self, content: CheckpointContent, beside: bool) -> _Work:
        """Return the values to save now, as the leading rank decides. Values that training changes are copied."""
        several, state = self._world.ranks.count > 1, self._context.state
        earlier, how, folder = None, "noted", self._run.checkpoints
        if self._world.leads and content.step != self.step:
            earlier = retention.with_frozen(folder, state)
            how = "whole" if earlier is None else "trained"
            if several:
                with contextlib.suppress(OSError):  # whoever writes there is told
                    save.start_save(folder, content.step)
        how = self._world.broadcast(how)
        self._saves += 1
        if how == "noted":
            return _Work(content, None, None, self._saves)
        values = save.host_copy(state, how == "whole", self._world.ranks) if beside or several else state
        return _Work(content, values, earlier, self._saves)

    def poll(self) -> None:
        """Report a save that has ended since, without waiting. Raises as `save` does."""
        if self._thread is not None and not self._thread.is_alive():
            self.finish()

    def finish(self) -> None:
        """Wait for the save that is under way. Raises as `save` does."""
        self.join()
        self._report()

    def join(self) -> None:
        """Wait for the save that is under way, whatever becomes of it."""
        if self._thread is not None:
            self._join(self._thread)
            self._thread = None

    def _join(self, thread: threading.Thread) -> None:
        with self._world.joining(thread), Waiting("Waiting for the save under way"):
            thread.join()

    def _write_beside(self, work: _Work, before: threading.Thread | None) -> None:
        """The body of the thread: it takes what time steps leave, so as not to hold up threads that wait together."""
        yield_processor()
        if before is not None:
            self._join(before)
            if self._error is not None:
                return  # there is nothing to add to; that failure is reported
        self._write(work)

    def _write(self, work: _Work) -> None:
        self._error = None
        if not self._world.leads:
            self._write_rank_files(work)
            return
        folder, content, ranks = self._run.checkpoints, work.content, self._world.ranks.count
        try:
            sync_file(self._run.metrics)
            if work.state is None:
                save.note_progress(folder / step_name(content.step), content.progress, val_loss=content.val_loss)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                retention.check_space(folder, ranks * retention.checkpoint_bytes(work.state, work.earlier is None))
                others = {"others": partial(self._others, work)} if ranks > 1 else {}
                save.save_checkpoint(folder, work.state, content, work.earlier, **others)
            self._failures, self.step = 0, content.step
            config = self._context.config
            retention.prune_checkpoints(
                folder, config.keep_last, config.keep_best, config.keep_every, config.keep_hours
            )
        except NonFiniteError as error:
            self._error = NonFiniteError(str(error), content.step)
        except (OSError, CheckpointError) as error:
            why = str(error).rstrip(".")
            self._error = TtrainError(f"The checkpoint of step {content.step} could not be saved in {folder}: {why}.")
        except Exception as error:  # of any kind: it must not be lost with the thread
            self._error = error
        if self._error is not None:
            self.step = None

    def _write_rank_files(self, work: _Work) -> None:
        """Tell the leading rank what was written, or why it was not."""
        self.step = work.content.step
        if work.state is None:
            return
        outcome: dict[str, Any] = {}
        try:
            rank = self._world.ranks.rank
            outcome["files"] = save.write_rank_files(self._run.checkpoints, self.step, work.state, rank)
        except Exception as error:  # none may be lost with the thread
            outcome = {"error": str(error) or type(error).__name__, "bad": isinstance(error, NonFiniteError)}
        self._world.send(f"save/{work.number}", json.dumps(outcome))

    def _others(self, work: _Work) -> Files:
        """The files of the other ranks, once they are written."""
        files: Files = {}
        for rank in range(1, self._world.ranks.count):
            outcome = json.loads(self._world.receive(f"save/{work.number}", rank))
            if "error" in outcome:
                raise (NonFiniteError if outcome["bad"] else CheckpointError)(outcome["error"])
            files |= outcome["files"]
        return files

    def _report(self) -> None:
        """Report the end of the newest save: raise its error, or warn of it where training can go on."""
        error, self._error = self._error, None
        if error is None:
            return
        if isinstance(error, NonFiniteError):
            raise self.nonfinite(str(error), error.step or 0)
        if isinstance(error, RankFailed) or not isinstance(error, TtrainError):
            raise error
        self._failures += 1
        self._context.events.add("save_failed", str(error), failures=self._failures)
        if self._failures >= _MOST_FAILURES:
            raise error
        self._context.loggers.console.say(
            f"WARNING: {error} Training goes on; if the next save fails as well, the run stops."
        )

    @property
    def failed(self) -> bool:
        """True if the newest save failed, so that its step is not on the disk."""
        return self._failures > 0

    def roll_back(self, step: int, why: str, config: GuardConfig) -> bool:
        """Go back to the newest checkpoint with a lower learning rate. Return False where there is none to go back to.

        `why` is a sentence about the step whose numbers went wrong.
        """
        self.join()
        context, progress = self._context, self._context.progress
        self._world.barrier()
        checkpoint, _ = retention.newest_complete(self._run.checkpoints)
        factor, rollbacks, spent = progress.lr_factor * config.lr_factor, progress.rollbacks + 1, progress.spent
        if checkpoint is None or rollbacks > config.max_rollbacks:
            return False
        checkpoint.load(context.state)
        vars(progress).update(vars(Progress.from_dict(checkpoint.progress)), wandb_id=progress.wandb_id)
        progress.lr_factor, progress.rollbacks, progress.spent = factor, rollbacks, spent
        dropped = context.loggers.file.cut(checkpoint.step, progress.evaluated_at == checkpoint.step)
        note = (
            f"{why} Rolled back to step {checkpoint.step} with {factor:g} times the learning rate; {dropped} lines "
            f"after it were removed from {self._run.metrics.name}."
        )
        context.events.warn("rollback", note, step, to=checkpoint.step, lr_factor=factor)
        context.check_held_out()
        self._assume_saved()
        return True

    def nonfinite(self, what: str, step: int, found: str = "") -> NonFiniteError:
        """Return the error that ends the run: `what` went wrong, and a sentence about the tensor that was `found`."""
        self.join()  # so that the newest checkpoint is there
        good, _ = retention.newest_complete(self._run.checkpoints)
        last, fix = "No checkpoint was saved before it.", _LOWER
        if good is not None:
            again = f"{self._context.command} {shlex.quote(override('resume', good.path))}"
            last = f"The last good checkpoint is {good.path} (step {good.step})."
            fix = f"Continue from it with other settings, such as: {again} optimizer.lr=<lower>"
        return NonFiniteError(f"Step {step}: {what}. {found} {last} {fix}", step=step)

    def _assume_saved(self) -> None:
        """Note that the state is that of the run's checkpoint of the current step."""
        self._saved = self._key
        self.step = self._saved[0] or None

    @property
    def _key(self) -> tuple[int, float | None]:
        """The current step, and its val/loss where it was evaluated."""
        progress = self._context.progress
        return progress.step, progress.val_loss if progress.evaluated_at == progress.step else None


def yield_processor() -> None:
    """Lower the priority of this thread, where the system knows priorities of single threads (Linux)."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
