"""The endless stream of tokens that documents make, pass after pass, and sequences that are cut from it."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ttrain.data.counter import derive_key, random_words

Places = NDArray[np.int64]  # indices of tokens in their split

_DOCUMENTS = 4  # tells this stream of random numbers from the others of a seed
_HELD_GROUPS = 4  # orders that are kept, of the groups read last
_HELD_PASSES = 2  # of whole documents: a batch may hold sequences of two


class _Order(NamedTuple):
    """A group's documents in the order of one pass, and where each ends, counted from the group's first token."""

    documents: NDArray[np.int64]
    ends: NDArray[np.int64]


class DocumentStream:
    """All documents of a split, laid end to end in pass after pass.

    `ends` are the places in the split at which documents end. Without a `group` documents keep their order. With one,
    every `group` neighbours are shuffled among themselves, anew for every pass. The order is a function of the seed,
    the pass and the group, so any position can be read at once, and only the orders of a few groups are held.
    """

    def __init__(self, ends: NDArray[np.int64], group: int | None) -> None:
        self._ends, self._starts = ends, np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        self._group = group
        self._order = lru_cache(_HELD_GROUPS)(self._shuffled)

    def read(self, seed: int, position: int, length: int) -> Places:
        """Return where in the split the tokens [position, position + length) of the stream lie."""
        parts: list[Places] = []
        while length:
            number, offset = divmod(position, self.tokens)
            part = np.arange(*self._run(seed, number, offset, length))
            parts.append(part)
            position, length = position + len(part), length - len(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def begins(self, places: Places) -> NDArray[np.bool_]:
        """Return for each token if it is the first of its document."""
        return self._starts[np.searchsorted(self._starts, places, "right") - 1] == places

    @property
    def tokens(self) -> int:
        """Tokens of a pass."""
        return int(self._ends[-1])

    def documents(self, seed: int, number: int) -> tuple[NDArray[np.int64], ...]:
        """Return start and length, int64 [documents], of all documents in the order of one pass."""
        if self._group is None:
            return self._starts, self._ends - self._starts
        groups = range(-(-len(self._ends) // self._group))
        order = np.concatenate([self._order(seed, number, group).documents for group in groups])
        return self._starts[order], (self._ends - self._starts)[order]

    def _run(self, seed: int, number: int, offset: int, most: int) -> tuple[int, int]:
        """Return start and end of tokens that lie side by side, from an offset of one pass on."""
        if self._group is None:
            return offset, min(offset + most, int(self._ends[-1]))
        group = int(np.searchsorted(self._ends, offset, "right")) // self._group
        first = int(self._starts[group * self._group])
        order = self._order(seed, number, group)
        place = int(np.searchsorted(order.ends, offset - first, "right"))
        document = order.documents[place]
        left = int(order.ends[place]) - (offset - first)
        end = int(self._ends[document])
        return end - left, min(end, end - left + most)

    def _shuffled(self, seed: int, number: int, group: int) -> _Order:
        assert self._group is not None
        first = group * self._group
        count = min(self._group, len(self._ends) - first)
        words = random_words(derive_key(_DOCUMENTS, seed, number, group), np.arange(count, dtype=np.uint64))
        documents = first + np.argsort(words, kind="stable")
        return _Order(documents, np.cumsum(self._ends[documents] - self._starts[documents]))


class _Laid(NamedTuple):
    """The documents of one pass that sequences hold, in order, and the first document of each sequence and the end."""

    starts: NDArray[np.int64]  # in the split
    lengths: NDArray[np.int64]  # tokens that are read
    offsets: NDArray[np.int64]  # in the pass, with all tokens of all documents
    firsts: list[int]


class WholeDocuments:
    """Sequences of neighbouring documents of a stream, as many as fit whole, with nothing (-1) after them.

    A document of more than `context` tokens loses its end, or with `skip` is left out. The first sequence begins with
    the first document that begins at token `start` of the stream, or behind it; none holds documents of two passes.
    """

    def __init__(self, stream: DocumentStream, context: int, skip: bool, seed: int = 0, start: int = 0) -> None:
        self._stream, self._context, self._skip, self._seed = stream, context, skip, seed
        self._pass, self._offset = divmod(start, stream.tokens)
        self._begins = [0]  # number of the first sequence of each pass, as far as they were laid
        self._laid = lru_cache(_HELD_PASSES)(self._lay)

    def __len__(self) -> int:
        """Return how many sequences the first pass has."""
        return len(self._laid(0).firsts) - 1

    def read(self, number: int) -> Places:
        """Return where in the split the tokens of one sequence lie."""
        laid, place = self._find(number)[1:]
        documents = range(laid.firsts[place], laid.firsts[place + 1])
        found = np.concatenate([laid.starts[each] + np.arange(laid.lengths[each]) for each in documents])
        return np.pad(found, (0, self._context - len(found)), constant_values=-1)

    def position(self, number: int) -> int:
        """Return the token of the stream that a sequence begins with."""
        index, laid, place = self._find(number)
        return (self._pass + index) * self._stream.tokens + int(laid.offsets[laid.firsts[place]])

    def _find(self, number: int) -> tuple[int, _Laid, int]:
        """Return the pass of a sequence, counted from the first, its documents, and the sequence's place in it."""
        while self._begins[-1] <= number:
            self._begins.append(self._begins[-1] + len(self._laid(len(self._begins) - 1).firsts) - 1)
        index = bisect_right(self._begins, number) - 1
        return index, self._laid(index), number - self._begins[index]

    def _lay(self, index: int) -> _Laid:
        starts, lengths = self._stream.documents(self._seed, self._pass + index)
        offsets = np.cumsum(lengths) - lengths
        kept = offsets >= (0 if index else self._offset)
        if self._skip:
            kept &= lengths <= self._context
        lengths = np.minimum(lengths[kept], self._context)
        filled = np.cumsum(lengths)
        following = np.searchsorted(filled, filled - lengths + self._context, "right").tolist()
        firsts = [0]
        while firsts[-1] < len(lengths):  # the first document that fits no more begins the next sequence
            firsts.append(following[firsts[-1]])
        return _Laid(starts[kept], lengths, offsets[kept], firsts)
