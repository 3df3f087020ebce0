"""Text in files, read as one stream of characters; memory never holds all of it."""

from __future__ import annotations

import codecs
import json
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ttrain.core.errors import DataError
from ttrain.core.folders import at_home
from ttrain.core.names import listed, with_line_breaks
from ttrain.data.settings import TextConfig

READ_BYTES = 1 << 18
PIECE_CHARACTERS = 1 << 16
ROW_SUFFIXES = (".jsonl", ".ndjson")  # of files with a document per row
NAME_ROWS = "name such files .jsonl, with one object a line"

# Tests, installed packages, and files that the build of this Python generated.
_UNREAD_FOLDERS = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
_GENERATED = ("_sysconfigdata", "config-")
# First bytes of files that are taken for text, their form, and the remedy.
_FIRST_BYTES = {
    codecs.BOM_UTF16_LE: ("UTF-16", "Convert it to UTF-8"),
    codecs.BOM_UTF16_BE: ("UTF-16", "Convert it to UTF-8"),
    b"\x1f\x8b": ("gzip", "Unpack it, or name it .gz and use data=documents"),
    b"\x28\xb5\x2f\xfd": ("zstandard", "Unpack it, or name it .zst and use data=documents"),
    b"\xfd7zXZ": ("xz", "Unpack it"),
    b"BZh": ("bzip2", "Unpack it"),
    b"PK\x03\x04": ("zip", "Unpack it"),
    b"PAR1": ("Parquet", "Name it .parquet and use data=documents"),
    b"ARROW1": ("Arrow", "Name it .arrow and use data=documents"),
}
# A line end with a visible character on either side: no token of byte-level BPE spans it.
_LINE_END = re.compile(r"(?<=\S)\n(?=\S)")


@dataclass(frozen=True)
class _Segment:
    """A part of the stream: the bytes of one file, or the separator between two."""

    file: Path | None
    start: int
    length: int


