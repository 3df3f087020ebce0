"""Divide a batch and the state among ranks: pure functions of numbers."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from ttrain.core.spec import Part, flat_offsets

T = TypeVar("T")
BLOCK = 1024  # elements of a tensor that one sum of squares covers, and that no two ranks share
BUCKET_MB = 25.0  # sent at a time


@dataclass(frozen=True)
class Ranks:
    """The batch is `slices` slices of consecutive rows, and each rank computes as many of them, one after another.

    What is summed over slices is summed in one binary tree, so that its bits do not depend on the number of ranks:
    slices and ranks are powers of two, and a rank's slices are a subtree.
    """

    rank: int = 0
    count: int = 1
    slices: int = 1
    shards: bool = False  # whether each rank updates a shard of the model and keeps the optimizer's state of that alone
    bucket_mb: float = BUCKET_MB  # of fp32 gradients that are sent at a time
    divides: bool = False  # whether each rank also keeps that shard of the weights alone, and gathers what it reads
    prefetch: int = 1  # blocks ahead of the one that is computed whose weights are gathered meanwhile

    @property
    def bucket(self) -> int:
        """Elements that are sent at a time at most."""
        return max(int(self.bucket_mb * 2**20 / 4), 1)

    @property
    def own(self) -> range:
        """The slices of this rank."""
        local = self.slices // self.count
        return range(self.rank * local, (self.rank + 1) * local)

    @property
    def levels(self) -> int:
        """Count the levels of the tree within a rank: so many sums wait for another at most."""
        return len(self.own).bit_length() - 1

    @property
    def sharding(self) -> bool:
        return self.shards and self.count > 1

    @property
    def dividing(self) -> bool:
        return self.divides and self.count > 1

    @property
    def single(self) -> bool:
        """Return whether batch and state are one piece, so that nothing is summed over slices."""
        return self.slices == 1


def tree_sum(values: Sequence[T], add: Callable[[T, T], T]) -> T:
    """The sum of as many values as a power of two, by pairs of neighbours, then pairs of pairs."""
    while len(values) > 1:
        values = [add(values[index], values[index + 1]) for index in range(0, len(values), 2)]
    return values[0]


@dataclass(frozen=True)
class Sharding:
    """Owners of tensors that lie side by side, as core.spec.flat_offsets lays them.

    Each bucket of `bounds` holds where the shards of its ranks begin, in elements, and where it ends.
    """

    sizes: tuple[int, ...]
    bounds: tuple[tuple[int, ...], ...]

    @cached_property
    def parts(self) -> list[tuple[tuple[Part, ...], ...]]:
        """Return the parts of each tensor's elements that a rank owns, by tensor and rank."""
        offsets, _ = flat_offsets(self.sizes)
        return [
            tuple(tuple(self._within(offset, size, rank)) for rank in range(len(self.bounds[0]) - 1))
            for offset, size in zip(offsets, self.sizes, strict=True)
        ]

    def _within(self, offset: int, size: int, rank: int) -> list[Part]:
        found: list[Part] = []
        for bucket in self.bounds:
            start, stop = max(bucket[rank] - offset, 0), min(bucket[rank + 1] - offset, size)
            if start < stop and found and found[-1][1] == start:
                found[-1] = (found[-1][0], stop)
            elif start < stop:
                found.append((start, stop))
        return found


def sharding_of(sizes: Sequence[int], count: int, whole: Sequence[bool], limit: int = sys.maxsize) -> Sharding:
    """Buckets of nearly equal size in shards of nearly equal size.

    They are cut at multiples of BLOCK elements of a tensor, but not within one that is to stay `whole`.
    """
    offsets, end = flat_offsets(sizes)
    limit = -(-end // -(-end // limit))
    cuts = [0]
    for offset, size, kept in zip(offsets, sizes, whole, strict=True):
        cuts += range(offset, offset + max(size, 1), max(size, 1) if kept else BLOCK)
    cuts = [*dict.fromkeys(cuts), end]
    bounds: list[tuple[int, ...]] = []
    start = 0
    while start < end or not bounds:
        last = max(bisect_left(cuts, start + limit + 1) - 1, bisect_left(cuts, start) + 1)
        stop = cuts[min(last, len(cuts) - 1)]
        inside = cuts[bisect_left(cuts, start) : last + 1]
        bounds.append(tuple(_nearest(inside, start + (stop - start) * rank / count) for rank in range(count + 1)))
        start = stop
    return Sharding(tuple(sizes), tuple(bounds))


def _nearest(cuts: Sequence[int], wanted: float) -> int:
    place = bisect_left(cuts, wanted)
    return min(cuts[max(place - 1, 0) : place + 1], key=lambda cut: abs(cut - wanted))
