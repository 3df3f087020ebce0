"""Medians, quartiles, ratios, and what their interval promises."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from ttrain.bench.ratios import ratio, spread


def test_quartiles_by_another_library() -> None:
    times = list(np.random.default_rng(0).lognormal(size=21))
    found = spread(times, min(times))
    expected = statistics.quantiles(times, n=4, method="inclusive")
    assert [found.q1, found.median, found.q3] == pytest.approx(expected)
    assert (found.fastest, found.rounds) == (min(times), 21)


def test_times_as_fast_is_the_other_over_the_own() -> None:
    found = ratio([2.0, 2.0, 2.0], [6.0, 6.0, 6.0])
    assert (found.ratio, found.low, found.high) == (3.0, 3.0, 3.0)


def test_only_rounds_that_both_took_part_in_count() -> None:
    assert ratio([1.0, 1.0], [2.0, 2.0, 99.0]).ratio == 2.0


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    """A true ratio of 1.5 under noise that both share: at least 85 of 100 intervals of 95 % contain it."""
    generator, hits = np.random.default_rng(5), 0
    for seed in range(100):
        shared = generator.lognormal(0, 0.3, 20)
        own, other = (shared * scale * generator.lognormal(0, 0.1, 20) for scale in (1.0, 1.5))
        found = ratio(list(own), list(other), seed)
        hits += found.low <= 1.5 <= found.high
    assert hits >= 85
