"""Keys and options that went: what to give instead, on the command line and for the recorded config of a run."""

from __future__ import annotations

# Old key, section or `key=option` -> the new one, or a sentence that says what to do.
RENAMED: dict[str, str] = {
    "guard.search_seconds": "Leave it out: the step that went wrong is run once more.",
    "train.block_schedule": "train.length_schedule",
    "train.block_steps": "train.phase_steps",
    "train.eval_batches": "Give train.eval_sequences: it counts sequences, not batches.",
    "verify.golden": "Leave it out: a card's reference functions are a device of the tests now.",
}


def instead(old: str) -> str:
    """Return the sentence that answers a key, section or `key=option` that went; empty for any other."""
    new = RENAMED.get(old, "")
    return new if " " in new or not new else f"It is now {new}."
