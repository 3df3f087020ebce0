"""Text of any size turned into token files, some at a time."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ttrain.core.errors import DataError
from ttrain.data.corpus import Corpus
from ttrain.data.settings import TextConfig
from ttrain.data.text import OnBytes, choose_tokenizer, describe, encode_split, learning_bytes
from ttrain.data.tokenizer import Tokenizer
from ttrain.data.tokens import HEADER_FILE, HEADER_FORMAT, TOKENIZER_FILE, TRAIN_FILE, VAL_FILE

_FILES = {"train": TRAIN_FILE, "val": VAL_FILE}


def prepare(config: TextConfig, destination: Path | str, *, progress: bool = True) -> dict[str, Any]:
    """Tokenize a corpus into a folder that data=tokens reads, and return the content of its `tokens.json`.

    The tokens and the splits are those that data=text makes of the same config. Memory does not grow with the text,
    apart from the word counts of a BPE tokenizer being learnt. The folder appears only once it is whole.
    Raises DataError when the corpus can't be used, or the destination exists or can't be written.
    """
    final = Path(destination).expanduser()
    if final.exists():
        raise DataError(f"{final} exists already. Give another folder, or remove it first.")
    corpus = Corpus(config)
    partial = final.with_name(f".{final.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        header = _fill(partial, corpus, config, progress)
        os.rename(partial, final)
        _sync(final.parent)
    except OSError as error:
        raise DataError(f"cannot write {final}: {error.strerror or error}. Choose another folder.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return header


def _fill(folder: Path, corpus: Corpus, config: TextConfig, progress: bool) -> dict[str, Any]:
    from tqdm import tqdm

    def bar(total: int, what: str) -> Any:
        return tqdm(
            total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024, disable=not progress or not total
        )

    with bar(learning_bytes(config, corpus), "learning the tokenizer") as shown:
        tokenizer = choose_tokenizer(config, corpus, lambda raw: shown.update(len(raw)))
    _write(folder / TOKENIZER_FILE, [tokenizer.to_json().encode()])
    digest = hashlib.sha256()
    splits = {}
    with bar(corpus.size, "writing tokens") as shown:

        def on_bytes(raw: bytes) -> None:
            digest.update(raw)
            shown.update(len(raw))

        for split in _FILES:
            splits[split] = _write_split(folder, corpus, tokenizer, split, on_bytes)
    described = describe(corpus, tokenizer, digest.hexdigest())
    header = {
        "format": HEADER_FORMAT,
        "dtype": tokenizer.dtype.name,
        "vocabulary": tokenizer.vocabulary,
        "splits": splits,
        "tokenizer": described.pop("tokenizer"),
        "corpus": described,
    }
    _write(folder / HEADER_FILE, [json.dumps(header, indent=2).encode()])
    _sync(folder)
    return header


def _write_split(folder: Path, corpus: Corpus, tokenizer: Tokenizer, split: str, on_bytes: OnBytes) -> dict[str, Any]:
    digest = hashlib.sha256()
    written = 0
    stored = tokenizer.dtype.newbyteorder("<")

    def parts() -> Iterator[bytes]:
        nonlocal written
        for ids in encode_split(corpus, tokenizer, split, on_bytes):
            raw = ids.astype(stored, copy=False).tobytes()
            digest.update(raw)
            written += len(ids)
            yield raw

    _write(folder / _FILES[split], parts())
    if written == 0:
        raise DataError(f"the {split} split of {corpus.source} has no tokens. Give more text or another data.held_out.")
    return {"file": _FILES[split], "tokens": written, "sha256": digest.hexdigest()}


def _write(file: Path, parts: Iterable[bytes]) -> None:
    with open(file, "wb") as stream:
        for part in parts:
            stream.write(part)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(folder: Path) -> None:
    """Make a rename or a new file last through a power cut, where the system lets a folder be synced."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
