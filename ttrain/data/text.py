"""Text that is tokenized at the start of a run and kept in memory, or written to token files of any size."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from ttrain.core.errors import DataError
from ttrain.core.folders import at_home
from ttrain.core.units import format_bytes
from ttrain.data.batches import Sizes, TokenDataset
from ttrain.data.chat.jinja import tokenizer_settings
from ttrain.data.corpus import Corpus, byte_bar
from ttrain.data.library_tokenizer import read_tokenizer, train_bpe
from ttrain.data.settings import TOKENIZERS, DocumentsConfig, TextConfig
from ttrain.data.tokenizer import ByteTokenizer, CharTokenizer, Ids, Tokenizer, check_round_trip, named_place

# Bytes per byte of text while its ids are gathered: two copies of at most one 16-bit id per byte.
_HELD_PER_BYTE = 4
BPE_BYTES = 1 << 30  # merges hardly change beyond so much text, while learning them takes memory with it


def open_text(config: TextConfig, sizes: Sizes) -> TokenDataset:
    """Open the dataset of a text corpus. Raises DataError for a text that can't be used; see Corpus, TokenDataset."""
    context = require_context(config.name, sizes)
    corpus = Corpus(config)
    available, needed = psutil.virtual_memory().available, corpus.size * _HELD_PER_BYTE
    if needed > available:
        room = f"{format_bytes(needed)} of memory once tokenized, and {format_bytes(available)} are free"
        mend = "Train on what task=prepare makes of it, with data=tokens, or set data.max_bytes"
        raise DataError(f"data.path={corpus.found.given} needs {room}. {mend}.")
    parts: dict[str, list[Ids]] = {"train": [], "val": []}
    tokenizer, described = encode_corpus(config, corpus, None, lambda split, ids: parts[split].append(ids))
    train, val = (np.concatenate([np.zeros(0, tokenizer.dtype), *part]) for part in parts.values())
    description = {**described, "tokenizer": tokenizer.description}
    return TokenDataset(train, val, context, tokenizer.vocabulary, config, tokenizer=tokenizer, description=description)


def encode_corpus(
    config: TextConfig, corpus: Corpus, delay: float | None, add: Callable[[str, Ids], object]
) -> tuple[Tokenizer, dict[str, Any]]:
    """Call `add` with each split and its ids, piece by piece. No token spans the boundary of the splits.

    Return the tokenizer, and the corpus's entry in a run's record; its sha256 is that of its bytes, separators
    included. For `delay` see byte_bar. Raises DataError for a tokenizer that does not fit the corpus.
    """
    # Held-out text has no unseen character, since these are taken from all of it. Merges are learned from the training
    # split alone, and cover every text because bytes do.
    sizes = {"char": corpus.size, "bpe": corpus.character_start(min(corpus.boundary, BPE_BYTES))}
    learned = sizes.get(config.tokenizer, 0)
    digest = hashlib.sha256()
    with named_place(corpus.place):
        with byte_bar(learned, "learning the tokenizer", delay) as on_bytes:
            tokenizer = chosen_tokenizer(config, corpus.text(0, learned, on_bytes))
        tokenizer.notices += tuple(check_round_trip(tokenizer, corpus.samples()))
        with byte_bar(corpus.size, "writing tokens", delay) as on_bytes:

            def read(raw: bytes) -> None:
                digest.update(raw)
                on_bytes(raw)

            for split, start, stop in (("train", 0, corpus.boundary), ("val", corpus.boundary, corpus.size)):
                for ids in tokenizer.encode_pieces(corpus.text(start, stop, read)):
                    add(split, ids)
    corpus.require_unchanged()
    described = {
        "source": corpus.found.given,
        "files": len(corpus.found.files),
        "bytes": {"train": corpus.boundary, "val": corpus.size - corpus.boundary},
        "sha256": digest.hexdigest(),
    }
    return tokenizer, with_notices(described, (*corpus.notices, *tokenizer.notices))


def chosen_tokenizer(config: TextConfig | DocumentsConfig, texts: Iterable[str]) -> Tokenizer:
    """Return the tokenizer that a config names; that of characters and that of merges are learned from the texts."""
    if config.tokenizer == "byte":
        return ByteTokenizer()
    if config.tokenizer == "char":
        return CharTokenizer.of(texts)
    return train_bpe(texts, config.vocabulary_size) if config.tokenizer == "bpe" else named_tokenizer(config.tokenizer)


def named_tokenizer(path: str) -> Tokenizer:
    """Read the tokenizer in a file that data.tokenizer names. Raises DataError where there is none."""
    if not os.path.exists(os.path.expanduser(path)):
        kinds = ", ".join(TOKENIZERS)
        raise DataError(f"data.tokenizer={path} is neither {kinds} nor the path of a tokenizer.json.")
    tokenizer = read_tokenizer(path)
    tokenizer.config = tokenizer_settings(at_home(path))
    return tokenizer


def with_notices(described: dict[str, Any], notices: Iterable[str]) -> dict[str, Any]:
    """Return a description of data with further `notices`, which a run tells at its start."""
    told = [*described.get("notices", ()), *notices]
    return {**described, "notices": told} if told else described


def byte_counter(tokenizer: Tokenizer, end: int | None) -> Callable[[Mapping[str, Any]], int]:
    """Return a function that counts the UTF-8 bytes of the text that the targets of a batch stand for.

    No byte stands for targets below zero, for ids that the tokenizer lacks, for `end`, which ends a document, and for
    the tokens that the tokenizer puts before a text.
    """
    around = [*tokenizer.start, *([] if end is None else [end])]

    @cache  # at the first call: a large vocabulary takes a second
    def tables() -> NDArray[np.int64]:
        found = np.pad(np.stack(tokenizer.byte_counts()), ((0, 0), (0, 1)))
        found[:, around] = 0
        return found

    def count(batch: Mapping[str, Any]) -> int:
        tokens, targets = batch["tokens"], batch["targets"]
        valid = targets >= 0
        starts = np.isin(tokens[valid], around).astype(np.intp)
        return int(tables()[starts, np.minimum(targets[valid], tokenizer.vocabulary)].sum())

    return count


def require_context(name: str, sizes: Sizes) -> int:
    """Return the length of a training sequence. Raises DataError where the model takes no sequences."""
    if sizes.context is None:
        raise DataError(f"data={name} gives sequences of tokens, which this model does not take. Use data=regression.")
    return sizes.context
