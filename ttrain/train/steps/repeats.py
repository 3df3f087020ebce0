"""List the steps that make up an optimizer step of one rank, and how often each of them runs."""

from __future__ import annotations

from ttrain.parallel.ranks import Ranks


def joins(ranks: Ranks, gradient_accumulation: int, guarded: bool) -> bool:
    """Return whether `train` computes the last micro-batch and the rest: then ranks exchange gradients in backward."""
    return ranks.count > 1 or (gradient_accumulation == 1 and ranks.single and not guarded)


def repeats(ranks: Ranks, micro_batches: int, joined: bool, guarded: bool) -> dict[str, int]:
    """Return how often each step runs where a slice has so many `micro_batches`; steps that never run are left out."""
    slices, last = len(ranks.own), int(joined)  # `train` does what comes last of each
    counts = {"accumulate_first": slices, "accumulate_next": slices * (micro_batches - 1)}
    counts["accumulate_next" if micro_batches > 1 else "accumulate_first"] -= last
    for level in range(ranks.levels):
        counts |= {f"keep{level}": slices >> level + 1, f"merge{level}": (slices >> level + 1) - last}
    counts |= {"train": 1} if joined else {"norm": 1} if guarded else {}
    counts |= {"update": 1} if guarded or not joined else {}
    return {name: count for name, count in counts.items() if count}
