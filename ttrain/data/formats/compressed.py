"""Files that may be compressed, as their names say, and their bytes, unpacked piece by piece."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

from ttrain.core.errors import DataError, raised_as

OnBytes = Callable[[bytes], object]

COMPRESSED = (".gz", ".zst")
_READ_BYTES = 1 << 14  # unpacked at once: 16 MiB of what gzip packs best


def plain_name(name: str) -> str:
    """Return a file's name without the suffix of its compression."""
    return next((name[: -len(ending)] for ending in COMPRESSED if name.lower().endswith(ending)), name)


def open_unpacked(file: Path, on_bytes: OnBytes = len) -> BinaryIO:
    """Open a stream of the unpacked bytes of a file; `on_bytes` is called with the bytes of the file that it reads.

    Reading raises DataError for a file that can't be unpacked, is cut off, or has bytes behind its end.
    """
    return io.BufferedReader(_Unpacked(_pieces(file, on_bytes)))


def needing(file: Path, library: str) -> AbstractContextManager[None]:
    """Raise DataError where the package that a file needs is missing or does not load."""
    return raised_as(DataError, f"data.sources: {file} needs {library}", "Run: pip install 'ttrain[data]'", ImportError)


class _Unpacked(io.RawIOBase):
    """A stream of pieces of bytes."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._held = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._held:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._held = memoryview(piece)
        count = min(len(buffer), len(self._held))
        buffer[:count], self._held = self._held[:count], self._held[count:]
        return count


def _decoder(file: Path) -> tuple[Callable[[], Any], type[Exception], str] | None:
    """Return a maker of decompressors, each for one frame; the error that they raise; and the name of the form."""
    ending = file.suffix.lower()
    if ending not in COMPRESSED:
        return None
    if ending == ".gz":
        return lambda: zlib.decompressobj(wbits=31), zlib.error, "gzip"  # 31: with gzip's header and checksum
    with needing(file, "zstandard"):
        import zstandard
    return zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError, "zstandard"


def _pieces(file: Path, on_bytes: OnBytes) -> Iterator[bytes]:
    """Yield the unpacked bytes of a file, which may be several frames, one behind the other."""
    decoder, position = _decoder(file), 0
    frame: Any = None if decoder is None else decoder[0]()
    with open(file, "rb") as stream:
        while raw := stream.read(_READ_BYTES):
            on_bytes(raw)
            position += len(raw)
            if decoder is None:
                yield raw
                continue
            make, failure, form = decoder
            while raw:
                frame = make() if frame.eof else frame
                try:
                    yield frame.decompress(raw)
                except failure as error:
                    why = f"is not whole or not {form}: {error}, somewhere in its first {position} bytes"
                    raise DataError(f"data.sources: {file} {why}. Pack or fetch it again.") from None
                raw = frame.unused_data
    if decoder is not None and not frame.eof:
        raise DataError(f"data.sources: {file} is cut off: its {decoder[2]} does not end. Pack or fetch it again.")
