"""Measurements of this machine, in one file of the user's cache folder: sections with entries by key.

All processes share the file. Entries are added under a lock, and the file is replaced in one step. A file or an entry
that can't be read counts as missing, since to measure again costs nothing but time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from ttrain.core.files import lock_file, read_json, replace_file
from ttrain.core.folders import cache_folder

VERSION = 1  # of the file; one of another version counts as empty
Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Section(Generic[Entry]):
    """The measurements of one kind.

    `read` makes an entry of its JSON, and raises an error where that is damaged. `pick` tells which of two entries of
    one key stays: the one that is `known`, or the `new` one.
    """

    name: str
    read: Callable[[Any], Entry]
    pick: Callable[[Entry, Entry], Entry] = lambda known, new: new
    file: Path | None = None  # another one than that of the cache folder

    @property
    def path(self) -> Path:
        return self.file or cache_folder() / "measured.json"

    def known(self) -> dict[str, Entry]:
        """Return all entries by key."""
        found: dict[str, Entry] = {}
        for key, value in self._sections().get(self.name, {}).items():
            with suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError):
                found[key] = self.read(value)
        return found

    def keep(self, new: Mapping[str, Entry]) -> bool:
        """Add entries, and return True if that worked. False means that the file can't be written."""
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path.with_suffix(".lock"), "a", encoding="utf-8") as lock:
                lock_file(lock, wait=True)
                known = self.known()
                picked = {key: self.pick(known[key], entry) if key in known else entry for key, entry in new.items()}
                sections = {**self._sections(), self.name: {**known, **picked}}
                replace_file(self.path, json.dumps({"version": VERSION, "sections": sections}, indent=1) + "\n")
            return True
        return False

    def _sections(self) -> dict[str, dict[str, Any]]:
        content = read_json(self.path)
        sections = content.get("sections") if content.get("version") == VERSION else None
        return {k: v for k, v in sections.items() if isinstance(v, dict)} if isinstance(sections, dict) else {}


def positive(value: Any) -> float:
    """Return a number above zero that is finite. Raises ValueError for another one."""
    if not 0 < (number := float(value)) < math.inf:
        raise ValueError(number)
    return number
