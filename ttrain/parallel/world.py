"""The ranks of a run, for the host: sums and choices that all ranks share, and the rank that leads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Thread
from typing import Any, TypeVar

from ttrain.device.base import Group
from ttrain.parallel.ranks import Ranks, tree_sum

T = TypeVar("T")  # a JSON value
Numbers = Mapping[str, float]  # truth values count as numbers


class World:
    """One process alone. Every method is called by all ranks, at the same place of the same run."""

    group: Group | None = None  # what devices exchange tensors through

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()
        self._texts: dict[str, str] = {}
        self.follow: Callable[[str], object] = str  # what the other ranks do while one works `once`, as it broadcasts

    @property
    def leads(self) -> bool:
        """Return whether this rank writes the run's files and talks to the user."""
        return self.ranks.rank == 0

    def gather(self, records: Sequence[Numbers]) -> list[dict[str, float]]:
        """The records of all ranks, in the order of the ranks; all have the same keys, and each rank as many."""
        return [dict(record) for record in records]

    def broadcast(self, value: T, rank: int = 0) -> T:
        """The value of one rank, the leading one's by default, on all ranks."""
        return value

    def once(self, work: Callable[[], str]) -> str:
        """Return the result of the leading rank's work, however long that takes. Where it fails, all fail likewise.

        Meanwhile the others `follow` each text that the work broadcasts.
        """
        return work()

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        """The others enter once the leading rank is done: what it left on the disk they need not do."""
        yield

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather([{"here": True}])

    def close(self) -> None:
        """Leave the other ranks; at the end of `together` this is done."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around all that ranks do together: the first error of one ends all, with its message and its rank."""
        yield

    def agree(self, what: str, facts: Mapping[str, Any]) -> None:
        """Raises UserError where another rank has other facts, JSON values by name."""

    def remember(self, key: str, text: str) -> None:
        """Keep a text for as long as the process that started the ranks, which may start them again."""

    def remembered(self, key: str) -> str | None:
        return None

    def send(self, key: str, text: str) -> None:
        """Leave a text for whichever rank receives it. Any thread may."""
        self._texts[key] = text

    def receive(self, key: str, rank: int) -> str:
        """Wait for the text that a rank sends."""
        return self._texts.pop(key)

    def joining(self, thread: Thread) -> AbstractContextManager[None]:
        """Around a wait for another thread of this process, which may itself wait for other ranks."""
        return nullcontext()

    def sum_slices(self, records: Sequence[Numbers], beside: Numbers) -> tuple[dict[str, float], dict[str, float]]:
        """The sums over all slices of numbers that this rank has for its own, added in one order.

        Numbers of the rank itself travel `beside` them: the second result is as that of `largest`.
        """
        gathered = self.gather([{**record, **beside} for record in records])
        most = {name: largest([record.pop(name) for record in gathered]) for name in beside}
        return tree_sum(gathered, lambda x, y: {name: value + y[name] for name, value in x.items()}), most

    def first(self, found: tuple[int, str] | None) -> str | None:
        """Return the text that comes first by its place among those that ranks have found, and say whose it is."""
        places = [record["place"] for record in self.gather([{"place": math.inf if found is None else found[0]}])]
        rank = places.index(min(places))
        if places[rank] == math.inf:
            return None
        text = self.broadcast("" if found is None else found[1], rank)
        return f"{text} on rank {rank}" if len(places) > 1 else text

    def largest(self, numbers: Numbers) -> dict[str, float]:
        """Return the largest number that any rank has, by name; NaN where one is."""
        return self.sum_slices([{}], numbers)[1]


def largest(numbers: Sequence[float]) -> float:
    """Return the largest number, or NaN where one is."""
    return next((number for number in numbers if math.isnan(number)), max(numbers))
