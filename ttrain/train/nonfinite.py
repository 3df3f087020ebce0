"""What to say when a loss or gradient norm became NaN or infinite."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ttrain.graph.graph import Kind
from ttrain.train.protocols import State
from ttrain.train.retention import newest_complete

_KINDS = (Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER)


def first_nonfinite(state: State) -> str | None:
    """The first tensor with NaN or Inf, with its count: parameters in order, then gradients, then optimizer state."""
    for kind in _KINDS:
        for name in state.names(kind):
            array = np.asarray(state.read(name))
            bad = array.size - int(np.isfinite(array).sum())
            if bad:
                return f"{kind.value} {name} ({bad} of {array.size} elements)"
    return None


def nonfinite_message(what: str, step: int, state: State, checkpoints: Path) -> str:
    """Step, first bad tensor, last good checkpoint, and what to do."""
    tensor = first_nonfinite(state)
    found = f"The first tensor with NaN or Inf is {tensor}." if tensor else "Parameters and optimizer state are finite."
    good, _ = newest_complete(checkpoints)
    if good is None:
        last = "No checkpoint was saved before it."
        fix = "Try a lower optimizer.lr, more schedule.warmup or a lower optimizer.clip_norm."
    else:
        last = f"The last good checkpoint is {good.path} (step {good.step})."
        fix = f"Continue from it with other settings, such as: python -m ttrain resume={good.path} optimizer.lr=<lower>"
    return f"Step {step}: {what}. {found} {last} {fix}"
