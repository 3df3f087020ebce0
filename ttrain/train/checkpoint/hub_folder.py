"""Folders of the Transformers library and GGUF files: their place, their model, and their weights."""

from __future__ import annotations

import re
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any

from ttrain.core.errors import CheckpointError, ConfigError, DataError, UserError, raised_as
from ttrain.core.files import read_json, read_object, text_of
from ttrain.core.folders import at_home
from ttrain.data.gguf_file import gguf_tokenizer, is_gguf
from ttrain.models import gpt_weights, llama_weights
from ttrain.train.checkpoint.gguf_model import gguf_config, gguf_tensors
from ttrain.train.checkpoint.tensor_files import LazyTensor, tensors_of

ADAPTER_CONFIG = "adapter_config.json"
CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_TEXTS = (CONFIG, *_TOKENIZER, "generation_config.json", INDEX)
_FAMILIES: dict[str, tuple[str, Any]] = {  # model_type -> our model, and what reads its config
    "gpt2": ("gpt", gpt_weights),
    **dict.fromkeys(llama_weights.ARCHITECTURES, ("llama", llama_weights)),
}
_DAMAGED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)  # of a config of other kinds
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def find_folder(given: str, weights: bool = False) -> Path:
    """The folder or GGUF file that a path means, or the folder of a name on the Hugging Face hub.

    A name takes what the local cache has. Without `weights` it brings what is small. Raises UserError where there is
    none, and it can't be downloaded.
    """
    folder = at_home(given)
    if folder.exists() or folder.suffix == ".gguf" or not _NAME.fullmatch(given):
        if not (is_gguf(folder) or (folder / CONFIG).is_file()):
            raise UserError(f"is no folder with a {CONFIG}. Give one as Transformers writes it, or a .gguf file.")
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


def tokenizer_file(folder: Path) -> Path:
    """The tokenizer.json of a folder; a GGUF file has its tokenizer in itself."""
    return folder if is_gguf(folder) else folder / "tokenizer.json"


def read_own_tokenizer(folder: Path) -> str | None:
    """The tokenizer.json of a folder or GGUF file; None where there is none that can be read."""
    with suppress(DataError):  # whoever needs it tells why, see `gguf_tokenizer`
        return gguf_tokenizer(folder) if is_gguf(folder) else text_of(folder / "tokenizer.json") or None
    return None


def holds_model(folder: Path) -> bool:
    """True for a folder of Transformers' form: one that ttrain writes has no `model_type`."""
    return "model_type" in read_json(folder / CONFIG)


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder or GGUF file. Raises UserError for one that can't be read."""
    return gguf_config(folder) if is_gguf(folder) else read_object(folder / CONFIG)


def read_architecture(folder: Path) -> dict[str, Any]:
    """`name` and sizes of the model in a folder or GGUF file, by the keys of our configs.

    Raises CheckpointError for a model that is none of ours.
    """
    with (
        raised_as(CheckpointError, "its config", of=ConfigError),
        raised_as(CheckpointError, "its config is damaged", "Bring it anew.", _DAMAGED),
    ):
        config = read_config(folder)
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
        sizes = {"name": name, **family.config_from_transformers(config)}
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
    counts, widths = ("layers", "experts"), ("heads", "kv_heads", "head_width", "width", "hidden", "vocabulary")
    for key in (*counts, *widths, "expert_width"):
        value, bound = sizes.get(key), len(tensors) if key in counts else 10 * largest
        if isinstance(value, int) and value > bound:
            held = f"{len(tensors)} tensors of at most {largest} rows or columns"
            raise CheckpointError(f"its config makes model.{key}={value}, but its weights are {held}.")


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
    """The tensors of a folder or GGUF file by Transformers' names; values are read when they are needed.

    Raises CheckpointError where a file is missing or damaged, or the index names other tensors than the files hold.
    """
    if is_gguf(folder):
        with raised_as(CheckpointError, str(folder), of=(CheckpointError, *_DAMAGED)):
            return gguf_tensors(folder)
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
