"""The endless stream of tokens that documents make, pass after pass, as a function of a position in it."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ttrain.data.counter import derive_key, random_words

Places = NDArray[np.int64]  # indices of tokens in their split

_DOCUMENTS = 4  # tells this stream of random numbers from the others of a seed
_HELD_GROUPS = 4  # orders that are kept, of the groups read last


class _Order(NamedTuple):
    """A group's documents in the order of one pass, and where each ends, counted from the group's first token."""

    documents: NDArray[np.int64]
    ends: NDArray[np.int64]


def starts_of(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each document starts that ends there."""
    return np.concatenate([np.zeros(1, np.int64), ends[:-1]])


class WholeDocuments:
    """Sequences of neighbouring documents, as many as fit whole, with nothing (-1) after them.

    A document of more than `context` tokens loses its end, or with `skip` is left out; `long` counts those.
    """

    def __init__(self, ends: NDArray[np.int64], context: int, skip: bool) -> None:
        starts = starts_of(ends)
        self._long, self._context = starts[ends - starts > context], context
        self.long = len(self._long)
        kept = ends - starts <= context if skip else np.ones(len(ends), np.bool_)
        self._starts, lengths = starts[kept], np.minimum(ends - starts, context)[kept]
        self._filled, firsts = np.cumsum(lengths), [0]
        while firsts[-1] < len(lengths):  # the first document that fits no more begins the next sequence
            before = self._filled[firsts[-1] - 1] if firsts[-1] else 0
            firsts.append(int(np.searchsorted(self._filled, before + context, "right")))
        self._lengths, self._firsts = lengths, firsts

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def silenced(self, marks: NDArray[np.uint8]) -> int:
        """How many of those that lose their end lose every target with it; `marks` tells which tokens are targets."""
        return sum(not marks[start + 1 : start + self._context].any() for start in self._long)

    def read(self, number: int) -> Places:
        """Where in the split the tokens of one sequence lie."""
        documents = range(self._firsts[number], self._firsts[number + 1])
        parts = [self._starts[each] + np.arange(self._lengths[each]) for each in documents]
        found = np.concatenate(parts)
        return np.pad(found, (0, self._context - len(found)), constant_values=-1)


class DocumentStream:
    """All documents of a split laid end to end, again and again.

    `ends` tells where each document of the split ends. Without a `group` documents keep their order. With one, every
    so many neighbours are shuffled among themselves, anew for every pass; the order is a function of the seed, the pass
    and the group, so any position can be read at once, and no more than a group's order is ever held.
    """

    def __init__(self, ends: NDArray[np.int64], group: int | None) -> None:
        self._ends, self._starts = ends, starts_of(ends)
        self._group = group
        self._orders: OrderedDict[tuple[int, int, int], _Order] = OrderedDict()

    def read(self, seed: int, position: int, length: int) -> Places:
        """Where in the split the tokens [position, position + length) of the stream lie."""
        parts: list[Places] = []
        while length:
            number, offset = divmod(position, int(self._ends[-1]))
            part = np.arange(*self._run(seed, number, offset, length))
            parts.append(part)
            position, length = position + len(part), length - len(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def begins(self, places: Places) -> NDArray[np.bool_]:
        """Whether each token is the first of its document."""
        return self._starts[np.searchsorted(self._starts, places, "right") - 1] == places

    def _run(self, seed: int, number: int, offset: int, most: int) -> tuple[int, int]:
        """Start and end of tokens that lie side by side, from an offset of one pass on."""
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

    def _order(self, seed: int, number: int, group: int) -> _Order:
        key = seed, number, group
        if key in self._orders:
            self._orders.move_to_end(key)
            return self._orders[key]
        assert self._group is not None
        first = group * self._group
        count = min(self._group, len(self._ends) - first)
        words = random_words(derive_key(_DOCUMENTS, seed, number, group), np.arange(count, dtype=np.uint64))
        documents = first + np.argsort(words, kind="stable")
        order = _Order(documents, np.cumsum(self._ends[documents] - self._starts[documents]))
        self._orders[key] = order
        if len(self._orders) > _HELD_GROUPS:
            self._orders.popitem(last=False)
        return order
