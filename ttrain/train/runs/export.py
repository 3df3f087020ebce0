"""Weights outside of a running session: out of checkpoints, into files of weights and into new run folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ttrain.core.errors import UserError
from ttrain.core.files import new_folder
from ttrain.train.checkpoint.save import CheckpointContent, KeptValues, save_checkpoint
from ttrain.train.checkpoint.weights_file import Metadata, write_pt, write_safetensors
from ttrain.train.protocols import Array
from ttrain.train.runs.run_directory import RunDirectory


def weight_state(values: Mapping[str, Array], model: Any) -> KeptValues:
    """Return weights by path as the state that a checkpoint is written from; each is read when it is asked for."""
    own = model.persistent().items()
    return KeptValues({path: (each.kind, each.stored_spec, partial(_as_fp32, values, path)) for path, each in own})


def _as_fp32(values: Mapping[str, Array], path: str) -> Array:
    return np.asarray(values[path], np.float32)


def write_weights(
    model: Any, values: Mapping[str, Array], file: Path, form: str, step: int, metadata: Metadata
) -> None:
    """Writes parameters by path into a file, with what is said of them, in a form that `export_problem` allows."""
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


def write_run(folder: Path, stored: KeptValues, content: CheckpointContent, attempt: dict[str, Any]) -> None:
    """Make a new run folder with one checkpoint that holds parameters only. Raises as `whole_folder` does."""
    with whole_folder(folder) as beside, closing(RunDirectory.claim(str(beside), "")) as run:
        save_checkpoint(run.checkpoints, stored, content)
        run.record(content.config, attempt)
