"""The checkpoints of a run: list them, choose the one to resume from and the ones to keep."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ttrain.core.errors import CheckpointError
from ttrain.core.files import hold_for_reading, lock_file, read_json
from ttrain.core.units import format_bytes
from ttrain.graph import Kind
from ttrain.train.checkpoint.checkpoint import UNFINISHED, Checkpoint, read_manifest
from ttrain.train.protocols import SAVED_KINDS, StateValues

SMALL_FILES = 1 << 22  # bytes of a checkpoint's JSON and of the file system's own records, generously
_TRIES = 5  # to read a checkpoint of a run that goes on
_HELD = "config.json"  # the file of a checkpoint that who reads it holds; nothing ever replaces it
_STEP_NAME = re.compile(r"step_\d{8,}")


Skipped = list[tuple[Path, str]]  # checkpoints that can't be used, each with the reason


def is_dry_run(run: Path) -> bool:
    """True if the record that a run ended with says that no values were computed."""
    return read_json(run / "summary.json").get("computes") is False


def refuse_dry_run(run: Path) -> None:
    """Raises CheckpointError for a run on a device that computes no values."""
    if is_dry_run(run):
        told = f"{run} was a dry run on a device that computes no values: nothing was trained, so it has no checkpoint"
        raise CheckpointError(f"{told}. Train on a device that computes, with another run.dir.")


def list_checkpoints(folder: Path) -> tuple[list[Checkpoint], Skipped]:
    """Checkpoints by ascending step, read from their manifests, and the directories that have no valid one."""
    found, skipped = list[Checkpoint](), Skipped()
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name.startswith(UNFINISHED):
            skipped.append((path, "the save was cut off"))
        elif _STEP_NAME.fullmatch(path.name):
            try:
                found.append(read_manifest(path))
            except CheckpointError as error:
                if path.exists():  # else the run that goes on has removed it just now
                    skipped.append((path, str(error)))
    return sorted(found, key=lambda checkpoint: checkpoint.step), skipped


def newest_complete(folder: Path) -> tuple[Checkpoint | None, Skipped]:
    """The checkpoint with the highest step that verifies, and every one that was passed over, with the reason."""
    newest, skipped = _first_readable(folder, lambda found: found[::-1])
    return newest, sorted(skipped, reverse=True)


def best_checkpoint(found: list[Checkpoint]) -> Checkpoint | None:
    """The checkpoint with the lowest val_loss, by the manifests; the earlier of two equal ones.

    Those that were measured on other held-out data than the newest one do not compare with it.
    """
    scored = [checkpoint for checkpoint in found if checkpoint.val_loss is not None]
    same = [each for each in scored if each.progress.get("held_out") == scored[-1].progress.get("held_out")]
    return min(same, key=lambda each: (each.val_loss or 0.0, each.step), default=None)


def prune_checkpoints(
    folder: Path, keep_last: int, keep_best: bool, keep_every: int | None = None, keep_hours: float | None = None
) -> list[Path]:
    """Delete old checkpoints; called only after a new one was verified.

    It keeps the newest `keep_last`, the best if asked, those of every `keep_every` steps, and one of every `keep_hours`
    hours.
    """
    found, _ = list_checkpoints(folder)
    best = best_checkpoint(found) if keep_best else None
    kept = found[-keep_last:] + ([] if best is None else [best])
    if keep_every is not None:
        kept += [checkpoint for checkpoint in found if checkpoint.step % keep_every == 0]
    spaced: list[Checkpoint] = []  # the first one, and each that was saved at least so long after the one before
    for checkpoint in found if keep_hours is not None else ():
        if not spaced or checkpoint.saved_at - spaced[-1].saved_at >= 3600 * (keep_hours or 0):
            spaced.append(checkpoint)
    return [each.path for each in found if each not in kept + spaced and _remove(each.path)]


def _remove(checkpoint: Path) -> bool:
    """Remove a checkpoint and return True; return False for one that another process reads now."""
    doomed = checkpoint.with_name(f"{UNFINISHED}removed_{checkpoint.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            if not lock_file(held.enter_context(open(checkpoint / _HELD, "r+", encoding="utf-8"))):
                return False
        os.replace(checkpoint, doomed)  # a deletion that is cut off must not leave half of a checkpoint under its name
    shutil.rmtree(doomed, ignore_errors=True)
    return True


def hold(checkpoint: Checkpoint) -> Checkpoint | None:
    """The checkpoint, verified; its files stay for as long as what is returned is held, whatever its run does.

    None where its run has removed it meanwhile. Raises CheckpointError where it is damaged.
    """
    file = checkpoint.path / _HELD
    try:
        reader = hold_for_reading(file)
        if not os.path.samestat(os.fstat(reader.fileno()), file.stat()):
            return None  # another took its place
        return dataclasses.replace(checkpoint, reader=reader).verify()
    except (OSError, CheckpointError) as error:
        if not checkpoint.path.exists():
            return None
        raise CheckpointError(str(error)) from None


def _first_readable(
    folder: Path, preferred: Callable[[list[Checkpoint]], list[Checkpoint]]
) -> tuple[Checkpoint | None, Skipped]:
    """The first that can be read, held, of the `preferred` ones, and all passed over; looks again where one goes away.

    `preferred` chooses from those that are there by their manifests.
    """
    for _ in range(_TRIES):
        found, skipped = list_checkpoints(folder)
        for candidate in preferred(found):
            try:
                held = hold(candidate)
            except CheckpointError as error:
                skipped.append((candidate.path, str(error)))
                continue
            if held is None:
                break
            return held, skipped
        else:
            return None, skipped
    raise CheckpointError(f"{folder.parent} removes its checkpoints faster than they can be read. Stop it first.")


def put_back_replaced(folder: Path) -> None:
    """Gives a checkpoint its name back where a kill came after it was moved aside and before its successor came."""
    for path in folder.glob(f"{UNFINISHED}replaced_*") if folder.is_dir() else []:
        target = folder / path.name.removeprefix(f"{UNFINISHED}replaced_")
        if not target.exists():
            os.replace(path, target)


def remove_unfinished(folder: Path) -> None:
    """Deletes what saves and deletions left that were cut off. For the process that holds the run, before it saves."""
    put_back_replaced(folder)
    for path in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def set_aside_after(folder: Path, step: int) -> list[Path]:
    """Moves later checkpoints to `folder/abandoned_after_<step>`, so that a new history can take their names."""
    later = [checkpoint.path for checkpoint in list_checkpoints(folder)[0] if checkpoint.step > step]
    moved = []
    for path in later:
        aside = folder / f"abandoned_after_{step:08d}"
        aside.mkdir(exist_ok=True)
        number = 1
        while (target := aside / (path.name if number == 1 else f"{path.name}_{number}")).exists():
            number += 1
        os.replace(path, target)
        moved.append(target)
    return moved


def with_frozen(folder: Path, state: StateValues) -> Checkpoint | None:
    """Return the newest checkpoint of a run, if it holds the frozen parameters of this state."""
    newest = list_checkpoints(folder)[0][-1:] if state.names(Kind.FROZEN) else []
    return newest[0] if newest and newest[0].holds(state, Kind.FROZEN) else None


def checkpoint_bytes(state: StateValues, frozen: bool = True) -> int:
    """Bytes that the disk must have for a checkpoint: its tensors, those that are frozen or not, room for all else."""
    kinds = [kind for kind in SAVED_KINDS if frozen or kind is not Kind.FROZEN]
    return SMALL_FILES + sum(state.spec(name).nbytes for name in state.names(*kinds))


def check_space(folder: Path, needed: int) -> None:
    """Raises CheckpointError unless so many bytes fit on the disk."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        told = f"{folder} has {format_bytes(free)} free, and checkpoints of this model need {format_bytes(needed)}"
        raise CheckpointError(f"{told}. Make room or give another run.dir.")


