"""GGUF, the file format of llama.cpp: what a file says, its tensors, and its tokenizer.

How a text is cut into words has a name there, and tokens and merges are lists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ttrain.core.errors import DataError, raised_as

_LETTERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
# GGUF's name of how a text is cut into words -> the parts of a tokenizer.json that do so.
_SPLITS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [{**_BYTES, "use_regex": True}],
    "smollm": [{"type": "Digits", "individual_digits": True}, {**_BYTES, "use_regex": True}],
    "qwen2": [{**_SPLIT, "pattern": {"Regex": _LETTERS % r"\p{N}"}}, _BYTES],
    "llama-bpe": [{**_SPLIT, "pattern": {"Regex": _LETTERS % r"\p{N}{1,3}"}}, _BYTES],
}
_KEY = "tokenizer.ggml."


def is_gguf(path: Path) -> bool:
    """True for a file with the ending of GGUF."""
    return path.suffix == ".gguf" and path.is_file()


def open_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata of a file by key, and its tensors by name, as the library gguf describes them.

    Raises DataError where it can't be read, and where the library is missing.
    """
    kinds = (OSError, ValueError, LookupError, OverflowError, RecursionError, MemoryError)
    with (
        raised_as(DataError, f"{path} needs the package gguf", "Run: pip install 'ttrain[gguf]'", ImportError),
        raised_as(DataError, f"{path} is no GGUF file that can be read", "Bring it anew.", kinds),
    ):
        found = path.stat()
        return _opened(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=2)
def _opened(path: Path, changed: int, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """The library's, which takes three times as long, and does not end where a count is wrong."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: str | None = None) -> Any:
            if self.byte_order != "I":
                raise ValueError("it is of a big-endian machine, and gguf-convert-endian converts it")
            return np.frombuffer(self.data, dtype, int(count), int(offset))  # ValueError where the file ends early

    reader = Reader(path)
    said = {name: field.contents() for name, field in reader.fields.items()}
    return said, {tensor.name: tensor for tensor in reader.tensors}


def pre_tokenizer_name(described: Mapping[str, Any]) -> str | None:
    """GGUF's name of how a tokenizer.json cuts a text into words; None where there is none."""
    steps = described.get("pre_tokenizer") or {}
    parts = steps.get("pretokenizers", [steps])
    parts = [{**part, "trim_offsets": True} if "trim_offsets" in part else part for part in parts]  # which cuts nothing
    if parts == [_BYTES] and not described["model"].get("merges"):
        parts = _SPLITS["gpt-2"]  # of single bytes, whatever the words
    return next((name for name, known in _SPLITS.items() if known == parts), None)


def gguf_tokenizer(path: Path) -> str:
    """The tokenizer.json of a GGUF file. Raises DataError for a kind that is not read here."""
    said, _ = open_gguf(path)
    kind, split = said.get(f"{_KEY}model"), said.get(f"{_KEY}pre")
    advice = "Give the model's own: data.tokenizer=<tokenizer.json>."
    with raised_as(DataError, f"{path} has a tokenizer that can't be used", advice, Exception):  # of the libraries
        if kind == "llama":
            return _sentencepiece(said, path)
        if kind == "gpt2" and split in _SPLITS:
            return _byte_level(said, split)
    known = f"model=llama, or model=gpt2 and pre={', '.join(_SPLITS)}"
    raise DataError(f"{path} has {_KEY}model={kind} and {_KEY}pre={split}; ttrain reads {known}. {advice}")


def _byte_level(said: Mapping[str, Any], split: str) -> str:
    """The tokenizer.json of merges of bytes, as llama.cpp runs them. Raises any error for a damaged description."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    texts = said[f"{_KEY}tokens"]
    types = said.get(f"{_KEY}token_type", [1] * len(texts))
    # A row of the embedding that no token has is of type 5, whatever name it gets.
    vocabulary = {text: number for number, (text, kind) in enumerate(zip(texts, types, strict=True)) if kind != 5}
    merges = [(one, two) for one, two in (pair.split(" ") for pair in said[f"{_KEY}merges"]) if one + two in vocabulary]
    model: Any = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split == "llama-bpe"))
    model.decoder = decoders.ByteLevel()
    model.normalizer = normalizers.NFC() if split == "qwen2" else None
    for kind, add in ((3, model.add_special_tokens), (4, model.add_tokens)):  # of control, and defined by a user
        add([AddedToken(text, normalized=False, special=kind == 3) for text, own in zip(texts, types) if own == kind])
    if said.get(f"{_KEY}add_bos_token", split == "llama-bpe"):
        start = texts[number := said[f"{_KEY}bos_token_id"]]
        model.post_processor = processors.TemplateProcessing([start, "$A"], [start, "$A", "$B:1"], [(start, number)])
    cut = {"type": "Sequence", "pretokenizers": _SPLITS[split]}
    return json.dumps({**json.loads(model.to_str()), "pre_tokenizer": cut})


def _sentencepiece(said: Mapping[str, Any], path: Path) -> str:
    """The tokenizer.json that Transformers makes of Llama's kind, without the files beside this one.

    As in llama.cpp, a blank goes before each piece of text between special tokens.
    """
    from tokenizers.normalizers import Prepend, Replace, Sequence
    from transformers import AutoTokenizer

    with TemporaryDirectory() as folder:
        (Path(folder) / "model.gguf").symlink_to(path.absolute())
        model = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf").backend_tokenizer
    before = [Prepend("▁")] if said.get(f"{_KEY}add_space_prefix", True) else []
    model.pre_tokenizer, model.normalizer = None, Sequence([*before, Replace(" ", "▁")])
    return str(model.to_str())


def gguf_settings(path: Path) -> dict[str, Any]:
    """Special tokens and chat template of a GGUF file, as `tokenizer_settings` gives those of a folder."""
    said, _ = open_gguf(path)
    texts, template = said.get(f"{_KEY}tokens"), said.get("tokenizer.chat_template")
    known = dict(enumerate(texts)) if isinstance(texts, list) else {}
    settings: dict[str, Any] = {"chat_template": template} if isinstance(template, str) else {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        number = said.get(f"{_KEY}{theirs}_token_id")
        if type(number) is int and isinstance(known.get(number), str):
            settings |= {f"{ours}_token": known[number], f"{ours}_token_id": number}
    return settings
