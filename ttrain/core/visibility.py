"""Which keys a query may look at, and how much nearer ones are preferred: what attention adds to its scores."""

from __future__ import annotations

import numpy as np

CAUSAL, PAIRS = "causal", "pairs"
MASKS = (CAUSAL, PAIRS)
POSITION_BIASES = ("none", "future", "distance")


def visible_keys(mask: str, time: int) -> np.ndarray:
    """bool [query, key]. causal: keys up to the query; pairs: keys up to the end of the query's aligned pair."""
    query, key = np.indices((time, time))
    return key <= query if mask == CAUSAL else key // 2 <= query // 2


def alibi_slopes(heads: int) -> np.ndarray:
    """One slope a head (Press et al., 2022): 2^(-8 i / H) for i = 1..H where H is a power of two.

    Otherwise the slopes of the largest power of two below it, then every second one of the next power.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    rest = heads - power
    return np.concatenate([slopes, alibi_slopes(2 * power)[0 : 2 * rest : 2]]) if rest else slopes


def score_bias(mask: str, position_bias: str, heads: int, time: int, hidden: float) -> np.ndarray:
    """fp32 [heads or 1, query, key] to add to scaled scores: `hidden` where a key may not be seen.

    position_bias: future counts -slope for every position that a key lies ahead of its query, which is all that
    AGILLM-3 has; distance counts how far apart they are.
    """
    query, key = np.indices((time, time))
    if position_bias == "none" or (position_bias == "future" and mask == CAUSAL):
        bias = np.zeros((1, time, time), np.float32)
    else:
        apart = np.maximum(key - query, 0) if position_bias == "future" else np.abs(key - query)
        bias = (-alibi_slopes(heads)[:, None, None] * apart).astype(np.float32)
    bias[:, ~visible_keys(mask, time)] = hidden
    return bias
