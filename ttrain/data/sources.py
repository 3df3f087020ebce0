"""Documents in local files: rows of .jsonl files and of tables, and text files of one document or several."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ttrain.core.errors import DataError
from ttrain.core.folders import at_home
from ttrain.core.names import listed
from ttrain.core.units import format_bytes
from ttrain.data.chat.conversation import TOOLS, Chat, json_kind, parsed
from ttrain.data.chat.jinja import TokenizerTemplate, chat_settings, template_file
from ttrain.data.chat.messages import Rendered, Span, Template
from ttrain.data.corpus import NAME_ROWS, ROW_SUFFIXES, Listing, files_in, holds_json, not_text
from ttrain.data.formats.compressed import OnBytes, is_compressed, open_unpacked, plain_name
from ttrain.data.formats.tables import TABLES, row_value, saved_dataset, table_rows
from ttrain.data.settings import DocumentsConfig

LONGEST_DOCUMENT = 1 << 30  # bytes; a document is held in memory as a whole
# Endings of files whose bytes are neither rows nor text.
_NOT_READ = {
    ".json": "is one JSON value; name it .jsonl, if it has a row per line, or write it so",
    ".xz": "is compressed; unpack it",
    ".bz2": "is compressed; unpack it",
    ".zip": "is compressed; unpack it",
    ".csv": "is a table; convert it to .jsonl",
}
_UNREAD = ("documents", "functions", "chat_template_kwargs")  # beside a conversation
_NAMED_KEYS = 8  # most that an error message lists
_CHUNK_ROWS, _CHUNK_BYTES = 64, 1 << 18  # read at once: their conversations are rendered in one request


class Document(NamedTuple):
    """One document, never blank. `place` is file:line of its start, in a table file:row.

    `replies` are the parts of a conversation that are learnt as replies, None for a text. A `closed` document gets no
    end token, since its text has an end of its own.
    """

    text: str
    place: str
    replies: tuple[Span, ...] | None = None
    closed: bool = False


@dataclass(frozen=True)
class Source:
    """One entry of data.sources, and its files in reading order."""

    given: str
    files: tuple[Path, ...]
    notices: tuple[str, ...] = ()  # sentences about files that are not read

    @property
    def size(self) -> int:
        """Bytes of all files. Raises DataError for an unreadable one."""
        return sum(found.st_size for found in map(_facts, self.files))


@dataclass
class Skipped:
    """Counts of what was left out while documents were read."""

    blank: int = 0
    bad_rows: int = 0
    first_bad: str | None = None  # the problem of the first of them
    unread: Counter[str] = field(default_factory=Counter)  # rows by the thing in them that is not read

    def notices(self) -> Iterator[str]:
        """Yield a sentence for each kind of thing that was left out."""
        if self.bad_rows:
            yield f"{self.bad_rows} bad row(s) are left out (data.bad_rows=skip), the first: {self.first_bad}."
        if self.blank:
            yield f"{self.blank} blank document(s) are left out."
        for what, rows in self.unread.items():
            yield f"{rows} row(s) have {what}."


def find_sources(config: DocumentsConfig) -> list[Source]:
    """Return the sources of a config. Raises DataError for a missing, empty or repeated one, and an unknown form."""
    if not config.sources:
        raise DataError("data=documents needs data.sources, a list of .jsonl, .parquet or text files or of folders.")
    sources = [_source(given, config) for given in config.sources]
    seen: dict[Path, tuple[str, Path]] = {}
    for source in sources:
        for file in source.files:
            target = file.resolve()
            given, first = seen.setdefault(target.with_name(plain_name(target.name)), (source.given, file))
            if first is not file:
                other = "" if first == file else f", as {first} too"
                raise DataError(
                    f"data.sources: {file} is given twice, by {given} and {source.given}{other}. Leave one out."
                )
        if not source.size:
            raise DataError(f"data.sources: {source.given} is empty. Leave it out, or give a file with documents.")
    return sources


class DocumentReader:
    """Reads the documents of a config. `skipped` counts the rows and documents that it leaves out."""

    def __init__(
        self, config: DocumentsConfig, template: Template | TokenizerTemplate | None = None, learns: bool = True
    ) -> None:
        """`template` takes the place of the config's. Unless it `learns`, no message has to say how it is learnt."""
        self._config, self._learns = config, config.loss_on if learns else None
        self._template = template or chat_template(config)
        self.skipped = Skipped()

    def in_turn(self, sources: list[Source], on_bytes: list[OnBytes]) -> Iterator[Document]:
        """Yield one document of each source in turn; where a source ends, the others go on.

        `on_bytes` has a function for each source, called with its raw bytes in order. Raises DataError that names file
        and line.
        """
        open_sources = [self.documents(source, called) for source, called in zip(sources, on_bytes, strict=True)]
        read, most = 0, self._config.max_documents
        while open_sources:
            for documents in list(open_sources):
                document = next(documents, None)
                if document is None:
                    open_sources.remove(documents)
                    continue
                yield document
                read += 1
                if read == most:
                    return

    def documents(self, source: Source, on_bytes: OnBytes) -> Iterator[Document]:
        """Yield the documents of one source that are not blank."""
        for file in source.files:
            try:
                if _suffix(file) in TABLES:
                    keys = self._config.text_key, self._config.chat_key
                    found = self._rows(file, table_rows(file, *keys, on_bytes))
                elif has_rows(file):
                    found = self._rows(file, read_lines(file, on_bytes))
                else:
                    found = _texts(file, self._config.delimiter, on_bytes)
                for document in found:
                    if document.text.strip():
                        yield document
                    else:
                        self.skipped.blank += 1
            except OSError as error:
                raise DataError(f"data.sources: cannot read {file}: {error.strerror or error}.") from error

    def _rows(self, file: Path, rows: Iterator[tuple[int, Any]]) -> Iterator[Document]:
        for chunk in _chunks(rows):
            read = [(f"{file}:{number}", self._read(row)) for number, row in chunk]
            chats = [found for _, found in read if isinstance(found, Chat)]
            rendered = iter(self._template.render_all(chats) if chats else [])
            for place, found in read:
                text = next(rendered) if isinstance(found, Chat) else found
                document = text if isinstance(text, Exception) else self._document(text, place)
                if isinstance(document, Document):
                    yield document
                else:
                    self._leave_out(f"{place}: {document}", document)

    def _leave_out(self, problem: str, error: Exception) -> None:
        """Count a row that can't be used. Raises DataError where such a row stops the run."""
        if isinstance(error, DataError):  # a template that takes too much would do so again
            raise DataError(problem)
        if self._config.bad_rows == "stop":
            raise DataError(f"{problem}. Mend the row, or leave such rows out with data.bad_rows=skip.")
        self.skipped.bad_rows += 1
        self.skipped.first_bad = self.skipped.first_bad or problem

    def _read(self, given: Any) -> str | Chat | ValueError:
        """Return the text or conversation of a line of JSON or a row of a table, or what is wrong with it."""
        try:
            row: Any = json.loads(given) if isinstance(given, str) else row_value(given)
            return self._field(row)
        except json.JSONDecodeError as error:
            return ValueError(f"not JSON: {error.msg} at column {error.colno} (a row is one line)")
        except RecursionError:
            return ValueError("not JSON that can be read: too many brackets inside each other")
        except ValueError as error:
            return error

    def _document(self, found: str | Rendered, place: str) -> Document | ValueError:
        text = found if isinstance(found, str) else found.text
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return ValueError(f"has {text[error.start]!a}, half of a surrogate pair, which is no character")
        if isinstance(found, str):
            return Document(text, place)
        if self._config.loss_on == "replies" and not any(start < end for start, end in found.replies):
            return ValueError(
                "has no reply of the assistant to learn, so data.loss_on=replies would learn nothing of it"
            )
        return Document(text, place, found.replies, isinstance(self._template, TokenizerTemplate))

    def _field(self, row: Any) -> str | Chat:
        text_key, chat_key = self._config.text_key, self._config.chat_key
        if isinstance(row, list):
            if any(isinstance(item, dict) and text_key in item for item in row):
                raise ValueError("is a list of rows, not one conversation; write each row in a line of its own")
            return Chat.of(row, learns=self._learns)
        if not isinstance(row, dict):
            raise ValueError(f"is {json_kind(row)}, not an object with {text_key!r} or {chat_key!r}")
        # A null or blank value under one key leaves the choice to the other.
        keys = [key for key in (text_key, chat_key) if key in row]
        filled = [key for key in keys if not _is_blank(row[key])]
        key = next(iter(filled or keys), None)
        value = parsed(row[key]) if key == chat_key else row[key] if key else None
        if key == text_key and isinstance(value, str):
            if filled == [text_key, chat_key]:
                self.skipped.unread[f"{chat_key!r} beside {text_key!r}, of which only the text is read"] += 1
            return value
        if key == chat_key and isinstance(value, list):
            unread = _UNREAD if isinstance(self._template, TokenizerTemplate) else (TOOLS, *_UNREAD)
            for name in (name for name in unread if row.get(name)):
                self.skipped.unread[f"{name!r}, which data.template={self._config.template} is not given"] += 1
            return Chat.of(value, row.get(TOOLS), self._learns)
        if key is not None:
            raise ValueError(
                f"{key!r} is {json_kind(value)}, not {'text' if key == text_key else 'a list of messages'}"
            )
        named = ", ".join(list(map(str, row))[:_NAMED_KEYS]) or "none"
        raise ValueError(
            f"has neither {text_key!r} (data.text_key) nor {chat_key!r} (data.chat_key); its keys are {named}"
        )


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _chunks(rows: Iterator[tuple[int, Any]]) -> Iterator[list[tuple[int, Any]]]:
    """Group rows that are not blank, so that their conversations are rendered together."""
    chunk, size = list[tuple[int, Any]](), 0
    try:
        for number, row in rows:
            if isinstance(row, str) and not row.strip():
                continue
            chunk.append((number, row))
            size += len(row) if isinstance(row, str) else row.nbytes
            if len(chunk) == _CHUNK_ROWS or size > _CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
    except DataError:  # behind the rows that can be read
        yield chunk
        raise
    yield chunk


