"""Token files of documents, written in two passes over the sources, in three where the tokenizer is learned.

Beside the files of a prepared folder there are `train.ends` and `val.ends`: the place in the ids of its split at which
each document ends, little-endian uint64, the end token included. With data.loss_on=replies there are `train.marks` and
`val.marks` as well: a byte for every token, 1 where it is a target.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice, tee
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import DataError
from ttrain.core.folders import at_home
from ttrain.core.units import counted
from ttrain.data.corpus import SAMPLE_CHARACTERS, FileList, byte_bar
from ttrain.data.end_token import EndToken, with_end_token
from ttrain.data.library_tokenizer import LibraryTokenizer, Marks
from ttrain.data.settings import TOKENIZERS, DocumentsConfig
from ttrain.data.sources import Document, DocumentReader, has_rows
from ttrain.data.text import BPE_BYTES, chosen_tokenizer, with_notices
from ttrain.data.tokenizer import Ids, Tokenizer, check_round_trip, named_place
from ttrain.data.tokens import split_writers, write_header

_LEARNING = "learning the tokenizer"


def fill_documents(
    folder: Path, config: DocumentsConfig, sources: list[FileList], delay: float | None, told: Iterable[str] = ()
) -> dict[str, Any]:
    """Write the token files of a config's documents into an empty folder, and return the content of `tokens.json`.

    Sentences that are `told` are kept in it, besides those of what was read. For `delay` see byte_bar.
    """
    passes = _Passes(config, sources, delay)
    every = (document.text for document in passes.documents(_LEARNING))
    made, tokenizer, end = tokenizer_of(config, every if config.tokenizer == "char" else passes.training_text())
    with named_place(passes.place):
        tokenizer.notices += tuple(check_round_trip(tokenizer, passes.samples))
        order = np.argsort(passes.origins, kind="stable") if config.weights else slice(None)
        found = passes.documents("writing tokens", apart=bool(config.weights))
        documents = _encoded(found, made, tokenizer, end, config.loss_on == "replies")
        splits = _write_splits(folder, documents, passes.held_out[order], config.loss_on == "replies")
    held, skipped, mixed = int(passes.held_out.sum()), passes.skipped, {}
    if config.weights:
        mixed = {"by_source": {"train": passes.counts(~passes.held_out), "val": passes.counts(passes.held_out)}}
    described = {
        "source": [source.given for source in sources],
        "files": sum(len(source.files) for source in sources),
        "bytes": passes.bytes,
        "documents": {"train": len(passes.held_out) - held, "val": held},
        "blank_documents": skipped.blank,
        "bad_rows": skipped.bad_rows,
        "sha256": passes.sha256,
        **({} if skipped.first_bad is None else {"first_bad_row": skipped.first_bad}),
        **mixed,
    }
    described = with_notices(described, [*tokenizer.notices, *skipped.notices(), *told])
    return write_header(folder, tokenizer, splits, described, end_token=vars(end))


def tokenizer_of(config: DocumentsConfig, texts: Iterable[str]) -> tuple[Tokenizer, Tokenizer, EndToken]:
    """Return the tokenizer of a config, perhaps learned from texts, the same with an end token, and that token."""
    made = chosen_tokenizer(config, texts)
    file = None if config.tokenizer in TOKENIZERS else at_home(config.tokenizer)
    tokenizer, end = with_end_token(made, config.end_token, file)
    tokenizer.config = {"eos_token": end.text, **made.config}
    if config.template != "tokenizer":  # that beside the tokenizer is not the one that the texts are made with
        tokenizer.config = {name: text for name, text in tokenizer.config.items() if name != "chat_template"}
        tokenizer.config["eos_token"] = end.text
    return made, tokenizer, end


def held_out_documents(hashes: NDArray[np.uint64], share: float, of: str = "data.sources") -> NDArray[np.bool_]:
    """Return a mask of the documents that are held out: those with the lowest hashes, so that equal ones never part.

    Both splits get a document at least. Raises DataError, which names what they are `of`, where all documents are equal
    or there is only one.
    """
    count = len(hashes)
    wanted = min(max(1, round(share * count)), count)
    held: NDArray[np.bool_] = hashes <= np.partition(hashes, wanted - 1)[wanted - 1]
    if held.all():
        held = hashes < hashes.max()  # equal documents took more than their share
    if not held.any():
        what = "one document" if count == 1 else f"{count} documents, all equal,"
        raise DataError(f"{of} has {what} and needs at least two: one to train on, one held out.")
    return held


class _Passes:
    """Reads the documents of a config again and again.

    The first pass finds the documents that are held out, the starts of documents 1, 2, 4, 8 and so on as `samples`, and
    the checksum of all that was read.
    """

    def __init__(self, config: DocumentsConfig, sources: list[FileList], delay: float | None) -> None:
        self._config, self._sources, self._delay = config, sources, delay
        self._size, self.bytes = sum(source.size for source in sources), 0
        self._hashes, origins, self.samples = array("Q"), array("I"), list[str]()
        digests = [hashlib.sha256() for _ in sources]
        reader = DocumentReader(config)
        with byte_bar(self._size, "reading documents", delay) as on_bytes:

            def counted(digest: Any, raw: bytes) -> None:
                self.bytes += len(raw)
                digest.update(raw)
                on_bytes(raw)

            for document in reader.in_turn(sources, [partial(counted, digest) for digest in digests]):
                if not len(self._hashes) & (len(self._hashes) + 1):
                    self.samples.append(document.text[:SAMPLE_CHARACTERS])
                content = hashlib.blake2b(document.text.encode(), digest_size=8).digest()
                self._hashes.append(int.from_bytes(content, "little"))
                origins.append(document.source)
        self.origins, self.skipped = np.array(origins), reader.skipped
        self.sha256 = hashlib.sha256("".join(digest.hexdigest() for digest in digests).encode()).hexdigest()
        self.held_out = self._held_out()

    def _held_out(self) -> NDArray[np.bool_]:
        """Return a mask of the documents that are held out, in reading order."""
        sources = self._sources
        hints = "".join(f" {notice}" for source in sources for notice in source.notices)  # may say why so few
        if not self._hashes:
            bad = self.skipped.bad_rows
            left_out = f" and {bad} rows that can't be used" if bad else ""
            raise DataError(f"data.sources has only blank documents{left_out}. Give files with text.{hints}")
        for source, count in zip(sources, self.counts(), strict=True):
            if count < (source.limit or 0) and len(self._hashes) != self._config.max_documents:
                more = f"limit={source.limit} of {source.given} is more than its {counted(count, 'document')}"
                raise DataError(f"data.sources: {more}. Give a lower limit, or leave it out.{hints}")
        try:
            hashes, share = np.frombuffer(self._hashes, np.uint64), self._config.held_out
            return self._held_out_of_each(hashes) if self._config.weights else held_out_documents(hashes, share)
        except DataError as error:
            if self._config.delimiter is None and not all(has_rows(file) for each in sources for file in each.files):
                splits = "data.delimiter splits a text file: it is the line between two documents, '' for a blank."
                hints = f" {splits}{hints}"
            raise DataError(f"{error}{hints}") from None

    def _held_out_of_each(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Hold out a share of each source, and whatever is equal to it. Raises DataError where nothing else is left."""
        of_each = {f"data.sources: {source.given}": self.origins == n for n, source in enumerate(self._sources)}
        parts = [(hashes[own], of) for of, own in of_each.items() if own.any()]
        held = np.concatenate([own[held_out_documents(own, self._config.held_out, of)] for own, of in parts])
        mask: NDArray[np.bool_] = np.isin(hashes, held)
        for of, own in of_each.items():
            if mask[own].all():
                none = "has no document to train on: all are blank, or equal to ones held out of other sources"
                raise DataError(f"{of} {none}. Leave it out.")
        return mask

    def counts(self, of: Any = ...) -> list[int]:
        """Return how many documents each source has, all or those `of` a mask."""
        return [*map(int, np.bincount(self.origins[of], minlength=len(self._sources)))]

    def documents(self, what: str = "", apart: bool = False) -> Iterator[Document]:
        """Yield all documents, with a bar where it is said `what` is done with them; `apart` source after source."""
        with byte_bar(self._size if what else 0, what, self._delay) as on_bytes:
            reader, read = DocumentReader(self._config), (self._sources, [on_bytes] * len(self._sources))
            each = map(islice, reader.each(*read), self.counts()) if apart else [reader.in_turn(*read)]
            yield from chain.from_iterable(each)

    def training_text(self) -> Iterator[str]:
        """Yield the training documents, each with a line break after it, so that no merge spans two."""
        taken = 0
        for document, left_out in zip(self.documents(_LEARNING), self.held_out, strict=False):
            if not left_out:
                yield document.text + "\n"
                taken += len(document.text)
                if taken > BPE_BYTES:
                    return

    def place(self, wanted: re.Pattern[str]) -> str:
        """Return the place of the first document with a match, and the number of its character."""
        for document in self.documents():
            if found := wanted.search(document.text):
                return f"{document.place}, character {found.start() + 1} of the document"
        return f"data.sources={','.join(source.given for source in self._sources)}"


