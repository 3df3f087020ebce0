"""Weights outside of a running session: out of checkpoints, into files of weights and into new run folders."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ttrain.core.errors import UserError
from ttrain.core.files import new_folder
from ttrain.core.spec import TensorSpec
from ttrain.graph.kinds import Kind
from ttrain.train.checkpoint.save import CheckpointContent, save_checkpoint
from ttrain.train.checkpoint.weights_file import Metadata, write_pt, write_safetensors
from ttrain.train.protocols import Array
from ttrain.train.runs.run_directory import RunDirectory


@dataclass
class WeightState:
    """Weights by path as the state that a checkpoint is written from; each is read when it is asked for."""

    values: Mapping[str, Array]
    model: Any

    def names(self, *kinds: Kind) -> list[str]:
        of = {path: tensor.kind for path, tensor in self.model.persistent().items()}
        return [path for path, kind in of.items() if not kinds or kind in kinds]

    def spec(self, name: str) -> TensorSpec:
        return self.model.persistent()[name].stored_spec

    def read(self, name: str) -> Array:
        return np.asarray(self.values[name], np.float32)


def file_problem(model: Any, file: Path, form: str) -> str | None:
    """Return why weights can't be written so; None where they can."""
    if file.suffix not in (".pt", ".safetensors"):
        return f"export.file={file}: the name must end with .pt or .safetensors."
    if form == "ttrain" and file.suffix == ".pt":
        return f"export.form=ttrain: is written as .safetensors. Give export.file={file.with_suffix('.safetensors')}."
    if form != "ttrain" and not hasattr(model, "to_original"):
        return f"export.form={form}: model.name={model.config.name} has no other form. Give export.form=ttrain."
    return None


def write_weights(
    model: Any, values: Mapping[str, Array], file: Path, form: str, step: int, metadata: Metadata
) -> None:
    """Writes parameters by path into a file, with what is said of them, in a form that `file_problem` allows."""
    header = metadata.to_header()
    if file.suffix == ".pt":
        write_pt(file, {**model.original_file(values), "step": step, **header})
    elif form == "ttrain":
        write_safetensors(file, values, header)
    else:
        write_safetensors(file, model.to_original(values), header)


def require_new(folder: Path) -> None:
    """Raises UserError for a folder that holds something."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"export.dir={folder} exists and is not empty. Give a new folder.")


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A place to write what goes into a new folder, which is there whole or not at all.

    Raises UserError where it is not new or can't be written.
    """
    require_new(folder)
    try:
        with new_folder(folder) as beside:
            yield beside
    except OSError as error:
        raise UserError(f"export.dir={folder} can't be written: {error.strerror or error}.") from None


def write_run(folder: Path, stored: WeightState, content: CheckpointContent, attempt: dict[str, Any]) -> Path:
    """A new run folder with one checkpoint that holds parameters only. Returns the folder.

    Raises UserError where the folder can't be made or is not new; nothing is left of one that does not get whole.
    """
    require_new(folder)
    with closing(RunDirectory.claim(str(folder), "")) as run:
        try:
            save_checkpoint(run.checkpoints, stored, content)
            run.record(content.config, attempt)
        except BaseException:
            shutil.rmtree(run.path, ignore_errors=True)
            raise
        return run.path
