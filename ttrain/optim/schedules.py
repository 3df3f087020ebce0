"""Learning rate over steps, as a factor of the peak.

Steps count from 1. With i = step - 1, W warm-up steps and S steps to the end, every shape starts as nanoGPT's schedule
does: factor = (i + 1) / (W + 1) for i < W. Then, with the progress r = (i - W) / (S - 1 - W), which is 0 at the first
step after the warm-up and 1 at step S:

    constant  1
    linear    1 - r (1 - final)
    cosine    final + (1 - final) (1 + cos(pi r)) / 2          (Loshchilov and Hutter, 2017)
    wsd       1 up to step S - decay S, or decay_from, then linear to final at step S  (warm-up, stable, decay; Hu et
              al., 2024)

Step S and those after it have the factor `min_lr_ratio`; where it is the only step after the warm-up, it has the peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ttrain.optim.settings import ScheduleConfig

Schedule = Callable[[int], float]  # step, counted from 1 -> factor


def constant(config: ScheduleConfig, steps: int) -> Schedule:
    """The peak after the warm-up. `steps` is the run's length; no shape needs it if config.steps is given."""
    return _shaped(config, steps, lambda index, end: 1.0)


def linear(config: ScheduleConfig, steps: int) -> Schedule:
    """A straight line from the peak to `min_lr_ratio`."""
    return _shaped(config, steps, lambda index, end: _line(_progress(index, config.warmup, end), config.min_lr_ratio))


def cosine(config: ScheduleConfig, steps: int) -> Schedule:
    """Half a period of the cosine from the peak to `min_lr_ratio`."""

    def shape(index: int, end: int) -> float:
        half = 0.5 * (1 + math.cos(math.pi * _progress(index, config.warmup, end)))
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * half

    return _shaped(config, steps, shape)


def wsd(config: ScheduleConfig, steps: int) -> Schedule:
    """Peak, then a straight line to `min_lr_ratio` over the last `decay` share of the steps, or from `decay_from`."""

    def shape(index: int, end: int) -> float:
        stable = config.decay_from or end - config.decay * end
        start = max(config.warmup, stable - 1)
        return _line(_progress(index, start, end), config.min_lr_ratio)

    return _shaped(config, steps, shape)


def _shaped(config: ScheduleConfig, steps: int, shape: Callable[[int, int], float]) -> Schedule:
    end = config.steps or steps

    def factor(step: int) -> float:
        index = step - 1
        return (index + 1) / (config.warmup + 1) if index < config.warmup else shape(index, end)

    return factor


def _progress(index: int, start: float, end: int) -> float:
    """0 up to index `start`, 1 at index `end` - 1, the last step's, and from there on; 0 where the two are one."""
    if index >= end:
        return 1.0
    return 0.0 if index <= start else (index - start) / (end - 1 - start)


def _line(progress: float, min_lr_ratio: float) -> float:
    return (1 - progress) + progress * min_lr_ratio
