"""Guards against numbers that go wrong: spikes of the loss, updates that change nothing, steps that are not finite."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any

import numpy as np

from ttrain.core.errors import NonFiniteError, RankFailed, TtrainError
from ttrain.core.names import listed
from ttrain.core.spec import DType
from ttrain.engine.state import State
from ttrain.graph import Kind, Node, Stage, Value
from ttrain.models.base import Batch
from ttrain.optim.base import AVERAGE
from ttrain.train.loop.checkpoints import Checkpoints, RunContext
from ttrain.train.protocols import SAVED_KINDS, Array
from ttrain.train.settings import GuardConfig
from ttrain.train.steps.step import Call, Rates, StepResult, TrainStep

_FEWEST_MOVED = 0.05  # share of a bf16 parameter's elements that a healthy update moves
_BF16_SPACING = 2.0**16  # how much further apart numbers of bf16 are than those of fp32
_SAMPLE = 2**16  # elements of a tensor that are looked at
_MARGIN = 16.0  # a step this many times larger than the spacing of the numbers can't be lost in rounding


class SpikeGuard:
    """Does with a loss far above the median of those before what guard.spike says. A spike enters no median."""

    def __init__(self, config: GuardConfig, context: RunContext, checkpoints: Checkpoints) -> None:
        self._config, self._context, self._checkpoints = config, context, checkpoints
        self._losses: deque[float] = deque(maxlen=config.spike_window)

    def forget(self) -> None:
        """Start the window of losses anew."""
        self._losses.clear()

    def __call__(self, step: int, result: StepResult, rates: Rates) -> bool:
        """Return True where the run was rolled back for a spike."""
        config, losses, loss = self._config, self._losses, result.loss
        if config.spike == "ignore" or loss is None or not result.finite:
            return False
        usual = median(losses) if losses else 0.0
        if len(losses) < config.spike_window or not loss > config.spike_factor * usual > 0:
            losses.append(loss)
            return False
        note = f"Step {step}: train/loss {loss:.4f} is a spike; its recent median is {usual:.4f}."
        if config.spike == "rollback" and self._checkpoints.roll_back(step, note, config):
            return True
        self._context.events.warn("spike", note, step)
        return False


class LearningGuard:
    """Checks once per attempt that its first updates reach parameters and optimizer's tensors: guard.check_learning.

    Problems are certain faults, doubts may be rounding. Of a large tensor some elements are looked at, spread evenly,
    and those of its gradient and slots: a large model takes no more time and memory than a small one.

    Frozen parameters have no gradient in the state. Of a gradient that is freed within the step the optimizer's tensors
    tell; where they don't, only that no parameter at all has moved is a problem.
    """

    def __init__(self, config: GuardConfig, context: RunContext, stochastic: bool = False) -> None:
        """Remember the parameters as they are now.

        `stochastic` tells that bf16 parameters are rounded stochastically: then most of their elements may stay where
        they are, and none is lost.
        """
        self._context, self._state, self._left = context, context.state, config.check_learning or 0
        self._before: dict[str, Array] = {}
        self._narrow: set[str] = set()  # bf16 without master weights
        self._rate = self._typical = 0.0  # sum of the learning rates; root mean square of the last step's gradients
        if self._left:
            gradients = set(self._state.names(Kind.GRADIENT))
            names = self._state.names(Kind.PARAMETER)
            trained = [name for name in names if not gradients or f"{name}/gradient" in gradients]
            self._before = {name: self._sample(name) for name in trained}
            self._narrow = {n for n in trained if self._state.spec(n).dtype is DType.BF16 and not stochastic}

    def forget(self) -> None:
        """End the check, such as where the parameters are those of a checkpoint again."""
        self._left, self._before = 0, {}

    def __call__(self, step: int, result: StepResult, rates: Rates) -> bool:
        """Warn of doubts after the last step of the check; always return False. Raises TtrainError for problems."""
        if not (self._left and result.finite) or result.loss is None:  # a step without targets has no gradient
            return False
        self._rate += min(rates.values())
        self._typical = result.grad_norm / math.sqrt(sum(self._state.spec(name).size for name in self._before) or 1)
        self._left -= 1
        if self._left:
            return False
        problems, doubts = self.found() if self._rate else ([], [])
        self.forget()
        told, wrong = (listed(each, between="; ") for each in (doubts, problems))
        mend = " optimizer.stochastic_rounding=true keeps them on average." if "bf16" in told else ""
        note = f"Step {step}: {told}; such updates may be lost in rounding.{mend}" if doubts else ""
        if problems:
            raise TtrainError(
                f"Step {step}: the updates do not reach the model: {wrong}. This is a fault of the device or engine; "
                f"try engine=dynamic, or guard.check_learning=null to train on regardless. {note}".strip()
            )
        if doubts:
            self._context.events.warn("not_moving", note, step)
        return False

    def found(self) -> tuple[list[str], list[str]]:
        """Return problems and doubts, one sentence per tensor."""
        problems, doubts, unsure, moved = list[str](), list[str](), list[str](), False
        slots = self._state.names(Kind.OPTIMIZER)
        for name, before in self._before.items():
            largest, known = self._largest_gradient(name)
            if largest == 0:
                continue
            values, own = self._sample(name), [slot for slot in slots if slot.startswith(f"{name}/")]
            still = float(np.mean(values == before))
            moved |= still < 1
            if still == 1:
                largest /= self._context.progress.loss_scale or 1.0
                step = self._rate * (1.0 if f"{name}/second_moment" in own else largest)
                lost = step <= _MARGIN * self._spacing(name, values)
                if not lost and not known:
                    unsure.append(f"{name} did not move, and its gradient is not kept")
                elif not lost or name not in self._narrow:
                    (doubts if lost else problems).append(f"{name} has a gradient but did not move")
            problems += [f"{slot} is still all zero" for slot in own if known and not np.any(self._sample(slot))]
            if name in self._narrow and 1 - still < _FEWEST_MOVED:
                share = f"{100 * still:.0f} % of its elements did not move"
                doubts.append(f"{name} is bf16 without a master copy, and {share}")
        (doubts if moved else problems).extend(unsure)
        return problems, doubts

    def _spacing(self, name: str, values: Array) -> float:
        """Return how far apart numbers are that are as large as the largest value."""
        spacing = float(np.spacing(np.float32(np.abs(values).max(initial=0.0))))
        return spacing * (_BF16_SPACING if self._state.spec(name).dtype is DType.BF16 else 1)

    def _largest_gradient(self, name: str) -> tuple[float, bool]:
        """Return a parameter's largest gradient and True; where it is not known, a typical gradient and False."""
        gradient = f"{name}/gradient"
        if gradient not in self._state.names(Kind.GRADIENT):
            return math.inf, True  # not kept: assume that there is one
        if self._state.keeps(gradient):
            return self._largest(gradient), True
        slots = [slot for slot in self._state.names(Kind.OPTIMIZER) if slot.startswith(f"{name}/")]
        largest = max((self._largest(slot) for slot in slots if not slot.endswith(f"/{AVERAGE}")), default=0.0)
        return (largest, True) if largest else (self._typical, False)

    def _largest(self, name: str) -> float:
        return float(np.abs(self._sample(name)).max(initial=0.0))

    def _sample(self, name: str) -> Array:
        return self._state.sample(name, _SAMPLE)


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
        if result.overflowed:
            self.context.progress.skipped_steps += 1
            scale = f"its update is skipped, and the loss scale is now {self.context.progress.loss_scale:g}"
            self.context.events.tell("skipped", f"Step {step}: {what}; {scale}.", step)
            return False
        tensor = self._in_gradients()
        found = "" if tensor is None else f" From the loss backwards, the first bad gradient is {tensor}."
        if config.nonfinite == "rollback" and self.checkpoints.roll_back(step, f"Step {step}: {what}.{found}", config):
            return True
        if config.nonfinite != "skip":
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
        again = "A resume with guard.nonfinite=skip guard.max_skips=1 names the first bad tensor of the step."
        return f"{found} {again}".strip()

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
            if bad := _bad_elements(self._state.read(name if self._state.keeps(name) else path)):
                return self._world.first((place, f"gradient {path} ({bad})"))
        return self._world.first(None)

    def _in_step(self, batch: Batch, rates: Rates, number: int) -> str | None:
        """Run a step whose update was left out once more, node by node, up to the first bad tensor. Return it in words.

        Ranks exchange tensors in the calls, which they run to their end.
        """
        persistent = _first_nonfinite(self._state)  # which ranks read together, whatever their batch holds
        before = first_bad_input(batch) or persistent
        found = self._world.first(None if before is None else (0, before))
        *own, last = self.train_step.calls(batch, rates, number)
        several = self._world.ranks.count > 1
        return found or self._in_calls(own, to_end=several) or self._in_calls([last], to_end=several)

    def _in_calls(self, calls: Sequence[Call], to_end: bool) -> str | None:
        """Return the first bad tensor that any rank finds in calls; run `to_end`, ranks compare by numbers of nodes."""
        found: list[tuple[int, str]] = []
        nodes = count()

        def look(node: Node, read: Callable[[Value], Array]) -> bool:
            place = next(nodes) if to_end else 0
            received = node.attributes.get("key") and not node.overwritten  # what is under way may hold anything
            outputs = () if received else node.outputs
            bad = filter(None, (_described(node, output, read(output)) for output in outputs))
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
