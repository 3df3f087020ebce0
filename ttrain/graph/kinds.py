"""The kinds of values, and the stages of a step."""

from __future__ import annotations

from enum import Enum


class Kind(Enum):
    """The origin of a value."""

    INPUT = "input"  # uploaded for every step: the batch, learning rate, step number, seed
    PARAMETER = "parameter"
    FROZEN = "frozen"  # a parameter that no step of the run writes; saved once
    GRADIENT = "gradient"  # of a parameter, kept from backward to update
    OPTIMIZER = "optimizer"  # moments, velocities
    COPY = "copy"  # a parameter rounded to the compute dtype; derived, never saved
    BUFFER = "buffer"  # of a model, not trained but written by its steps, such as a running mean; saved
    CONSTANT = "constant"  # of a model, derived from its config, such as a mask; never written by a step, never saved
    CACHE = "cache"  # keys and values of a text that sampling goes on with, or training data; never saved
    NODE = "node"  # the output of a node

    @property
    def is_state(self) -> bool:
        """True if the buffer outlives the step."""
        return self not in (Kind.INPUT, Kind.NODE)


class Stage(Enum):
    """Part of the step that a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
