"""Turns: who, when, how many steps, and what is timed."""

from __future__ import annotations

import gc
from unittest.mock import Mock

import pytest

from tests.bench.pretend import Clock, Pretender
from ttrain.bench.interleave import LEAST_ROUNDS, Seat, interleave, take_turn


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection in the process of all tests takes long."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


def seats(clock: Clock, **seconds: float) -> list[Seat]:
    return [Seat(Pretender(name, each, clock), step=5) for name, each in seconds.items()]


def test_everybody_has_one_turn_per_round_in_an_order_that_changes() -> None:
    clock = Clock()
    rounds = list(interleave(seats(clock, a=1, b=2, c=3), 12, 1e9, seed=1, clock=clock))
    assert [{turn.contender for turn in turns} for turns in rounds] == [{"a", "b", "c"}] * 12
    assert [{turn.round for turn in turns} for turns in rounds] == [{number} for number in range(12)]
    orders = [tuple(turn.contender for turn in turns) for turns in rounds]
    assert len(set(orders)) > 3
    again = Clock()
    repeated = interleave(seats(again, a=1, b=2, c=3), 12, 1e9, seed=1, clock=again)
    assert [tuple(turn.contender for turn in turns) for turns in repeated] == orders


def test_settling_steps_are_not_timed_and_step_numbers_go_on() -> None:
    clock = Clock()
    (seat,) = seats(clock, a=0.5)
    seat.settle, seat.timed = 2, 3
    turn = take_turn(seat, 0, True, clock)
    assert turn.seconds == pytest.approx([0.5] * 3)
    assert seat.contender.numbers == [6, 7, 8, 9, 10]  # type: ignore[attr-defined]
    take_turn(seat, 1, True, clock)
    assert seat.contender.numbers[-1] == seat.step == 15  # type: ignore[attr-defined]


def test_a_device_that_runs_ahead_is_timed_over_the_whole_turn() -> None:
    clock = Clock()
    (seat,) = seats(clock, a=0.5)
    seat.timed = 4
    turn = take_turn(seat, 0, False, clock)
    assert turn.seconds == pytest.approx([0.5])
    assert seat.contender.waits == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("step_seconds", "settle", "timed", "beside"),
    [(0.1, 2, 8, 3), (10.0, 1, 1, 1), (0.001, 200, 800, 300), (1e-9, 400, 1600, 20_000), (0.0, 400, 1600, 20_000)],
)
def test_the_size_of_a_turn_of_a_second(step_seconds: float, settle: int, timed: int, beside: int) -> None:
    """Beside a neighbour it settles for three tenths of a second, but for no more than 20,000 steps."""
    (seat,) = seats(Clock(), a=1.0)
    seat.size(step_seconds, 1.0)
    assert (seat.settle, seat.timed) == (settle, timed)
    seat.beside = Mock()
    seat.size(step_seconds, 1.0)
    assert (seat.settle, seat.timed) == (beside, timed)


def test_time_ends_it_but_not_before_a_spread_can_be_told() -> None:
    clock = Clock()
    assert len(list(interleave(seats(clock, a=1.0), 50, 0.001, clock=clock))) == LEAST_ROUNDS
    clock = Clock()
    assert len(list(interleave(seats(clock, a=1.0), 50, 20.0, clock=clock))) == 10  # two steps a turn
