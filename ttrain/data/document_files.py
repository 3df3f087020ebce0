"""Token files of documents, written in two passes over the sources, in three where byte-pair encoding is learnt.

Beside the files of a prepared folder there are `train.ends` and `val.ends`: the place in the ids of its split at which
each document ends, little-endian uint64, the end token included. With data.loss_on=replies there are `train.marks` and
`val.marks` as well: a byte for every token, 1 where it is a target.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import tee
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import DataError
from ttrain.core.folders import at_home
from ttrain.data.chat.jinja import chat_settings
from ttrain.data.end_token import EndToken, with_end_token
from ttrain.data.formats.compressed import OnBytes
from ttrain.data.library_tokenizer import LibraryTokenizer, Marks, train_bpe
from ttrain.data.settings import DocumentsConfig
from ttrain.data.sources import Document, DocumentReader, Skipped, Source, has_rows
from ttrain.data.text import BPE_BYTES, named_tokenizer, with_notices
from ttrain.data.tokenizer import (
    SAMPLE_CHARACTERS,
    ByteTokenizer,
    CharTokenizer,
    Ids,
    Tokenizer,
    check_round_trip,
    named_place,
)
from ttrain.data.tokens import FILES, Bars, SplitWriter, write_header


@dataclass
class _Scan:
    """Findings of the first pass: the documents that are held out, and the checksum of all that was read."""

    held_out: NDArray[np.bool_]  # in reading order
    characters: CharTokenizer | None
    skipped: Skipped
    sha256: str
    bytes: int
    samples: list[str]  # the starts of documents 1, 2, 4, 8 and so on


def fill_documents(
    folder: Path, config: DocumentsConfig, sources: list[Source], bars: Bars, notices: Iterable[str] = ()
) -> dict[str, Any]:
    """Write the token files of a config's documents into an empty folder, and return the content of `tokens.json`.

    `notices` are kept in it, besides those of what was read.
    """
    total = sum(source.size for source in sources)
    with bars.open(total, "reading documents") as shown:
        scan = _scan(config, sources, lambda raw: shown.update(len(raw)))
    with bars.open(total if config.tokenizer == "bpe" else 0, "learning the tokenizer") as shown:
        made, file = _tokenizer(config, sources, scan, lambda raw: shown.update(len(raw)))
    tokenizer, end = with_end_token(made, config.end_token, file)
    if config.template == "tokenizer" and file is not None:
        tokenizer.config = {"eos_token": end.text, **chat_settings(file)}
    else:  # a template beside the tokenizer is not the one that the texts are made with
        tokenizer.config = {**made.config, "eos_token": end.text}
        tokenizer.config.pop("chat_template", None)
    encoder = _Encoder(made, tokenizer, end, config.loss_on == "replies")
    with named_place(lambda wanted: _place(config, sources, wanted)):
        tokenizer.notices += tuple(check_round_trip(tokenizer, scan.samples))
    with bars.open(total, "writing tokens") as shown, named_place(lambda wanted: _place(config, sources, wanted)):
        splits = _write_splits(folder, config, sources, scan.held_out, encoder, lambda raw: shown.update(len(raw)))
    held = int(scan.held_out.sum())
    described = {
        "source": [source.given for source in sources],
        "files": sum(len(source.files) for source in sources),
        "bytes": scan.bytes,
        "documents": {"train": len(scan.held_out) - held, "val": held},
        "blank_documents": scan.skipped.blank,
        "bad_rows": scan.skipped.bad_rows,
        "sha256": scan.sha256,
        "tokenizer": tokenizer.description,
    }
    if scan.skipped.first_bad is not None:
        described["first_bad_row"] = scan.skipped.first_bad
    described = with_notices(described, [*tokenizer.notices, *scan.skipped.notices(), *notices])
    return write_header(folder, tokenizer, splits, described, end_token=vars(end))


def content_hash(text: str) -> int:
    """Return 64 bits that depend on a document's content."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def held_out_documents(hashes: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Return a mask of the documents that are held out: those with the lowest hashes, so that equal ones never part.

    Both splits get a document at least. Raises DataError where all documents are equal or there is only one.
    """
    count = len(hashes)
    wanted = min(max(1, round(share * count)), count)
    held: NDArray[np.bool_] = hashes <= np.partition(hashes, wanted - 1)[wanted - 1]
    if held.all():
        held = hashes < hashes.max()  # equal documents took more than their share
    if not held.any():
        what = "one document" if count == 1 else f"{count} documents, all equal,"
        raise DataError(f"data.sources has {what} and needs at least two: one to train on, one held out.")
    return held


def _scan(config: DocumentsConfig, sources: list[Source], on_bytes: OnBytes) -> _Scan:
    """Read everything once."""
    digests = [hashlib.sha256() for _ in sources]
    size = 0

    def counted(digest: Any, raw: bytes) -> None:
        nonlocal size
        size += len(raw)
        digest.update(raw)
        on_bytes(raw)

    reader, hashes, samples = DocumentReader(config), array("Q"), list[str]()

    def texts() -> Iterator[str]:
        for document in reader.in_turn(sources, [partial(counted, digest) for digest in digests]):
            if not len(hashes) & (len(hashes) + 1):
                samples.append(document.text[:SAMPLE_CHARACTERS])
            hashes.append(content_hash(document.text))
            yield document.text

    characters = None
    if config.tokenizer == "char":
        characters = CharTokenizer.of(texts())
    else:
        for _ in texts():
            pass
    if not hashes:
        left_out = f" and {reader.skipped.bad_rows} rows that can't be used" if reader.skipped.bad_rows else ""
        raise DataError(f"data.sources has only blank documents{left_out}. Give files with text.{_hints(sources)}")
    try:
        held = held_out_documents(np.frombuffer(hashes, np.uint64), config.held_out)
    except DataError as error:
        whole = any(not has_rows(file) for source in sources for file in source.files)
        split = " data.delimiter splits a text file: it is the line between two documents, '' for a blank one."
        hint = split if whole and config.delimiter is None else ""
        raise DataError(f"{error}{hint}{_hints(sources)}") from None
    joined = hashlib.sha256("".join(digest.hexdigest() for digest in digests).encode()).hexdigest()
    return _Scan(held, characters, reader.skipped, joined, size, samples)


def _hints(sources: list[Source]) -> str:
    """Return the notices of the sources, which may say why there is so little in them."""
    return "".join(f" {notice}" for source in sources for notice in source.notices)


def _place(config: DocumentsConfig, sources: list[Source], wanted: re.Pattern[str]) -> str:
    """Return the place of the first document with a match, and the number of its character."""
    for document in DocumentReader(config).in_turn(sources, [lambda _: None] * len(sources)):
        if found := wanted.search(document.text):
            return f"{document.place}, character {found.start() + 1} of the document"
    return f"data.sources={','.join(source.given for source in sources)}"


def _tokenizer(
    config: DocumentsConfig, sources: list[Source], scan: _Scan, on_bytes: OnBytes
) -> tuple[Tokenizer, Path | None]:
    """Return the tokenizer that a config names, and the file that it was read from."""
    if config.tokenizer == "byte":
        return ByteTokenizer(), None
    if scan.characters is not None:
        return scan.characters, None
    if config.tokenizer == "bpe":
        return train_bpe(_training_text(config, sources, scan, on_bytes), config.vocabulary_size), None
    return named_tokenizer(config.tokenizer), at_home(config.tokenizer)


@dataclass(frozen=True)
class _Encoder:
    """Encodes documents, the end token included.

    `made` is the tokenizer before it got an end token. That of characters or bytes is quick, and agrees with `whole` on
    every text without the end token.
    """

    made: Tokenizer
    whole: Tokenizer
    end: EndToken
    replies: bool  # only the assistant's replies are learnt of a conversation

    def encode(self, documents: Iterable[Document]) -> Iterator[tuple[Document, Ids, Marks | None]]:
        """Yield each document with its ids and, where `replies` count alone, the marks of its targets.

        A text begins with the tokens that the tokenizer puts before one, a conversation as its template writes it.
        """
        documents, again = tee(documents)
        start, ending = (np.array(added, self.whole.dtype) for added in (self.whole.start, [self.end.id]))
        for document, (ids, marks) in zip(documents, self._marked(again), strict=True):
            if len(ids) and document.replies is None and not np.array_equal(ids[: len(start)], start):
                ids = np.concatenate([start, ids])
                marks = None if marks is None else np.append(np.ones(len(start), np.bool_), marks)
            if len(ids) and ids[-1] != self.end.id and not document.closed:
                ids = np.concatenate([ids, ending])
                marks = None if marks is None else np.append(marks, True)
            yield document, ids, marks

    def _marked(self, documents: Iterator[Document]) -> Iterator[tuple[Ids, Marks | None]]:
        if not self.replies:
            yield from ((ids, None) for ids in self._ids(document.text for document in documents))
            return
        library = self.whole if isinstance(self.whole, LibraryTokenizer) else LibraryTokenizer(self.whole.to_json())
        for document in documents:
            parts = [(0, len(document.text))] if document.replies is None else document.replies
            yield from library.encode_marked([(document.text, parts)])

    def _ids(self, texts: Iterable[str]) -> Iterator[Ids]:
        if not isinstance(self.made, CharTokenizer | ByteTokenizer):
            yield from self.whole.encode_documents(texts)
            return
        for text in texts:
            tokenizer = self.whole if self.end.text in text else self.made
            (ids,) = tokenizer.encode_documents([text])
            yield ids.astype(self.whole.dtype, copy=False)


def _training_text(config: DocumentsConfig, sources: list[Source], scan: _Scan, on_bytes: OnBytes) -> Iterator[str]:
    """Yield the training documents, each with a line break after it, so that no merge spans two."""
    taken = 0
    documents = DocumentReader(config).in_turn(sources, [on_bytes] * len(sources))
    for document, left_out in zip(documents, scan.held_out, strict=False):
        if not left_out:
            yield document.text + "\n"
            taken += len(document.text)
            if taken > BPE_BYTES:
                return


def _write_splits(
    folder: Path,
    config: DocumentsConfig,
    sources: list[Source],
    held_out: NDArray[np.bool_],
    encoder: _Encoder,
    on_bytes: OnBytes,
) -> dict[str, Any]:
    """Write the files of both splits. Raises DataError where the sources changed since they were counted."""
    encoded, number = encoder.encode(DocumentReader(config).in_turn(sources, [on_bytes] * len(sources))), -1
    with ExitStack() as files:
        writers = {split: files.enter_context(SplitWriter(folder, split, encoder.replies)) for split in FILES}
        for number, (document, ids, marks) in enumerate(encoded):
            if not len(ids):
                raise DataError(f"{document.place}: the tokenizer makes no token of this document. Leave it out.")
            if number < len(held_out):
                writers["val" if held_out[number] else "train"].add(ids, marks, ends=True)
        if number + 1 != len(held_out):
            raise DataError("data.sources changed while being read. Start again.")
        return {split: writer.finish() for split, writer in writers.items()}
