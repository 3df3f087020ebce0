"""Token files of a text of any size, written piece by piece."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ttrain.core.errors import DataError
from ttrain.core.folders import at_home
from ttrain.data.corpus import Corpus
from ttrain.data.document_files import fill_documents
from ttrain.data.formats.compressed import OnBytes
from ttrain.data.settings import DocumentsConfig, TextConfig
from ttrain.data.sources import find_sources
from ttrain.data.text import choose_tokenizer, describe, encode_split, learning_bytes
from ttrain.data.tokenizer import Tokenizer
from ttrain.data.tokens import FILES, Bars, SplitWriter, write_folder, write_header

_ADVICE = "Make room or name another folder: prepare.dir=<folder>."


def prepare(config: TextConfig | DocumentsConfig, destination: Path | str, *, progress: bool = True) -> dict[str, Any]:
    """Tokenize a corpus into a folder that data=tokens reads, and return the content of its `tokens.json`.

    data=text, or data=documents, makes the same tokens and splits of the same config. Memory does not grow with the
    text, except for the word counts while BPE is learnt and for some bytes per document. The folder appears once it is
    complete. Raises DataError where the corpus can't be used, and where the destination exists or can't be written.
    """
    final = at_home(destination)
    if final.exists():
        raise DataError(f"{final} exists already. Give another folder, or remove it first.")
    if isinstance(config, DocumentsConfig):
        sources = find_sources(config)
        told = [notice for source in sources for notice in source.notices]
        return write_folder(
            final, lambda folder: fill_documents(folder, config, sources, Bars(progress), told), _ADVICE
        )
    corpus = Corpus(config)
    return write_folder(final, lambda folder: _fill(folder, corpus, config, Bars(progress)), _ADVICE)


def _fill(folder: Path, corpus: Corpus, config: TextConfig, bars: Bars) -> dict[str, Any]:
    with bars.open(learning_bytes(config, corpus), "learning the tokenizer") as shown:
        tokenizer = choose_tokenizer(config, corpus, lambda raw: shown.update(len(raw)))
    digest = hashlib.sha256()
    splits = {}
    with bars.open(corpus.size, "writing tokens") as shown:

        def on_bytes(raw: bytes) -> None:
            digest.update(raw)
            shown.update(len(raw))

        for split in FILES:
            splits[split] = _write_split(folder, corpus, tokenizer, split, on_bytes)
    corpus.require_unchanged()
    return write_header(folder, tokenizer, splits, describe(corpus, tokenizer, digest.hexdigest()))


def _write_split(folder: Path, corpus: Corpus, tokenizer: Tokenizer, split: str, on_bytes: OnBytes) -> dict[str, Any]:
    with SplitWriter(folder, split) as writer:
        for ids in encode_split(corpus, tokenizer, split, on_bytes):
            writer.add(ids.astype(tokenizer.dtype, copy=False))
        if not writer.tokens:
            raise DataError(
                f"the {split} split of {corpus.source} has no tokens. Give more text or another data.held_out."
            )
        return writer.finish()
