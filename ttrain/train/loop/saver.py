"""Saving beside training: a step waits for the copy to host memory, a thread does the rest.

One save is written at a time. A save that fails is reported and tried again when the next one is due; the second
failure in a row ends the run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ttrain.core.errors import NonFiniteError, TtrainError
from ttrain.core.files import sync_file
from ttrain.core.spec import TensorSpec
from ttrain.core.units import format_bytes
from ttrain.graph.kinds import Kind
from ttrain.parallel.world import World
from ttrain.train.checkpoint.checkpoint import Checkpoint, step_name
from ttrain.train.checkpoint.retention import checkpoint_bytes, prune_checkpoints, with_frozen
from ttrain.train.checkpoint.save import CheckpointContent, note_progress, save_checkpoint
from ttrain.train.logging.events import Events
from ttrain.train.protocols import SAVED_KINDS, Array, StateValues
from ttrain.train.runs.run_directory import RunDirectory
from ttrain.train.settings import TrainConfig

_MOST_FAILURES = 2  # in a row
_NICENESS = 10  # of the thread that saves: a tenth of a processor that a step wants as well


class HostCopy:
    """The saved part of a state in host memory, as it is now; with or without the values that are frozen."""

    def __init__(self, state: StateValues, frozen: bool = True) -> None:
        self._kinds = {name: kind for kind in SAVED_KINDS for name in state.names(kind)}
        self._specs = {name: state.spec(name) for name in self._kinds}
        self._arrays = {
            name: state.read(name) for name, kind in self._kinds.items() if frozen or kind is not Kind.FROZEN
        }

    def names(self, *kinds: Kind) -> list[str]:
        return [name for name, kind in self._kinds.items() if not kinds or kind in kinds]

    def spec(self, name: str) -> TensorSpec:
        return self._specs[name]

    def read(self, name: str) -> Array:
        return self._arrays[name]


class Saver:
    """Writes the checkpoints of one run and lets old ones go once the new one is verified."""

    def __init__(
        self,
        run: RunDirectory,
        state: StateValues,
        config: TrainConfig,
        events: Events,
        say: Callable[[str], None],
        world: World | None = None,
    ) -> None:
        """All ranks of a `world` call `save`, since each may hold parts of the state; the leading one writes."""
        self._world = world or World()
        self._run, self._state, self._config, self._events, self._say = run, state, config, events, say
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._failures = 0
        self.step: int | None = None  # whose state the newest save holds, done or under way; None where it failed
        self.delay_seconds = 0.0  # that steps waited for saves, over all of them

    def save(self, content: CheckpointContent, *, wait: bool = False) -> None:
        """Starts a save, or with `wait` finishes it; then a save that fails is tried once more.

        Where the newest save is of the same step, the tensors stay, and the rest of the content takes its place there.
        Raises NonFiniteError where the state holds NaN or Inf, TtrainError where saves failed repeatedly.
        """
        start = time.perf_counter()
        if wait or content.step != self.step:
            self.finish()
        noted = self._world.of_leader(content.step == self.step)
        if not self._world.leads or self._world.ranks.sharding:
            self._save_joined(content, noted, wait)
            self.delay_seconds += time.perf_counter() - start
            return
        earlier = None if noted else with_frozen(self._run.checkpoints, self._state)
        if self._config.async_save and not wait:
            copy, before = None if noted else HostCopy(self._state, frozen=earlier is None), self._thread
            self.step = content.step
            given = (copy, content, before, earlier)
            self._thread = threading.Thread(target=self._write_beside, args=given, name="save")
            self._thread.start()
        else:
            self._write(None if noted else self._state, content, earlier)
            if wait and isinstance(self._error, TtrainError) and not isinstance(self._error, NonFiniteError):
                self._report()
                self._write(self._state, content)
        self.delay_seconds += time.perf_counter() - start
        if self._thread is None:
            self._report()

    def _save_joined(self, content: CheckpointContent, noted: bool, wait: bool) -> None:
        """Where other ranks hold parts: all read the whole state, and the leading rank writes it."""
        copy = None if noted or not self._world.ranks.sharding else HostCopy(self._state)
        if not self._world.leads:
            self.step = content.step
        elif self._config.async_save and not wait:
            before, self.step = self._thread, content.step
            self._thread = threading.Thread(target=self._write_beside, args=(copy, content, before, None), name="save")
            self._thread.start()
        else:
            self._write(copy, content)
            if wait and copy is not None and self._error is not None:
                self._report()
                self._write(copy, content)
        if self._thread is None:
            self._report()

    def poll(self) -> None:
        """Reports a save that has ended since, without waiting. Raises as `save` does."""
        if self._thread is not None and not self._thread.is_alive():
            self.finish()

    def finish(self) -> None:
        """Waits for the save that is under way. Raises as `save` does."""
        self.join()
        self._report()

    def join(self) -> None:
        """Waits for the save that is under way, whatever becomes of it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write_beside(
        self,
        state: StateValues | None,
        content: CheckpointContent,
        before: threading.Thread | None,
        earlier: Checkpoint | None,
    ) -> None:
        """The body of the thread: it takes what time steps leave, so as not to hold up threads that wait together."""
        yield_processor()
        if before is not None:
            before.join()
            if self._error is not None:
                return  # there is nothing to add to; that failure is reported
        self._write(state, content, earlier)

    def _write(self, state: StateValues | None, content: CheckpointContent, earlier: Checkpoint | None = None) -> None:
        """Without a state the newest save, which is of the same step, gets the content besides tensors.

        An `earlier` checkpoint holds what is frozen.
        """
        self._error = None
        folder = self._run.checkpoints
        try:
            sync_file(self._run.metrics)
            if state is None:
                facts = {"val_loss": content.val_loss, "held_out": content.progress.get("held_out")}
                note_progress(folder / step_name(content.step), content.progress, **facts)
            else:
                _check_room(folder, state, content.step, frozen=earlier is None)
                save_checkpoint(folder, state, content, earlier)
            self._failures, self.step = 0, content.step
            config = self._config
            prune_checkpoints(folder, config.keep_last, config.keep_best, config.keep_every, config.keep_hours)
        except NonFiniteError as error:
            self._error = NonFiniteError(str(error), content.step)
        except TtrainError as error:
            self._error = error
        except OSError as error:
            self._error = TtrainError(f"The checkpoint of step {content.step} could not be saved in {folder}: {error}.")
        except Exception as error:  # a fault of ours: it must not be lost with the thread
            self._error = error
        if self._error is not None:
            self.step = None

    def _report(self) -> None:
        """What the newest save ended with."""
        error, self._error = self._error, None
        if error is None:
            return
        if isinstance(error, NonFiniteError) or not isinstance(error, TtrainError):
            raise error
        self._failures += 1
        self._events.add("save_failed", str(error), failures=self._failures)
        if self._failures >= _MOST_FAILURES:
            raise error
        self._say(f"WARNING: {error} Training goes on; if the next save fails as well, the run stops.")

    @property
    def failed(self) -> bool:
        """Whether the newest save failed, so that its step is not on the disk."""
        return self._failures > 0


def yield_processor() -> None:
    """Lowers the priority of this thread, where the system knows priorities of single threads (Linux)."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def _check_room(folder: Path, state: StateValues, step: int, frozen: bool) -> None:
    """Raises TtrainError unless a checkpoint fits on the disk; the newest one is kept until this one is verified."""
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = checkpoint_bytes(state, frozen), shutil.disk_usage(folder).free
    if free < needed:
        raise TtrainError(
            f"The checkpoint of step {step} could not be saved in {folder}: {format_bytes(free)} are free, "
            f"{format_bytes(needed)} are needed. Earlier checkpoints are untouched. Make room, then resume."
        )
