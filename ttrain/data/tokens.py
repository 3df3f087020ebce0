"""Token ids in files: folders that appear once they are complete, and files read through memory maps.

A prepared folder holds `train.bin` and `val.bin` (raw little-endian ids), `tokenizer.json`, and `tokens.json` with the
type, the vocabulary, and the count and SHA-256 of each split. A folder of raw files holds `train.bin` and may hold
`val.bin`; a single raw file is split by data.held_out.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import DataError, raised_as
from ttrain.core.files import new_folder, write_synced
from ttrain.core.folders import at_home
from ttrain.data.batches import Sizes, TokenDataset, require_ids
from ttrain.data.library_tokenizer import read_tokenizer
from ttrain.data.sequences.taught import ENTRY, VERIFIED_BYTES, TaughtTokens
from ttrain.data.settings import TOKEN_DTYPES, TokensConfig
from ttrain.data.text import named_tokenizer, require_context, with_notices
from ttrain.data.tokenizer import Ids, Tokenizer

TRAIN_FILE, VAL_FILE, HEADER_FILE, TOKENIZER_FILE = "train.bin", "val.bin", "tokens.json", "tokenizer.json"
FILES = {"train": TRAIN_FILE, "val": VAL_FILE}
ENDS_FILE = {"train": "train.ends", "val": "val.ends"}
MARKS_FILE = {"train": "train.marks", "val": "val.marks"}
HEADER_FORMAT = "ttrain tokens 1"

_SCAN_TOKENS = 1 << 22


@dataclass(frozen=True)
class TokenFiles:
    """Files of token ids, their type and their vocabulary. `header` is the tokens.json of a prepared folder."""

    train: Path
    val: Path | None
    dtype: np.dtype[Any]
    vocabulary: int
    tokenizer: Tokenizer | None
    header: dict[str, Any] | None


def open_tokens(config: TokensConfig, sizes: Sizes) -> TokenDataset | TaughtTokens:
    """Open the dataset of token files. Raises DataError for files that can't be used; see TokenDataset."""
    context = require_context(config.name, sizes)
    files = find_token_files(config)
    train, hashes, whole = open_split(files, "train", config.verify)
    if files.val is not None:
        val, val_hashes, val_whole = open_split(files, "val", config.verify)
        hashes, whole = {**hashes, **val_hashes}, whole and val_whole
    else:
        boundary = round(len(train) * (1 - config.held_out))
        train, val = train[:boundary], train[boundary:]
    description: dict[str, Any] = {
        "source": config.path,
        "files": 1 if files.val is None else 2,
        "bytes": {"train": train.nbytes, "val": val.nbytes},
        "dtype": files.dtype.name,
        "sha256": hashes,
    }
    if files.header is not None:
        description |= {key: files.header[key] for key in ("corpus", "end_token") if key in files.header}
        description = with_notices(description, files.header["corpus"].get("notices", ()))
    if files.tokenizer is not None:
        description["tokenizer"] = files.tokenizer.description
    dataset = TokenDataset(
        train,
        val,
        context,
        files.vocabulary,
        config,
        tokenizer=files.tokenizer,
        description=description,
        check_batches=not whole,
        held_out_advice=None if files.val is None else "Prepare the tokens anew with a larger data.held_out",
    )
    if sizes.stored is None:
        return dataset
    return TaughtTokens(dataset, files.train.parent, (files.header or {}).get(ENTRY), sizes.stored, config)


def find_token_files(config: TokensConfig) -> TokenFiles:
    """Return the files that a config names. Raises DataError for missing files, and for ids of an unknown type."""
    if config.path is None:
        raise DataError("data=tokens needs data.path, a folder made with task=prepare or a file of raw token ids.")
    path = at_home(config.path)
    train, val = path / TRAIN_FILE, path / VAL_FILE
    if (path / HEADER_FILE).is_file():
        return _prepared(path, config)
    if path.is_file() or train.is_file():
        return _raw(path if path.is_file() else train, val if val.is_file() else None, config)
    what = f"has no {HEADER_FILE} and no {TRAIN_FILE}" if path.is_dir() else "does not exist"
    raise DataError(f"data.path={config.path} {what}. Give a folder made with task=prepare or a raw file.")


