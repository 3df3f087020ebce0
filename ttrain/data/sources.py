"""Documents in local files: rows of .jsonl files and of tables, and text files of one document or several."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from ttrain.core.errors import DataError, raised_as
from ttrain.core.folders import at_home
from ttrain.core.names import listed
from ttrain.core.units import format_bytes
from ttrain.data.chat.conversation import LEARNED, TOOLS, Chat, json_kind, parsed
from ttrain.data.chat.jinja import TokenizerTemplate, chat_settings
from ttrain.data.chat.messages import Span, Template
from ttrain.data.corpus import NAME_ROWS, ROW_SUFFIXES, FileList, find_files, holds_json, not_text
from ttrain.data.formats.compressed import OnBytes, open_unpacked, plain_name
from ttrain.data.formats.tables import TABLES, row_value, saved_dataset, table_rows
from ttrain.data.settings import DocumentsConfig

LONGEST_DOCUMENT = 1 << 30  # bytes; a document is held in memory as a whole
_KEY = "data.sources"
# Endings of files whose bytes are neither rows nor text.
_NOT_READ = {
    ".json": "is one JSON value; name it .jsonl, if it has a row per line, or write it so",
    ".csv": "is a table; convert it to .jsonl",
    **dict.fromkeys((".xz", ".bz2", ".zip"), "is compressed; unpack it"),
}
_UNREAD = ("documents", "functions", "chat_template_kwargs")  # beside a conversation
_NAMED_KEYS = 8  # most that an error message lists


class Document(NamedTuple):
    """One document, never blank. `place` is file:line of its start, in a table file:row.

    `replies` are the parts of a conversation that are learned as replies, None for a text. A `closed` document gets no
    end token, since its text has an end of its own.
    """

    text: str
    place: str
    replies: tuple[Span, ...] | None = None
    closed: bool = False
    source: int = 0  # its place in data.sources


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


def find_sources(config: DocumentsConfig) -> list[FileList]:
    """Return the sources of a config. Raises DataError for a missing, empty or repeated one, and an unknown form."""
    sources = [replace(_source(each.path, config), limit=each.limit) for each in config.entries]
    seen: dict[Path, tuple[str, Path]] = {}
    for source in sources:
        for file in source.files:
            target = file.resolve()
            given, first = seen.setdefault(target.with_name(plain_name(target.name)), (source.given, file))
            if first is not file:
                twice = f"{_KEY}: {file} is given twice, by {given} and {source.given}"
                raise DataError(f"{twice}{'' if first == file else f', as {first} too'}. Leave one out.")
        if not source.size:
            raise DataError(f"{_KEY}: {source.given} is empty. Leave it out, or give a file with documents.")
    return sources


class DocumentReader:
    """Reads the documents of a config. `skipped` counts the rows and documents that it leaves out."""

    def __init__(
        self, config: DocumentsConfig, template: Template | TokenizerTemplate | None = None, learns: bool = True,
        columns: tuple[str, str] | None = ("", ""),
    ) -> None:  # fmt: skip
        """`template` takes the place of the config's. Unless it `learns`, no message has to say how it is learned.

        None for `columns` reads all columns of a table, else those of text and messages.
        """
        self._config, self._learns = config, config.loss_on if learns else None
        self._columns = columns and (config.text_key, config.chat_key)
        self._template = template or chat_template(config)
        self.skipped = Skipped()

    def in_turn(self, sources: list[FileList], on_bytes: list[OnBytes]) -> Iterator[Document]:
        """Yield one document of each source in turn; where a source ends, the others go on.

        `on_bytes` has a function for each source, called with its raw bytes in order. Raises DataError that names file
        and line.
        """
        turns, read = deque(self.each(sources, on_bytes)), 0
        while turns and read != self._config.max_documents:
            if (document := next(turns[0], None)) is None:
                turns.popleft()
                continue
            yield document
            turns.rotate(-1)
            read += 1

    def each(self, sources: list[FileList], on_bytes: list[OnBytes]) -> Iterator[Iterator[Document]]:
        """Yield the documents of each source, up to its limit."""
        for number, (source, counted) in enumerate(zip(sources, on_bytes, strict=True)):
            found = islice(self.documents(source, counted), source.limit)
            yield map(partial(Document._replace, source=number), found)

    def documents(self, source: FileList, on_bytes: OnBytes) -> Iterator[Document]:
        """Yield the documents of one source that are not blank."""
        for file in source.files:
            with raised_as(DataError, f"{_KEY}: cannot read {file}"):
                if _suffix(file) in TABLES:
                    found = self._rows(file, table_rows(file, self._columns, on_bytes))
                elif has_rows(file):
                    found = self._rows(file, read_lines(file, on_bytes))
                else:
                    found = _texts(file, self._config.delimiter, on_bytes)
                for document in found:
                    if document.text.strip():
                        yield document
                    else:
                        self.skipped.blank += 1

    def _rows(self, file: Path, rows: Iterator[tuple[int, Any]]) -> Iterator[Document]:
        for number, row in rows:
            if isinstance(row, str) and not row.strip():
                continue
            place = f"{file}:{number}"
            try:
                with raised_as(DataError, place, of=DataError):  # a template that takes too much would do so again
                    document = self._document(row, place)
            except ValueError as error:
                self.refuse(f"{place}: {error}")
            else:
                yield document

    def refuse(self, problem: str) -> None:
        """Count a bad row, or raise DataError for it, as data.bad_rows says."""
        if self._config.bad_rows == "stop":
            raise DataError(f"{problem}. Mend the row, or leave such rows out with data.bad_rows=skip.") from None
        self.skipped.bad_rows += 1
        self.skipped.first_bad = self.skipped.first_bad or problem

    def _document(self, row: Any, place: str) -> Document:
        """Return the document of a line of JSON or a row of a table. Raises ValueError for one that can't be used."""
        try:
            found = self._content(json.loads(row) if isinstance(row, str) else row_value(row))
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error.msg} at column {error.colno} (a row is one line)") from None
        except RecursionError:
            raise ValueError("not JSON that can be read: too many brackets inside each other") from None
        text, replies = (found, None) if isinstance(found, str) else self._template.render(found)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"has {text[error.start]!a}, half of a surrogate pair, which is no character"
            raise ValueError(half) from None
        if replies is None:
            return Document(text, place)
        if self._config.loss_on == "replies" and not any(start < end for start, end in replies):
            raise ValueError("has no reply of the assistant to learn, as data.loss_on=replies asks for")
        return Document(text, place, replies, isinstance(self._template, TokenizerTemplate))

    def _content(self, row: Any) -> str | Chat:
        text_key, chat_key = self._config.text_key, self._config.chat_key
        if isinstance(row, list):
            if any(isinstance(item, dict) and text_key in item for item in row):
                raise ValueError("is a list of rows, not one conversation; write each row in a line of its own")
            return Chat.of(row, learns=self._learns)
        if not isinstance(row, dict):
            raise ValueError(f"is {json_kind(row)}, not an object with {text_key!r} or {chat_key!r}")
        # A null or blank value under one key leaves the choice to the other.
        keys = [key for key in (text_key, chat_key) if key in row]
        filled = [key for key in keys if (row[key].strip() if isinstance(row[key], str) else row[key] is not None)]
        if not keys:
            named = ", ".join(list(map(str, row))[:_NAMED_KEYS]) or "none"
            wanted = f"neither {text_key!r} (data.text_key) nor {chat_key!r} (data.chat_key)"
            raise ValueError(f"has {wanted}; its keys are {named}")
        if (filled or keys)[0] == chat_key:
            return self._chat(row)
        if not isinstance(row[text_key], str):
            raise ValueError(f"{text_key!r} is {json_kind(row[text_key])}, not text")
        if len(filled) > 1:
            self.skipped.unread[f"{chat_key!r} beside {text_key!r}, of which only the text is read"] += 1
        return str(row[text_key])

    def _chat(self, row: dict[str, Any]) -> Chat:
        key = self._config.chat_key
        messages = parsed(row[key])
        if not isinstance(messages, list):
            raise ValueError(f"{key!r} is {json_kind(messages)}, not a list of messages")
        chat = Chat.of(messages, row.get(TOOLS), self._learns)
        unread = [name for name in _UNREAD if parsed(row.get(name)) not in (None, "", "null", [], {})]
        unread += [name for name, learned in LEARNED.items() if row.get(name) not in (None, learned)]
        if chat.tools and not isinstance(self._template, TokenizerTemplate):
            unread.append(TOOLS)
        self.skipped.unread.update(f"{name!r} beside {key!r}, which is not read" for name in unread)
        return chat


