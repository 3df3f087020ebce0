"""The masks and position biases that attention adds to its scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ttrain.core.errors import ShapeError

CAUSAL, PAIRS, FULL = "causal", "pairs", "full"
MASKS = (CAUSAL, PAIRS, FULL)
POSITION_BIASES = ("none", "future", "distance")
HIDDEN = -1e30  # added to scores that must get no probability; infinite values make NaN of what tiles are padded with


@dataclass(frozen=True)
class AttentionMask:
    """The rules of one attention.

    name: causal hides keys after the query; pairs hides keys after the end of the query's aligned pair; full hides
    none. position_bias: future counts -slope (see `alibi_slopes`) for every position that a key lies ahead of its
    query, which is all that AGILLM-3 has and nothing under `causal`; distance counts how far apart they are. window:
    keys that lie as far from the query or farther are hidden, so a causal query sees at most that many.

    Raises ShapeError for what is none of these.
    """

    name: str = CAUSAL
    position_bias: str = "none"
    window: int | None = None

    def __post_init__(self) -> None:
        _require(self.name in MASKS, f"mask={self.name}", f"one of {', '.join(MASKS)}")
        known = self.position_bias in POSITION_BIASES
        _require(known, f"position_bias={self.position_bias}", f"one of {', '.join(POSITION_BIASES)}")
        _require(self.window is None or self.window >= 1, f"window={self.window}", "at least 1, the query's own key")
        if self.name == CAUSAL and self.position_bias == "future":
            object.__setattr__(self, "position_bias", "none")

    @property
    def biased(self) -> bool:
        return self.position_bias != "none"

    @property
    def is_causal(self) -> bool:
        """True if it only hides the keys after the query."""
        return self == AttentionMask()

    @property
    def is_full(self) -> bool:
        """True if it hides nothing and adds no bias."""
        return self == AttentionMask(FULL)

    def hidden(self, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        """bool of the shape that both broadcast to: keys at these places that queries at these places don't attend to.

        Both are integers.
        """
        last = {CAUSAL: query, PAIRS: query | 1, FULL: key}[self.name]
        return (key > last) if self.window is None else (key > last) | (abs(query - key) >= self.window)

    def keys(self, start: int, stop: int, time: int) -> range:
        """Keys among which are all, of `time`, that the queries from `start` up to `stop` attend to."""
        end, reach = {CAUSAL: stop, PAIRS: stop + stop % 2, FULL: time}[self.name], self.window or time
        return range(max(start - reach + 1, 0), min(end, stop - 1 + reach, time))

    def score_bias(self, heads: int, time: int, hidden: float) -> np.ndarray:
        """fp32 [heads or 1, query, key] to add to scaled scores: `hidden` where a key is not attended to."""
        query, key = np.arange(time)[:, None], np.arange(time)
        bias = self.preference(heads, query, key).astype(np.float32)
        bias[:, self.hidden(query, key)] = hidden
        return bias

    def preference(self, heads: int, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        """fp64 [heads or 1, query, key]: the position bias of queries and keys at these places, zero without any."""
        apart = np.maximum(key - query, 0) if self.position_bias == "future" else np.abs(key - query)
        return (-alibi_slopes(heads) if self.biased else np.zeros(1))[:, None, None] * apart

    def __str__(self) -> str:
        words = [self.name, *([self.position_bias] if self.biased else [])]
        return "+".join([*words, *([f"window {self.window}"] if self.window else [])])


def alibi_slopes(heads: int) -> np.ndarray:
    """One slope a head (Press et al., 2022): 2^(-8 i / H) for i = 1..H where H is a power of two.

    Otherwise the slopes of the largest power of two below it, then every second one of the next power.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    rest = heads - power
    return np.concatenate([slopes, alibi_slopes(2 * power)[0 : 2 * rest : 2]]) if rest else slopes


def _require(condition: bool, got: str, expected: str) -> None:
    if not condition:
        raise ShapeError(f"attention: got {got}, expected {expected}.")


EVERY_KEY = AttentionMask(FULL)
