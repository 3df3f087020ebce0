"""Estimate how large a batch is worth while: the gradient's noise scale, from micro-batches beside the whole batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

NOISE_NORM = "noise_norm"  # output of a step: norm of what the first micro-batch adds to the gradient
_DECAY = 0.95  # of the means over steps


@dataclass
class NoiseScale:
    """The simple noise scale tr(S) / |G|^2 (McCandlish et al., 2018), S being the covariance of one row's gradient.

    E |g_n|^2 = |G|^2 + tr(S) / n for a batch of n rows, so norms for two sizes give both numbers. Each is averaged over
    steps, as one step tells little; the means start anew with an attempt. A batch far below the scale is mostly noise,
    one far above it learns hardly more than a smaller one.
    """

    rows: int  # of a micro-batch
    noise: float = 0.0
    signal: float = 0.0

    def add(self, first: float, whole: float, parts: int) -> float | None:
        """Note the norms of a step of so many micro-batches: `first` as in NOISE_NORM. Return the scale in rows.

        None where none shows yet, and where a step is one micro-batch and tells nothing.
        """
        if parts < 2 or not math.isfinite(first + whole):
            return None
        one, all_ = (parts * first) ** 2, whole**2
        noise = (one - all_) / (parts - 1) * parts * self.rows
        signal = (parts * all_ - one) / (parts - 1)
        self.noise += (1 - _DECAY) * (noise - self.noise)
        self.signal += (1 - _DECAY) * (signal - self.signal)
        return self.noise / self.signal if self.noise > 0 and self.signal > 0 else None
