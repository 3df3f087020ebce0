"""Seeds as a pure function of where they are used, so that a resumed run draws the numbers it would have drawn."""

from __future__ import annotations

import hashlib
import struct

ROUNDING = -1  # in place of a micro-batch: what an update's rounding draws from


def step_seed(seed: int, step: int, micro_batch: int = 0, slice_: int = 0) -> int:
    """Seed of one micro-batch's random numbers: 63 bits, so that it is a positive int64.

    The slice is that of the whole batch, whichever rank computes it.
    """
    packed = struct.pack("<4q", seed, step, micro_batch, slice_)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