def chat_template(config: DocumentsConfig) -> Template | TokenizerTemplate:
    """Return the template of a config. Raises DataError for one that can't be used."""
    if config.template != "tokenizer":
        return Template(config.template)
    file = at_home(config.tokenizer)
    return TokenizerTemplate(chat_settings(file), config.loss_on == "replies", file.parent)


def _source(given: str, config: DocumentsConfig) -> FileList:
    found, path = find_files(given, config.suffixes, _KEY, plain_name), at_home(given)
    if path.is_dir():
        found = saved_dataset(path, found)
    elif why := _NOT_READ.get(_suffix(path)):
        raise DataError(f"{_KEY}: {given} {why}.")
    notices = [*found.notices]
    if found.others:
        others = f"{_KEY}: {len(found.others)} file(s) of {given} are not read, because their names don't end in"
        ends = " or ".join(config.suffixes)
        notices.append(f"{others} {ends}: {listed(found.others)}. data.suffixes says which are.")
    if rows := [file for file in found.files if not has_rows(file) and holds_json(file)]:
        plain = f"{_KEY}: {listed(rows)} are read as plain text, JSON syntax included."
        notices.append(f"{plain} To read the rows in them, {NAME_ROWS}.")
    if packed := [file for file in found.files if _suffix(file) in TABLES and file.name != plain_name(file.name)]:
        raise DataError(f"{_KEY}: {packed[0]} is a table that is compressed as a whole. Unpack it.")
    return replace(found, notices=tuple(notices))


