"""Write files atomically: a file is complete or absent, even after a power cut."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ttrain.core.errors import CheckpointError, UserError, raised_as

CHUNK_BYTES = 1 << 22
LARGEST_JSON = 1 << 30  # bytes


def write_synced(path: Path, data: bytes) -> str:
    """Write a new file, wait until it is on the disk, and return the SHA-256 of what was handed over."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def replace_file(path: Path, content: bytes | str | Callable[[Path], object]) -> None:
    """Replace a file in one step: readers see the old content or the new one, never a part.

    `content` may write it, to the path beside that it is given.
    """
    beside = _beside(path)
    beside.unlink(missing_ok=True)
    try:
        if callable(content):
            _remove_left(path)
            content(beside)
            sync_file(beside)
        else:
            write_synced(beside, content.encode() if isinstance(content, str) else content)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    sync_file(path.parent)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a folder beside to fill, which takes the name of the new one once it is whole, or is removed."""
    beside = _beside(folder)
    try:
        _remove_left(folder)
        beside.mkdir(parents=True)
        yield beside
        sync_file(beside)
        os.replace(beside, folder)
        sync_file(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def read_table(path: Path) -> Any:
    """Return the content of a YAML file that lies beside a module of ttrain."""
    import yaml

    return yaml.load(path.read_text("utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.tmp")


def _remove_left(path: Path) -> None:
    """Remove what processes of this machine that are gone have left beside a path."""
    import psutil

    for left in path.parent.glob(f".{glob.escape(f'{path.name}.{platform.node()}')}.*.tmp"):
        number = left.name.split(".")[-2]
        if number.isdecimal() and int(number) < 2**31 and not psutil.pid_exists(int(number)):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def write_chosen(key: str, path: Path, content: str, folders: bool = False) -> None:
    """Replace the file that a key of the config names, with `folders` making those around it.

    Raises UserError where it can't be written.
    """
    with raised_as(UserError, f"{key}={path}: can't be written", "Give another file."):
        if folders:
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)


def text_of(path: Path) -> str:
    """Return the text of a file; empty where it can't be read."""
    with suppress(OSError):
        return path.read_text("utf-8", errors="replace")
    return ""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty where there is none, or `read_object` refuses it."""
    with suppress(CheckpointError):
        return read_object(path)
    return {}


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises CheckpointError if it can't be read, is huge, or holds no object."""
    with raised_as(CheckpointError, f"{path} can't be read"):
        if path.stat().st_size > LARGEST_JSON:
            raise CheckpointError(f"{path} has more than 1 GiB, which is no JSON of ours. Give another file.")
        return parsed_object(path, path.read_bytes())


def parsed_object(path: Path, data: bytes) -> dict[str, Any]:
    """The object that the content of a JSON file is. Raises CheckpointError, which names the file, for any other."""
    with raised_as(CheckpointError, f"{path} is not JSON that can be read", of=(ValueError, RecursionError)):
        value = json.loads(data.decode())
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, expected an object.")
    return value


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file that never changes a second name; a file system without hard links gets a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        sync_file(target)


def sync_file(path: Path) -> None:
    """Wait until what was written to a file, by whatever handle, or the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(file: IO[str], wait: bool = False) -> bool:
    """Lock a file for this process, and return True if that worked. The lock ends with the process, however it ends.

    With `wait` until nobody else holds it, else False is returned at once where somebody does.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # any but one: a file system without locks
        return not isinstance(error, BlockingIOError)
    return True


def hold_for_reading(path: Path) -> IO[str]:
    """Return the opened file, which `lock_file` fails to lock until it is closed. Others may hold it as well.

    Waits while a process locks it, as one does for the moment in which it removes it.
    """
    file = open(path, encoding="utf-8")  # noqa: SIM115 - held by the caller
    with suppress(OSError):  # of a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH)
    return file


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def to_json(value: Any) -> str:
    """Indented JSON that ends with a newline. NaN and infinities are refused: JSON has none.

    A byte of a file name that is not UTF-8 reaches Python as a lone surrogate, which JSON can only hold escaped.
    """
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace").decode()


def sha256_json(value: Any) -> str:
    """SHA-256 of a value's canonical JSON (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()
