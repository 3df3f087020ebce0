"""How many rows of a head's logits are formed at a time: what torch's kernels and the generated ones share."""

from __future__ import annotations

CHUNK_LOGITS = 2**23  # 32 MiB in fp32: large enough for full-speed products, small enough to matter for memory
_LEAST_ROWS = 32


def chunk_rows(rows: int, vocabulary: int, logits: int, summed: int) -> int:
    """How many of all rows a chunk of about `logits` logits has.

    Chunks of bf16 add the head's gradient up in fp32, in `summed` bytes a row of the vocabulary; 0 where they don't.
    All rows are one chunk where their logits take no more: that is faster as well, since long products are.
    """
    if 2 * rows <= summed:
        return rows
    return min(max(min(_LEAST_ROWS, logits), logits // vocabulary), rows)
