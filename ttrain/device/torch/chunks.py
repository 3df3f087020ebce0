"""How many rows of a head's logits are formed at a time: what torch's kernels and the generated ones share."""

from __future__ import annotations

CHUNK_LOGITS = 2**23  # 32 MiB in fp32: large enough for full-speed products, small enough to matter for memory
_LEAST_ROWS = 32


def chunk_rows(vocabulary: int, logits: int = CHUNK_LOGITS) -> int:
    """Rows of a chunk of about `logits` logits."""
    return max(min(_LEAST_ROWS, logits), logits // vocabulary)
