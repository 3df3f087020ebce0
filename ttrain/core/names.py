"""The valid name or number nearest to a wrong one, lists cut short, and line breaks in texts from a command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def did_you_mean(given: str, valid: Iterable[str]) -> str:
    """A sentence to append to an error: the nearest valid name where one is near, else the valid names."""
    options = sorted(set(valid))
    folded = {option.lower(): option for option in options}
    near = difflib.get_close_matches(given.lower(), folded, n=1, cutoff=0.6)
    if near:
        return f"Did you mean {folded[near[0]]!r}? Valid: {', '.join(options)}."
    return f"Valid: {', '.join(options)}." if options else "There is none."


def listed(items: Iterable[object], shown: int = 3, between: str = ", ") -> str:
    """The first few, and how many more there are."""
    texts = [str(item) for item in items]
    more = f"{between if between.isspace() else ' '}and {len(texts) - shown} more" if len(texts) > shown else ""
    return between.join(texts[:shown]) + more


def one_slip(given: str, other: str) -> bool:
    """True if one letter was left out, added or exchanged, or two neighbours swapped. Numbers differ on purpose."""
    start = _alike(given, other)
    end = _alike(given[start:][::-1], other[start:][::-1])
    parts = given[start : len(given) - end], other[start : len(other) - end]
    swapped = len(parts[0]) == 2 and parts[0] == parts[1][::-1]
    return (swapped or max(map(len, parts)) == 1) and not any(map(str.isdigit, "".join(parts)))


def _alike(given: str, other: str) -> int:
    """Return the number of characters that both begin with."""
    return next((at for at, (one, two) in enumerate(zip(given, other)) if one != two), min(len(given), len(other)))


def bare_name(path: str) -> str:
    """Return the name of a file or folder without its endings."""
    return Path(path).name.partition(".")[0]


def with_line_breaks(text: str) -> str:
    """The text with a line break for each pair of the characters backslash and n: shells and Hydra pass those on."""
    return text.replace("\\n", "\n")


def nearest_divisor(number: int, wanted: int) -> str:
    """The divisor of `number` that is nearest to `wanted`, as a sentence; empty if none is within reach."""
    start = min(wanted, number)
    for distance in range(min(start, 10_000)):
        for candidate in (start - distance, start + distance):
            if candidate <= number and number % candidate == 0:
                return f"Nearest that does: {candidate}."
    return ""
