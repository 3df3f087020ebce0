"""A whole folder that the Transformers library opens: config, weights, tokenizer and model card."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import ttrain
from ttrain.core.errors import ConfigError, UserError, raised_as
from ttrain.core.files import new_folder, to_json, write_synced
from ttrain.core.units import format_count
from ttrain.data.end_token import OF_MODEL, TOKEN_IDS, EndToken, end_ids, own_end, token_text
from ttrain.data.gguf_file import pre_tokenizer_name
from ttrain.data.library_tokenizer import LibraryTokenizer
from ttrain.device.quantized import Quantized
from ttrain.models.weight_checks import TOKENS
from ttrain.train.checkpoint.hub_folder import CONFIG, INDEX, WEIGHTS, written_config
from ttrain.train.checkpoint.save import CheckpointContent, KeptValues, save_checkpoint
from ttrain.train.checkpoint.tensor_files import in_shards
from ttrain.train.checkpoint.weights_file import Metadata, write_pt, write_safetensors
from ttrain.train.protocols import Array
from ttrain.train.runs.run_directory import RunDirectory


def weight_state(values: Mapping[str, Array], model: Any) -> KeptValues:
    """Return weights by path as the state that a checkpoint is written from; each is read when it is asked for."""
    own = model.persistent()
    codes = {path: code for path, each in own.items() if (code := getattr(each, "code", None)) is not None}
    kept = {path: (each.kind, each.stored_spec) for path, each in own.items() if path not in codes}
    kept |= {name: (own[path].kind, spec) for path in codes for name, spec in own[path].pieces.items()}

    def read(name: str) -> Array:
        path, _, part = name.rpartition("/")
        if path not in codes:
            return np.asarray(values[name], np.float32)
        value = values[path]
        return (value if isinstance(value, Quantized) else Quantized.of(codes[path], value)).parts[part]

    return KeptValues(kept, read)


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
    with raised_as(UserError, f"export.dir={folder} can't be written"), new_folder(folder) as beside:
        yield beside


def write_run(folder: Path, stored: KeptValues, content: CheckpointContent, attempt: dict[str, Any]) -> None:
    """Make a new run folder with one checkpoint that holds parameters only. Raises as `whole_folder` does."""
    with whole_folder(folder) as beside, closing(RunDirectory.claim(str(beside), "")) as run:
        save_checkpoint(run.checkpoints, stored, content)
        run.record(content.config, attempt)


_SWITCHES = ("byte_fallback", "ignore_merges", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
_IN_CARD = ("model", "data", "train", "optimizer", "schedule", "precision")


@dataclass(frozen=True)
class Written:
    """A model that goes out, its parameters by path, its tokenizer and its end token, where there are any."""

    model: Any
    values: Mapping[str, Array]
    tokenizer: str | None
    end_token: str | None
    tokenizer_config: Mapping[str, Any]  # what is known of it
    form: str | None = None  # the model_type of the folder that the model comes from

    @cached_property
    def end(self) -> EndToken | None:
        """The token that ends a document; None where the tokenizer has none, or may mean several."""
        return None if self.tokenizer is None else own_end(self.tokenizer, self.end_token)

    def token_ids(self, tokenizer: LibraryTokenizer) -> dict[str, Any]:
        """Ids of special tokens: those that the model came with, else those of the tokenizer's tokens.

        What ends a document ends a text too.
        """
        known = self.tokenizer_config
        named = {name: token_text(known.get(name.removesuffix("_id"))) for name in TOKEN_IDS}
        ids = {name: known.get(name, text and tokenizer.token_id(text)) for name, text in named.items()}
        if self.model.opened_by != TOKENS:  # whose texts are without the end token, so that it can pad
            ids["pad_token_id"] = ids["pad_token_id"] or (self.end and self.end.id)
        ends = list(dict.fromkeys([*end_ids(known), *([] if self.end is None else [self.end.id])]))
        return ids | {"eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None}

    def config(self) -> dict[str, Any]:
        """The config.json, of a model with another head than that of tokens too. Raises ConfigError as `_form` does."""
        form, (ending, said) = self._form(), self.model.stated
        return {**form, **said, "architectures": [re.sub("ForCausalLM|LMHeadModel", ending, form["architectures"][0])]}

    def _form(self) -> dict[str, Any]:
        """The config.json of the form that opens as what it is. Raises ConfigError where there is none.

        Transformers 5 gives a Qwen2 model a tokenizer of Qwen2's kind, whatever the folder says, and a Llama of the
        same function the folder's own.
        """
        config, form = self.model.config, written_config(self.model.config, self.form)
        if form["model_type"] != "qwen2" or self.tokenizer is None or _is_qwens(json.loads(self.tokenizer)):
            return form
        if config.window is not None:
            told = "Transformers opens a model with biases and a window with Qwen2's tokenizer, and this one is another"
            raise ConfigError(f"export.form=huggingface: {told}. Give export.form=ttrain or gguf.")
        return written_config(replace(config, projection_bias=True))

    def weights(self) -> dict[str, Array]:
        """Weights by the names of the form; a bias that the model lacks is zero."""
        weights, config = self.model.to_transformers(self.values), self._form()
        if config["model_type"] == "llama" and config["attention_bias"]:
            for number in range(config["num_hidden_layers"]):
                name = f"model.layers.{number}.self_attn.o_proj.bias"
                weights.setdefault(name, np.zeros(config["hidden_size"], np.float32))
        return weights


def write_folder(folder: Path, written: Written, card: str, shard_bytes: int) -> None:
    """Writes a new folder with weights in fp32, in files of at most so many bytes each, and its README.md.

    Raises UserError where it is not new or can't be written; a folder that does not get whole never has its name.
    """
    with whole_folder(folder) as beside:
        for name, content in {**_texts(written), **_sentence_files(written.model), "README.md": card}.items():
            (beside / name).parent.mkdir(exist_ok=True)
            write_synced(beside / name, content.encode())
        _write_weights(beside, written.weights(), shard_bytes)


def _texts(written: Written) -> dict[str, str]:
    """Content of every file but those of weights."""
    config, files = written.model.config, dict[str, str]()
    ids: dict[str, Any] = dict.fromkeys(TOKEN_IDS)
    if written.tokenizer is not None:
        described: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.longest}
        described["clean_up_tokenization_spaces"] = False
        if written.end is not None:
            described["eos_token"] = written.end.text
            described |= {} if written.model.opened_by == TOKENS else {"pad_token": written.end.text}
        described |= {key: value for key, value in written.tokenizer_config.items() if key not in OF_MODEL}
        ids = written.token_ids(LibraryTokenizer(written.tokenizer))
        files |= {"tokenizer.json": written.tokenizer, "tokenizer_config.json": to_json(described)}
    files[CONFIG] = to_json({**written.config(), "dtype": "float32", **ids})
    return files | {"generation_config.json": to_json(ids)}


def _sentence_files(model: Any) -> dict[str, str]:
    """Content of the files by which sentence-transformers makes vectors of length one, where the model is for that."""
    if not model.pooling:
        return {}
    steps = enumerate((("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")))
    kind = "sentence_transformers.models."
    modules = [{"idx": n, "name": str(n), "path": path, "type": kind + name} for n, (path, name) in steps]
    modes = {f"pooling_mode_{name}": name.startswith(model.pooling) for name in ("mean_tokens", "lasttoken")}
    pooling = to_json({"word_embedding_dimension": model.width, **modes})
    return {"modules.json": to_json(modules), "1_Pooling/config.json": pooling}


def _is_qwens(described: Mapping[str, Any]) -> bool:
    """True for a tokenizer.json that Transformers' Qwen2Tokenizer, which takes its tokens alone, makes no other of."""
    model, added = described["model"], {token["content"] for token in described.get("added_tokens", ())}
    plain = model["type"] == "BPE" and not any(model.get(key) for key in _SWITCHES)
    cuts = pre_tokenizer_name(described) == "qwen2" and (described.get("normalizer") or {}).get("type") == "NFC"
    return plain and cuts and "<|endoftext|>" in added


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
        "initial values": base or "random",
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
