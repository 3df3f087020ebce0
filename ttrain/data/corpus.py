"""Text in files, read as one stream of characters; memory never holds all of it."""

from __future__ import annotations

import codecs
import json
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from ttrain.core.errors import DataError, raised_as
from ttrain.core.folders import at_home
from ttrain.core.names import listed, with_line_breaks
from ttrain.data.formats.compressed import OnBytes, open_unpacked
from ttrain.data.settings import TextConfig

READ_BYTES = 1 << 18
PIECE_CHARACTERS = 1 << 16
SAMPLE_CHARACTERS = 1 << 12  # of one place of a corpus, or of one document, to check what comes back of it
ROW_SUFFIXES = (".jsonl", ".ndjson")  # of files with a document per row
NAME_ROWS = "name such files .jsonl, with one object a line"

# Tests, installed packages, and files that the build of this Python generated.
_UNREAD_FOLDERS = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
_GENERATED = ("_sysconfigdata", "config-")
# First bytes of files that are taken for text, their form, the remedy, and the suffix with which documents are read.
_FIRST_BYTES = {
    codecs.BOM_UTF16_LE: ("UTF-16", "Convert it to UTF-8", ""),
    codecs.BOM_UTF16_BE: ("UTF-16", "Convert it to UTF-8", ""),
    b"\x1f\x8b": ("gzip", "Unpack it", ".gz"),
    b"\x28\xb5\x2f\xfd": ("zstandard", "Unpack it", ".zst"),
    b"\xfd7zXZ": ("xz", "Unpack it", ""),
    b"BZh": ("bzip2", "Unpack it", ""),
    b"PK\x03\x04": ("zip", "Unpack it", ""),
    b"PAR1": ("Parquet", "Convert it to UTF-8", ".parquet"),
    b"ARROW1": ("Arrow", "Convert it to UTF-8", ".arrow"),
}
# A line end with a visible character on either side: no token of byte-level BPE spans it.
_LINE_END = re.compile(r"(?<=\S)\n(?=\S)")


