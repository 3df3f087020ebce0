"""Learning-rate schedules against closed forms and their own landmarks."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from ttrain.optim.schedules import Schedule, schedule
from ttrain.optim.settings import ScheduleConfig

SHAPES, STEPS = ("constant", "linear", "cosine", "wsd"), 100


def build(name: str, **options: float) -> Schedule:
    return schedule(ScheduleConfig(name=name, **options), STEPS)


def nanogpt_rate(iteration: int, warmup: int, decay_steps: int, lowest: float) -> float:
    """The rule of nanoGPT's training script for a peak of 1, iterations counted from 0."""
    if iteration < warmup:
        return (iteration + 1) / (warmup + 1)
    if iteration > decay_steps:
        return lowest
    share = (iteration - warmup) / (decay_steps - warmup)
    return lowest + 0.5 * (1 + math.cos(math.pi * share)) * (1 - lowest)


@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize("min_lr_ratio", [0.0, 0.1])
def test_cosine_is_nanogpts_schedule(warmup: int, min_lr_ratio: float) -> None:
    factor = build("cosine", warmup=warmup, min_lr_ratio=min_lr_ratio)
    for step in range(1, STEPS + 50):
        assert factor(step) == pytest.approx(nanogpt_rate(step - 1, warmup, STEPS - 1, min_lr_ratio), abs=1e-12)


# Factor at step 1, the last of the warm-up, the first after it, one on the way, the step before the last, and the last.
LANDMARKS = {
    "linear": (0.1, 0.9, 1.0, 1 - 45 / 90 * 0.75, 1 - 89 / 90 * 0.75, 0.25),
    "cosine": (0.1, 0.9, 1.0, 0.625, 0.25 + 0.375 * (1 + math.cos(math.pi * 89 / 90)), 0.25),
    "constant": (0.1, 0.9, 1.0, 1.0, 1.0, 1.0),
    "wsd": (0.1, 0.9, 1.0, 1.0, 1 - 19 / 20 * 0.75, 0.25),
}


@pytest.mark.parametrize("name", SHAPES)
def test_first_warmup_end_and_last_step(name: str) -> None:
    factor = build(name, min_lr_ratio=0.25, warmup=9)
    assert [factor(step) for step in range(1, 10)] == pytest.approx([step / 10 for step in range(1, 10)])
    assert build(name)(1) == 1.0 == build("wsd", decay=0.0)(STEPS)
    assert tuple(map(factor, (1, 9, 10, 55, 99, STEPS))) == pytest.approx(LANDMARKS[name], abs=1e-12)
    last = LANDMARKS[name][-1]
    assert factor(STEPS) == factor(STEPS + 1) == factor(STEPS + 1000) == last  # to the bit
    for lowest in (0.0, 0.1, 1 / 3, 1.0):
        assert build(name, min_lr_ratio=lowest, warmup=7)(STEPS) == (1.0 if name == "constant" else lowest)
    falling = [factor(step) for step in range(10, STEPS + 2)]
    assert all(later <= earlier for earlier, later in pairwise(falling))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("warmup", [0, 4])
def test_an_only_step_after_the_warmup_is_at_the_peak(name: str, warmup: int) -> None:
    factor = schedule(ScheduleConfig(name=name, warmup=warmup, min_lr_ratio=0.0), warmup + 1)
    assert factor(warmup + 1) == 1.0
    assert factor(warmup + 2) == (1.0 if name == "constant" else 0.0)


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_the_config_may_set_an_end_other_than_the_runs(name: str) -> None:
    assert build(name, steps=10, min_lr_ratio=0.5)(10) == pytest.approx(0.5)
    assert build(name, steps=10, min_lr_ratio=0.5)(9) > 0.5


@pytest.mark.parametrize("name", SHAPES)
def test_warmup_as_long_as_the_run_divides_by_nothing(name: str) -> None:
    factor = build(name, warmup=STEPS)
    assert factor(STEPS) == pytest.approx(STEPS / (STEPS + 1))
    assert math.isfinite(factor(STEPS + 1))


def test_a_decay_from_a_given_step_is_a_line_from_there_to_the_end() -> None:
    factor = build("wsd", min_lr_ratio=0.25, warmup=9, decay_from=60)
    assert [factor(step) for step in (10, 59, 60)] == [1.0] * 3
    for step in range(60, STEPS + 1):
        assert factor(step) == pytest.approx(1 - (step - 60) / 40 * 0.75, abs=1e-12)
    assert [build("wsd", decay_from=80)(step) for step in range(1, 101)] == [
        build("wsd")(step) for step in range(1, 101)
    ]
