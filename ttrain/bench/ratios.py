"""Medians, quartiles, and the ratio of two medians with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """Quartiles of step times, in ms; one sample per round, the median of that turn's steps."""

    median: float
    q1: float
    q3: float
    fastest: float  # single step
    rounds: int


@dataclass(frozen=True)
class Ratio:
    """How many times as fast: median of the other / own median, with its bootstrap interval."""

    ratio: float
    low: float
    high: float


def spread(round_ms: Sequence[float], fastest_ms: float) -> Spread:
    """Quartiles of the rounds' medians."""
    q1, median, q3 = (float(value) for value in np.percentile(np.asarray(round_ms), [25, 50, 75]))
    return Spread(median, q1, q3, fastest_ms, len(round_ms))


def ratio(own_ms: Sequence[float], other_ms: Sequence[float], seed: int = 0) -> Ratio:
    """Ratio of medians over the rounds that both took part in.

    The interval is a percentile bootstrap (Efron, 1979) over rounds: a round is drawn with the turns of both, since
    what disturbs the machine disturbs them together.
    """
    count = min(len(own_ms), len(other_ms))
    own, other = np.asarray(own_ms[:count]), np.asarray(other_ms[:count])
    drawn = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    ratios = np.median(other[drawn], axis=1) / np.median(own[drawn], axis=1)
    low, high = np.percentile(ratios, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return Ratio(float(np.median(other) / np.median(own)), float(low), float(high))
