"""Turns: every contender in every round, in random order, several steps at a time."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from ttrain.bench.contender import Contender
from ttrain.bench.process import Neighbour

Clock = Callable[[], float]
LEAST_ROUNDS = 3
MOST_STEPS = 2000  # per turn
NOTICE_SECONDS = 0.3  # an engine looks for neighbours ten times a second


@dataclass(frozen=True)
class Turn:
    """What one contender did in one round: seconds per timed step."""

    contender: str
    round: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class Seat:
    """A contender with its place in the stream of steps and the size of its turns."""

    contender: Contender
    step: int  # last step done
    settle: int = 1  # steps that warm the caches up again and are not timed
    timed: int = 1
    beside: Neighbour | None = None  # what runs meanwhile

    @property
    def name(self) -> str:
        """Of its row."""
        return self.contender.name if self.beside is None else beside(self.contender.name)

    def size(self, step_seconds: float, turn_seconds: float) -> None:
        """Fit a turn into `turn_seconds`: at least one untimed and one timed step. Beside a neighbour it begins with
        steps in which it can be noticed.
        """
        step_seconds = max(step_seconds, 1e-9)
        steps = min(max(round(turn_seconds / step_seconds), 2), MOST_STEPS)
        settle = max(1, steps // 5)
        self.timed = steps - settle
        noticed = 0 if self.beside is None else min(ceil(NOTICE_SECONDS / step_seconds), 10 * MOST_STEPS)
        self.settle = max(settle, noticed)


def beside(contender: str) -> str:
    """The row of what a contender does beside a neighbour."""
    return f"{contender} beside"


def take_turn(seat: Seat, number: int, each: bool, clock: Clock = time.perf_counter) -> Turn:
    """Settle, then time: every step by itself, or without `each` the whole turn, so that a device can run ahead."""
    with nullcontext() if seat.beside is None else seat.beside.running():
        turn = Turn(seat.name, number, _timed(seat, each, clock))
    seat.contender.rest()
    return turn


def _timed(seat: Seat, each: bool, clock: Clock) -> tuple[float, ...]:
    contender, handle = seat.contender, None
    for _ in range(seat.settle):
        seat.step += 1
        handle = contender.step(seat.step)
    if handle is not None:
        contender.loss(handle)
    contender.synchronize()
    marks = [clock()]
    for _ in range(seat.timed):
        seat.step += 1
        handle = contender.step(seat.step)
        if each:
            marks.append(clock())
    if not each:
        contender.synchronize()
        marks.append(clock())
        return ((marks[1] - marks[0]) / seat.timed,)
    return tuple(after - before for before, after in pairwise(marks))


def interleave(
    seats: Sequence[Seat],
    rounds: int,
    seconds: float,
    *,
    each: bool = True,
    seed: int = 0,
    clock: Clock = time.perf_counter,
) -> Iterator[list[Turn]]:
    """The turns of one round after the other, until all rounds are done or the time is up after LEAST_ROUNDS."""
    order = random.Random(seed)
    stop = clock() + seconds
    for number in range(rounds):
        if number >= LEAST_ROUNDS and clock() >= stop:
            return
        gc.collect()  # so that no contender pays for what another one left behind
        shuffled = list(seats)
        order.shuffle(shuffled)
        yield [take_turn(seat, number, each, clock) for seat in shuffled]