class Corpus:
    """The files of a config, in order, as one stream of UTF-8 bytes.

    `size` counts the bytes, and those from `boundary` on are held out; each is at the start of a character. Raises
    DataError where the path is missing, unreadable or empty. Reading raises it for bytes that are not UTF-8.
    """

    def __init__(self, config: TextConfig) -> None:
        if config.path is None:
            self.found = _standard_library()
        else:
            self.found = find_files(config.path, config.suffixes, "data.path")
        self.notices = [*self.found.notices]
        if config.path is not None and (rows := [file for file in self.found.files if holds_json(file)]):
            command = f"data=documents 'data.sources=[{config.path}]'"
            misnamed = any(file.suffix.lower() not in ROW_SUFFIXES for file in rows)
            mend = f", {NAME_ROWS}, and read them with data=documents." if misnamed else f": {command}."
            told = f"data={config.name} trains on the JSON syntax of {listed(rows)} as well."
            self.notices.append(f"{told} For the texts in the rows{mend}")
        try:
            separator = with_line_breaks(config.separator).encode()
        except UnicodeEncodeError:
            raise DataError(f"data.separator={config.separator!r} is not UTF-8. Give UTF-8 text.") from None
        self._stamps = self.found.stamps()
        if not any(size for _, size, _ in self._stamps):
            empty = f"holds no text: {len(self._stamps)} empty file(s)"
            raise DataError(f"data.path={self.found.given} {empty}. Give another.")
        parts: list[tuple[Path | bytes, int]] = []
        for file, (_, size, _) in zip(self.found.files, self._stamps, strict=True):
            parts += [(separator, len(separator)), (file, size)]
        *begins, self.size = accumulate((length for _, length in parts[1:]), initial=0)
        # A file or separator, its bytes, and where it begins.
        self._segments = [(*part, begin) for part, begin in zip(parts[1:], begins, strict=True)]
        if config.max_bytes is not None and config.max_bytes < self.size:
            self.size = self.character_start(config.max_bytes)
        self.boundary = self.character_start(round(self.size * (1 - config.held_out)))

    def text(self, start: int, stop: int, on_bytes: OnBytes = len) -> Iterator[str]:
        """Yield the text of the bytes [start, stop), piece by piece; both must be starts of characters.

        `on_bytes` is called with the bytes of each piece, in order.
        """
        for content, first, last in self._parts(start, stop):
            for raw, characters in _decode(content, first, last):
                on_bytes(raw)
                yield characters

    def samples(self, size: int = SAMPLE_CHARACTERS, count: int = 16) -> Iterator[str]:
        """Yield texts of about `size` bytes from `count` evenly spaced places; all of a short corpus."""
        for first in range(0, self.size, max(size, self.size // count)):
            start, stop = (self.character_start(min(self.size, place)) for place in (first, first + size))
            yield "".join(self.text(start, stop))

    def place(self, wanted: re.Pattern[str]) -> str:
        """Return file and line of the first match, which must lie within a line; without a match the source."""
        for content, length, _ in self._segments:
            line = 1
            for _, characters in _decode(content, 0, length):
                if found := wanted.search(characters):
                    file = "data.separator" if isinstance(content, bytes) else content
                    return f"{file}:{line + characters.count(chr(10), 0, found.start())}"
                line += characters.count("\n")
        return f"data.path={self.found.given}"

    def require_unchanged(self) -> None:
        """Raise DataError where a file was changed since the corpus was opened."""
        if self.found.stamps() != self._stamps:
            path = self.found.given
            raise DataError(f"data.path={path} changed while being read. Start again, or give a copy of it.")

    def _parts(self, start: int, stop: int) -> Iterator[tuple[Path | bytes, int, int]]:
        """Yield the contents that hold the bytes [start, stop), and which bytes of each."""
        for content, length, begin in self._segments:
            first, last = max(start - begin, 0), min(stop - begin, length)
            if first < last:
                yield content, first, last

    def character_start(self, offset: int) -> int:
        """Return the nearest start of a character at or before a byte; what is not UTF-8 is told when it is read."""
        if offset == self.size:
            return offset
        around = b"".join(raw for part in self._parts(offset - 3, offset + 1) for raw in _read(*part))
        return offset - next((back for back, byte in enumerate(reversed(around)) if byte & 0xC0 != 0x80), 0)


def cut(parts: Iterable[str], size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Yield a text in pieces of `size` to 2 * `size` characters, which end at line ends where they can.

    The pieces depend on the text alone, not on the parts in which it arrives.
    """
    held, begin = "", 0  # the character before what is held tells whether that begins with a line end
    for part in parts:
        held += part
        while len(held) - begin > 2 * size:
            end = _LINE_END.search(held, begin + size - 1, begin + 2 * size)
            stop = end.end() if end else begin + 2 * size
            yield held[begin:stop]
            begin = stop
        if begin > 1:
            held, begin = held[begin - 1 :], 1
    if len(held) > begin:
        yield held[begin:]


def _decode(content: Path | bytes, start: int, stop: int) -> Iterator[tuple[bytes, str]]:
    """Yield the bytes [start, stop) of a file, piece by piece, and the text that ends in each.

    A byte-order mark is no text.
    """
    marked = isinstance(content, Path) and start == 0
    decoder, position = codecs.getincrementaldecoder("utf-8-sig" if marked else "utf-8")(), start
    for raw in _read(content, start, stop):
        position += len(raw)
        try:
            text, why = decoder.decode(raw, position == stop), ""
            if "\0" in text:
                why = f"byte {position - len(raw) + raw.index(0)} (0x00 does not occur in text)"
        except UnicodeDecodeError as error:
            bad = position - len(error.object) + error.start
            text, why = "", f"byte {bad} (0x{error.object[error.start]:02x} is not UTF-8)"
        if why:
            raise not_text(f"data.path: {content!s}", next(_read(content, 0, 8)), why)
        yield raw, text


def _read(content: Path | bytes, start: int, stop: int) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content[start:stop]
        return
    with raised_as(DataError, f"data.path: cannot read {content}"), open(content, "rb") as stream:
        stream.seek(start)
        while start < stop:
            chunk = stream.read(min(READ_BYTES, stop - start))
            if not chunk:
                raise DataError(f"{content} was cut to {start} bytes while being read. Start again.")
            start += len(chunk)
            yield chunk


@dataclass(frozen=True)
class FileList:
    """Files of the path that a key of the config gives, in reading order; `others` have other suffixes.

    `notices` are sentences about what is not read, or is read otherwise than it looks.
    """

    key: str
    given: str
    files: list[Path]
    others: tuple[Path, ...] = ()
    notices: tuple[str, ...] = ()
    limit: int | None = None  # documents that are read of it

    def stamps(self) -> list[tuple[str, int, int]]:
        """Return path, size and time of change of the files: they are equal as long as no file has changed.

        Raises DataError for a file that can't be looked at.
        """

        def facts(file: Path) -> tuple[str, int, int]:
            with raised_as(DataError, f"{self.key}: cannot read {file}"):
                found = os.stat(file)
            return str(file.absolute()), found.st_size, found.st_mtime_ns

        return [facts(file) for file in self.files]

    @property
    def size(self) -> int:
        """Bytes of all files. Raises DataError for an unreadable one."""
        return sum(size for _, size, _ in self.stamps())


def find_files(given: str, suffixes: list[str], key: str, plain: Callable[[str], str] = str) -> FileList:
    """Return the file of a path, or those below a folder in the order of their relative paths.

    Of a folder, hidden files and linked folders are not read. If there are suffixes, a file's name there, or `plain` of
    it, has to end in one of them. Raises DataError, which names `key`.
    """
    path = at_home(given)
    with raised_as(DataError, f"{key}: cannot read {path}"):
        if path.is_file():
            return FileList(key, given, [path])
        found = _walk(path, lambda name: name.startswith(".")) if path.is_dir() else None
    if found is None:
        what = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise DataError(f"{key}: {given} {what} (looked in {path.absolute().parent}). Only local files are read.")
    told, unfollowed = "", [each for each in found if each.is_symlink() and not each.is_file()]
    if unfollowed:
        links = f"{key}: {len(unfollowed)} linked folder(s) or broken link(s) are not read: {listed(unfollowed)}"
        told = f"{links}. Put the files themselves there, or link each of them."
    files, others, ends = list[Path](), list[Path](), tuple(suffixes) or ""
    for each in (each for each in found if each.is_file()):
        wanted = each.name.endswith(ends) or plain(each.name).endswith(ends)
        (files if wanted else others).append(each)
    if not files:
        ending = f" that ends in {' or '.join(suffixes)} (data.suffixes)" if suffixes else ""
        holds = f" It has {listed(others)}." if others else ""
        more = f" {told}" if told else ""
        raise DataError(f"{key}={path} is a folder without any file{ending}.{holds}{more} Give UTF-8 text files.")
    return FileList(key, given, files, tuple(others), (told,) if told else ())


def holds_json(file: Path) -> bool:
    """Return whether a file has rows by its name, or by its first line, an object or a list of JSON."""
    if file.suffix.lower() in ROW_SUFFIXES:
        return True
    # What can't be read raises an error later.
    with suppress(OSError, ValueError, RecursionError, DataError), open_unpacked(file) as stream:
        first = stream.readline(READ_BYTES).removeprefix(codecs.BOM_UTF8).strip()
        return first[:1] in (b"{", b"[") and isinstance(json.loads(first), dict | list)
    return False


def _standard_library() -> FileList:
    """List the ASCII .py files of the running Python's standard library, without tests and generated files.

    The few others hold tables of characters, which would more than double a character vocabulary.
    """
    root = Path(sysconfig.get_path("stdlib"))
    with raised_as(DataError, f"data.path=null: cannot read {root}"):
        found = _walk(root, lambda name: name in _UNREAD_FOLDERS or name.startswith(_GENERATED))
    readable = [path for path in found if path.name.endswith(".py") and os.access(path, os.R_OK)]
    files = [path for path in readable if path.read_bytes().isascii()]
    if not files:
        raise DataError(f"data.path=null reads Python's standard library, but {root} has no source. Give data.path.")
    return FileList("data.path", f"standard library of Python {platform.python_version()}", files)


def _walk(root: Path, skipped: Callable[[str], bool]) -> list[Path]:
    """List the files and linked folders below a folder, without those of skipped names."""

    def fail(error: OSError) -> None:
        raise error

    found: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if not skipped(name)]
        found += [Path(folder, name) for name in names if not skipped(name)]
        found += [path for name in folders if (path := Path(folder, name)).is_symlink()]
    return sorted(found, key=Path.as_posix)  # all begin alike


@contextmanager
def byte_bar(total: int, what: str, delay: float | None) -> Iterator[OnBytes]:
    """Give a function to call with the bytes that are done. A bar appears after `delay` seconds, with None never."""
    if delay is None or not total:
        yield len
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024, delay=delay) as shown:
        yield lambda raw: shown.update(len(raw))


def not_text(place: str, start: bytes, why: str, trains: bool = True) -> DataError:
    """Return the error for a file that is not UTF-8; it names the form that the first bytes show.

    It gives advice for a file that a model `trains` on.
    """
    found = (told for mark, told in _FIRST_BYTES.items() if start.startswith(mark))
    kind, remedy, suffix = next(found, ("", "Convert it to UTF-8", ""))
    why = f"{why}; it begins as {kind} does" if kind else why
    if trains:
        remedy += f", or name it {suffix} and use data=documents" if suffix else ""
        remedy += ", leave it out of a folder with data.suffixes, or use data=tokens if it holds token ids"
    return DataError(f"{place} is not UTF-8 text: {why}. {remedy}.")
