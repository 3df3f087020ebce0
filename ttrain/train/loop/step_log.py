"""One line of metrics for a step, and the time that the loop takes."""

from __future__ import annotations

import math

from ttrain.train.logging.meter import Meter
from ttrain.train.logging.metrics import Metrics
from ttrain.train.loop.context import RunContext
from ttrain.train.steps.step import Rates, StepResult


class StepLog:
    """Times every step and logs those that are due."""

    def __init__(self, context: RunContext, meter: Meter) -> None:
        self._context, self.meter = context, meter

    def __call__(self, step: int, result: StepResult, rates: Rates) -> None:
        """Count a step, and log it every `train.log_every` steps, at the end, or where it is not finite."""
        progress, config = self._context.progress, self._context.config
        progress.seconds += self.meter.stop(result.tokens)
        progress.tokens += result.tokens
        if result.loss is not None and math.isfinite(result.loss):
            progress.train_loss = result.loss
        if not result.finite or step % config.log_every == 0 or step == config.steps:
            self._context.loggers.log(self._metrics(step, result, rates))

    def _metrics(self, step: int, result: StepResult, rates: Rates) -> Metrics:
        progress = self._context.progress
        return {
            "step": step,
            "train/loss": result.loss,
            **result.metrics,
            "lr": next(iter(rates.values())),
            **rates,
            "grad_norm": result.grad_norm,
            **self.meter.read(),
            "tokens": progress.tokens,
            "seconds": round(progress.seconds, 3),
            "nonfinite_steps": 0 if result.finite else 1,
            **({} if result.activation_norm is None else {"activation_norm": result.activation_norm}),
        }
