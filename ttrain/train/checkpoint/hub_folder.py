"""Folders of the Transformers library: their place, their model, and their weights."""

from __future__ import annotations

import re
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any

from ttrain.core.errors import CheckpointError, ConfigError, UserError, raised_as
from ttrain.core.files import read_json, read_object
from ttrain.core.folders import at_home
from ttrain.models import gpt_weights, llama_weights
from ttrain.train.checkpoint.tensor_files import LazyTensor, tensors_of

ADAPTER_CONFIG = "adapter_config.json"
CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_TEXTS = (CONFIG, *_TOKENIZER, "generation_config.json", INDEX)
_FAMILIES: dict[str, tuple[str, Any]] = {  # model_type -> our model, and what reads its config
    "gpt2": ("gpt", gpt_weights),
    **dict.fromkeys(llama_weights.ARCHITECTURES, ("llama", llama_weights)),
}
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def find_folder(given: str, weights: bool = False) -> Path:
    """The folder that a path or a name on the Hugging Face hub means, of the local cache where it is there.

    Without `weights` a name brings what is small. Raises UserError where there is none, and it can't be downloaded.
    """
    folder = at_home(given)
    if folder.exists() or not _NAME.fullmatch(given):
        if not (folder / CONFIG).is_file():
            raise UserError(f"is no folder with a {CONFIG}. Give one as save_pretrained of Transformers writes it.")
        return folder
    by_hand = f"Bring it with `hf download {given} --local-dir <folder>` and give the folder."
    advice = f"Run: pip install 'ttrain[hf]', or: {by_hand}"
    with raised_as(UserError, "names of the hub need huggingface_hub", advice, ImportError):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    patterns = [*_TEXTS, *(["model*.safetensors"] if weights else [])]
    with suppress(LocalEntryNotFoundError, HFValidationError):
        cached = Path(snapshot_download(given, local_files_only=True))
        if (cached / CONFIG).is_file() and not (weights and missing_weights(cached)):
            return cached
    try:
        return Path(snapshot_download(given, allow_patterns=patterns))
    except Exception as error:  # those of the system, of the hub and of whatever it speaks HTTP with
        why = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise UserError(f"is no folder, nor a model of the hub that can be had here ({why}). {by_hand}") from None


def holds_model(folder: Path) -> bool:
    """True for a folder of Transformers' form: one that ttrain writes has no `model_type`."""
    return "model_type" in read_json(folder / CONFIG)


def read_architecture(folder: Path) -> dict[str, Any]:
    """`name` and sizes of the model in a folder, by the keys of our configs.

    Raises CheckpointError for a model that is none of ours.
    """
    config = read_object(folder / CONFIG)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise CheckpointError(f"its config.json has model_type={kind!r}; ttrain has {', '.join(_FAMILIES)}.")
    if config.get("auto_map"):
        raise CheckpointError("its config.json names code of its own (auto_map), which ttrain does not run.")
    if config.get("quantization_config"):
        raise CheckpointError("its weights are quantized, which ttrain does not train. Give the original model.")
    if (folder / ADAPTER_CONFIG).is_file():
        told = f"it holds adapters too ({ADAPTER_CONFIG}), which Transformers adds to the model"
        raise CheckpointError(f"{told}. Move them to a folder of their own and give that as lora.from.")
    name, family = _FAMILIES[kind]
    try:
        sizes = {"name": name, **family.config_from_transformers(config)}
    except ConfigError as error:
        raise CheckpointError(f"its config.json: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"its config.json is damaged ({type(error).__name__}: {error}).") from None
    _check_sizes(folder, sizes)
    return sizes


def _check_sizes(folder: Path, sizes: dict[str, Any]) -> None:
    """Raises CheckpointError for a size that no tensor of the folder comes near, before anything is built of it.

    Weights that are not there, damaged or of slightly other shapes are told when they are read.
    """
    try:
        tensors = read_folder(folder).values()
    except CheckpointError:
        return
    largest = max((number for tensor in tensors for number in tensor.shape), default=0)
    for key in ("layers", "heads", "kv_heads", "head_width", "width", "hidden", "vocabulary"):
        value, bound = sizes.get(key), len(tensors) if key == "layers" else 10 * largest
        if isinstance(value, int) and value > bound:
            held = f"{len(tensors)} tensors of at most {largest} rows or columns"
            raise CheckpointError(f"its config.json makes model.{key}={value}, but its weights are {held}.")


def is_known(name: str) -> bool:
    """True if Transformers has our model of this name."""
    return any(name == ours for ours, _ in _FAMILIES.values())


def written_config(config: Any, form: str | None = None) -> dict[str, Any]:
    """The config.json for a model's config with its sizes, without what is said of tokens.

    `form` is the model_type of the folder that the model comes from, where there is one.
    """
    family = next(family for name, family in _FAMILIES.values() if name == config.name)
    return dict(family.config_to_transformers(config, form))


def missing_weights(folder: Path) -> str | None:
    """Return why the weights of a folder can't be read; None where all files are there."""
    if (folder / INDEX).is_file():
        absent = sorted(name for name in set(_weight_map(folder).values()) if not (folder / name).is_file())
        return f"{folder / INDEX} names {absent[0]}, which is not there. Bring the whole folder." if absent else None
    if (folder / WEIGHTS).is_file():
        return None
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickles:
        return f"{folder} holds pickles ({pickles[0]}), which could run code. Save the model as safetensors."
    return f"{folder} has no {WEIGHTS}. Bring the whole folder."


def read_folder(folder: Path) -> dict[str, LazyTensor]:
    """The tensors of a folder by the names in its files; values are read when they are needed.

    Raises CheckpointError where a file is missing or damaged, or the index names other tensors than the files hold.
    """
    if problem := missing_weights(folder):
        raise CheckpointError(problem)
    indexed = _weight_map(folder) if (folder / INDEX).is_file() else None
    files = [folder / name for name in ([WEIGHTS] if indexed is None else sorted(set(indexed.values())))]
    found: dict[str, LazyTensor] = {}
    for file in files:
        found |= {tensor.name: tensor for tensor in tensors_of(file)}
    if indexed is not None:
        wrong = [name for name, file in indexed.items() if name not in found or found[name].path.name != file]
        wrong += [name for name in found if name not in indexed]
        if wrong:
            raise CheckpointError(f"{folder / INDEX} and its files do not agree about {wrong[0]}. Bring it anew.")
    return found


def _weight_map(folder: Path) -> dict[str, str]:
    """File by tensor. Raises CheckpointError for an index that is none."""
    names = read_object(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{folder / INDEX} has no weight_map. Bring the folder anew.")
    for name in names.values():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise CheckpointError(f"{folder / INDEX} names {name!r}; weights are read from .safetensors beside it.")
    return dict(names)