def chat_template(config: DocumentsConfig) -> Template | TokenizerTemplate:
    """Return the template of a config. Raises DataError for one that can't be used."""
    if config.template != "tokenizer":
        return Template(config.template)
    file = at_home(config.tokenizer)
    return TokenizerTemplate(chat_settings(file), config.loss_on == "replies", template_file(file))


def _source(given: str, config: DocumentsConfig) -> Source:
    found = _files(given, config)
    notices = found.notices("data.sources")
    if found.others:
        notices.append(
            f"data.sources: {len(found.others)} file(s) of {given} are not read, because their names don't end in "
            f"{' or '.join(config.suffixes)}: {listed(found.others)}. data.suffixes says which are."
        )
    if rows := [file for file in found.files if not has_rows(file) and holds_json(file, _opened)]:
        notices.append(
            f"data.sources: {listed(rows)} are read as plain text, JSON syntax included. To read the rows in "
            f"them, {NAME_ROWS}."
        )
    if packed := [file for file in found.files if is_compressed(file) and _suffix(file) in TABLES]:
        raise DataError(f"data.sources: {packed[0]} is a table that is compressed as a whole. Unpack it.")
    return Source(given, tuple(found.files), tuple(notices))


def has_rows(file: Path) -> bool:
    """True if a document is a row of the file; else it is text."""
    return _suffix(file) in (*ROW_SUFFIXES, *TABLES)


