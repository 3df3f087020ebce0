"""guard.nonfinite: a step whose loss or gradient is not finite stops the run, is skipped, or rolls the run back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from ttrain.core.errors import NonFiniteError, RankFailed
from ttrain.engine.state import State
from ttrain.graph import Kind, Node, Stage, Value
from ttrain.models.base import Batch
from ttrain.train.loop.checkpoints import Checkpoints
from ttrain.train.loop.context import RunContext
from ttrain.train.protocols import SAVED_KINDS, Array
from ttrain.train.settings import GuardConfig
from ttrain.train.steps.step import Call, Rates, StepResult, TrainStep

_WORDS = {Stage.FORWARD: "activation", Stage.BACKWARD: "gradient", Stage.UPDATE: "result"}


def _first_nonfinite(state: State) -> str | None:
    """Return the first tensor that checkpoints hold with NaN or Inf, with its count of them, kind by kind.

    All are read, so that ranks read the same ones, whatever each finds.
    """
    names = [(kind, name) for kind in SAVED_KINDS for name in state.names(kind)]
    found = [f"{kind.value} {name} ({bad})" for kind, name in names if (bad := _bad_elements(state.read(name)))]
    return next(iter(found), None)


def first_bad_state(state: State) -> str:
    """Return a sentence about the first tensor of the state that is not finite."""
    return _told(_first_nonfinite(state)) or "Parameters and optimizer state are finite."


def first_bad_input(batch: Batch) -> str | None:
    """The first field of a batch that holds NaN or Inf, with its count of them."""
    named = ((name, _bad_elements(array)) for name, array in batch.items())
    return next((f"input {name} ({bad})" for name, bad in named if bad), None)


def _told(tensor: str | None) -> str:
    return "" if tensor is None else f"The first tensor with NaN or Inf is {tensor}."


def _bad_elements(array: Any) -> str | None:
    """Return a text that counts the elements which are not finite; None where all are."""
    values = np.asarray(array)
    count = values.size - int(np.isfinite(values).sum())
    return f"{count} of {values.size} elements" if count else None


@dataclass(eq=False)
class NonFiniteGuard:
    """Does with a step that is not finite what guard.nonfinite says.

    It names the first bad tensor of the step. Each rank looks at what it computes, and all are told what was found.
    """

    config: GuardConfig
    context: RunContext
    checkpoints: Checkpoints
    reader: Callable[[int], Batch]  # returns the batch of a step
    train_step: TrainStep
    parameters: Sequence[str]  # in the order of the model

    def __post_init__(self) -> None:
        self._state, self._world = self.context.state, self.context.world
        self._skips = 0  # in a row

    def forget(self) -> None:
        """Count skipped updates anew."""
        self._skips = 0

    def __call__(self, step: int, result: StepResult, rates: Rates) -> bool:
        """Return True where the run went back to a checkpoint. Raises NonFiniteError where it has to stop."""
        if result.finite:
            self._skips = 0
            return False
        config, what = self.config, str(result.bad)
        tensor = self._in_gradients()
        found = "" if tensor is None else f" From the loss backwards, the first bad gradient is {tensor}."
        if config.nonfinite == "rollback" and self.checkpoints.roll_back(step, f"Step {step}: {what}.{found}", config):
            return True
        if result.applied:
            raise self.checkpoints.nonfinite(what, step, self._after_update(step, found))
        self._skips += 1
        self.context.progress.skipped_steps += 1
        note = f"Step {step}: {what}; its update is skipped.{found}"
        self.context.events.warn("skipped", note, step, tensor=tensor)
        if self._skips >= config.max_skips:
            error = self.checkpoints.nonfinite(what, step, self._repeated(step, rates))
            raise NonFiniteError(f"{self._skips} updates in a row were skipped. {error}", step=step)
        return False

    def _after_update(self, step: int, gradient: str) -> str:
        """Describe the first bad tensor of a step whose parameters were updated, so that it can't be repeated."""
        found = _told(first_bad_input(self.reader(step))) or gradient.strip()
        return f"{found} guard.nonfinite=skip guard.max_skips=1 names the first bad tensor of the step.".strip()

    def _repeated(self, step: int, rates: Rates) -> str:
        """Repeat a step up to its first bad tensor, and describe that. The state is of no more use afterwards."""
        try:
            found = _told(self._in_step(self.reader(step), rates, step))
        except RankFailed:
            raise
        except Exception as error:  # the message about the step matters more
            return f"The search for the first bad tensor failed: {error or type(error).__name__}."
        return found or "The repeated step had no NaN or Inf, so the device does not compute the same values twice."

    def _in_gradients(self) -> str | None:
        """Return the first bad gradient as backward makes them, from the loss to the input.

        They are kept as they were before clipping, which would spread a NaN over all of them. Of one that was freed,
        where nothing is clipped, the parameter tells that it updated.
        """
        gradients = self._state.names(Kind.GRADIENT)
        named = [(path, f"{path}/gradient") for path in reversed(self.parameters)]
        for place, (path, name) in enumerate(each for each in named if each[1] in gradients):
            if bad := _bad_elements(self._state.read(name if self._state.tensor(name).placed else path)):
                return self._world.first((place, f"gradient {path} ({bad})"))
        return self._world.first(None)

    def _in_step(self, batch: Batch, rates: Rates, number: int) -> str | None:
        """Run a step whose update was left out once more, node by node, up to the first bad tensor. Return it in words.

        Ranks exchange tensors in the last call, which they run to its end.
        """
        persistent = _first_nonfinite(self._state)  # which ranks read together, whatever their batch holds
        before = first_bad_input(batch) or persistent
        found = self._world.first(None if before is None else (0, before))
        *own, last = self.train_step.calls(batch, rates, number)
        several = self._world.ranks.count > 1
        return found or self._in_calls(own, to_end=False) or self._in_calls([last], to_end=several)

    def _in_calls(self, calls: Sequence[Call], to_end: bool) -> str | None:
        """Return the first bad tensor that any rank finds in calls; run `to_end`, ranks compare by numbers of nodes."""
        found: list[tuple[int, str]] = []
        nodes = count()

        def look(node: Node, read: Callable[[Value], Array]) -> bool:
            place = next(nodes) if to_end else 0
            bad = filter(None, (_described(node, output, read(output)) for output in node.outputs))
            found.extend((place, text) for text in bad)
            return bool(found) and not to_end

        self.train_step.inspect(calls, look)
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
