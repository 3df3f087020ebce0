"""The endless stream of tokens of documents, epoch after epoch, and the sequences that are cut from it."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ttrain.data.counter import derive_key, random_words

Places = NDArray[np.int64]  # indices of tokens in their split

_DOCUMENTS = 4  # tells this stream of random numbers from the others of a seed
_HELD_EPOCHS = 2  # a batch may hold sequences of two


class Epoch(NamedTuple):
    """Documents in the order of an epoch: where each begins in the split, its tokens, and its start in the epoch."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    offsets: NDArray[np.int64]


class DocumentStream:
    """All documents of a split, laid end to end in epoch after epoch.

    `ends` are the places in the split at which documents end. Without a `group` documents keep their order. With one,
    every `group` neighbours are shuffled among themselves, anew for every epoch. The order is a function of the seed,
    the epoch and the group, so any position can be read at once.
    """

    def __init__(self, ends: NDArray[np.int64], group: int | None) -> None:
        self._starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        self._ends, self._group = ends, group
        self.tokens = int(ends[-1])  # of an epoch
        self.documents = lru_cache(_HELD_EPOCHS)(self._documents)

    def read(self, seed: int, position: int, length: int) -> Places:
        """Return where in the split the tokens [position, position + length) of the stream lie."""
        parts: list[Places] = []
        while length:
            number, offset = divmod(position, self.tokens)
            part = np.arange(offset, min(offset + length, self.tokens))
            position, length = position + len(part), length - len(part)
            if self._group is not None:
                order = self.documents(seed, number)
                index = np.searchsorted(order.offsets, part, "right") - 1
                part += order.starts[index] - order.offsets[index]
            parts.append(part)
        return np.concatenate(parts)

    def begins(self, places: Places) -> NDArray[np.bool_]:
        """Return for each token if it is the first of its document."""
        return self._starts[np.searchsorted(self._starts, places, "right") - 1] == places

    def _documents(self, seed: int, number: int) -> Epoch:
        """Return all documents in the order of one epoch."""
        order = np.arange(len(self._ends))
        if self._group is not None:
            for number_of_group, first in enumerate(range(0, len(order), self._group)):
                group = order[first : first + self._group]
                key = derive_key(_DOCUMENTS, seed, number, number_of_group)
                group[:] = first + np.argsort(random_words(key, np.arange(len(group), dtype=np.uint64)), kind="stable")
        lengths = (self._ends - self._starts)[order]
        return Epoch(self._starts[order], lengths, np.cumsum(lengths) - lengths)


class WholeDocuments:
    """Sequences of neighbouring documents of a stream, as many as fit whole, with nothing (-1) after them.

    A document of more than `context` tokens loses its end, or with `skip` is left out. The first sequence begins with
    the first document that begins at token `start` of the stream, or behind it; none holds documents of two epochs.
    """

    def __init__(self, stream: DocumentStream, context: int, skip: bool, seed: int = 0, start: int = 0) -> None:
        self._stream, self._context, self._skip, self._seed = stream, context, skip, seed
        self._epoch, self._offset = divmod(start, stream.tokens)
        self._begins = [0]  # number of the first sequence of each epoch, as far as they were laid
        self._laid = lru_cache(_HELD_EPOCHS)(self._lay)

    def __len__(self) -> int:
        """Return how many sequences the first epoch has."""
        return len(self._laid(0)[1]) - 1

    def read(self, number: int) -> Places:
        """Return where in the split the tokens of one sequence lie."""
        _, (laid, firsts), place = self._find(number)
        documents = range(firsts[place], firsts[place + 1])
        found = np.concatenate([laid.starts[each] + np.arange(laid.lengths[each]) for each in documents])
        return np.pad(found, (0, self._context - len(found)), constant_values=-1)

    def position(self, number: int) -> int:
        """Return the token of the stream that a sequence begins with."""
        index, (laid, firsts), place = self._find(number)
        return (self._epoch + index) * self._stream.tokens + int(laid.offsets[firsts[place]])

    def _find(self, number: int) -> tuple[int, tuple[Epoch, list[int]], int]:
        """Return the epoch of a sequence, counted from the first, its documents, and the sequence's place in it."""
        while self._begins[-1] <= number:
            self._begins.append(self._begins[-1] + len(self._laid(len(self._begins) - 1)[1]) - 1)
        index = bisect_right(self._begins, number) - 1
        return index, self._laid(index), number - self._begins[index]

    def _lay(self, index: int) -> tuple[Epoch, list[int]]:
        """Return the documents that sequences hold of an epoch, as far as they are read, and their first ones."""
        starts, lengths, offsets = self._stream.documents(self._seed, self._epoch + index)
        kept = offsets >= (0 if index else self._offset)
        if self._skip:
            kept &= lengths <= self._context
        lengths = np.minimum(lengths[kept], self._context)
        filled = np.cumsum(lengths)
        following = np.searchsorted(filled, filled - lengths + self._context, "right").tolist()
        firsts = [0]
        while firsts[-1] < len(lengths):  # the first document that fits no more begins the next sequence
            firsts.append(following[firsts[-1]])
        return Epoch(starts[kept], lengths, offsets[kept]), firsts
