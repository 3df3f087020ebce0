"""Text of any size turned into token files, some at a time."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrain.core.errors import DataError
from ttrain.data.corpus import Corpus
from ttrain.data.settings import DocumentsConfig, TextConfig
from ttrain.data.text import OnBytes, choose_tokenizer, describe, encode_split, learning_bytes
from ttrain.data.tokenizer import Tokenizer
from ttrain.data.tokens import HEADER_FILE, HEADER_FORMAT, TOKENIZER_FILE, TRAIN_FILE, VAL_FILE

_ADVICE = "Make room or name another folder: prepare.dir=<folder>."
FILES = {"train": TRAIN_FILE, "val": VAL_FILE}


def prepare(config: TextConfig | DocumentsConfig, destination: Path | str, *, progress: bool = True) -> dict[str, Any]:
    """Tokenize a corpus into a folder that data=tokens reads, and return the content of its `tokens.json`.

    The tokens and the splits are those that data=text, or data=documents, makes of the same config. Memory does not
    grow with the text, apart from the word counts of a BPE tokenizer being learnt and some bytes per document. The
    folder appears only once it is whole. Raises DataError when the corpus can't be used, or the destination exists or
    can't be written.
    """
    from ttrain.data.document_files import fill_documents
    from ttrain.data.sources import find_sources

    final = Path(destination).expanduser()
    if final.exists():
        raise DataError(f"{final} exists already. Give another folder, or remove it first.")
    if isinstance(config, DocumentsConfig):
        sources = find_sources(config)
        return write_folder(final, lambda folder: fill_documents(folder, config, sources, Bars(progress)), _ADVICE)
    corpus = Corpus(config)
    return write_folder(final, lambda folder: _fill(folder, corpus, config, Bars(progress)), _ADVICE)


def write_folder(final: Path, fill: Callable[[Path], dict[str, Any]], advice: str) -> dict[str, Any]:
    """Let `fill` write a folder's files beside their place, then put them there in one step; what it returns.

    Raises DataError, which ends with the `advice`, where that can't be written.
    """
    partial = final.with_name(f"{_partial(final)}{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        header = fill(partial)
        os.rename(partial, final)
        _sync(final.parent)
    except OSError as error:
        raise DataError(f"cannot write {final}: {error.strerror or error}. {advice}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return header


def clear_partial(final: Path) -> None:
    """Remove what processes of this machine that were killed have left of a folder."""
    for left in final.parent.glob(f"{_partial(final)}*"):
        number = left.name.rpartition("-")[2]
        if number.isdecimal() and not _alive(int(number)):
            shutil.rmtree(left, ignore_errors=True)


def _partial(final: Path) -> str:
    return f".{final.name}.partial-{platform.node()}-"


def _alive(process: int) -> bool:
    """Whether a process of this machine may still run."""
    if os.name != "posix":  # elsewhere the question would stop it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is somebody else's
        return True
    return True


@dataclass(frozen=True)
class Bars:
    """Progress bars over bytes. With a `delay` one appears only once its work has taken so many seconds."""

    shown: bool = True
    delay: float = 0.0

    def open(self, total: int, what: str) -> Any:
        """A bar: a context manager with `update(bytes)`."""
        from tqdm import tqdm

        return tqdm(
            total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024, disable=not self.shown or not total,
            delay=self.delay,
        )  # fmt: skip


def _fill(folder: Path, corpus: Corpus, config: TextConfig, bars: Bars) -> dict[str, Any]:
    with bars.open(learning_bytes(config, corpus), "learning the tokenizer") as shown:
        tokenizer = choose_tokenizer(config, corpus, lambda raw: shown.update(len(raw)))
    digest = hashlib.sha256()
    splits = {}
    with bars.open(corpus.size, "writing tokens") as shown:

        def on_bytes(raw: bytes) -> None:
            digest.update(raw)
            shown.update(len(raw))

        for split in FILES:
            splits[split] = _write_split(folder, corpus, tokenizer, split, on_bytes)
    corpus.require_unchanged()
    return write_header(folder, tokenizer, splits, describe(corpus, tokenizer, digest.hexdigest()))


def write_header(
    folder: Path, tokenizer: Tokenizer, splits: dict[str, Any], described: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """Write `tokenizer.json` and `tokens.json`, the latter last; `more` are further keys of it, which it returns."""
    write_file(folder / TOKENIZER_FILE, [tokenizer.to_json().encode()])
    header = {
        "format": HEADER_FORMAT,
        "dtype": tokenizer.dtype.name,
        "vocabulary": tokenizer.vocabulary,
        "splits": splits,
        "tokenizer": described.pop("tokenizer"),
        "corpus": described,
        **more,
    }
    write_file(folder / HEADER_FILE, [json.dumps(header, indent=2).encode()])
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

    write_file(folder / FILES[split], parts())
    if written == 0:
        raise DataError(f"the {split} split of {corpus.source} has no tokens. Give more text or another data.held_out.")
    return {"file": FILES[split], "tokens": written, "sha256": digest.hexdigest()}


def write_file(file: Path, parts: Iterable[bytes]) -> None:
    """Write a file and wait until it is on the disk."""
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
