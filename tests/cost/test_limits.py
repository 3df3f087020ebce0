"""The search for what fits, on memory that grows in known ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ttrain.train.forecast.limits import CEILING, TRIES, device_memory, largest

GROWTHS: dict[str, Callable[[int], int]] = {
    "line": lambda n: 5_000 + 70 * n,
    "square": lambda n: 5_000 + 7 * n + n * n,
    "steps": lambda n: 64 * (1_000 + 3 * (n // 7)),
}


@pytest.mark.parametrize("start", [1, 48, 4_096, 100_000])
@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("step", [1, 32])
def test_the_largest_is_found_with_few_plans(growth: str, start: int, step: int) -> None:
    planned: list[int] = []

    def needed(value: int) -> int:
        planned.append(value)
        return GROWTHS[growth](value)

    found = largest(needed, start, 1_000_000, step)
    best = max(n for n in range(step, 200_000, step) if GROWTHS[growth](n) <= 1_000_000)
    assert found.nbytes == GROWTHS[growth](found.value) <= 1_000_000 and found.value % step == 0
    assert found.value >= 0.9 * best - step and len(planned) <= TRIES


def test_nothing_fits_or_a_ceiling_ends_the_search() -> None:
    assert largest(lambda n: 100 + n, 64, 50).value == 0
    found = largest(lambda n: 1, 16, 50)
    assert found.capped and found.value == CEILING


def test_memory_is_told_without_opening_a_device() -> None:
    memory = device_memory("cpu")
    assert memory is not None and memory[0] > 2**28
    assert device_memory("null") is None
