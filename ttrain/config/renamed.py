"""Replacements for keys and options that were removed or renamed, and for Hydra's keys that do nothing here.

Both are answered on the command line, those that went also in the recorded config of a run.
"""

from __future__ import annotations

from pathlib import Path

from ttrain.core.files import read_table

# Old key, section or `key=option` -> the new one, or a sentence that says what to do.
RENAMED: dict[str, str] = read_table(Path(__file__).with_suffix(".yaml"))


def instead(old: str) -> str:
    """Return the sentence that answers a key, section or `key=option` that went; empty for any other."""
    if old.startswith("recipe=bench-"):
        return "Give task=bench bench=<preset>; --help lists the presets."
    new = RENAMED.get(old, "")
    return new if " " in new or not new else f"It is now {new}."


def instead_of_hydras(key: str) -> str:
    """Return the sentence that answers a key of Hydra, or a section of its keys, that does nothing with ttrain."""
    while key and key not in RENAMED:
        key = key.rpartition(".")[0]
    return RENAMED.get(key, "Leave it out.")