def has_rows(file: Path) -> bool:
    """True if a document is a row of the file; else it is text."""
    return _suffix(file) in (*ROW_SUFFIXES, *TABLES)


def _suffix(file: Path) -> str:
    """Return the suffix of a file's name, without that of a compression."""
    return Path(plain_name(file.name)).suffix.lower()


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
            long = f"{file}:{start}: a document of more than {format_bytes(LONGEST_DOCUMENT)}"
            raise DataError(f"{long}. Split it, give data.delimiter, the line between two documents, or use data=text.")
    if delimiter is None or any(map(str.strip, parts)):
        yield Document("".join(parts), f"{file}:{start}")


def read_lines(file: Path, on_bytes: OnBytes, trains: bool = True) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their ends, counted from 1, without a byte-order mark.

    Raises DataError for what is not UTF-8, with the advice for data that a model `trains` on.
    """
    start = b""
    with open_unpacked(file, on_bytes) as stream:
        for number in count(1):
            raw = stream.readline(LONGEST_DOCUMENT)
            start = start or raw[:8]
            if not raw:
                return
            if len(raw) == LONGEST_DOCUMENT:
                raise DataError(f"{file}:{number}: a line of more than {format_bytes(LONGEST_DOCUMENT)}. Split it.")
            try:
                line, bad = raw.decode("utf-8"), raw.find(b"\0")
            except UnicodeDecodeError as error:
                line, bad = "", error.start
            if bad >= 0:
                raise not_text(f"{file}:{number}", start, f"byte {bad + 1} of the line (0x{raw[bad]:02x})", trains)
            yield number, line.removeprefix("\ufeff") if number == 1 else line
