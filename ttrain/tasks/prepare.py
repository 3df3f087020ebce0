"""task=prepare: write a text of any size, piece by piece, into token files for data=tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ttrain.config.schema import Config
from ttrain.core.errors import DataError
from ttrain.core.folders import at_home
from ttrain.core.units import format_count
from ttrain.data.corpus import Corpus
from ttrain.data.document_files import fill_documents
from ttrain.data.settings import DocumentsConfig, TextConfig
from ttrain.data.sources import find_sources
from ttrain.data.text import encode_corpus
from ttrain.data.tokens import split_writers, write_folder, write_header

_ADVICE = "Make room or name another folder: prepare.dir=<folder>."


def run(config: Config) -> None:
    """Tokenize the corpus of `data` into `prepare.dir`, and say how to train on it."""
    # The config's checks hold it so.
    assert isinstance(config.data, TextConfig | DocumentsConfig) and config.prepare.dir is not None
    header = prepare(config.data, config.prepare.dir)
    for notice in header["corpus"].get("notices", ()):
        print(f"WARNING: {notice}")
    counts = ", ".join(f"{split} {format_count(part['tokens'])}" for split, part in header["splits"].items())
    print(f"{config.prepare.dir}: {counts} tokens of {header['vocabulary']} ids")
    keys: dict[str, object] = {"data": "tokens", "data.path": config.prepare.dir}
    if isinstance(config.data, DocumentsConfig):
        keys["data.order"] = "sequential"
    fewest, context = min(part["tokens"] for part in header["splits"].values()), getattr(config.model, "context", None)
    if context is not None and fewest <= context:
        keys["model.context"] = max(1, fewest - 1)
    print(f"train on it: {config.source.command(keys, without=['data', 'prepare'], task='train')}")


def prepare(config: TextConfig | DocumentsConfig, destination: Path | str, *, progress: bool = True) -> dict[str, Any]:
    """Tokenize a corpus into a folder that data=tokens reads, and return the content of its `tokens.json`.

    data=text, or data=documents, makes the same tokens and splits of the same config. Memory does not grow with the
    text, except for the word counts while BPE is learned and for some bytes per document. The folder appears once it is
    complete. Raises DataError where the corpus can't be used, and where the destination exists or can't be written.
    """
    final, delay = at_home(destination), 0.0 if progress else None
    if final.exists():
        raise DataError(f"{final} exists already. Give another folder, or remove it first.")
    if isinstance(config, DocumentsConfig):
        sources = find_sources(config)
        told = [notice for source in sources for notice in source.notices]
        return write_folder(final, lambda folder: fill_documents(folder, config, sources, delay, told), _ADVICE)
    corpus = Corpus(config)
    return write_folder(final, lambda folder: _fill(folder, corpus, config, delay), _ADVICE)


def _fill(folder: Path, corpus: Corpus, config: TextConfig, delay: float | None) -> dict[str, Any]:
    with split_writers(folder) as writers:
        tokenizer, described = encode_corpus(config, corpus, delay, lambda split, ids: writers[split].add(ids))
        for split, writer in writers.items():
            if not writer.tokens:
                more = "Give more text or another data.held_out."
                raise DataError(f"the {split} split of {corpus.found.given} has no tokens. {more}")
        splits = {split: writer.finish() for split, writer in writers.items()}
    return write_header(folder, tokenizer, splits, described)
