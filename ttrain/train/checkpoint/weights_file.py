"""Read and write files of weights, .pt of PyTorch and .safetensors, without running code from them."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from ttrain.core.errors import CheckpointError, UserError, raised_as
from ttrain.core.files import read_json, replace_file
from ttrain.core.names import listed
from ttrain.data.gguf_file import is_gguf
from ttrain.models.identity import whole
from ttrain.models.weight_checks import Weights, as_fp32, mismatches, unusable
from ttrain.train.checkpoint.hub_folder import read_architecture, read_folder, read_own_tokenizer
from ttrain.train.checkpoint.tensor_files import open_shard, tensors_of

SUFFIXES = (".pt", ".safetensors")
_MODEL, _TOKENIZER = "ttrain_model", "tokenizer_json"  # names of texts that our files hold beside the weights


def read_file(path: Path) -> dict[str, Any]:
    """Content of a file or folder of weights.

    A .pt file gives dictionaries, torch tensors and plain values; a .safetensors file, a GGUF file and a folder of
    Transformers give tensors that are read when they are needed.

    Raises CheckpointError for a path that is none of these, is damaged, or holds anything that would run code.
    """
    if path.is_dir() or is_gguf(path):
        return dict(read_folder(path))
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file. Give a {', '.join(SUFFIXES)} or .gguf file.")
    if path.suffix == ".safetensors":
        return {tensor.name: tensor for tensor in tensors_of(path)}
    if path.suffix != ".pt":
        raise CheckpointError(f"{path}: the name must end with {' or '.join(SUFFIXES)}.")
    content = _read_pt(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, expected a dictionary of weights.")
    return content


def _read_pt(path: Path) -> Any:
    import warnings

    import torch

    try:
        # Files of PyTorch before 1.6 are no archives, and can't be mapped; archives packed anew may be compressed, and
        # PyTorch would map the compressed bytes.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols that only files with more in them have
            return torch.load(path, map_location="cpu", weights_only=True, mmap=_mappable(path))
    except Exception as error:  # the bytes of a damaged file can make the reader fail in any way
        reason = getattr(error, "strerror", None) or type(error).__name__
        told = "it is damaged, or holds more than tensors and plain values, which could run code"
        raise CheckpointError(f"{path} is not a .pt file that can be read ({reason}): {told}.") from None


def _mappable(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())


@dataclass(frozen=True)
class Metadata:
    """Facts that a source of weights tells of its model and its tokens, besides the weights."""

    model: Mapping[str, Any] | None  # the model's config by our keys
    tokenizer: str | None = None  # the JSON of the tokenizer
    original: Mapping[str, Any] = field(default_factory=dict)  # all that a file of another program holds

    def of(self, model: Any) -> dict[str, Any]:
        """Return plain values by our keys; a model with `original_config` understands what its original writes."""
        told = self.model
        if told is None:
            told = model.original_config(self.original) if hasattr(model, "original_config") else {}
        plain = {key: value for key, value in told.items() if isinstance(value, str | int | float | NoneType)}
        return plain if self.model is None else whole(plain, model.config)

    def to_header(self) -> dict[str, str]:
        """Return texts by name, for the header of a file of weights."""
        tokenizer = {} if self.tokenizer is None else {_TOKENIZER: self.tokenizer}
        return ({} if self.model is None else {_MODEL: json.dumps(dict(self.model))}) | tokenizer


def read_metadata(path: Path, content: Mapping[str, Any]) -> Metadata:
    """Read what a file or folder says besides its weights: in itself, or in a config.json beside it.

    `content` is the file's.
    """
    if path.is_dir() or is_gguf(path):
        with raised_as(CheckpointError, str(path), of=CheckpointError):
            return Metadata(read_architecture(path), read_own_tokenizer(path))
    texts = {**content, **(metadata_of(path) if path.suffix == ".safetensors" else {})}
    beside, tokenizer = read_json(path.with_name("config.json")), texts.get(_TOKENIZER)
    model = _object(texts.get(_MODEL))
    if model is None and isinstance(beside.get("model"), dict):  # a shard of a checkpoint of ours
        model, file = beside["model"], path.with_name("tokenizer.json")
        tokenizer = file.read_text("utf-8", "replace") if tokenizer is None and file.is_file() else tokenizer
    return Metadata(model, tokenizer if isinstance(tokenizer, str) else None, {**beside, **content})


def same_tokenizer(one: str | None, other: str | None) -> bool:
    """True if two tokenizers are one, by their JSON; one that is not known is like any other."""
    return one is None or other is None or one == other or (_object(one) or one) == _object(other)


def metadata_of(path: Path) -> dict[str, str]:
    """The texts in the header of a safetensors file."""
    with suppress(CheckpointError), open_shard(path) as file:
        return dict(file.metadata() or {})
    return {}


def _object(text: Any) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        found = json.loads(text) if isinstance(text, str) else None
        return found if isinstance(found, dict) else None
    return None


def weights_of(path: Path, model: Any, content: Mapping[str, Any], strict: bool = False) -> Mapping[str, Any]:
    """The weights in a file by the paths of `model.persistent()`, as arrays or tensors: what fits by name, no more.

    `content` is the file's, in our names or the original's. Raises CheckpointError for a file in which no name fits, or
    one fits a value that is no weight, and, if `strict`, where names and shapes are not exactly the model's.
    """
    shapes = {name: parameter.stored_spec.shape for name, parameter in model.persistent().items()}
    if found := {name: content[name] for name in content if name in shapes}:
        problems = mismatches(content, shapes, "not a parameter of this model") if strict else unusable(found)
        if problems:
            told = "does not fit this model" if strict else "holds values that are no weights"
            raise CheckpointError(f"{path} {told}:\n  " + listed(problems, 20, "\n  "))
        return found
    with raised_as(CheckpointError, str(path), of=CheckpointError):
        converted = model.from_original(content, strict=strict) if hasattr(model, "from_original") else {}
    if not converted:
        raise CheckpointError(f"{path} holds no weight of {model.config.name}: got {listed(content, 5) or 'nothing'}.")
    return converted


def read_parameters(path: Path, model: Any, content: Mapping[str, Any] | None = None) -> Weights:
    """All parameters and saved buffers of a model from a file, in our names or the original's, one at a time.

    `content` is the file's, where it was read already. Raises CheckpointError as `weights_of` does, and naming what is
    not finite.
    """
    content = read_file(path) if content is None else content
    weights = Weights.widened(weights_of(path, model, content, strict=True))
    for name, weight in weights.items():
        if not np.isfinite(weight).all():
            raise CheckpointError(f"{path}: {name} holds NaN or infinity in fp32. Give another file.")
    return weights


def write_safetensors(path: Path, weights: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
    """Writes weights as fp32, with texts in the header. Replaces the file."""
    from safetensors.numpy import save_file

    header = {"format": "pt", **(metadata or {})}
    write_file(path, lambda beside: save_file({name: as_fp32(each) for name, each in weights.items()}, beside, header))


def write_pt(path: Path, content: Mapping[str, Any]) -> None:
    """Writes nested dictionaries of arrays and plain values as PyTorch does, arrays as tensors. Replaces the file."""
    import torch

    made: dict[int, Any] = {}  # an array that occurs twice, as a tied weight does, is written once

    def tensors(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: tensors(part) for name, part in value.items()}
        if isinstance(value, np.ndarray) and id(value) not in made:
            made[id(value)] = torch.from_numpy(as_fp32(value))
        return made[id(value)] if isinstance(value, np.ndarray) else value

    def write(beside: Path) -> None:
        with open(beside, "wb") as file:  # a file of ours, so that a full disk is told in the system's words
            torch.save(tensors(content), file)

    write_file(path, write)


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replaces a file with what `write` makes, in a folder that is made. Raises UserError where that fails."""
    from safetensors import SafetensorError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, write)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError on top of the system's error
        system = error.__context__ if isinstance(error.__context__, OSError) else error
        told = (str(system).strip() or "it ends early").splitlines()[0].rstrip(".")
        raise UserError(f"{path} can't be written: {told}") from None