def open_ids(file: Path, dtype: np.dtype[Any]) -> Ids:
    """Map the ids in a file into memory. Raises DataError where it is empty, unreadable or cut off."""
    with raised_as(DataError, f"cannot read {file}"):
        size = file.stat().st_size
        if size == 0:
            raise DataError(f"{file} is empty. Prepare the tokens again.")
        if size % dtype.itemsize:
            what = f"has {size} bytes, not a multiple of the {dtype.itemsize} of {dtype.name}"
            raise DataError(f"{file} {what}. Give data.dtype as it was written, or prepare the tokens again.")
        return np.memmap(file, dtype=dtype, mode="r")


def _prepared(folder: Path, config: TokensConfig) -> TokenFiles:
    header = _read_header(folder / HEADER_FILE)
    for key in ("dtype", "vocabulary"):
        given = getattr(config, key)
        if given is not None and given != header[key]:
            raise DataError(f"data.{key}={given}, but {folder / HEADER_FILE} says {header[key]}. Leave data.{key} out.")
    tokenizer = read_tokenizer(folder / TOKENIZER_FILE, "data.path")
    if tokenizer.hash != header["tokenizer"]["sha256"]:
        raise DataError(f"{folder / TOKENIZER_FILE} is not the one that the tokens were made with. Prepare them again.")
    tokenizer.config = header.get("tokenizer_config", {})
    dtype = np.dtype(header["dtype"]).newbyteorder("<")
    return TokenFiles(folder / TRAIN_FILE, folder / VAL_FILE, dtype, header["vocabulary"], tokenizer, header)


def _raw(train: Path, val: Path | None, config: TokensConfig) -> TokenFiles:
    if config.dtype is None or config.vocabulary is None:
        needed = f"data.dtype={'|'.join(TOKEN_DTYPES)} and data.vocabulary=<number of ids>"
        raise DataError(f"data.path={config.path} holds raw token ids, which tell neither. Give {needed}.")
    tokenizer = None if config.tokenizer is None else named_tokenizer(config.tokenizer)
    if tokenizer is not None and tokenizer.vocabulary > config.vocabulary:
        more = f"has {tokenizer.vocabulary} ids, more than data.vocabulary={config.vocabulary}"
        raise DataError(f"data.tokenizer={config.tokenizer} {more}. Give the tokenizer that made the ids.")
    dtype = np.dtype(config.dtype).newbyteorder("<")
    return TokenFiles(train, val, dtype, config.vocabulary, tokenizer, None)


def _read_header(file: Path) -> dict[str, Any]:
    damages = OSError, ValueError, KeyError, TypeError, RecursionError
    with raised_as(DataError, f"{file} is damaged", "Prepare the tokens again.", damages):
        header: Any = json.loads(file.read_text(encoding="utf-8"))
        splits = [header["splits"][split] for split in FILES]
        numbers = (header["vocabulary"], *(split["tokens"] for split in splits))
        texts = (header["tokenizer"]["sha256"], *(split["sha256"] for split in splits))
        known = header["format"] == HEADER_FORMAT and header["dtype"] in TOKEN_DTYPES
        typed = all(isinstance(each, int) for each in numbers) and all(isinstance(each, str) for each in texts)
        complete = known and typed and isinstance(header["corpus"], dict)
    if not complete:
        raise DataError(f"{file} does not describe token files of this version. Prepare the tokens again.")
    return dict(header)


