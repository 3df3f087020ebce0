"""Guards against numbers that go wrong: spikes of the loss, and updates that change nothing."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

import numpy as np

from ttrain.core.errors import TtrainError
from ttrain.core.names import listed
from ttrain.core.spec import DType
from ttrain.engine.state import State
from ttrain.graph.kinds import Kind
from ttrain.optim.base import AVERAGE
from ttrain.train.loop.checkpoints import Checkpoints
from ttrain.train.loop.context import Context
from ttrain.train.protocols import Array
from ttrain.train.settings import GuardConfig
from ttrain.train.steps.step import Rates, StepResult

_FEWEST_MOVED = 0.05  # share of a bf16 parameter's elements that a healthy update moves
_BF16_SPACING = 2.0**16  # how much further apart numbers of bf16 are than those of fp32
_SAMPLE = 2**16  # elements of a tensor that are looked at
_MARGIN = 16.0  # a step this many times larger than the spacing of the numbers can't be lost in rounding


class SpikeDetector:
    """Compares each loss with the median of those before. A spike does not enter the median."""

    def __init__(self, config: GuardConfig) -> None:
        self._factor = config.spike_factor
        self._losses: deque[float] = deque(maxlen=config.spike_window)

    def is_spike(self, loss: float) -> bool:
        """Return whether the loss is above spike_factor times the median of a full window, and above 0."""
        full = len(self._losses) == self._losses.maxlen
        if full and loss > self._factor * median(self._losses) > 0:
            return True
        self._losses.append(loss)
        return False

    def usual(self) -> float:
        """The median that spikes are measured by."""
        return median(self._losses) if self._losses else math.nan

    def forget(self) -> None:
        """Start the window of losses anew."""
        self._losses.clear()


class SpikeGuard:
    """Does with a spike of the loss what guard.spike says."""

    def __init__(self, config: GuardConfig, context: Context, checkpoints: Checkpoints) -> None:
        self._config, self._context, self._checkpoints = config, context, checkpoints
        self._detector = SpikeDetector(config)

    def before(self) -> None:
        """Nothing is looked at before a step."""

    def forget(self) -> None:
        """Start the window of losses anew."""
        self._detector.forget()

    def __call__(self, step: int, result: StepResult, rates: Rates) -> bool:
        """Return True where the run was rolled back for a spike."""
        config, detector, loss = self._config, self._detector, result.loss
        if config.spike == "ignore" or loss is None or not result.finite or not detector.is_spike(loss):
            return False
        note = f"Step {step}: train/loss {loss:.4f} is a spike; its recent median is {detector.usual():.4f}."
        if config.spike == "rollback" and self._checkpoints.roll_back(step, note, config):
            return True
        self._context.events.warn("spike", note, step)
        return False


class LearningGuard:
    """Checks once per attempt that its first updates reach the parameters: guard.check_learning."""

    def __init__(self, config: GuardConfig, context: Context, stochastic: bool = False) -> None:
        """`stochastic` tells that bf16 parameters are rounded stochastically."""
        self._context, self._stochastic = context, stochastic
        self._steps = config.check_learning  # None once the check is done
        self._check: LearningCheck | None = None

    def before(self) -> None:
        """Remember the parameters as they are before the first step."""
        if self._steps is not None and self._check is None:
            self._check = LearningCheck(self._context.state, self._steps, self._stochastic)

    def forget(self) -> None:
        """End the check: the parameters are those of a checkpoint again."""
        self._steps = self._check = None

    def __call__(self, step: int, result: StepResult, rates: Rates) -> bool:
        """Warn of doubts after the last step of the check; always return False. Raises TtrainError for problems."""
        if self._check is None or result.loss is None:  # a step without targets has no gradient
            return False
        doubts = self._check.after(step, min(rates.values()) if result.finite else 0.0, result.grad_norm)
        if doubts is not None:
            self.forget()
        if doubts:
            self._context.events.warn("not_moving", doubts, step)
        return False


class LearningCheck:
    """A check that the first updates of an attempt reach the parameters and the optimizer's tensors.

    It is made before the first of `steps` and asked after the last: `problems` are certain faults, `doubts` may be
    rounding. Of a large tensor it looks at some elements, spread evenly, and at those of its gradient and slots: it
    costs a large model no more time and memory than a small one, tensor by tensor.

    Frozen parameters have no gradient in the state. `stochastic` tells that bf16 parameters are rounded stochastically:
    then most of their elements may stay where they are, and none is lost. Of a gradient that is freed within the step
    the optimizer's tensors tell; where they don't, only that no parameter at all has moved is a problem.
    """

    def __init__(self, state: State, steps: int = 1, stochastic: bool = False) -> None:
        self._state, self._left = state, steps
        gradients = set(state.names(Kind.GRADIENT))
        trained = [name for name in state.names(Kind.PARAMETER) if not gradients or f"{name}/gradient" in gradients]
        self._before = {name: self._sample(name) for name in trained}
        narrow = (name for name in trained if state.spec(name).dtype is DType.BF16 and not stochastic)
        self._narrow = frozenset(narrow)  # bf16 without master weights
        self._rate = 0.0
        self._typical = 0.0  # root mean square of the last step's gradients

    def after(self, number: int, rate: float, norm: float) -> str | None:
        """Look at a step: its learning rate, 0 without an update, and the norm of its gradients. Return doubts in a
        note after the last step, and None before it.

        Raises TtrainError for problems.
        """
        self._rate, self._left = self._rate + rate, self._left - 1
        self._typical = norm / math.sqrt(sum(self._state.spec(name).size for name in self._before) or 1)
        if self._left > 0:
            return None
        problems, doubts = self.ask()
        note = _doubts_note(number, doubts) if doubts else ""
        if problems:
            raise TtrainError(f"{_problems_message(number, problems)} {note}".strip())
        return note

    def ask(self) -> tuple[list[str], list[str]]:
        """(problems, doubts), one sentence per tensor. Nothing is said where the learning rate was 0."""
        problems, doubts, unsure, moved = list[str](), list[str](), list[str](), False
        if self._rate == 0:
            return problems, doubts
        slots = self._state.names(Kind.OPTIMIZER)
        for name, before in self._before.items():
            largest, known = self._largest_gradient(name)
            if largest == 0:
                continue
            values = self._sample(name)
            still = float(np.mean(values == before))
            if still == 1:
                step = self._rate * (1.0 if f"{name}/second_moment" in slots else largest)
                spacing = float(np.spacing(np.float32(np.abs(values).max(initial=0.0))))
                if self._state.spec(name).dtype is DType.BF16:
                    spacing *= _BF16_SPACING
                if step > _MARGIN * spacing and not known:
                    unsure.append(f"{name} did not move, and its gradient is not kept")
                elif step > _MARGIN * spacing:
                    problems.append(f"{name} has a gradient but did not move")
                elif name not in self._narrow:
                    doubts.append(f"{name} has a gradient but did not move")
            else:
                moved = True
            for slot in (slot for slot in slots if known and slot.startswith(f"{name}/")):
                if not np.any(self._sample(slot)):
                    problems.append(f"{slot} is still all zero")
            if name in self._narrow and 1 - still < _FEWEST_MOVED:
                lost = f"{100 * still:.0f} % of its elements did not move"
                doubts.append(f"{name} is bf16 without a master copy, and {lost}")
        (doubts if moved else problems).extend(unsure)
        return problems, doubts

    def _largest_gradient(self, name: str) -> tuple[float, bool]:
        """Return a parameter's largest gradient and True; where it is not known, a typical gradient and False."""
        gradient = f"{name}/gradient"
        if gradient not in self._state.names(Kind.GRADIENT):
            return math.inf, True  # not kept: assume that there is one
        if self._state.tensor(gradient).placed:
            return self._largest(gradient), True
        slots = [slot for slot in self._state.names(Kind.OPTIMIZER) if slot.startswith(f"{name}/")]
        largest = max((self._largest(slot) for slot in slots if not slot.endswith(f"/{AVERAGE}")), default=0.0)
        return (largest, True) if largest else (self._typical, False)

    def _largest(self, name: str) -> float:
        return float(np.abs(self._sample(name)).max(initial=0.0))

    def _sample(self, name: str) -> Array:
        return self._state.sample(name, _SAMPLE)


def _doubts_note(number: int, doubts: list[str]) -> str:
    """One warning for all tensors whose updates hardly move them."""
    mend = " optimizer.stochastic_rounding=true keeps them on average." if any("bf16" in it for it in doubts) else ""
    return f"Step {number}: {listed(doubts, between='; ')}; such updates may be lost in rounding.{mend}"


def _problems_message(number: int, problems: list[str]) -> str:
    """Return why a run can't go on whose updates move nothing."""
    return (
        f"Step {number}: the updates do not reach the model: {listed(problems, between='; ')}. This is a fault of the "
        f"device or engine; try engine=dynamic, or guard.check_learning=null to train on regardless."
    )
