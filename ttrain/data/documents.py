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

from ttrain.core.errors import DataError, raised_as
from ttrain.core.files import sha256_file
from ttrain.core.folders import at_home, cache_folder
from ttrain.data.batches import Batch, Sizes, Split, TokenSequences, held_out, require_length, sample_numbers
from ttrain.data.chat.jinja import TEMPLATE_FILE
from ttrain.data.corpus import FileList
from ttrain.data.counter import Words
from ttrain.data.document_files import fill_documents
from ttrain.data.end_token import CONFIG_FILE
from ttrain.data.examples import open_examples
from ttrain.data.sequences.mixture import Mixture
from ttrain.data.sequences.stream import DocumentStream, Places, WholeDocuments
from ttrain.data.settings import DocumentsConfig, TokensConfig
from ttrain.data.sources import find_sources
from ttrain.data.text import require_context, with_notices
from ttrain.data.tokenizer import Ids, Tokenizer
from ttrain.data.tokens import ENDS_FILE, HEADER_FILE, MARKS_FILE, find_token_files, open_ids, open_split, write_folder

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

    Training sequence n holds the tokens [n * context, (n + 1) * context) of the endless stream that the epochs make. So
    an epoch reads every token once, and a sequence may hold parts of several documents, or the end of one epoch and the
    start of the next. The last position of a sequence has no target (-1), since the token after it begins the next
    sequence. Held-out documents lie in the order in which they were read.

    With long_documents=cut or skip sequences hold whole documents instead, neighbours in the stream, and after them
    tokens that count for nothing; order=shuffled shuffles all documents anew for every epoch.

    With attention=document the parts of documents in a sequence are separate: `positions` count from 0 in each, and its
    last token has no target.

    Raises DataError when a split is shorter than one sequence.
    """

    def __init__(
        self,
        splits: dict[str, Ids],
        ends: dict[str, NDArray[np.int64]],
        context: int,
        config: DocumentsConfig,
        tokenizer: Tokenizer,
        description: dict[str, Any],
        marks: dict[str, NDArray[np.uint8]] | None = None,
    ) -> None:
        for split, ids in splits.items():
            if config.long_documents == "split":
                advice = "Raise data.held_out" if split == "val" else "Give more documents"
                require_length(split, len(ids), context, context, advice)
        self.vocabulary: int | None = tokenizer.vocabulary
        self.tokenizer: Tokenizer | None = tokenizer
        self._splits, self._config = splits, config
        self._packs = config.long_documents != "split"
        group = None if config.order == "sequential" else len(ends["train"])
        if group is not None and not self._packs:
            group = config.shuffle_buffer or group
        self._streams = {"train": DocumentStream(ends["train"], group), "val": DocumentStream(ends["val"], None)}
        self._ends, self._marks = ends, marks
        self._resize(context, 0, 0)
        self.description = {
            **with_notices(description, self._long()),
            "tokens": {split: len(ids) for split, ids in splits.items()},
            "vocabulary": tokenizer.vocabulary,
            **({"sequences": {split: len(self._whole(split)) for split in splits}} if self._packs else {}),
            "order": config.order,
            "shuffle_buffer": config.shuffle_buffer if group is not None else None,
        }

    def batch(self, split: Split, seed: int, first: int, rows: int) -> Batch:
        """Return arrays by field, int64 [rows, context]; the last target of a row is -1. See batches.Dataset."""
        places = np.stack(self._rows(split, seed, sample_numbers(first, rows)))
        tokens = np.where(places < 0, 0, self._splits[split][places]).astype(np.int64)
        learned = places >= 0 if self._marks is None else (places >= 0) & (self._marks[split][places] > 0)
        targets = np.full_like(tokens, -1)
        targets[:, :-1] = np.where(learned[:, 1:], tokens[:, 1:], -1)
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
        return len(self._whole("val")) if self._packs else len(self._splits["val"]) // self.context

    def position(self, seed: int, number: int) -> int:
        """See TokenSequences: a token of the stream, in which long documents are whole."""
        if not self._packs or self._config.limit is not None:
            return super().position(seed, number)
        return self._whole("train", seed).position(number - self._first)

    def _long(self) -> Iterator[str]:
        """Tell of documents that do not fit into a sequence."""
        counts = [self._too_long(split) for split in self._ends]
        long, silenced = (sum(each) for each in zip(*counts, strict=True))
        if long:
            what = "are left out" if self._config.long_documents == "skip" else "lose their end"
            documents = sum(map(len, self._ends.values()))
            yield f"{long} of {documents} documents are longer than model.context={self.context} and {what}."
        if silenced:
            yield f"{silenced} of these lose all that the assistant says, so nothing is learned of them."

    def _too_long(self, split: str) -> tuple[int, int]:
        """Return how many documents are longer than a sequence, and how many of these lose every target by that."""
        lengths = np.diff(self._ends[split], prepend=0)
        long = lengths > self.context
        if not self._packs or self._marks is None or self._config.long_documents == "skip":
            return int(self._packs and long.sum()), 0
        starts, marks = (self._ends[split] - lengths)[long], self._marks[split]
        return len(starts), sum(not marks[start + 1 : start + self.context].any() for start in starts)

    def _resize(self, context: int, sequences: int, tokens: int) -> None:
        super()._resize(context, sequences, tokens)
        if self._config.attention == "document":
            self.fields["positions"] = self.fields["tokens"]
        self._packed: dict[tuple[str, int], WholeDocuments] = {}
        for split, ends in self._ends.items():
            long, silenced = self._too_long(split)
            none = self._config.long_documents == "skip" and long == len(ends)
            if none or silenced == len(ends):
                left = "none" if none else "no reply of the assistant"
                every = f"every one of the {split} documents is longer than model.context={context}"
                leaves = f"data.long_documents={self._config.long_documents} leaves {left}"
                other = "cut" if none else "split"
                raise DataError(f"{every}, so {leaves}. Give a larger model.context, or data.long_documents={other}.")

    def _whole(self, split: str, seed: int = 0) -> WholeDocuments:
        """Return the sequences of whole documents of a split, in the training split from where this part begins."""
        if (split, seed) not in self._packed:
            start = self._offset if split == "train" and self._config.limit is None else 0
            skip = self._config.long_documents == "skip"
            self._packed[split, seed] = WholeDocuments(self._streams[split], self.context, skip, seed, start)
        return self._packed[split, seed]

    def _rows(self, split: str, seed: int, numbers: Words) -> list[Places]:
        """Return where the tokens of sequences lie in their split."""
        first, offset = self._first, self._offset
        if split == "val":
            numbers, seed, first, offset = held_out(numbers, self.val_samples), 0, 0, 0
        elif self._config.limit is not None:
            numbers, first, offset = numbers % np.uint64(self._config.limit), 0, 0
        if self._packs:
            return [self._whole(split, seed).read(int(number) - first) for number in numbers]
        starts = (offset + (int(number) - first) * self.context for number in numbers)
        return [self._streams[split].read(seed, start, self.context) for start in starts]


def open_documents(config: DocumentsConfig, sizes: Sizes) -> Any:
    """Open a DocumentDataset, a Mixture of weighted sources, or rows for an objective.

    Documents are tokenized first unless the cache has them.

    Raises DataError for sources that can't be used.
    """
    context = require_context(config.name, sizes)
    if sizes.rows is not None:
        return open_examples(config, context, sizes.rows)
    sources = find_sources(config)
    folder = tokenized(config, sources)
    splits, ends, marks = {}, {}, {}
    try:
        files = find_token_files(TokensConfig(path=str(folder)))
        assert files.header is not None and files.tokenizer is not None
        for split in ("train", "val"):
            splits[split] = open_split(files, split, False)[0].view(np.ndarray)
            found = open_ids(folder / ENDS_FILE[split], np.dtype("<u8"))
            if hashlib.sha256(found.data).hexdigest() != files.header["splits"][split]["ends_sha256"]:
                raise DataError(f"{folder / ENDS_FILE[split]} has changed since it was written: its SHA-256 differs.")
            ends[split] = found.astype(np.int64).view(np.ndarray)
            if config.loss_on == "replies":
                marks[split] = open_ids(folder / MARKS_FILE[split], np.dtype(np.uint8)).view(np.ndarray)
                if len(marks[split]) != len(splits[split]):
                    raise DataError(f"{folder / MARKS_FILE[split]} has changed since it was written.")
    except (DataError, KeyError) as error:
        raise DataError(f"{error} These are tokenized documents that can be made again: remove {folder}.") from None
    described = {**files.header["corpus"], "tokenizer": files.tokenizer.description}
    described |= {"dtype": files.dtype.name, "end_token": files.header["end_token"]}
    described = with_notices(described, (told for source in sources for told in source.notices))
    if not config.weights:
        return DocumentDataset(splits, ends, context, config, files.tokenizer, described, marks or None)
    parts, begins, counts = {}, dict.fromkeys(splits, (0, 0)), described.pop("by_source")
    for number, entry in enumerate(config.entries):
        documents = {split: counts[split][number] for split in splits}
        own: list[dict[str, Any]] = [{}, {}, {}]  # ids, ends and marks by split
        for split, (document, token) in begins.items():  # those of the sources before
            lasts = ends[split][document : document + documents[split]]
            begins[split], cut = (document + len(lasts), lasts[-1]), slice(token, lasts[-1])
            own[0][split], own[1][split] = splits[split][cut], lasts - token
            own[2] |= {split: marks[split][cut]} if marks else {}
        rest = context, config, files.tokenizer, {"weight": entry.weight, "documents": documents}, own[2] or None
        with raised_as(DataError, f"data.sources: {entry.path}", of=DataError):
            parts[str(entry.name)] = DocumentDataset(own[0], own[1], *rest)
    return Mixture(parts, config.weights, described)


def tokenized(config: DocumentsConfig, sources: list[FileList]) -> Path:
    """Return the folder with the token files of a config's documents; write it first where the cache lacks it.

    Its name depends on path, size and time of change of every file, and on the keys that change tokens or splits.
    """
    base = cache_folder() / "documents" if config.cache is None else at_home(config.cache)
    stamps = [[source.given, *source.stamps()] for source in sources]
    kept = {name: value for name, value in dataclasses.asdict(config).items() if name not in _FREE_KEYS}
    tokenizer = at_home(config.tokenizer)
    files = [tokenizer, *(tokenizer.with_name(name) for name in (CONFIG_FILE, TEMPLATE_FILE))]
    contents = [sha256_file(file) for file in files if os.access(file, os.R_OK) and file.is_file()]
    cut = [[bool(each.weight), each.limit] for each in config.entries]
    key = json.dumps([_LAYOUT, stamps, kept, contents, *(cut if any(map(any, cut)) else [])], sort_keys=True).encode(
        errors="backslashreplace"
    )
    folder = base / hashlib.sha256(key).hexdigest()[:32]

    def fill(place: Path) -> dict[str, Any]:
        header = fill_documents(place, config, sources, _QUIET_SECONDS)
        if [[source.given, *source.stamps()] for source in sources] != stamps:
            raise DataError("data.sources changed while being read. Start again.")
        return header

    if not os.path.isfile(folder / HEADER_FILE):
        try:
            write_folder(folder, fill, _ADVICE)
        except DataError:
            if not os.path.isfile(folder / HEADER_FILE):  # else another process was faster
                raise
    return folder
