"""Counter-based random bits: a hash of (seed, stream, element), with nothing hidden and nothing stored.

The 32 bits of element i hash a counter: h = mix(i + mix(seed_low ^ mix(seed_high ^ mix(stream)))), where mix is the
32-bit finaliser `lowbias32` (C. Wellons, "Prospecting for Hash Functions", 2018, public domain). Dropout keeps an
element iff h >= p 2^32. Integer arithmetic makes the bits the same on every device and engine.
"""

from __future__ import annotations

MIX_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
MIX_SHIFTS = (16, 15, 16)
SIGN = 1 << 31


def mix(x: int) -> int:
    """lowbias32 of a 32-bit number."""
    for shift, multiplier in zip(MIX_SHIFTS, (*MIX_MULTIPLIERS, 1), strict=True):
        x = (x ^ x >> shift) * multiplier & 0xFFFFFFFF
    return x


def stream_key(seed: int, stream: int) -> int:
    """The 32-bit key of one stream of bits: which run, step and rank (seed), and which layer (stream)."""
    return mix((seed & 0xFFFFFFFF) ^ mix((seed >> 32 & 0xFFFFFFFF) ^ mix(stream & 0xFFFFFFFF)))


def keep_threshold(p: float) -> int:
    """Elements whose bits are at or above this are kept."""
    return min(round(p * 2**32), 2**32 - 1)


def signed(number: int) -> int:
    """The int32 that has the same bits as a 32-bit unsigned number."""
    return number - (1 << 32) if number >= SIGN else number
