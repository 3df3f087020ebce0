"""Save a checkpoint under another name, sync, verify, then rename it. Older checkpoints stay intact until then."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from ttrain.core.errors import CheckpointError, NonFiniteError, TtrainError, raised_as
from ttrain.core.files import link_or_copy, read_object, sha256_file, sync_file, to_json, write_synced
from ttrain.core.spec import DType, TensorSpec, stored_part_name
from ttrain.core.waiting import waited_for
from ttrain.engine.state import State
from ttrain.graph import Kind
from ttrain.parallel.ranks import Ranks
from ttrain.train.checkpoint.checkpoint import (
    FORMAT,
    MANIFEST,
    STEMS,
    UNFINISHED,
    Checkpoint,
    read_manifest,
    sealed,
    step_name,
)
from ttrain.train.checkpoint.tensor_files import in_shards
from ttrain.train.protocols import SAVED_KINDS, Array, StateValues

SHARD_BYTES = 1 << 29
Files = dict[str, dict[str, Any]]  # by name: bytes and sha256


@dataclass(frozen=True)
class CheckpointContent:
    """Contents of a checkpoint besides tensors."""

    step: int
    config: dict[str, Any]
    progress: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None  # the tokenizer's JSON
    val_loss: float | None = None
    tokenizer_config: dict[str, Any] | None = None  # its end token, and the chat template of the data


def save_checkpoint(
    folder: Path,
    state: StateValues,
    content: CheckpointContent,
    earlier: Checkpoint | None = None,
    others: Callable[[], Files] | None = None,
) -> Checkpoint:
    """Writes `folder/step_<step>` and returns it verified. What was there before stays intact if that fails.

    The files of frozen parameters are those of an `earlier` checkpoint that holds them; the state is not read for them.
    With `others` the state is the shard of rank 0, and they give the files that the other ranks have written, once they
    have; then the folder was made by `start_save`.
    Raises NonFiniteError where a tensor holds NaN or Inf, and TtrainError where the files can't be written.
    """
    target = folder / step_name(content.step)
    told = f"The checkpoint of step {content.step} could not be saved in {folder}"
    advice = "Earlier checkpoints are untouched. Make room or make the folder writable, then resume."
    beside = _beside(folder, content.step)
    with raised_as(TtrainError, told, advice, (OSError, CheckpointError)), ExitStack() as after:
        after.callback(shutil.rmtree, beside, ignore_errors=True)
        if others is None:
            start_save(folder, content.step)
        files = _write_tensors(beside, state, "" if others is None else "-rank0", frozen=earlier is None)
        known: Files = {} if others is None else others()
        if earlier is not None:
            known |= {name: earlier.files[name] for name in earlier.files_of(Kind.FROZEN)}
            for name in earlier.files_of(Kind.FROZEN):
                link_or_copy(earlier.path / name, beside / name)
        _write_texts(beside, content, files | known)
        sync_file(beside)
        read_manifest(beside).verify(known)
        _take_place(beside, target)
        sync_file(folder)
    return read_manifest(target)


def start_save(folder: Path, step: int) -> None:
    """Makes the empty folder that a checkpoint is written into."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(_beside(folder, step), ignore_errors=True)
    _beside(folder, step).mkdir()


def write_rank_files(folder: Path, step: int, state: StateValues, rank: int) -> Files:
    """Writes the files of a rank's shard into the folder of `start_save`, and returns them, verified."""
    beside = _beside(folder, step)
    files = _write_tensors(beside, state, f"-rank{rank}")
    for name, entry in files.items():
        if sha256_file(beside / name) != entry["sha256"]:
            raise CheckpointError(f"{beside / name} does not hold what was written")
    return files


def _beside(folder: Path, step: int) -> Path:
    return folder / f"{UNFINISHED}{step_name(step)}"


def note_progress(path: Path, progress: dict[str, Any], **facts: Any) -> Checkpoint:
    """Replaces in one step what a checkpoint says of its progress, and the manifest's keys in `facts`.

    The other files stay, so whoever reads them goes on. Raises TtrainError where that can't be written.
    """
    beside, kinds = path.with_name(f"{UNFINISHED}{path.name}"), (OSError, CheckpointError)
    told = f"{path}: progress could not be written"
    with raised_as(TtrainError, told, "Make room, then resume.", kinds), ExitStack() as after:
        after.callback(shutil.rmtree, beside, ignore_errors=True)
        manifest = {key: value for key, value in read_object(path / MANIFEST).items() if key != "sha256"}
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        write_synced(beside / MANIFEST, sealed({**manifest, **facts, "progress": progress}).encode())
        os.replace(beside / MANIFEST, path / MANIFEST)
        sync_file(path)
    return read_manifest(path)