class Corpus:
    """The files of a config, in order, as one stream of UTF-8 bytes.

    `size` counts the bytes, and those from `boundary` on are held out; each is at the start of a character. Raises
    DataError where the path is missing, unreadable or empty. Reading raises it for bytes that are not UTF-8.
    """

    def __init__(self, config: TextConfig) -> None:
        self.source, found = _find(config)
        self.files, self.notices = found.files, found.notices("data.path")
        if config.path is not None and (rows := [file for file in self.files if holds_json(file)]):
            command = f"data=documents 'data.sources=[{config.path}]'"
            misnamed = any(file.suffix.lower() not in ROW_SUFFIXES for file in rows)
            mend = f", {NAME_ROWS}, and read them with data=documents." if misnamed else f": {command}."
            self.notices.append(
                f"data={config.name} trains on the JSON syntax of {listed(rows)} as well. For the texts in the "
                f"rows{mend}"
            )
        try:
            self._separator = with_line_breaks(config.separator).encode()
        except UnicodeEncodeError:
            raise DataError(f"data.separator={config.separator!r} is not UTF-8. Give UTF-8 text.") from None
        self._stamps = [_stamp(file) for file in self.files]
        self._segments = list(self._lay_out())
        total = sum(segment.length for segment in self._segments)
        if not any(segment.length for segment in self._segments if segment.file is not None):
            raise DataError(f"data.path={self.source} holds no text: {len(self.files)} empty file(s). Give another.")
        self.size = total
        if config.max_bytes is not None and config.max_bytes < total:
            self.size = self._character_start(config.max_bytes)
        self.boundary = self._character_start(round(self.size * (1 - config.held_out)))

    def text(self, start: int, stop: int, on_bytes: Callable[[bytes], object] | None = None) -> Iterator[str]:
        """Yield the text of the bytes [start, stop), piece by piece; both must be starts of characters.

        `on_bytes` is called with the bytes of each piece, in order.
        """
        for segment in self._segments:
            first = max(start, segment.start) - segment.start
            last = min(stop, segment.start + segment.length) - segment.start
            if first >= last:
                continue
            for raw, characters in self._parts(segment, first, last):
                if on_bytes is not None:
                    on_bytes(raw)
                yield characters

    def samples(self, size: int, count: int = 16) -> Iterator[str]:
        """Yield texts of about `size` bytes from `count` evenly spaced places; all of a short corpus."""
        step = max(size, self.size // count)
        for first in range(0, self.size, step):
            start, stop = (self._character_start(min(self.size, place)) for place in (first, first + size))
            yield "".join(self.text(start, stop))

    def place(self, wanted: re.Pattern[str]) -> str:
        """Return file and line of the first match, which must lie within a line; without a match the source."""
        for segment in self._segments:
            line = 1
            for _, characters in self._parts(segment, 0, segment.length):
                if found := wanted.search(characters):
                    return f"{segment.file or 'data.separator'}:{line + characters.count(chr(10), 0, found.start())}"
                line += characters.count("\n")
        return f"data.path={self.source}"

    def require_unchanged(self) -> None:
        """Raise DataError for a file that was changed since the corpus was opened."""
        for file, stamp in zip(self.files, self._stamps, strict=True):
            if _stamp(file) != stamp:
                raise DataError(f"data.path: {file} changed while being read. Start again, or give a copy of it.")

    def learning_end(self, most: int) -> int:
        """Return the end of the training text, or of the whole characters in its first `most` bytes."""
        return self.boundary if self.boundary <= most else self._character_start(most)

    def _parts(self, segment: _Segment, first: int, last: int) -> Iterable[tuple[bytes, str]]:
        if segment.file is not None:
            return _decode(segment.file, first, last)
        raw = self._separator[first:last]
        return [(raw, raw.decode())]

    def _lay_out(self) -> Iterator[_Segment]:
        position = 0
        for number, (file, (length, _)) in enumerate(zip(self.files, self._stamps, strict=True)):
            if number and self._separator:
                yield _Segment(None, position, len(self._separator))
                position += len(self._separator)
            yield _Segment(file, position, length)
            position += length

    def _character_start(self, offset: int) -> int:
        """Return the nearest start of a character at or before a byte."""
        for start in range(offset, max(-1, offset - 4), -1):
            if start in (0, self.size) or self._byte(start) & 0xC0 != 0x80:
                return start
        return offset  # not UTF-8: reading names the byte

    def _byte(self, offset: int) -> int:
        for segment in self._segments:
            inside = offset - segment.start
            if 0 <= inside < segment.length:
                if segment.file is None:
                    return self._separator[inside]
                return next(_read(segment.file, inside, inside + 1))[0]
        raise IndexError(offset)


def cut(parts: Iterable[str], size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Yield a text in pieces of `size` to 2 * `size` characters, which end at line ends where they can.

    The pieces depend on the text alone, not on the parts in which it arrives.
    """
    pending: list[str] = []
    length, before = 0, ""  # the character before what is pending tells whether that begins with a line end
    for part in parts:
        pending.append(part)
        length += len(part)
        if length > 2 * size:
            *pieces, rest = _cut_whole("".join([before, *pending]), size, len(before))
            yield from pieces
            pending, length, before = [rest], len(rest), pieces[-1][-1]
    rest = "".join(pending)
    if rest:
        yield rest


def _cut_whole(text: str, size: int, start: int) -> Iterator[str]:
    while len(text) - start > 2 * size:
        end = _LINE_END.search(text, start + size - 1, start + 2 * size)
        stop = end.end() if end else start + 2 * size
        yield text[start:stop]
        start = stop
    yield text[start:]


def _decode(file: Path, start: int, stop: int) -> Iterator[tuple[bytes, str]]:
    """Yield the bytes [start, stop) of a file and their text, piece by piece, without a byte-order mark."""
    held, position = b"", start
    for chunk in _read(file, start, stop):
        raw = held + chunk
        last = position + len(raw) == stop
        try:
            text, used = raw.decode("utf-8"), len(raw)
        except UnicodeDecodeError as error:
            cut_short = error.end == len(raw) and error.reason == "unexpected end of data"
            if last or not cut_short:
                why = f"byte {position + error.start} (0x{raw[error.start]:02x} is not UTF-8)"
                raise not_text(f"data.path: {file}", _start(file), why) from None
            text, used = raw[: error.start].decode("utf-8"), error.start
        if "\0" in text:
            why = f"byte {position + raw.index(0)} (0x00 does not occur in text)"
            raise not_text(f"data.path: {file}", _start(file), why)
        if position == 0:
            text = text.removeprefix("\ufeff")
        yield raw[:used], text
        held, position = raw[used:], position + used


def _read(file: Path, start: int, stop: int) -> Iterator[bytes]:
    try:
        with open(file, "rb") as stream:
            stream.seek(start)
            position = start
            while position < stop:
                chunk = stream.read(min(READ_BYTES, stop - position))
                if not chunk:
                    raise DataError(f"{file} was cut to {position} bytes while being read. Start again.")
                position += len(chunk)
                yield chunk
    except OSError as error:
        raise _unreadable(file, error) from error


def _find(config: TextConfig) -> tuple[str, Listing]:
    """Return the name of the corpus, and its files in order."""
    if config.path is None:
        return f"standard library of Python {platform.python_version()}", Listing(_standard_library())
    path = at_home(config.path)
    try:
        if path.is_dir():
            return str(config.path), files_in(path, config.suffixes, "data.path")
        if path.is_file():
            return str(config.path), Listing([path])
    except OSError as error:
        raise _unreadable(path, error) from error
    what = "is neither a file nor a folder" if path.exists() else "does not exist"
    raise DataError(
        f"data.path={config.path} {what} (looked in {path.absolute().parent}). "
        "Give a UTF-8 text file or a folder of them, or null for the standard library of Python."
    )


@dataclass(frozen=True)
class Listing:
    """Files of a folder in reading order, and those that are not read."""

    files: list[Path]
    unfollowed: tuple[Path, ...] = ()  # linked folders and broken links
    others: tuple[Path, ...] = ()  # files with other suffixes

    def notices(self, key: str) -> list[str]:
        """Return a sentence about the links that are not read, if there are any."""
        if not self.unfollowed:
            return []
        return [
            f"{key}: {len(self.unfollowed)} linked folder(s) or broken link(s) are not read: "
            f"{listed(self.unfollowed)}. Put the files themselves there, or link each of them."
        ]


def files_in(folder: Path, suffixes: list[str], key: str, plain: Callable[[str], str] = str) -> Listing:
    """List the files below a folder in the order of their relative paths, without hidden files and linked folders.

    If there are suffixes, a file's name, or `plain` of it, has to end in one of them. Raises DataError, which names
    `key`, where no file is left.
    """
    found = [path for path in _walk(folder, lambda name: name.startswith(".")) if not path.name.startswith(".")]
    unfollowed = tuple(path for path in found if path.is_symlink() and not path.is_file())
    readable = [path for path in found if path.is_file()]
    ends = tuple(suffixes) or ""
    files = [path for path in readable if path.name.endswith(ends) or plain(path.name).endswith(ends)]
    listing = Listing(files, unfollowed, tuple(path for path in readable if path not in set(files)))
    if not files:
        wanted = f" that ends in {' or '.join(suffixes)} (data.suffixes)" if suffixes else ""
        holds = f" It has {listed(listing.others)}." if listing.others else ""
        more = "".join(f" {notice}" for notice in listing.notices(key))
        raise DataError(
            f"{key}={folder} is a folder without any file{wanted}.{holds} Give a folder of UTF-8 text files.{more}"
        )
    return listing


def _plain(file: Path) -> BinaryIO:
    return open(file, "rb")


def holds_json(file: Path, opened: Callable[[Path], BinaryIO] = _plain) -> bool:
    """True for a file of rows by its name, and where the first line is an object or a list of JSON."""
    if file.suffix.lower() in ROW_SUFFIXES:
        return True
    try:
        with opened(file) as stream:
            first = stream.readline(READ_BYTES).removeprefix(codecs.BOM_UTF8).strip()
        return first[:1] in (b"{", b"[") and isinstance(json.loads(first), dict | list)
    except (OSError, ValueError, RecursionError):  # the error comes when it is read
        return False


def _standard_library() -> list[Path]:
    """List the ASCII .py files of the running Python's standard library, without tests and generated files.

    The few others hold tables of characters, which would more than double a character vocabulary.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in _walk(root, lambda name: name in _UNREAD_FOLDERS or name.startswith(_GENERATED))
        if path.name.endswith(".py") and not path.name.startswith(_GENERATED) and _is_ascii(path)
    ]
    if not files:
        raise DataError(
            f"data.path=null takes the sources of Python's standard library, but {root} has none. "
            "Give data.path, a UTF-8 text file or a folder of them."
        )
    return files


def _walk(root: Path, skip_folder: Callable[[str], bool]) -> list[Path]:
    def fail(error: OSError) -> None:
        raise _unreadable(Path(error.filename or root), error)

    found: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if not skip_folder(name)]
        found += [
            Path(folder, name) for name in (*names, *(name for name in folders if os.path.islink(Path(folder, name))))
        ]
    return sorted(found, key=Path.as_posix)  # all begin alike


def _is_ascii(file: Path) -> bool:
    try:
        return file.read_bytes().isascii()
    except OSError:
        return False


def _stamp(file: Path) -> tuple[int, int]:
    """Return size and time of change."""
    try:
        found = file.stat()
        return found.st_size, found.st_mtime_ns
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: OSError) -> DataError:
    return DataError(f"data.path: cannot read {file}: {error.strerror or error}.")


def _start(file: Path) -> bytes:
    with _plain(file) as stream:
        return stream.read(8)


def not_text(place: str, start: bytes, why: str) -> DataError:
    """Return the error for a file that is not UTF-8; it names the form that the first bytes show."""
    found = (told for mark, told in _FIRST_BYTES.items() if start.startswith(mark))
    kind, advice = next(found, (None, "Convert it to UTF-8"))
    if kind is not None:
        why = f"{why}; it begins as {kind} does"
    return DataError(
        f"{place} is not UTF-8 text: {why}. {advice}, leave it out of a folder with data.suffixes, or use "
        "data=tokens if it holds token ids."
    )
