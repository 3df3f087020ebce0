"""Distributions of a teacher beside token files: task=prepare writes them, and objective=distillation learns them.

The folder of task=prepare then holds `teacher.json` too, and for each split an array per field: `train.teacher_ids.npy`
and so on. A row of them belongs to one sequence; the sequences follow one another without a gap.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import DataError, raised_as
from ttrain.core.files import write_synced
from ttrain.core.spec import DType, TensorSpec
from ttrain.data.batches import Baseline, Batch, Split, TokenDataset, held_out, sample_numbers, shuffled_epochs
from ttrain.data.settings import TokensConfig

FORMAT = "ttrain teacher 1"
FILE = "teacher.json"
IDS, LOG_PROBS, OF_TARGETS = "teacher_ids", "teacher_log_probs", "teacher_of_targets"
_WRITTEN = {IDS: "<u4", LOG_PROBS: "<f4", OF_TARGETS: "<f4"}
VERIFIED_BYTES = 256 << 20  # files up to this size are read whole at the start
_ADVICE = "Prepare the tokens again."


def taught_fields(rows: int, context: int, top_k: int) -> dict[str, TensorSpec]:
    """Return the specs of a teacher's fields of a batch of sequences.

    They are the `top_k` likeliest ids after each token, in falling order, their log-probabilities and that of all other
    ids together, and the log-probability of the target.
    """
    return {
        IDS: TensorSpec((rows, context, top_k), DType.INT64),
        LOG_PROBS: TensorSpec((rows, context, top_k + 1), DType.FP32),
        OF_TARGETS: TensorSpec((rows, context), DType.FP32),
    }


def write_taught(
    folder: Path, split: str, sequences: int, specs: Mapping[str, TensorSpec], made: Iterable[Batch]
) -> dict[str, str]:
    """Write the fields of a split and return the SHA-256 of their files; `specs` are those of one sequence."""
    digests = {name: hashlib.sha256() for name in specs}
    with ExitStack() as opened:
        files = {name: opened.enter_context((folder / f"{split}.{name}.npy").open("wb")) for name in specs}
        for name, spec in specs.items():
            shape = (sequences, *spec.shape[1:])
            said = {"descr": _WRITTEN[name], "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_2_0(files[name], said)  # type: ignore[no-untyped-call]
        for batch in made:
            for name, array in batch.items():
                raw = array.astype(_WRITTEN[name]).tobytes()
                files[name].write(raw)
                digests[name].update(raw)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    return {name: digest.hexdigest() for name, digest in digests.items()}


def write_description(folder: Path, said: Mapping[str, Any]) -> None:
    """Write `teacher.json`."""
    write_synced(folder / FILE, json.dumps({"format": FORMAT, **said}, indent=2).encode())


class TaughtTokens:
    """Neighbouring sequences of token files with the fields of `taught_fields`. See data.batches.Dataset.

    An epoch takes each sequence once, in a new order unless data.order=sequential.
    """

    def __init__(self, tokens: TokenDataset, folder: Path, objective: Any, config: TokensConfig) -> None:
        """Raises DataError where the folder has no such fields as the config of the `objective` asks for."""
        self._tokens, self._config, self.context = tokens, config, tokens.context
        self.vocabulary, self.tokenizer = tokens.vocabulary, tokens.tokenizer
        said = _read_description(folder, tokens.context, objective)
        specs = taught_fields(1, tokens.context, objective.top_k)
        self.fields = {**tokens.fields, **{name: spec.with_shape(*spec.shape[1:]) for name, spec in specs.items()}}
        self._arrays = {split: _open_arrays(folder, split, said, specs, config.verify) for split in ("train", "val")}
        self.description = {**tokens.description, "teacher": said}

    def batch(self, split: Split, seed: int, first: int, rows: int) -> Batch:
        """See data.batches.Dataset."""
        arrays, numbers = self._arrays[split], sample_numbers(first, rows)
        count = len(arrays[IDS])
        if split == "val":
            places = held_out(numbers, count)
        else:
            numbers = numbers if self._config.limit is None else numbers % np.uint64(self._config.limit)
            ordered = self._config.order == "sequential"
            places = numbers % np.uint64(count) if ordered else shuffled_epochs(seed, numbers, count)[1]
        found = {name: array[places] for name, array in arrays.items()}
        found[IDS] = found[IDS].astype(np.int64)
        return {**self._tokens.read(split, places * np.uint64(self.context)), **found}

    @property
    def val_samples(self) -> int:
        """See data.batches.Dataset."""
        return self._tokens.val_samples

    def baseline(self, samples: int | None = None) -> Baseline:
        """See data.batches.Dataset."""
        return self._tokens.baseline(samples)


def _read_description(folder: Path, context: int, objective: Any) -> dict[str, Any]:
    file, asked = folder / FILE, {"context": context, "top_k": objective.top_k, "temperature": objective.temperature}
    if not file.is_file():
        keys = f"objective=distillation objective.teacher=<run> objective.top_k={objective.top_k}"
        raise DataError(f"{folder} has no {FILE}, so no teacher read it. Run task=prepare with {keys}.")
    with raised_as(DataError, f"{file} is damaged", _ADVICE, (OSError, ValueError, KeyError, TypeError)):
        said: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        known = {key: said[key] for key in asked}
        if said["format"] != FORMAT or not isinstance(said["sha256"], dict):
            raise ValueError("it is of another version")
    for key, given in asked.items():
        if known[key] != given:
            option = f"model.{key}" if key == "context" else f"objective.{key}"
            raise DataError(f"{option}={given}: {file} says {known[key]}. Give {option}={known[key]}, or prepare anew.")
    return said


def _open_arrays(
    folder: Path, split: str, said: Mapping[str, Any], specs: Mapping[str, TensorSpec], verify: bool
) -> dict[str, NDArray[Any]]:
    """Map the arrays of a split into memory."""
    found: dict[str, NDArray[Any]] = {}
    for name, spec in specs.items():
        file = folder / f"{split}.{name}.npy"
        with raised_as(DataError, f"{file} is damaged", _ADVICE, (OSError, ValueError, KeyError, TypeError)):
            array = np.load(file, mmap_mode="r", allow_pickle=False)
            wanted = (said["sequences"][split], *spec.shape[1:])
            if array.shape != wanted or array.dtype != np.dtype(_WRITTEN[name]):
                raise ValueError(f"it has {array.dtype}{list(array.shape)}, not {_WRITTEN[name]}{list(wanted)}")
            checked = verify or array.nbytes <= VERIFIED_BYTES
            if checked and hashlib.sha256(array.data).hexdigest() != said["sha256"][split][name]:
                raise ValueError("its SHA-256 differs")
        found[name] = array.view(np.ndarray)
    return found
