"""Text that is tokenized at the start of a run and kept in memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from ttrain.data.corpus import Corpus
from ttrain.data.formats.compressed import OnBytes
from ttrain.data.library_tokenizer import read_tokenizer, train_bpe
from ttrain.data.settings import TOKENIZERS, TextConfig
from ttrain.data.tokenizer import (
    SAMPLE_CHARACTERS,
    ByteTokenizer,
    CharTokenizer,
    Ids,
    Tokenizer,
    check_round_trip,
    named_place,
)

# Bytes per byte of text while its ids are gathered: two copies of at most one 16-bit id per byte.
_HELD_PER_BYTE = 4
BPE_BYTES = 1 << 30  # merges hardly change beyond so much text, while learning them takes memory with it


def open_text(config: TextConfig, sizes: Sizes) -> TokenDataset:
    """Open the dataset of a text corpus. Raises DataError for a text that can't be used; see Corpus, TokenDataset."""
    context = require_context(config.name, sizes)
    corpus = Corpus(config)
    _require_memory(corpus)
    tokenizer = choose_tokenizer(config, corpus)
    digest = hashlib.sha256()
    train = _gather(encode_split(corpus, tokenizer, "train", digest.update), tokenizer)
    val = _gather(encode_split(corpus, tokenizer, "val", digest.update), tokenizer)
    corpus.require_unchanged()
    description = describe(corpus, tokenizer, digest.hexdigest())
    return TokenDataset(train, val, context, tokenizer.vocabulary, config, tokenizer=tokenizer, description=description)


def choose_tokenizer(config: TextConfig, corpus: Corpus, on_bytes: OnBytes | None = None) -> Tokenizer:
    """Return the tokenizer that a config names, made from the corpus where it has to be.

    Characters are taken from the whole corpus, so that held-out text has no unseen one. Merges of byte-pair encoding
    are learnt from the training split alone, and cover every text because bytes do. Raises DataError for a tokenizer
    that does not fit the corpus; see check_round_trip.
    """
    learnt = corpus.text(0, learning_bytes(config, corpus), on_bytes)
    tokenizer: Tokenizer
    if config.tokenizer == "byte":
        tokenizer = ByteTokenizer()
    elif config.tokenizer == "char":
        tokenizer = CharTokenizer.of(learnt)
    elif config.tokenizer == "bpe":
        tokenizer = train_bpe(learnt, config.vocabulary_size)
    else:
        tokenizer = named_tokenizer(config.tokenizer)
    with named_place(corpus.place):
        tokenizer.notices += tuple(check_round_trip(tokenizer, corpus.samples(SAMPLE_CHARACTERS)))
    return tokenizer


def named_tokenizer(path: str) -> Tokenizer:
    """Read the tokenizer in a file that data.tokenizer names. Raises DataError where there is none."""
    if not os.path.exists(os.path.expanduser(path)):
        kinds = ", ".join(TOKENIZERS)
        raise DataError(f"data.tokenizer={path} is neither {kinds} nor the path of a tokenizer.json.")
    tokenizer = read_tokenizer(path)
    tokenizer.config = tokenizer_settings(at_home(path))
    return tokenizer


def learning_bytes(config: TextConfig, corpus: Corpus) -> int:
    """Return how many bytes of the corpus, from its start, `choose_tokenizer` reads."""
    if config.tokenizer == "char":
        return corpus.size
    return corpus.learning_end(BPE_BYTES) if config.tokenizer == "bpe" else 0


def encode_split(corpus: Corpus, tokenizer: Tokenizer, split: str, on_bytes: OnBytes) -> Iterator[Ids]:
    """Yield the ids of one split of a corpus, piece by piece. No token spans the boundary of the splits."""
    start, stop = (0, corpus.boundary) if split == "train" else (corpus.boundary, corpus.size)
    with named_place(corpus.place):
        yield from tokenizer.encode_pieces(corpus.text(start, stop, on_bytes))


def describe(corpus: Corpus, tokenizer: Tokenizer, sha256: str) -> dict[str, Any]:
    """Return a corpus's entry in a run's record; `sha256` is that of its bytes, separators included."""
    described = {
        "source": corpus.source,
        "files": len(corpus.files),
        "bytes": {"train": corpus.boundary, "val": corpus.size - corpus.boundary},
        "sha256": sha256,
        "tokenizer": tokenizer.description,
    }
    return with_notices(described, (*corpus.notices, *tokenizer.notices))


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


def _gather(parts: Iterator[Ids], tokenizer: Tokenizer) -> Ids:
    return np.concatenate([np.zeros(0, tokenizer.dtype), *parts])


def _require_memory(corpus: Corpus) -> None:
    available, needed = psutil.virtual_memory().available, corpus.size * _HELD_PER_BYTE
    if needed > available:
        raise DataError(
            f"data.path={corpus.source} has {format_bytes(corpus.size)} of text, which needs "
            f"{format_bytes(needed)} of memory once tokenized, and {format_bytes(available)} are free. "
            "Make token files of it with task=prepare and train on those with data=tokens, or set data.max_bytes."
        )
