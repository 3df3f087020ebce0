"""What to say when a loss or gradient norm became NaN or infinite."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ttrain.graph.graph import Kind
from ttrain.train.protocols import State
from ttrain.train.retention import newest_complete

_PARAMETERS_FIRST = (Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER)
_GRADIENTS_FIRST = (Kind.GRADIENT, Kind.PARAMETER, Kind.OPTIMIZER)


def first_nonfinite(state: State, kinds: Sequence[Kind] = _PARAMETERS_FIRST) -> str | None:
    """The first tensor with NaN or Inf, with its count of them; tensors of one kind come in the state's order."""
    for kind in kinds:
        for name in state.names(kind):
            array = np.asarray(state.read(name))
            bad = array.size - int(np.isfinite(array).sum())
            if bad:
                return f"{kind.value} {name} ({bad} of {array.size} elements)"
    return None


def nonfinite_message(what: str, step: int, state: State, checkpoints: Path, *, loss_is_finite: bool = False) -> str:
    """Step, first bad tensor, last good checkpoint, and what to do.

    Where the loss is still finite the trouble began in backward, so gradients are looked at first. They are stored
    before clipping, which would spread a NaN over all of them.
    """
    tensor = first_nonfinite(state, _GRADIENTS_FIRST if loss_is_finite else _PARAMETERS_FIRST)
    found = f"The first tensor with NaN or Inf is {tensor}." if tensor else "Parameters and optimizer state are finite."
    good, _ = newest_complete(checkpoints)
    if good is None:
        last = "No checkpoint was saved before it."
        fix = "Try a lower optimizer.lr, more schedule.warmup or a lower optimizer.clip_norm."
    else:
        path = shlex.quote(str(good.path))
        last = f"The last good checkpoint is {good.path} (step {good.step})."
        fix = f"Continue from it with other settings, such as: python -m ttrain resume={path} optimizer.lr=<lower>"
    return f"Step {step}: {what}. {found} {last} {fix}"