def _suffix(file: Path) -> str:
    """Return the suffix of a file's name, without that of a compression."""
    return Path(plain_name(file.name)).suffix.lower()


def _files(given: str, config: DocumentsConfig) -> Listing:
    path = at_home(given)
    try:
        if path.is_dir():
            return saved_dataset(path, files_in(path, config.suffixes, "data.sources", plain_name))
        if path.is_file():
            why = _NOT_READ.get(_suffix(path))
            if why is not None:
                raise DataError(f"data.sources: {given} {why}.")
            return Listing([path])
    except OSError as error:
        raise DataError(f"data.sources: cannot read {path}: {error.strerror or error}.") from error
    what = "is neither a file nor a folder" if path.exists() else "does not exist"
    raise DataError(f"data.sources: {given} {what} (looked in {path.absolute().parent}). Only local files are read.")


def _texts(file: Path, delimiter: str | None, on_bytes: OnBytes) -> Iterator[Document]:
    """Yield the documents of a text file: all of it, or the parts between lines that hold the delimiter alone."""
    parts: list[str] = []
    start, size = 1, 0
    for number, line in read_lines(file, on_bytes):
        if delimiter is not None and line.strip() == delimiter.strip():
            if any(map(str.strip, parts)):
                yield Document("".join(parts).rstrip("\r\n"), f"{file}:{start}")
            parts, start, size = [], number + 1, 0
            continue
        parts.append(line)
        size += len(line)
        if size > LONGEST_DOCUMENT:
            raise DataError(
                f"{file}:{start}: a document of more than {format_bytes(LONGEST_DOCUMENT)}. Give data.delimiter, the "
                "line between two documents, or split the file; data=text reads a text that is not documents."
            )
    if delimiter is None or any(map(str.strip, parts)):
        yield Document("".join(parts), f"{file}:{start}")


def read_lines(file: Path, on_bytes: OnBytes) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their ends, counted from 1, without a byte-order mark."""
    start = b""
    with _opened(file, on_bytes) as stream:
        for number in count(1):
            raw = stream.readline(LONGEST_DOCUMENT)
            start = start or raw[:8]
            if not raw:
                return
            if len(raw) == LONGEST_DOCUMENT:
                raise DataError(f"{file}:{number}: a line of more than {format_bytes(LONGEST_DOCUMENT)}. Split it.")
            if not is_compressed(file):  # else the stream calls it
                on_bytes(raw)
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                why = f"byte {error.start + 1} of the line (0x{raw[error.start]:02x} is not UTF-8)"
                raise not_text(f"{file}:{number}", start, why) from None
            if "\0" in line:
                raise not_text(f"{file}:{number}", start, f"byte {raw.index(0) + 1} of the line (0x00)")
            yield number, line.removeprefix("\ufeff") if number == 1 else line


def _opened(file: Path, on_bytes: OnBytes = len) -> BinaryIO:
    return open_unpacked(file, on_bytes) if is_compressed(file) else open(file, "rb")


def _facts(file: Path) -> os.stat_result:
    try:
        return os.stat(file)
    except OSError as error:
        raise DataError(f"data.sources: cannot read {file}: {error.strerror or error}.") from error


def stamp(sources: list[Source]) -> list[list[Any]]:
    """Return path, size and time of change of every file: they are equal as long as no file has changed."""

    def facts(file: Path) -> list[Any]:
        found = _facts(file)
        return [str(file.absolute()), found.st_size, found.st_mtime_ns]

    return [[source.given, *map(facts, source.files)] for source in sources]
