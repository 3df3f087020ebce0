"""Find the checkpoint that a run continues from, and the changes since it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ttrain.core.errors import CheckpointError, ConfigError
from ttrain.core.names import one_slip
from ttrain.core.options import as_keys, differences
from ttrain.data.library_tokenizer import parse_tokenizer
from ttrain.data.tokenizer import Tokenizer
from ttrain.models.identity import ALL, differing, whole
from ttrain.nn.settings import LoraConfig
from ttrain.train.checkpoint.checkpoint import (
    MANIFEST,
    UNFINISHED,
    Checkpoint,
    read_checkpoint,
    read_manifest,
    step_name,
)
from ttrain.train.checkpoint.retention import hold, newest_complete, refuse_dry_run, set_aside_after
from ttrain.train.checkpoint.save import note_progress
from ttrain.train.logging.metrics import cut_metrics
from ttrain.train.runs.run_directory import RECORD, RunDirectory, newest_attempt, part_of
from ttrain.train.settings import OF_A_COMMAND

# Keys that do not change what a run computes.
_UNREPORTED = (*OF_A_COMMAND, "sample", "profile", "verify")


@dataclass(frozen=True)
class ResumePoint:
    """A verified checkpoint, its run (None where it lies alone), and notes on checkpoints that were skipped."""

    checkpoint: Checkpoint
    run: Path | None
    notes: list[str] = field(default_factory=list)
    named: bool = False  # whether the checkpoint itself was given, rather than its run
    source: Path | None = None  # the checkpoint that this one is a copy of


def hold_run(resume: str, run_dir: str | None) -> RunDirectory | None:
    """Lock the run that `resume` continues, so that no other process changes it; None if there is none.

    A run that is only read, because run.dir is another folder, is not held. Raises UserError where a process holds it.
    """
    run = Path(run_dir) if resume == "auto" and run_dir is not None else _run_of(Path(resume))
    if resume == "none" or run is None or not (run / RECORD).exists():
        return None
    if run_dir is not None and Path(run_dir).resolve() != run.resolve():
        return None
    return RunDirectory.open(run)


def _run_of(path: Path) -> Path | None:
    """The run that a path names: its folder, or that of one of its checkpoints."""
    if not ((path / MANIFEST).exists() or path.parent.name == "checkpoints"):
        return path
    run = path.parent.parent if len(path.parts) > 2 else path.absolute().parent.parent
    return run if (run / RECORD).exists() else None


def find_resume_point(resume: str, run_dir: str | None) -> ResumePoint | None:
    """Find the checkpoint that `resume` names: none, auto, or the folder of a run or of a checkpoint.

    None where a new run should start: for `none`, and for `auto` where run.dir holds no checkpoint at all yet. Whatever
    else can't be resumed raises CheckpointError: a requested resume never becomes a fresh start. A checkpoint that was
    named is held, so that its run, which may go on, does not remove it.
    """
    if resume == "none":
        return None
    if resume == "auto":
        assert run_dir is not None  # the config's rules hold it so
        run = Path(run_dir)
        if not run.exists():
            _require_meant(run)
            return None
        if not (run / RECORD).exists() and any(entry.name != ".hydra" for entry in run.iterdir()):
            raise CheckpointError(f"{run} is not a run of ttrain: it has no {RECORD}. Give the folder of a run.")
        return _newest_of(run, must_exist=False)
    path = Path(resume)
    if not path.is_dir():
        raise CheckpointError(f"resume={resume}: there is no such folder. Give the folder of a run or of a checkpoint.")
    owner = _run_of(path)
    if owner != path:
        return ResumePoint(hold(read_manifest(path)) or read_checkpoint(path), owner, named=True)
    if (path / "checkpoints").is_dir():
        return _newest_of(path, must_exist=True)
    lacks = f"it has neither checkpoints/ nor {MANIFEST}"
    raise CheckpointError(f"{resume} is neither a run nor a checkpoint of ttrain: {lacks}.")


def _require_meant(run: Path) -> None:
    """Raises CheckpointError where a run beside the folder that does not exist has nearly its name."""
    with suppress(OSError):  # there is no such folder, or nobody may look
        for other in sorted(run.parent.iterdir()):
            if one_slip(run.name, other.name) and (other / RECORD).exists():
                told = f"there is no run {run}, but {other} is one. Give run.dir={other}, or resume=none for a new run."
                raise CheckpointError(f"resume=auto: {told}")


def _newest_of(run: Path, *, must_exist: bool) -> ResumePoint | None:
    checkpoint, skipped = newest_complete(run / "checkpoints")
    notes = [f"Skipped {path}: {reason}" for path, reason in skipped]
    if checkpoint is not None:
        return ResumePoint(checkpoint, run, notes)
    # A save that was cut off never was a checkpoint: where there is nothing else, the run begins again.
    if all(path.name.startswith(UNFINISHED) for path, _ in skipped) and not must_exist:
        return None
    if not notes:
        refuse_dry_run(run)
    listed = "".join(f"\n  {note}" for note in notes) or " Start anew with resume=none and another run.dir."
    raise CheckpointError(f"{run} has no checkpoint that can be resumed.{listed}")


def check_architecture(stored: dict[str, Any], model: Any, path: Path, effects: Collection[str] = ALL) -> None:
    """Raises CheckpointError naming every model key that differs between a checkpoint's config and a model's.

    `effects` says which count, see models/identity.py; all of them where the model is trained on.
    """
    if differences := "; ".join(differing(whole(stored.get("model", {}), model), model, effects)):
        raise CheckpointError(f"{path} is of another architecture: {differences}. Leave these keys as they were.")


def check_adapters(stored: dict[str, Any], lora: LoraConfig, path: Path) -> None:
    """Raises CheckpointError where adapters are not those that a checkpoint has."""
    before = {**asdict(LoraConfig()), **(stored.get("lora") or {})}
    keys = ("rank", "alpha", "targets", "base") if lora.rank or before["rank"] else ()
    pairs = {key: (before[key], getattr(lora, key)) for key in keys}
    if told := "; ".join(f"lora.{key}: {old} there, {new} given" for key, (old, new) in pairs.items() if old != new):
        raise CheckpointError(f"{path} has other adapters: {told}. Leave these keys out, or use train.init_from.")


def check_tokenizer(checkpoint: Checkpoint, given: Tokenizer | None) -> None:
    """Raises CheckpointError where the data's tokenizer is not the one that the checkpoint was trained with.

    The stored one is compared as it is read now: older checkpoints keep settings of a file that are off by now.
    """
    path, stored = checkpoint.path, checkpoint.tokenizer
    if stored is not None and given is not None and parse_tokenizer(stored).to_json() != given.to_json():
        own = path / "tokenizer.json"
        raise CheckpointError(f"{path} was trained with another tokenizer than the data's. Give data.tokenizer={own}.")


def config_difference(stored: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """One `key: old -> new` per setting of the run that changed since the checkpoint."""
    return [
        f"{key}: {old} -> {new}"
        for key, old, new in differences(stored, given)
        if not any(key == skipped or key.startswith(f"{skipped}.") for skipped in _UNREPORTED)
    ]


def check_sources(stored: Mapping[str, Any], given: Any) -> None:
    """Raises ConfigError if the user names a source of initial values that is not the one of the run."""
    for section, key in (("model", "from"), ("train", "init_from"), ("lora", "from")):
        before, now = stored.get(section, {}).get(key), as_keys(getattr(given, section)).get(key)
        if f"{section}.{key}" in given.source.explicit and now != before:
            began = before or "none"
            raise ConfigError(f"{section}.{key}={now}: is for new runs; this one began with {began}. Leave it out.")


def check_documents(point: ResumePoint, description: dict[str, Any]) -> None:
    """Raises CheckpointError where the documents of a run changed under it, so that its position would be another.

    Other sources, which the command line must have named, are no mistake: the run goes on at the same token of those.
    """
    stored = part_of(newest_attempt(point.run), "data")
    same = "documents" in stored and stored.get("source") == description.get("source")
    if same and stored.get("sha256") != description.get("sha256"):
        raise CheckpointError(
            f"{point.run} was trained on other content of {', '.join(description['source'])}. Restore the files, name "
            "other data.sources, or start anew with train.init_from=<this run>."
        )


def data_difference(run: Path, description: dict[str, Any]) -> list[str]:
    """Return one `data: key: old -> new` per fact of the data that changed since the newest attempt of a run."""
    stored = part_of(newest_attempt(run), "data")
    given = json.loads(json.dumps(description))
    return [f"data: {key}: {old} -> {new}" for key, old, new in differences(stored, given)] if stored else []


def branch_off(point: ResumePoint, run: RunDirectory) -> ResumePoint:
    """Copy checkpoint and metrics into a new run directory, which then no longer needs the other run.

    Returns the point with the copy.
    """
    source = point.checkpoint.path
    if point.run is not None and (point.run / run.metrics.name).exists():
        shutil.copyfile(point.run / run.metrics.name, run.metrics)
    beside = run.checkpoints / f"{UNFINISHED}{source.name}"
    shutil.copytree(source, beside)
    target = run.checkpoints / step_name(point.checkpoint.step)
    beside.rename(target)
    copied = note_progress(target, {**point.checkpoint.progress, "wandb_id": None})  # another run of W&B as well
    return replace(point, checkpoint=copied, source=source)


def take_up(
    point: ResumePoint, run: RunDirectory, evaluated: bool, config: dict[str, Any], data: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Make a run directory go on from a checkpoint. Return what to record, and what to tell.

    Metrics and checkpoints of later steps are cut off and set aside. `evaluated` tells that the checkpoint's step was.
    `config` and `data` describe the run as it is now.
    """
    checkpoint = point.checkpoint
    notes = [f"Resuming from {point.source or checkpoint.path} (step {checkpoint.step}).", *point.notes]
    aside = set_aside_after(run.checkpoints, checkpoint.step)
    notes += [f"Set aside, because of a later step: {', '.join(map(str, aside))}"] if aside else []
    dropped = cut_metrics(run.metrics, checkpoint.step, evaluated)
    notes += [f"Removed {dropped} lines after step {checkpoint.step} from {run.metrics.name}."] if dropped else []
    changes = config_difference(checkpoint.config, config)
    if point.run is not None:
        changes += data_difference(point.run, data)
    notes += [f"Changed since the checkpoint: {'; '.join(changes)}"] if changes else []
    return {"resumed_from": checkpoint.path.name, "dropped_metrics": dropped, "changes": changes}, notes
