"""A whole model on the disk: a folder of Transformers, or the newest checkpoint of a run, with its averages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ttrain.core.files import sha256_file
from ttrain.data.tokenizer import Tokenizer
from ttrain.models.weight_checks import Weights
from ttrain.train.checkpoint.adapters import as_for
from ttrain.train.checkpoint.checkpoint import STEMS, Checkpoint
from ttrain.train.checkpoint.hub_folder import find_folder, holds_model, read_architecture, read_folder
from ttrain.train.checkpoint.weights_file import weights_of
from ttrain.train.protocols import Array
from ttrain.train.runs.resume import find_resume_point


@dataclass(frozen=True)
class WeightSource:
    """A model by our keys, its tokenizer's JSON and its weights."""

    path: Path
    model: Mapping[str, Any]
    tokenizer: str | None
    checkpoint: Checkpoint | None = None

    @staticmethod
    def find(given: str) -> WeightSource:
        """Find a folder, hub name, run or checkpoint. Raises UserError for what is none."""
        path = Path(given)
        if path.is_dir() and not holds_model(path):
            point = find_resume_point(given, None)
            assert point is not None  # only resume=none and auto give none
            checkpoint = point.checkpoint
            return WeightSource(checkpoint.path, checkpoint.config["model"], checkpoint.tokenizer, checkpoint)
        path = find_folder(given, weights=True)
        file = path / "tokenizer.json"
        return WeightSource(path, read_architecture(path), file.read_text("utf-8") if file.is_file() else None)

    def values(self, model: Any) -> Mapping[str, Array]:
        """Return values by the model's paths, each read when it is asked for. Raises CheckpointError."""
        if self.checkpoint is None:
            return Weights.widened(weights_of(self.path, model, read_folder(self.path), strict=True))
        lora = self.checkpoint.config.get("lora") or {}
        return Weights.widened(as_for(model, self.checkpoint.weights(averages=True), lora))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of names and contents of all files of weights."""
        if self.checkpoint is not None:
            hashes = {name: self.checkpoint.files[name]["sha256"] for name in self.checkpoint.files_of(*STEMS)}
        else:
            files = {tensor.path for tensor in read_folder(self.path).values()}
            hashes = {file.name: sha256_file(file) for file in sorted(files)}
        return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()

    def has_ids_of(self, tokenizer: Tokenizer | None) -> bool:
        """True if both tokenizers have the same ids of tokens; one that is not known is like any other."""
        return self.tokenizer is None or tokenizer is None or _ids(self.tokenizer) == _ids(tokenizer.to_json())


def _ids(text: str) -> Any:
    described = json.loads(text)
    added = sorted((token["id"], token["content"]) for token in described.get("added_tokens") or ())
    return described["model"].get("vocab"), added
