"""Documents in files, and a tokenizer for chats with a template beside it and Transformers' reading of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ttrain.data.library_tokenizer import train_bpe
from ttrain.data.settings import DocumentsConfig
from ttrain.data.sources import DocumentReader, find_sources


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = train_bpe(["Say hi twice, again and again. Be brief. user assistant system\n"] * 20, 300)
    for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        tokenizer = tokenizer.with_token(token)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    return folder


def rows(name: str, *values: Any) -> str:
    """Write a file of rows, and return its name."""
    Path(name).write_text("".join(json.dumps(value) + "\n" for value in values), "utf-8")
    return name


def config_of(*sources: str, **options: Any) -> DocumentsConfig:
    return DocumentsConfig(sources=list(sources), **{"tokenizer": "byte", **options})


def read(*sources: str, **options: Any) -> list[str]:
    """Return the texts of the documents."""
    config = config_of(*sources, **options)
    found = find_sources(config)
    return [document.text for document in DocumentReader(config).in_turn(found, [len] * len(found))]


def configured(folder: Path, template: Any) -> None:
    """Give the tokenizer of a folder a chat template."""
    described = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


def theirs(folder: Path, template: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=template, **special)