def open_split(files: TokenFiles, split: str, verify: bool) -> tuple[Ids, dict[str, str | None], bool]:
    """Return the ids of a split's file, its SHA-256 by split (None where unknown), and if every id was checked."""
    file = files.val if split == "val" else files.train
    assert file is not None
    ids = open_ids(file, files.dtype)
    known = None if files.header is None else files.header["splits"][split]
    if known is not None and known["tokens"] != len(ids):
        raise DataError(f"{file} has {len(ids)} tokens, but {HEADER_FILE} says {known['tokens']}. Prepare them again.")
    if not verify and ids.nbytes > VERIFIED_BYTES:
        return ids, {split: known and known["sha256"]}, False
    digest = hashlib.sha256(ids.data).hexdigest()
    if known is not None and known["sha256"] != digest:
        raise DataError(f"{file} has changed since it was prepared: its SHA-256 differs. Prepare the tokens again.")
    for start in range(0, len(ids), _SCAN_TOKENS):
        require_ids(ids[None, start : start + _SCAN_TOKENS], files.vocabulary, [start], str(file))
    return ids, {split: digest}, True


def write_folder(final: Path, fill: Callable[[Path], dict[str, Any]], advice: str) -> dict[str, Any]:
    """Let `fill` write the files of a folder beside its place, rename it into place, and return `fill`'s result.

    Raises DataError, which ends with the `advice`, where the folder can't be written.
    """
    with raised_as(DataError, f"cannot write {final}", advice), new_folder(final) as partial:
        return fill(partial)


def write_header(
    folder: Path, tokenizer: Tokenizer, splits: dict[str, Any], described: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """Write `tokenizer.json`, then `tokens.json` with the further keys `more`; return the content of the latter."""
    write_synced(folder / TOKENIZER_FILE, tokenizer.to_json().encode())
    header = {
        "format": HEADER_FORMAT,
        "dtype": tokenizer.dtype.name,
        "vocabulary": tokenizer.vocabulary,
        "splits": splits,
        "tokenizer": tokenizer.description,
        "corpus": described,
        "tokenizer_config": tokenizer.config,
        **more,
    }
    write_synced(folder / HEADER_FILE, json.dumps(header, indent=2).encode())
    return header


@contextmanager
def split_writers(folder: Path, marked: bool = False) -> Iterator[dict[str, SplitWriter]]:
    """Open the writers of both splits, which write marks too where they are `marked`."""
    with ExitStack() as files:
        yield {split: SplitWriter(folder, split, files, marked) for split in FILES}


class SplitWriter:
    """Writes the ids of one split and, where they are given, marks of its targets and ends of its documents."""

    def __init__(self, folder: Path, split: str, opened: ExitStack, marked: bool) -> None:
        """The files are closed with `opened`."""
        self.split, self.tokens = split, 0
        self._folder, self._digest, self._ends = folder, hashlib.sha256(), array("Q")
        names = [FILES[split], *([MARKS_FILE[split]] if marked else [])]
        self._files = [opened.enter_context((folder / name).open("wb")) for name in names]

    def add(self, ids: Ids, marks: NDArray[np.bool_] | None = None, ends: bool = False) -> None:
        """Append ids; with `ends` a document ends with them."""
        raw = ids.astype(ids.dtype.newbyteorder("<"), copy=False).tobytes()
        for file, written in zip(self._files, (raw, b"" if marks is None else marks.tobytes()), strict=False):
            file.write(written)
        self._digest.update(raw)
        self.tokens += len(ids)
        if ends:
            self._ends.append(self.tokens)

    def finish(self) -> dict[str, Any]:
        """Wait until all is on the disk, and return the split's entry in `tokens.json`."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        entry = {"file": FILES[self.split], "tokens": self.tokens, "sha256": self._digest.hexdigest()}
        if not self._ends:
            return entry
        ends = np.frombuffer(self._ends, np.uint64).astype("<u8").tobytes()
        digest = write_synced(self._folder / ENDS_FILE[self.split], ends)
        return {**entry, "documents": len(self._ends), "ends_sha256": digest}
