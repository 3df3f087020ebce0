"""Find the first tensor of a step that holds NaN or infinity, and say what to do about it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from ttrain.engine.state import State
from ttrain.graph.graph import Node, Value
from ttrain.graph.kinds import Kind, Stage
from ttrain.models.base import Batch
from ttrain.train.checkpoint.retention import newest_complete
from ttrain.train.protocols import SAVED_KINDS, Array
from ttrain.train.runs.record import START, override
from ttrain.train.steps.step import Call, Rates, TrainStep

_WORDS = {Stage.FORWARD: "activation", Stage.BACKWARD: "gradient", Stage.UPDATE: "result"}


def first_nonfinite(state: State, kinds: Sequence[Kind]) -> str | None:
    """The first persistent tensor with NaN or Inf, with its count of them; tensors of one kind in the state's order.

    All are read, so that ranks read the same ones, whatever each finds.
    """
    named = [(f"{kind.value} {name}", _bad_elements(state.read(name))) for kind in kinds for name in state.names(kind)]
    return next((f"{name} ({bad})" for name, bad in named if bad), None)


def first_bad_state(state: State, *kinds: Kind) -> str:
    """A sentence about it."""
    tensor = first_nonfinite(state, kinds)
    if tensor is None:
        return "Parameters and optimizer state are finite."
    return f"The first tensor with NaN or Inf is {tensor}."


def first_bad_input(batch: Batch) -> str | None:
    """The first field of a batch that holds NaN or Inf, with its count of them."""
    named = ((name, _bad_elements(array)) for name, array in batch.items())
    return next((f"input {name} ({bad})" for name, bad in named if bad), None)


def _bad_elements(array: Any) -> str | None:
    """Return a text that counts the elements which are not finite; None where all are."""
    values = np.asarray(array)
    count = values.size - int(np.isfinite(values).sum())
    return f"{count} of {values.size} elements" if count else None


class StepSearch:
    """Looks for the first tensor that is not finite in a step.

    Each rank looks at what it computes, and all are told what was found first.
    """

    def __init__(self, state: State, step: TrainStep, parameters: Sequence[str]) -> None:
        """`parameters` in the order of the model."""
        self._state, self._step = state, step
        self._parameters, self._world = list(parameters), step.world

    def in_gradients(self) -> str | None:
        """The first bad gradient as backward makes them, from the loss to the input.

        They are kept as they were before clipping, which would spread a NaN over all of them. Of one that was freed,
        where nothing is clipped, the parameter tells that it updated.
        """
        gradients = self._state.names(Kind.GRADIENT)
        for place, path in enumerate(reversed(self._parameters)):
            name = f"{path}/gradient"
            kept = name in gradients and self._state.tensor(name).placed
            bad = _bad_elements(self._state.read(name if kept else path)) if name in gradients else None
            if bad:
                return self._world.first((place, f"gradient {path} ({bad})"))
        return self._world.first(None)

    def in_step(self, batch: Batch, rates: Rates, number: int) -> str | None:
        """Run a step whose update was left out once more, node by node, up to the first bad tensor. Return it in words.

        Ranks exchange tensors in the last call, which they run to its end.
        """
        persistent = first_nonfinite(self._state, SAVED_KINDS)  # which ranks read together, whatever their batch holds
        before = first_bad_input(batch) or persistent
        found = self._world.first(None if before is None else (0, before))
        *own, last = self._step.calls(batch, rates, number)
        several = self._world.ranks.count > 1
        return found or self._in_calls(own, to_end=False) or self._in_calls([last], to_end=several)

    def _in_calls(self, calls: Sequence[Call], to_end: bool) -> str | None:
        """The first bad tensor that any rank finds in calls; run `to_end`, ranks compare by numbers of nodes."""
        found: list[tuple[int, str]] = []
        nodes = count()

        def look(node: Node, read: Callable[[Value], Array]) -> bool:
            place = next(nodes) if to_end else 0
            bad = filter(None, (_described(node, output, read(output)) for output in node.outputs))
            found.extend((place, text) for text in bad)
            return bool(found) and not to_end

        self._step.inspect(calls, look)
        return self._world.first(found[0] if found else None)


def _described(node: Node, output: Value, values: Array) -> str | None:
    """An output of a node in words, where it is not finite."""
    bad = _bad_elements(values)
    if not bad:
        return None
    target = node.inputs[node.op.aliases(node).get(output.index, -1)] if node.op.aliases(node) else None
    if target is not None and target.kind.is_state:
        return f"{target.kind.value} {target.name.removesuffix('/gradient')} ({bad})"
    place = f" in {node.scope}" if node.scope else ""
    return f"the {_WORDS[node.stage]} that {node.op.name} makes{place} ({bad})"


def nonfinite_message(what: str, step: int, found: str, checkpoints: Path, command: str = START) -> str:
    """Step, what was `found` (a sentence), last good checkpoint, and what to do; `command` starts ttrain."""
    good, _ = newest_complete(checkpoints)
    if good is None:
        last = "No checkpoint was saved before it."
        fix = "Try a lower optimizer.lr, more schedule.warmup or a lower optimizer.clip_norm."
    else:
        again = shlex.quote(override("resume", good.path))
        last = f"The last good checkpoint is {good.path} (step {good.step})."
        fix = f"Continue from it with other settings, such as: {command} {again} optimizer.lr=<lower>"
    return f"Step {step}: {what}. {found} {last} {fix}"
