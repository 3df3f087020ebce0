"""Distributions of a teacher beside token files: task=prepare writes them, and objective=distillation learns them.

For each split there is an array `train.teacher.npy` with a row per sequence of tokens; the sequences follow one another
without a gap. `tokens.json` has an entry `teacher`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import DataError, raised_as
from ttrain.core.files import sha256_file
from ttrain.core.spec import DType, TensorSpec
from ttrain.data.batches import Baseline, Batch, Split, TokenDataset, places_of
from ttrain.data.settings import TokensConfig

ENTRY = "teacher"
IDS, LOG_PROBS, OF_TARGETS = "teacher_ids", "teacher_log_probs", "teacher_of_targets"
VERIFIED_BYTES = 256 << 20  # files up to this size are read whole at the start


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


def taught_file(folder: Path, split: str) -> Path:
    """Return the file of a split's array."""
    return folder / f"{split}.teacher.npy"


def taught_type(top_k: int) -> np.dtype[Any]:
    """Return the type of an array's elements: the fields of one token."""
    return np.dtype([(IDS, "<u4", (top_k,)), (LOG_PROBS, "<f4", (top_k + 1,)), (OF_TARGETS, "<f4")])


class TaughtTokens:
    """Neighbouring sequences of token files with the fields of `taught_fields`. See data.batches.Dataset.

    An epoch takes each sequence once, in a new order unless data.order=sequential.
    """

    def __init__(self, tokens: TokenDataset, folder: Path, said: Any, objective: Any, config: TokensConfig) -> None:
        """`said` is the entry of `tokens.json`, None without one, and `objective` the config of who learns.

        Raises DataError where the folder has no such distributions as the objective asks for.
        """
        self._tokens, self._config, self.context = tokens, config, tokens.context
        self.vocabulary, self.tokenizer = tokens.vocabulary, tokens.tokenizer
        asked = {"context": tokens.context, "top_k": objective.top_k, "temperature": objective.temperature}
        if not isinstance(said, dict):
            keys = f"objective=distillation objective.teacher=<run> objective.top_k={objective.top_k}"
            raise DataError(f"data.path={config.path}: no teacher read it. Run task=prepare with {keys}.")
        for key, given in asked.items():
            if said.get(key) != given:
                key, known = f"model.{key}" if key == "context" else f"objective.{key}", said.get(key)
                raise DataError(f"{key}={given}: the teacher of {config.path} has {known}. Give that, or prepare anew.")
        self._arrays = {split: self._open(folder, split, said) for split in ("train", "val")}
        specs = taught_fields(1, tokens.context, objective.top_k)
        self.fields = {**tokens.fields, **{name: spec.with_shape(*spec.shape[1:]) for name, spec in specs.items()}}
        self.description = {**tokens.description, ENTRY: said}

    def _open(self, folder: Path, split: Split, said: Mapping[str, Any]) -> NDArray[Any]:
        """Map the array of a split into memory."""
        file, verify = taught_file(folder, split), self._config.verify
        with raised_as(DataError, f"{file} is damaged", "Prepare anew.", (OSError, ValueError, KeyError, TypeError)):
            if (verify or file.stat().st_size <= VERIFIED_BYTES) and sha256_file(file) != said["sha256"][split]:
                raise ValueError("its SHA-256 differs")
            array: NDArray[Any] = np.lib.format.open_memmap(file, "r")  # type: ignore[no-untyped-call]
            if array.dtype != taught_type(said["top_k"]) or array.shape[1:] != (self.context,):
                raise ValueError(f"it has {array.dtype}{list(array.shape)}")
        return array.view(np.ndarray)

    def batch(self, split: Split, seed: int, first: int, rows: int) -> Batch:
        """See data.batches.Dataset."""
        array = self._arrays[split]
        places = places_of(self._config, split, seed, first, rows, len(array))
        found = array[places]
        batch = self._tokens.read(split, places * np.uint64(self.context))
        return {**batch, IDS: found[IDS].astype(np.int64), **{key: found[key] for key in (LOG_PROBS, OF_TARGETS)}}

    @property
    def val_samples(self) -> int:
        """See data.batches.Dataset."""
        return self._tokens.val_samples

    def baseline(self, samples: int | None = None) -> Baseline:
        """See data.batches.Dataset."""
        return self._tokens.baseline(samples)
