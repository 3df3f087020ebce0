"""data=documents: documents with an end token, laid end to end and cut into sequences that do not overlap."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import DataError
from ttrain.core.folders import at_home, cache_folder
from ttrain.data.batches import Batch, Sizes, Split, TokenSequences, held_out, sample_numbers, shuffled_passes
from ttrain.data.chat.jinja import TEMPLATE_FILE
from ttrain.data.counter import Words
from ttrain.data.document_files import ENDS_FILE, MARKS_FILE, fill_documents
from ttrain.data.end_token import CONFIG_FILE
from ttrain.data.settings import DocumentsConfig, TokensConfig
from ttrain.data.sources import Source, find_sources, stamp
from ttrain.data.stream import DocumentStream, Places, WholeDocuments
from ttrain.data.text import require_context, with_notices
from ttrain.data.tokenizer import Ids, Tokenizer
from ttrain.data.tokens import HEADER_FILE, Bars, clear_partial, find_token_files, open_split, write_folder

_LAYOUT = 4  # of a cached folder; a new number makes all be written again
_QUIET_SECONDS = 1.0  # tokenizing that takes less shows no bar
_ADVICE = (
    "The tokenized documents are kept there for the next run. Make room, or name a folder that can be written: "
    "data.cache=<folder>."
)
# Keys that change neither tokens nor splits.
_FREE_KEYS = ("name", "sources", "order", "shuffle_buffer", "attention", "long_documents", "limit", "cache")


class DocumentDataset(TokenSequences):
    """Next-token prediction on the stream of documents.

    Training sequence n holds the tokens [n * context, (n + 1) * context) of the endless stream that the passes over the
    documents make; so no token is left out or read twice within a pass, and a sequence may hold parts of several
    documents, and the end of one pass with the start of the next. The last position of a sequence has no target (-1),
    since the token after it begins the next sequence. Held-out documents lie in the order in which they were read.

    With long_documents=cut or skip sequences hold whole documents instead, neighbours as they were read, and after them
    tokens that count for nothing; order=shuffled shuffles all these sequences anew for every pass.

    With attention=document every part of a document in a sequence is apart from the others: `positions` count from 0 in
    it, and its last token has no target.

    Raises DataError when a split is shorter than one sequence.
    """

    def __init__(
        self,
        splits: dict[str, Ids],
        ends: dict[str, NDArray[np.int64]],
        context: int,
        vocabulary: int,
        config: DocumentsConfig,
        tokenizer: Tokenizer,
        description: dict[str, Any],
        marks: dict[str, NDArray[np.uint8]] | None = None,
    ) -> None:
        for split, ids in splits.items():
            if len(ids) < context and config.long_documents == "split":
                advice = "raise data.held_out" if split == "val" else "give more documents"
                raise DataError(
                    f"the {split} documents have {len(ids)} token(s), fewer than one sequence of "
                    f"model.context={context}. To go on, {advice}, or set model.context to at most {len(ids)}."
                )
        self.vocabulary: int | None = vocabulary
        self.tokenizer: Tokenizer | None = tokenizer
        self._splits, self._config = splits, config
        group = None if config.order == "read" else config.shuffle_buffer or len(ends["train"])
        self._streams = {"train": DocumentStream(ends["train"], group), "val": DocumentStream(ends["val"], None)}
        self._ends, self._marks = ends, marks
        self._resize(context, 0, 0)
        self.description = {
            **with_notices(description, self._long()),
            "tokens": {split: len(ids) for split, ids in splits.items()},
            "vocabulary": vocabulary,
            **({"sequences": {split: len(whole) for split, whole in self._whole.items()}} if self._whole else {}),
            "order": config.order,
            "shuffle_buffer": config.shuffle_buffer if group is not None else None,
        }

    def batch(self, split: Split, seed: int, first: int, rows: int) -> Batch:
        """Arrays by name of field, int64 [rows, context]; the last target of a row is -1. See batches.Dataset."""
        places = np.stack(self._rows(split, seed, sample_numbers(first, rows)))
        tokens = np.where(places < 0, 0, self._splits[split][places]).astype(np.int64)
        learnt = places >= 0 if self._marks is None else (places >= 0) & (self._marks[split][places] > 0)
        targets = np.full_like(tokens, -1)
        targets[:, :-1] = np.where(learnt[:, 1:], tokens[:, 1:], -1)
        if self._config.attention == "sequence":
            return {"tokens": tokens, "targets": targets}
        begins, columns = self._streams[split].begins(places), np.arange(self.context)
        begins[:, 1:] |= (places[:, 1:] < 0) & (places[:, :-1] >= 0)
        targets[:, :-1][begins[:, 1:]] = -1
        positions = columns - np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
        return {"tokens": tokens, "targets": targets, "positions": positions}

    @property
    def val_samples(self) -> int:
        """See batches.Dataset."""
        return len(self._whole["val"]) if self._whole else len(self._splits["val"]) // self.context

    def _long(self) -> Iterator[str]:
        """What to tell of documents that do not fit into a sequence."""
        if count := sum(whole.long for whole in self._whole.values()):
            what = "are left out" if self._config.long_documents == "skip" else "lose their end"
            documents = sum(map(len, self._ends.values()))
            yield f"{count} of {documents} documents are longer than model.context={self.context} and {what}."
        if count := sum(self._silenced.values()):
            yield f"{count} of these lose all that the assistant says, so nothing is learnt of them."

    def _resize(self, context: int, sequences: int, tokens: int) -> None:
        super()._resize(context, sequences, tokens)
        if self._config.attention == "document":
            self.fields["positions"] = self.fields["tokens"]
        self._whole: dict[str, WholeDocuments] = {}
        if self._config.long_documents != "split":
            skip = self._config.long_documents == "skip"
            self._whole = {split: WholeDocuments(ends, context, skip) for split, ends in self._ends.items()}
        marks = self._marks if self._config.long_documents == "cut" else None
        self._silenced = {split: self._whole[split].silenced(given) for split, given in (marks or {}).items()}
        for split, whole in self._whole.items():
            if not len(whole) or self._silenced.get(split) == len(self._ends[split]):
                left = "no reply of the assistant" if len(whole) else "none"
                raise DataError(
                    f"every one of the {split} documents is longer than model.context={context}, so "
                    f"data.long_documents={self._config.long_documents} leaves {left}. Give a larger model.context, or "
                    f"data.long_documents={'split' if len(whole) else 'cut'}."
                )

    def _rows(self, split: str, seed: int, numbers: Words) -> list[Places]:
        """Where the tokens of sequences lie in their split."""
        if split == "val":
            numbers, first, offset = held_out(numbers, self.val_samples), 0, 0
        elif self._config.limit is not None:
            numbers, first, offset = numbers % np.uint64(self._config.limit), 0, 0
        else:
            first, offset = self._first, self._offset
        if not self._whole:
            starts = (offset + (int(number) - first) * self.context for number in numbers)
            return [self._streams[split].read(seed, start, self.context) for start in starts]
        whole, numbers = self._whole[split], numbers - np.uint64(first) + np.uint64(offset // self.context)
        if split == "train" and self._config.order == "shuffled":
            _, numbers = shuffled_passes(seed, numbers, len(whole))
        return [whole.read(int(number) % len(whole)) for number in numbers]


def open_documents(config: DocumentsConfig, sizes: Sizes) -> DocumentDataset:
    """The dataset of documents, tokenized now unless the cache has them. Raises DataError for what can't be used."""
    context = require_context(config.name, sizes)
    sources = find_sources(config)
    folder = tokenized(config, sources)
    try:
        files = find_token_files(TokensConfig(path=str(folder)))
        assert files.header is not None and files.tokenizer is not None
        splits, ends, marks = {}, {}, {}
        for split in ("train", "val"):
            if config.loss_on == "replies":
                marks[split] = _marks(folder / MARKS_FILE[split], int(files.header["splits"][split]["tokens"]))
            splits[split] = open_split(files, split, False)[0].view(np.ndarray)
            ends[split] = _ends(folder, split, files.header)
    except (DataError, KeyError) as error:
        raise DataError(f"{error} These are tokenized documents that can be made again: remove {folder}.") from None
    described = {**files.header["corpus"], "tokenizer": files.tokenizer.description}
    described |= {"dtype": files.dtype.name, "end_token": files.header["end_token"]}
    described = with_notices(described, (told for source in sources for told in source.notices))
    return DocumentDataset(splits, ends, context, files.vocabulary, config, files.tokenizer, described, marks or None)


