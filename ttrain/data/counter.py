"""Random numbers and shuffles that are functions of a key and a counter: there is no state to save or to replay."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST_FACTOR, _SECOND_FACTOR = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_FEISTEL_ROUNDS = 6
_FEWEST_BITS = 4  # fewer give a Feistel network too few shuffles to choose from
_FEISTEL_FACTOR = np.uint64(0xD1342543DE82EF95)


def derive_key(*words: int) -> int:
    """Return a 64-bit key that depends on every word, taken modulo 2**64, and on their order."""
    key = 0
    for word in words:
        key = _mix((key ^ (word & _MASK)) + _GAMMA & _MASK)
    return key


def random_words(key: int | Words, counters: Words) -> Words:
    """Return uniform 64-bit words: outputs `counters` of SplitMix64 started at `key` (Steele, Lea and Flood, 2014)."""
    base = key if isinstance(key, np.ndarray) else np.uint64(key)
    words = (counters + np.uint64(1)) * np.uint64(_GAMMA) + base
    words ^= words >> np.uint64(30)
    words *= np.uint64(_FIRST_FACTOR)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_SECOND_FACTOR)
    words ^= words >> np.uint64(31)
    return words


def random_normals(key: int, counters: Words) -> NDArray[np.float64]:
    """Return standard normal numbers, one per counter (Box and Muller, 1958)."""
    twice = counters * np.uint64(2)
    radius = _unit(random_words(key, twice))
    angle = _unit(random_words(key, twice + np.uint64(1)))
    return np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)


def shuffled(keys: Words, positions: Words, size: int) -> Words:
    """Return the place of each position in [0, size) after a shuffle: a bijection for every single key.

    It is an unbalanced Feistel network over the bits of `size` - 1, repeated on results outside [0, size) (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002). Nothing of length `size` is ever held.
    """
    bits = max(_FEWEST_BITS, (size - 1).bit_length())
    rounds = random_words(keys[:, None], np.arange(_FEISTEL_ROUNDS, dtype=np.uint64)[None, :]).T
    placed = _feistel(positions, rounds, bits)
    outside = np.flatnonzero(placed >= np.uint64(size))
    while outside.size:
        again = _feistel(placed[outside], rounds[:, outside], bits)
        placed[outside] = again
        outside = outside[again >= np.uint64(size)]
    return placed


def _feistel(words: Words, rounds: Words, bits: int) -> Words:
    low_bits = np.uint64(bits - bits // 2)
    low_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high_mask = np.uint64((1 << bits // 2) - 1)
    low, high = words & low_mask, words >> low_bits
    for number, keys in enumerate(rounds):
        if number % 2:
            high = high ^ (_round(low, keys) & high_mask)
        else:
            low = low ^ (_round(high, keys) & low_mask)
    return high << low_bits | low


def _round(half: Words, keys: Words) -> Words:
    mixed = (half ^ keys) * _FEISTEL_FACTOR
    mixed ^= mixed >> np.uint64(32)
    mixed *= _FEISTEL_FACTOR
    return mixed >> np.uint64(32)


def _unit(words: Words) -> NDArray[np.float64]:
    """Map words to fp64 in (0, 1]."""
    return ((words >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53


def _mix(word: int) -> int:
    word = (word ^ word >> 30) * _FIRST_FACTOR & _MASK
    word = (word ^ word >> 27) * _SECOND_FACTOR & _MASK
    return word ^ word >> 31
