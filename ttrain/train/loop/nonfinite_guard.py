"""guard.nonfinite: a step whose loss or gradient is not finite stops the run, is skipped, or rolls the run back."""

from __future__ import annotations

from collections.abc import Callable

from ttrain.core.errors import NonFiniteError, RankFailed
from ttrain.graph.kinds import Kind
from ttrain.models.base import Batch
from ttrain.train.loop.checkpoints import Checkpoints
from ttrain.train.loop.context import Context
from ttrain.train.loop.nonfinite import StepSearch, first_bad_input, first_bad_state
from ttrain.train.settings import GuardConfig
from ttrain.train.steps.step import Rates, StepResult


class NonFiniteGuard:
    """Does with a step that is not finite what guard.nonfinite says."""

    def __init__(
        self,
        config: GuardConfig,
        context: Context,
        checkpoints: Checkpoints,
        reader: Callable[[int], Batch],
        search: StepSearch | None = None,
    ) -> None:
        """`reader` returns the batch of a step. `search` names the first bad tensor of a step."""
        self._config, self._context, self._checkpoints = config, context, checkpoints
        self._reader, self._search = reader, search
        self._skips = 0  # in a row

    def before(self) -> None:
        """Nothing is looked at before a step."""

    def forget(self) -> None:
        """Count skipped updates anew."""
        self._skips = 0

    def __call__(self, step: int, result: StepResult, rates: Rates) -> bool:
        """Return True where the run went back to a checkpoint. Raises NonFiniteError where it has to stop."""
        if result.finite:
            self._skips = 0
            return False
        config, what = self._config, str(result.bad)
        tensor = None if self._search is None else self._search.in_gradients()
        found = _first_gradient(tensor)
        note = f"Step {step}: {what}.{found}"
        if config.nonfinite == "rollback" and self._checkpoints.roll_back(step, note, config):
            return True
        if result.applied or config.nonfinite != "skip":
            raise self._checkpoints.nonfinite(what, step, self._first_bad(step, rates, result.applied, found))
        self._skips += 1
        self._context.progress.skipped_steps += 1
        note = f"Step {step}: {what}; its update is skipped.{found}"
        self._context.events.warn("skipped", note, step, tensor=tensor)
        if self._skips >= config.max_skips:
            error = self._checkpoints.nonfinite(what, step, self._first_bad(step, rates, False, found))
            raise NonFiniteError(f"{self._skips} updates in a row were skipped. {error}", step=step)
        return False

    def _first_bad(self, step: int, rates: Rates, applied: bool, gradient: str) -> str:
        """Describe the first bad tensor of a step in a sentence. The state is of no more use afterwards."""
        if self._search is None:
            return first_bad_state(self._context.state, Kind.GRADIENT, Kind.PARAMETER, Kind.OPTIMIZER)
        if applied:  # the parameters that the step began with are gone
            given = first_bad_input(self._reader(step))
            found = gradient.strip() if given is None else f"The first tensor with NaN or Inf is {given}."
            advice = "With guard.nonfinite=skip guard.max_skips=1 a resumed run names the first bad tensor of the step."
            return f"{found} {advice}".strip()
        try:
            tensor = self._search.in_step(self._reader(step), rates, step)
        except RankFailed:
            raise
        except Exception as error:  # the message about the step matters more
            return f"The search for the first bad tensor failed: {error or type(error).__name__}."
        if tensor is None:
            return "The repeated step had no NaN or Inf, so the device does not compute the same values twice."
        return f"The first tensor with NaN or Inf is {tensor}."


def _first_gradient(tensor: str | None) -> str:
    return "" if tensor is None else f" From the loss backwards, the first bad gradient is {tensor}."
