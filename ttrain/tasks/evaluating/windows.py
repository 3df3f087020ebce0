"""Documents cut into windows: every token is predicted once, from as much before it as asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ttrain.data.tokenizer import Ids
from ttrain.train.protocols import Array


@dataclass(frozen=True)
class Window:
    """Part of a document: tokens [start, stop) are read, and those after places `first` to stop - 1 predicted."""

    document: int
    start: int
    stop: int
    first: int


def windows_of(length: int, context: int, stride: int, document: int = 0) -> Iterator[Window]:
    """Yield the windows of a document of `length` tokens.

    The first token is only read. Later windows predict `stride` tokens each.

    Every window holds as much of what comes before its targets as fits.
    """
    done = 0  # targets that are predicted; target n is token n + 1
    while done < length - 1:
        stop = min(done + (stride if done else context), length - 1)
        yield Window(document, max(0, stop - context), stop, done)
        done = stop


@dataclass
class Texts:
    """Documents as held-out samples: rows of `context` tokens, with targets -1 where nothing is to be predicted."""

    documents: Sequence[Ids]
    context: int
    windows: Sequence[Window]
    description: dict[str, Any] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(documents: Sequence[Ids], context: int, stride: int | None = None) -> Texts:
        """Return the windows of all documents; see windows_of."""
        stride, numbered = min(stride or context, context), enumerate(documents)
        windows = [window for number, ids in numbered for window in windows_of(len(ids), context, stride, number)]
        return Texts(documents, context, windows)

    def parts(self, length_of: Callable[[int], int]) -> Iterator[Texts]:
        """Yield the windows in groups, from the shortest on: rows of `length_of(tokens)` hold those of a group."""
        lengths = [length_of(window.stop - window.start) for window in self.windows]
        for length in sorted(set(lengths)):
            own = [window for window, each in zip(self.windows, lengths, strict=True) if each == length]
            yield Texts(self.documents, length, own)

    @property
    def val_samples(self) -> int:
        """Number of windows."""
        return len(self.windows)

    def batch(self, split: str, seed: int, first: int, rows: int) -> dict[str, Array]:
        """Arrays `tokens` and `targets`, int64 [rows, context]."""
        tokens, targets = np.zeros((rows, self.context), np.int64), np.full((rows, self.context), -1, np.int64)
        for row, window in enumerate(self.windows[first : first + rows]):
            ids = self.documents[window.document]
            tokens[row, : window.stop - window.start] = ids[window.start : window.stop]
            places = slice(window.first - window.start, window.stop - window.start)
            targets[row, places] = ids[window.first + 1 : window.stop + 1]
        return {"tokens": tokens, "targets": targets}
