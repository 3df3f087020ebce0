"""List the built steps that one optimizer step of a rank runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ttrain.parallel.ranks import Ranks


def in_order(ranks: Ranks, micro_batches: int, joined: bool, guarded: bool) -> Iterator[tuple[str, int, int]]:
    """Yield name, slice and micro-batch of each built step, where a slice has so many `micro_batches`.

    The update of a guarded step is not among them, because it hangs on what they return.
    """
    for place, slice_ in enumerate(ranks.own):
        for number in range(micro_batches):
            if joined and (slice_, number) == (ranks.own[-1], micro_batches - 1):
                yield "train", slice_, number  # does what comes last of all
                return
            yield "accumulate_next" if number else "accumulate_first", slice_, number
        level = 0
        while place >> level & 1:
            yield f"merge{level}", slice_, 0
            level += 1
        if place + 1 < len(ranks.own):
            yield f"keep{level}", slice_, 0
    yield "norm" if guarded else "update", 0, 0


def repeats(ranks: Ranks, micro_batches: int, joined: bool, guarded: bool) -> Counter[str]:
    """Return how often each built step runs."""
    names = Counter(name for name, _, _ in in_order(ranks, micro_batches, joined, guarded))
    return names + Counter(update=int(guarded))
