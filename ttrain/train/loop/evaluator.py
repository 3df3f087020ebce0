"""Evaluations of a run under way."""

from __future__ import annotations

from collections.abc import Callable

from ttrain.core.errors import NonFiniteError
from ttrain.train.loop.checkpoints import Checkpoints
from ttrain.train.loop.context import Context
from ttrain.train.loop.evaluate import Evaluation
from ttrain.train.loop.nonfinite import first_bad_state
from ttrain.train.protocols import SAVED_KINDS


class Evaluator:
    """Evaluates the current step of a run, and logs and remembers its loss."""

    def __init__(self, context: Context, evaluation: Evaluation, checkpoints: Checkpoints) -> None:
        self.evaluation = evaluation
        self._context, self._checkpoints = context, checkpoints

    def __call__(self, stopped: Callable[[], bool]) -> bool | None:
        """Evaluate unless the current step was. Return True where the loss is the best so far, None if `stopped` did.

        Raises NonFiniteError.
        """
        context, progress = self._context, self._context.progress
        if progress.evaluated_at == progress.step:
            return False
        try:
            result = self.evaluation(stopped)
        except NonFiniteError as error:
            found = first_bad_state(context.state, *SAVED_KINDS)
            raise self._checkpoints.nonfinite(str(error), progress.step, found) from None
        if result is None:
            return None
        further = {f"val/{name}": value for name, value in result.metrics.items()}
        context.loggers.log({"step": progress.step, "val/loss": result.loss, **further})
        return progress.evaluated(result.loss, context.config.min_improvement)
