"""Learning rate over steps, as a factor of the peak.

Steps count from 1. With i = step - 1, W warm-up steps and S steps to the end, every shape starts as nanoGPT's schedule
does: factor = (i + 1) / (W + 1) for i < W. Then, with the progress r = (i - W) / (S - 1 - W), which is 0 at the first
step after the warm-up and 1 at step S:

    constant  1
    linear    1 - r (1 - m) with m = min_lr_ratio
    cosine    m + (1 - m) (1 + cos(pi r)) / 2          (Loshchilov and Hutter, 2017)
    wsd       1 up to step S - decay S, or decay_from, then linear to m at step S  (warm-up, stable, decay; Hu et al.,
              2024)

Step S and those after it have the factor `min_lr_ratio`; where it is the only step after the warm-up, it has the peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ttrain.optim.settings import ScheduleConfig

Schedule = Callable[[int], float]  # step, counted from 1 -> factor


def schedule(config: ScheduleConfig, steps: int) -> Schedule:
    """Return the schedule that a config names. `steps` is the run's length, its end unless config.steps is given."""
    end, lowest, start = config.steps or steps, config.min_lr_ratio, float(config.warmup)
    if config.name == "wsd":
        start = max(start, (config.decay_from or end - config.decay * end) - 1)

    def factor(step: int) -> float:
        index = step - 1
        if index < config.warmup:
            return (index + 1) / (config.warmup + 1)
        if config.name == "constant":
            return 1.0
        # 1 at index `end` - 1, the last step's, and from there on; 0 up to `start`, also where the two are one.
        progress = 1.0 if index >= end else 0.0 if index <= start else (index - start) / (end - 1 - start)
        if config.name == "cosine":
            return lowest + (1 - lowest) * (0.5 * (1 + math.cos(math.pi * progress)))
        return (1 - progress) + progress * lowest

    return factor
