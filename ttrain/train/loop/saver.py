"""Saving beside training: a step waits for the copy to host memory, a thread does the rest.

One save is written at a time. A save that fails is reported and tried again when the next one is due; the second
failure in a row ends the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ttrain.core.errors import CheckpointError, NonFiniteError, RankFailed, TtrainError
from ttrain.core.files import sync_file
from ttrain.core.units import format_bytes
from ttrain.train.checkpoint.checkpoint import Checkpoint, step_name
from ttrain.train.checkpoint.retention import checkpoint_bytes, prune_checkpoints, with_frozen
from ttrain.train.checkpoint.save import (
    CheckpointContent,
    Files,
    HostCopy,
    note_progress,
    save_checkpoint,
    start_save,
    write_rank_files,
)
from ttrain.train.loop.context import RunContext
from ttrain.train.protocols import StateValues

_MOST_FAILURES = 2  # in a row
_NICENESS = 10  # of the thread that saves: a tenth of a processor that a step wants as well


@dataclass(frozen=True)
class _Work:
    """One save. Without a state the newest save, which is of the same step, gets the content besides tensors.

    An `earlier` checkpoint holds what is frozen.
    """

    content: CheckpointContent
    state: StateValues | None
    earlier: Checkpoint | None
    number: int  # of the save in this process; the same on all ranks


class Saver:
    """Writes the checkpoints of one run and lets old ones go once the new one is verified."""

    def __init__(self, context: RunContext, nonfinite: Callable[[str, int], NonFiniteError] = NonFiniteError) -> None:
        """`nonfinite` makes the error that ends the run for a state of a step which is not finite.

        All ranks of a world call `save`, since each writes its shard of the state.
        """
        self._context, self._world, self._run = context, context.world, context.run
        self._nonfinite = nonfinite
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._failures = self._saves = 0
        self.step: int | None = None  # whose state the newest save holds, done or under way; None where it failed

    def save(self, content: CheckpointContent, *, wait: bool = False) -> None:
        """Start a save, or with `wait` finish it; then a save that fails is tried once more.

        Where the newest save is of the same step, the tensors stay, and the rest of the content takes its place there.
        Raises NonFiniteError where the state holds NaN or Inf, TtrainError where saves failed repeatedly.
        """
        if wait or content.step != self.step:
            self.finish()
        beside = self._context.config.async_save and not wait
        work = self._work(content, beside)
        if beside:
            before, self.step = self._thread, content.step
            self._thread = threading.Thread(target=self._write_beside, args=(work, before), name="save")
            self._thread.start()
            return
        self._write(work)
        lost = isinstance(self._error, TtrainError) and not isinstance(self._error, NonFiniteError)
        if wait and self._world.broadcast(lost):
            self._report()
            self._write(self._work(content, beside))
        if self._thread is None:
            self._report()

    def _work(self, content: CheckpointContent, beside: bool) -> _Work:
        """Return what to save now, as the leading rank decides; values are copied where the state goes on."""
        several, state = self._world.ranks.count > 1, self._context.state
        earlier, how, folder = None, "noted", self._run.checkpoints
        if self._world.leads and content.step != self.step:
            earlier = with_frozen(folder, state)
            how = "whole" if earlier is None else "trained"
            if several:
                with contextlib.suppress(OSError):  # whoever writes there is told
                    start_save(folder, content.step)
        how = self._world.broadcast(how)
        self._saves += 1
        if how == "noted":
            return _Work(content, None, None, self._saves)
        values = HostCopy(state, how == "whole", self._world.ranks) if beside or several else state
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
        with self._world.joining(thread):
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
        folder, content, several = self._run.checkpoints, work.content, self._world.ranks.count > 1
        try:
            sync_file(self._run.metrics)
            if work.state is None:
                note_progress(folder / step_name(content.step), content.progress, val_loss=content.val_loss)
            else:
                _check_room(folder, work.state, content.step, work.earlier is None, self._world.ranks.count)
                others = {"others": partial(self._others, work)} if several else {}
                save_checkpoint(folder, work.state, content, work.earlier, **others)
            self._failures, self.step = 0, content.step
            config = self._context.config
            prune_checkpoints(folder, config.keep_last, config.keep_best, config.keep_every, config.keep_hours)
        except NonFiniteError as error:
            self._error = NonFiniteError(str(error), content.step)
        except OSError as error:
            self._error = TtrainError(f"The checkpoint of step {content.step} could not be saved in {folder}: {error}.")
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
            outcome["files"] = write_rank_files(self._run.checkpoints, self.step, work.state, self._world.ranks.rank)
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
            raise self._nonfinite(str(error), error.step or 0)
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
        """Return whether the newest save failed, so that its step is not on the disk."""
        return self._failures > 0


def yield_processor() -> None:
    """Lower the priority of this thread, where the system knows priorities of single threads (Linux)."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def _check_room(folder: Path, state: StateValues, step: int, frozen: bool, ranks: int) -> None:
    """Raise TtrainError unless a checkpoint fits on the disk; the newest one is kept until this one is verified.

    The state is the shard of one of so many ranks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = ranks * checkpoint_bytes(state, frozen), shutil.disk_usage(folder).free
    if free < needed:
        raise TtrainError(
            f"The checkpoint of step {step} could not be saved in {folder}: {format_bytes(free)} are free, "
            f"{format_bytes(needed)} are needed. Earlier checkpoints are untouched. Make room, then resume."
        )
