"""Rows of Parquet and Arrow files, read in batches, and the folders that the library `datasets` saves."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ttrain.core.errors import DataError
from ttrain.core.names import listed
from ttrain.data.chat.conversation import LEARNED, TOOLS
from ttrain.data.corpus import READ_BYTES, FileList
from ttrain.data.formats.compressed import OnBytes, needing

TABLES = (".parquet", ".arrow")
_BATCH_BYTES = 1 << 20  # of a Parquet file's values held at once, unless one row has more
_BATCH_ROWS = 1024
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def table_rows(file: Path, keys: tuple[str, str] | None, on_bytes: OnBytes) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a table, counted from 1, each as a record batch of one row.

    It has the columns of the keys of text and messages, or all. `on_bytes` is called with all bytes of the file in
    order, in step with the rows. Raises DataError for a damaged file and for one without such a column.
    """
    with needing(file, "pyarrow"):
        import pyarrow as pa
        import pyarrow.parquet  # loaded here, so that a broken one is told alike
    number, batches = 0, _parquet if file.suffix.lower() == ".parquet" else _arrow
    with open(file, "rb") as raw:
        try:
            for batch, stop in batches(file, keys):
                if batches is _arrow:  # its bytes are taken as they are: a wrong offset would end the process
                    batch.validate(full=True)
                for index in range(batch.num_rows):
                    number += 1
                    yield number, batch.slice(index, 1)
                _tell(raw, stop, on_bytes)
        except (pa.ArrowException, OSError, ValueError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            told = f"data.sources: {file} can't be read behind row {number}: {why}"
            raise DataError(f"{told}. Fetch or write it again.") from None
        _tell(raw, os.fstat(raw.fileno()).st_size, on_bytes)


def row_value(row: Any) -> dict[str, Any]:
    """Return a row as a dictionary. Raises ValueError for bytes that are not UTF-8, and for damaged indices.

    A struct of a table has all its fields in every row, so the null fields of a message are left out.
    """
    try:
        return {name: _without_nulls(value) for name, value in row.to_pylist()[0].items()}
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text: 0x{error.object[error.start]:02x} at byte {error.start + 1}") from None
    except LookupError as error:
        raise ValueError(f"is damaged: {error}") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {name: _without_nulls(item) for name, item in value.items()}
    return {name: item for name, item in kept.items() if item is not None or name in ("role", "content")}


def saved_dataset(folder: Path, found: FileList) -> FileList:
    """Return the files that belong to a folder saved by `datasets`; for another folder all that was found.

    Raises DataError for a folder that holds several splits, or lacks a file.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(str(entry) for entry in sorted(folder.iterdir()) if entry.is_dir())
        raise DataError(f"data.sources: {folder} holds the splits of a data set. Name those to train on: {splits}.")
    try:
        state: Any = json.loads((folder / "state.json").read_text("utf-8"))
        files = [folder / str(part["filename"]) for part in state["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return found
    if missing := [file for file in files if file not in found.files]:
        raise DataError(f"data.sources: {folder / 'state.json'} names {missing[0]}, which is not there. Save it again.")
    own = {*files, folder / "state.json", folder / "dataset_info.json"}
    others = tuple(path for path in (*found.files, *found.others) if path not in own)
    return replace(found, files=files, others=others)


def _parquet(file: Path, keys: tuple[str, str] | None) -> Iterator[tuple[Any, int]]:
    """Yield batches of a file and the position of each; a large row group is read in several."""
    import pyarrow.parquet as pq

    size = file.stat().st_size
    # pre_buffer would hold all of a row group as it is packed, whatever buffer_size says.
    with pq.ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False, page_checksum_verification=True) as table:
        columns = _columns(file, table.schema_arrow.names, keys)
        for group in range(table.num_row_groups):
            told = table.metadata.row_group(group)
            rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * told.num_rows // max(1, told.total_byte_size)))
            for batch in table.iter_batches(rows, [group], columns, use_threads=False):
                yield batch, size * group // table.num_row_groups


def _arrow(file: Path, keys: tuple[str, str] | None) -> Iterator[tuple[Any, int]]:
    """Yield batches of a file and the position of each; Arrow's files have an index at the end, or are a stream."""
    import pyarrow as pa

    with pa.OSFile(str(file)) as raw:
        indexed = raw.read(6) == b"ARROW1"
        raw.seek(0)
        opened = pa.ipc.open_file if indexed else pa.ipc.open_stream
        names = opened(raw).schema.names
        columns = _columns(file, names, keys)
        raw.seek(0)
        options = pa.ipc.IpcReadOptions(included_fields=list(map(names.index, columns)))
        table = opened(raw, options=options)
        if indexed:
            for index in range(table.num_record_batches):
                yield table.get_batch(index), raw.size() * index // table.num_record_batches
            return
        for batch in table:
            yield batch, raw.tell()
        left = raw.size() - raw.tell()
        raw.seek(max(0, raw.tell() - len(_STREAM_END)))
        if left or raw.read() != _STREAM_END:
            what = f"{left} bytes follow its end" if left else "is cut off: it has no end mark"
            raise OSError(what)


def _columns(file: Path, names: list[str], keys: tuple[str, str] | None) -> list[str]:
    """Return the columns to read. Raises DataError where there is none, and where there are two of a name."""
    columns = [name for name in dict.fromkeys(keys or names) if name in names]
    if not columns:
        text_key, chat_key = keys or ("", "")
        wanted = f"neither a column {text_key!r} (data.text_key) nor {chat_key!r} (data.chat_key)"
        raise DataError(f"data.sources: {file} has {wanted}; its columns are {listed(names, 8) or 'none'}.")
    if keys and keys[1] in columns:
        columns += [name for name in (TOOLS, *LEARNED) if name in names and name not in columns]
    if twice := [name for name in columns if names.count(name) > 1]:
        raise DataError(f"data.sources: {file} has the column {twice[0]!r} twice. Rename one.")
    return columns


def _tell(raw: Any, stop: int, on_bytes: OnBytes) -> None:
    """Call `on_bytes` with the bytes up to a position."""
    while chunk := raw.read(min(READ_BYTES, max(0, stop - raw.tell()))):
        on_bytes(chunk)