def find_checkpoint(run: Path, which: str, say: Callable[[str], object] = lambda text: None) -> Checkpoint:
    """The verified checkpoint of a run that `last`, `best` or a step number names. Raises CheckpointError.

    While what is returned is held its files stay, also where the run goes on training and would remove them. `say` is
    told of damaged ones that `last` passed over.
    """
    folder = run / "checkpoints"
    if not folder.is_dir():
        raise CheckpointError(f"{run} is not a run of ttrain: it has no checkpoints/. Give the folder of a run.")
    checkpoint, skipped = _first_readable(folder, partial(_candidates, run, which))
    if checkpoint is not None:
        for path, reason in skipped:
            if which == "last" and not path.name.startswith(UNFINISHED):
                say(f"WARNING: Skipped {path}: {reason}")
        return checkpoint
    if which != "last":
        raise CheckpointError(skipped[-1][1])
    reasons = "".join(f"\n  {path}: {reason}" for path, reason in skipped)
    raise CheckpointError(f"{run} has no complete checkpoint yet.{reasons}")


def _candidates(run: Path, which: str, found: list[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints that `which` may mean, the preferred one first."""
    if not found:
        refuse_dry_run(run)
    if which == "last":
        return found[::-1]
    if which == "best":
        if (best := best_checkpoint(found)) is None:
            raise CheckpointError(f"{run} has no checkpoint with a val/loss. Give last instead of best.")
        return [best]
    named = [checkpoint for checkpoint in found if checkpoint.step == int(which)]
    if not named:
        steps = ", ".join(str(checkpoint.step) for checkpoint in found) or "none"
        raise CheckpointError(f"{run} has no checkpoint of step {which}. It has: {steps}.")
    return named
