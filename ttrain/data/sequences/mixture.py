"""Sequences of several sources in the shares that weights give, each sequence from one source."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain.data.batches import Batch, Split, TokenSequences
from ttrain.data.counter import derive_key, random_words
from ttrain.data.text import with_notices

ReadCounts = Mapping[str, tuple[int, int]]  # by source: how many of its sequences and tokens were read

_BLOCK = 256  # sequences that are shuffled among themselves
_DRAWS, _SOURCE = 5, 6  # tell these streams of random numbers from the others of a seed
_HELD_BLOCKS = 4


class Mixture(TokenSequences):
    """Sequences of the datasets `parts`, drawn by weights.

    The source of a training sequence follows from the seed and its number alone. Every block of 256 sequences has as
    many of each source as its weight asks for, rounded so that errors never add up, in random order. So a closed form
    tells how many of the sequences before one are of each source. A source gives its sequences in its own order, and
    has epochs of its own. Held-out sequences lie evenly among each other.
    """

    def __init__(self, parts: Mapping[str, Any], weights: Sequence[Sequence[float]], told: Mapping[str, Any]) -> None:
        """Take the datasets by name, their weights in each phase, and what is `told` of all sources together."""
        self.parts, self.weights = parts, weights
        first, each = next(iter(parts.values())), {name: part.description for name, part in parts.items()}
        self.vocabulary, self.tokenizer = first.vocabulary, first.tokenizer
        tokens = {split: sum(facts["tokens"][split] for facts in each.values()) for split in ("train", "val")}
        notices = [f"{name}: {notice}" for name, facts in each.items() for notice in facts.get("notices", ())]
        self.description = with_notices({**told, "sources": each, "tokens": tokens}, notices)
        self._start_at(first.context, 0, 0, {}, weights[0])

    def at(self, context: int, sequences: int, tokens: int, *mixed: Any) -> Mixture:
        """See TokenSequences. The ReadCounts so far may follow, and the weights from there on."""
        changed = copy(self)
        changed._start_at(context, sequences, tokens, *(mixed or ({}, self._weights)))
        return changed

    def _start_at(self, context: int, first: int, tokens: int, read: ReadCounts, weights: Sequence[float]) -> None:
        self.context, self._first, self._offset, self._weights = context, first, tokens, weights
        self._read = [read.get(name, (0, 0)) for name in self.parts]
        self._views = [part.at(context, *each) for part, each in zip(self.parts.values(), self._read, strict=True)]
        self.fields = self._views[0].fields
        self._sources = lru_cache(_HELD_BLOCKS)(self._shuffled)

    def batch(self, split: Split, seed: int, first: int, rows: int) -> Batch:
        """See batches.Dataset."""
        numbers = range(first, first + rows)
        if split == "train":
            sources = np.array([self._sources(seed, number // _BLOCK)[number % _BLOCK] for number in numbers])
            starts = self._drawn(seed, first)
        else:
            counts = np.array([self._held_out(number) for number in (*numbers, first + rows)])
            sources, starts = np.diff(counts, axis=0).argmax(1), counts[0]
        batch: Batch = {}
        for source, (name, view) in enumerate(zip(self.parts, self._views, strict=True)):
            if len(places := np.flatnonzero(sources == source)):
                part = view.batch(split, _seed_of(seed, name), int(starts[source]), len(places))
                for field, array in part.items():
                    batch.setdefault(field, np.empty((rows, *array.shape[1:]), array.dtype))[places] = array
        return batch

    @property
    def val_samples(self) -> int:
        """See batches.Dataset."""
        return sum(view.val_samples for view in self._views)

    def divided(self, samples: int) -> dict[str, tuple[Any, int]]:
        """Return by name the data of each source, and how many of the first `samples` held-out ones are of it."""
        return dict(zip(self.parts, zip(self._views, self._held_out(samples).tolist(), strict=True), strict=True))

    def _held_out(self, samples: int) -> NDArray[np.int64]:
        return quotas([view.val_samples for view in self._views], samples)

    def read_before(self, seed: int, number: int) -> ReadCounts:
        """Return what is read of each source before a training sequence."""
        drawn = zip(self.parts, self._views, self._drawn(seed, number).tolist(), strict=True)
        return {name: (count, view.position(_seed_of(seed, name), count)) for name, view, count in drawn}

    def metrics(self, read: ReadCounts) -> dict[str, float]:
        """Return how many epochs of each source were read, and its share of the sequences."""
        found, every = {}, sum(sequences for sequences, _ in read.values())
        for name, (sequences, tokens) in read.items():
            found[f"train/epochs/{name}"] = round(tokens / self.parts[name].description["tokens"]["train"], 4)
            found[f"train/share/{name}"] = round(sequences / every, 4)
        return found

    def _drawn(self, seed: int, number: int) -> NDArray[np.int64]:
        """Return how many sequences of each source come before the one of this number, int64 [sources]."""
        given, before = (self._counts(seed, each) for each in (number, self._first))
        return np.array([sequences for sequences, _ in self._read]) + given - before

    def _counts(self, seed: int, number: int) -> NDArray[np.int64]:
        block, inside = divmod(number, _BLOCK)
        begun = np.bincount(self._sources(seed, block)[:inside], minlength=len(self.parts))
        return quotas(self._weights, block * _BLOCK) + begun

    def _shuffled(self, seed: int, block: int) -> NDArray[np.int64]:
        """Return the sources of the sequences of a block, int64 [256]."""
        begin, end = (quotas(self._weights, _BLOCK * each) for each in (block, block + 1))
        words = random_words(derive_key(_DRAWS, seed, block), np.arange(_BLOCK, dtype=np.uint64))
        return np.repeat(np.arange(len(begin)), end - begin)[np.argsort(words, kind="stable")]


def quotas(weights: Sequence[float], count: int) -> NDArray[np.int64]:
    """Divide a count by weights, int64 [weights]. The parts add up to it; with a larger count no part is smaller."""
    found, left = [], count
    for number, weight in enumerate(weights):
        rest = sum(weights[number:])
        found.append(int(left * (weight / rest) + 0.5) if rest else 0)
        left -= found[-1]
    return np.array(found, np.int64)


def _seed_of(seed: int, name: str) -> int:
    """Return the seed of a source's order, which other sources do not change."""
    return derive_key(_SOURCE, seed, int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