def _encoded(
    documents: Iterable[Document], made: Tokenizer, whole: Tokenizer, end: EndToken, replies: bool
) -> Iterator[tuple[Document, Ids, Marks | None]]:
    """Yield each document with its ids and, where `replies` count alone, the marks of its targets.

    `made` is the tokenizer before it got an end token. A text begins with the tokens that the tokenizer puts before
    one, a conversation as its template writes it. The end token follows, unless the document is closed.
    """
    documents, again = tee(documents)
    start, ending = (np.array(added, whole.dtype) for added in (whole.start, [end.id]))
    for document, (ids, marks) in zip(documents, _marked(again, made, whole, end, replies), strict=True):
        if len(ids) and document.replies is None and not np.array_equal(ids[: len(start)], start):
            ids = np.concatenate([start, ids])
            marks = None if marks is None else np.append(np.ones(len(start), np.bool_), marks)
        if len(ids) and ids[-1] != end.id and not document.closed:
            ids = np.concatenate([ids, ending])
            marks = None if marks is None else np.append(marks, True)
        yield document, ids, marks


def _marked(
    documents: Iterator[Document], made: Tokenizer, whole: Tokenizer, end: EndToken, replies: bool
) -> Iterator[tuple[Ids, Marks | None]]:
    if replies:
        library = whole if isinstance(whole, LibraryTokenizer) else LibraryTokenizer(whole.to_json())
        yield from library.encode_marked(
            (each.text, [(0, len(each.text))] if each.replies is None else each.replies) for each in documents
        )
    elif isinstance(made, LibraryTokenizer):
        yield from ((ids, None) for ids in whole.encode_documents(document.text for document in documents))
    else:  # that of characters or bytes is quick, and agrees with `whole` on every text without the end token
        for document in documents:
            (ids,) = (whole if end.text in document.text else made).encode_documents([document.text])
            yield ids.astype(whole.dtype, copy=False), None


def _write_splits(
    folder: Path, documents: Iterable[tuple[Document, Ids, Marks | None]], held_out: NDArray[np.bool_], marked: bool
) -> dict[str, Any]:
    """Write the files of both splits. Raises DataError where the sources changed since they were counted."""
    number = -1
    with split_writers(folder, marked) as writers:
        for number, (document, ids, marks) in enumerate(documents):
            if not len(ids):
                raise DataError(f"{document.place}: the tokenizer makes no token of this document. Leave it out.")
            if number < len(held_out):
                writers["val" if held_out[number] else "train"].add(ids, marks, ends=True)
        if number + 1 != len(held_out):
            raise DataError("data.sources changed while being read. Start again.")
        return {split: writer.finish() for split, writer in writers.items()}