def _write_tensors(folder: Path, state: StateValues, of: str = "", frozen: bool = True) -> Files:
    """Writes the tensors of a state, with `of` in the names of its files."""
    files: Files = {}
    for kind, stem in STEMS.items():
        names = state.names(kind) if frozen or kind is not Kind.FROZEN else []
        shards = list(in_shards({name: state.spec(name).nbytes for name in names}, SHARD_BYTES))
        for number, names in enumerate(waited_for(shards, f"Writing files of {stem}"), 1):
            name = f"{stem}{of}-{number:05d}-of-{len(shards):05d}.safetensors"
            files[name] = _write_file(folder / name, _serialize(state, names))
    return files


def _write_file(path: Path, data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": write_synced(path, data)}


def _write_texts(folder: Path, content: CheckpointContent, files: Files) -> None:
    """Writes config and tokenizer, and the manifest of these and of the files that are there."""
    texts = {"config.json": to_json(content.config), "tokenizer.json": content.tokenizer}
    texts["tokenizer_config.json"] = to_json(content.tokenizer_config) if content.tokenizer_config else None
    written = {name: _write_file(folder / name, text.encode()) for name, text in texts.items() if text is not None}
    facts = {"step": content.step, "progress": content.progress, "val_loss": content.val_loss}
    manifest = {"format": FORMAT, **facts, "saved_at": round(time.time(), 3), "files": files | written}
    write_synced(folder / MANIFEST, sealed(manifest).encode())


def _serialize(state: StateValues, names: list[str]) -> bytes:
    """A shard in the dtypes of the state."""
    arrays = {}
    for name in names:
        arrays[name] = np.ascontiguousarray(state.read(name))
        if arrays[name].dtype.kind == "f" and not np.isfinite(arrays[name]).all():
            raise NonFiniteError(f"{name} holds NaN or Inf, so the state is not saved")
    import torch  # numpy has no bf16
    from safetensors.torch import save

    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    narrow = [name for name in names if state.spec(name).dtype is DType.BF16]
    return save(tensors | {name: tensors[name].bfloat16() for name in narrow}, metadata={"format": "pt"})


def _take_place(beside: Path, target: Path) -> None:
    """Renames `beside` to `target`. A directory in the way is one that a resume refused or has already replaced."""
    if not target.exists():
        os.replace(beside, target)
        return
    replaced = target.with_name(f"{UNFINISHED}replaced_{target.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    os.replace(target, replaced)
    try:
        os.replace(beside, target)
    except OSError:
        os.replace(replaced, target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


class KeptValues:
    """Tensors that stay as they are, each read when it is asked for."""

    def __init__(self, tensors: Mapping[str, tuple[Kind, TensorSpec]], read: Callable[[str], Array]) -> None:
        self._tensors, self.read = tensors, read

    def names(self, *kinds: Kind) -> list[str]:
        return [name for name, (kind, _) in self._tensors.items() if not kinds or kind in kinds]

    def spec(self, name: str) -> TensorSpec:
        return self._tensors[name][1]


def host_copy(state: StateValues, frozen: bool = True, ranks: Ranks | None = None) -> KeptValues:
    """Copy the saved part of a state into host memory, with or without the values that are frozen.

    Several ranks divide it: each has the parts that it alone holds, and some of the tensors that all hold.
    """
    ranks, divided = ranks or Ranks(), cast(State, state)
    kept: dict[str, tuple[Kind, TensorSpec]] = {}
    read: dict[str, Array] = {}
    of = {name: kind for kind in SAVED_KINDS if frozen or kind is not Kind.FROZEN for name in state.names(kind)}
    parts = {name: divided.own_parts(name) for name in of} if ranks.count > 1 else dict.fromkeys(of)
    mine = shared_out({name: state.spec(name).nbytes for name, own in parts.items() if own is None}, ranks)
    for name, kind in of.items():
        spec = state.spec(name)
        found = {name: (spec, state.read(name))} if name in mine else {}
        for part in parts[name] or ():
            values = divided.read_part(name, part)
            if part == (0, spec.size):
                found[name] = spec, values.reshape(spec.shape)
            else:
                found[stored_part_name(name, part, spec.shape)] = spec.with_shape(len(values)), values
        for each, (cut, values) in found.items():
            kept[each], read[each] = (kind, cut), values
    return KeptValues(kept, read.__getitem__)


def shared_out(sizes: Mapping[str, int], ranks: Ranks) -> set[str]:
    """The names that a rank takes, so that all have about as much."""
    loads, mine = [0] * ranks.count, set()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        rank = loads.index(min(loads))
        loads[rank] += sizes[name]
        if rank == ranks.rank:
            mine.add(name)
    return mine
