"""Number of rows of a head's logits that are formed at a time, in torch's kernels and in the generated ones."""

from __future__ import annotations

CHUNK_LOGITS = 2**23  # 32 MiB in fp32: on a CPU enough for full-speed products, few enough to matter for memory
_LEAST_ROWS = 32


def chunk_rows(rows: int, vocabulary: int, logits: int, summed: int) -> int:
    """Return how many of all rows a chunk of about `logits` logits has.

    Several chunks of bf16 need fp32 sums of the head's gradient: `summed` bytes for each id of the vocabulary, 0 where
    there are no such sums. All rows are one chunk where their logits take no more than that, which is faster too.
    """
    if 2 * rows <= summed:  # 2 bytes a logit in bf16
        return rows
    return min(max(min(_LEAST_ROWS, logits), logits // vocabulary), rows)
