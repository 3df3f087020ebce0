"""A whole folder that the Transformers library opens: config, weights, tokenizer and model card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ttrain
from ttrain.core.files import to_json, write_synced
from ttrain.core.units import format_count
from ttrain.data.end_token import TOKEN_IDS, end_ids, token_text
from ttrain.train.checkpoint.hub_folder import CONFIG, INDEX, WEIGHTS, is_known, written_config
from ttrain.train.checkpoint.tensor_files import in_shards
from ttrain.train.checkpoint.weights_file import write_safetensors
from ttrain.train.protocols import Array
from ttrain.train.runs.export import whole_folder

_IN_CARD = ("model", "data", "train", "optimizer", "schedule", "precision")


@dataclass(frozen=True)
class Written:
    """What goes into a folder: a model and its parameters by path, its tokenizer, its end token, its README.md."""

    model: Any
    values: Mapping[str, Array]
    tokenizer: str | None
    end_token: str | None
    card: str
    tokenizer_config: Mapping[str, Any]  # what is known of it


def folder_problem(config: Any) -> str | None:
    """Why a model can't be written so, None where it can."""
    if is_known(config.name):
        return None
    return (
        f"export.form=huggingface: Transformers has no model.name={config.name}. Give export.form=ttrain or original."
    )


def write_folder(folder: Path, written: Written, shard_bytes: int) -> None:
    """Writes a new folder with weights in fp32, in files of at most so many bytes each.

    Raises UserError where it is not new or can't be written; a folder that does not get whole never has its name.
    """
    with whole_folder(folder) as beside:
        for name, content in _texts(written).items():
            write_synced(beside / name, content.encode())
        _write_weights(beside, written.model.to_transformers(written.values), shard_bytes)


def _texts(written: Written) -> dict[str, str]:
    """Content of every file but those of weights."""
    config, files = written.model.config, {"README.md": written.card}
    ids: dict[str, Any] = dict.fromkeys(TOKEN_IDS)
    if written.tokenizer is not None:
        described: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.longest}
        described["clean_up_tokenization_spaces"] = False
        end = known_end(written.tokenizer, written.end_token)
        if end is not None:
            described["eos_token"] = end[0]
        described |= {key: value for key, value in written.tokenizer_config.items() if key not in TOKEN_IDS}
        ids = _token_ids(written, None if end is None else end[1])
        files |= {"tokenizer.json": written.tokenizer, "tokenizer_config.json": to_json(described)}
    files[CONFIG] = to_json({**written_config(config), "dtype": "float32", **ids})
    return files | {"generation_config.json": to_json(ids)}


def _token_ids(written: Written, end: int | None) -> dict[str, Any]:
    """Those that the model came with, else those of the tokenizer's tokens; the end of a document ends a text too."""
    from ttrain.data.library_tokenizer import LibraryTokenizer

    known, tokenizer = written.tokenizer_config, LibraryTokenizer(written.tokenizer or "")
    named = {name: token_text(known.get(name.removesuffix("_id"))) for name in TOKEN_IDS}
    ids = {name: known.get(name, text and tokenizer.token_id(text)) for name, text in named.items()}
    ends = list(dict.fromkeys([*end_ids(known), *([] if end is None else [end])]))
    return ids | {"eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None}


def known_end(tokenizer: str, named: str | None) -> tuple[str, int] | None:
    """Text and id of the token that ends a document; None where the tokenizer has none, or may mean several."""
    from ttrain.data.end_token import own_end

    end = own_end(tokenizer, named)
    return None if end is None else (end.text, end.id)


def _write_weights(folder: Path, weights: Mapping[str, Array], shard_bytes: int) -> None:
    shards = list(in_shards({name: 4 * weight.size for name, weight in weights.items()}, shard_bytes))
    many = len(shards) > 1
    names = [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" if many else WEIGHTS
        for number in range(1, len(shards) + 1)
    ]
    for file, shard in zip(names, shards):
        write_safetensors(folder / file, {name: weights[name] for name in shard})
    if many:
        total = sum(4 * weight.size for weight in weights.values())
        places = {name: file for file, shard in zip(names, shards) for name in shard}
        write_synced(folder / INDEX, to_json({"metadata": {"total_size": total}, "weight_map": places}).encode())


def model_card(name: str, config: Mapping[str, Any], parameters: int, origin: str, progress: Mapping[str, Any]) -> str:
    """README.md: what it is, what it was trained on, the losses, and the config."""
    import yaml

    data, base = config["data"], config["model"].get("from")
    corpus = data.get("sources") or data.get("path") or data["name"]
    head = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    facts = {
        "parameters": format_count(parameters),
        "first values": base or "random",
        "data": corpus if isinstance(corpus, str) else ", ".join(corpus),
        "steps": progress.get("step"),
        "tokens": progress.get("tokens"),
        "train loss": progress.get("train_loss"),
        "val loss": progress.get("val_loss"),
        "best val loss": progress.get("best_val_loss"),
    }
    rows = "".join(f"| {key} | {value} |\n" for key, value in facts.items() if value is not None)
    shown = yaml.safe_dump({section: config[section] for section in _IN_CARD}, sort_keys=False, allow_unicode=True)
    return (
        f"---\n{yaml.safe_dump(head)}---\n# {name}\n\nA {config['model']['name']} model, written by ttrain "
        f"{ttrain.__version__} from {origin}. Losses are in nats per token.\n\n| | |\n| --- | --- |\n{rows}\n"
        f"## Config\n\n```yaml\n{shown}```\n"
    )