def tokenized(config: DocumentsConfig, sources: list[Source]) -> Path:
    """The folder with the token files of a config's documents; written first where the cache has none.

    It is found again by path, size and time of change of every file, and by the keys that change tokens or splits.
    """
    base = cache_folder() / "documents" if config.cache is None else at_home(config.cache)
    stamped = stamp(sources)
    folder = base / _key(config, stamped)
    if os.path.isfile(folder / HEADER_FILE):
        return folder

    def fill(place: Path) -> dict[str, Any]:
        header = fill_documents(place, config, sources, Bars(delay=_QUIET_SECONDS))
        if stamp(sources) != stamped:
            raise DataError("data.sources changed while being read. Start again.")
        return header

    clear_partial(folder)
    try:
        write_folder(folder, fill, _ADVICE)
    except DataError:
        if not os.path.isfile(folder / HEADER_FILE):  # else another process was faster
            raise
    return folder


def _key(config: DocumentsConfig, stamped: list[list[Any]]) -> str:
    kept = {name: value for name, value in dataclasses.asdict(config).items() if name not in _FREE_KEYS}
    tokenizer = at_home(config.tokenizer)
    files = [tokenizer, *(tokenizer.with_name(name) for name in (CONFIG_FILE, TEMPLATE_FILE))]
    contents = [
        hashlib.sha256(file.read_bytes()).hexdigest() for file in files if os.access(file, os.R_OK) and file.is_file()
    ]
    text = json.dumps([_LAYOUT, stamped, kept, contents], sort_keys=True)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:32]


def _marks(file: Path, tokens: int) -> NDArray[np.uint8]:
    """Which tokens of a split are targets. Raises DataError for a file that is not the one that was written."""
    try:
        found = np.memmap(file, np.uint8, "r").view(np.ndarray)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {file}: {error}.") from None
    if len(found) != tokens:
        raise DataError(f"{file} has changed since it was written: it holds {len(found)} marks for {tokens} tokens.")
    return found


def _ends(folder: Path, split: str, header: dict[str, Any]) -> NDArray[np.int64]:
    """Where each document of a split ends. Raises DataError for a file that is not the one that was written."""
    file, known = folder / ENDS_FILE[split], header["splits"][split]
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or error}.") from None
    if hashlib.sha256(raw).hexdigest() != known["ends_sha256"]:
        raise DataError(f"{file} has changed since it was written: its SHA-256 differs.")
    return np.frombuffer(raw, "<u8").astype(np.int64)
