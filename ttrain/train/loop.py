"""The training loop: steps, evaluations, saves, and the ways in which a run ends."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ttrain.core.errors import Interrupted, NonFiniteError
from ttrain.train.checkpoint import CheckpointContent, save_checkpoint
from ttrain.train.evaluate import Evaluation
from ttrain.train.interrupt import StopRequests
from ttrain.train.loggers import Loggers
from ttrain.train.meter import Meter
from ttrain.train.metrics import Metrics
from ttrain.train.nonfinite import nonfinite_message
from ttrain.train.progress import Progress
from ttrain.train.protocols import Dataset, State
from ttrain.train.retention import prune_checkpoints
from ttrain.train.run_directory import RunDirectory
from ttrain.train.settings import TrainConfig
from ttrain.train.step import StepResult, TrainStep


@dataclass
class Loop:
    """Trains from `progress.step` to `config.steps`.

    Everything that varies from step to step is a function of (seed, step), so a run that was stopped after any step and
    resumed from its checkpoint continues exactly.
    """

    config: TrainConfig
    seed: int
    step: TrainStep
    evaluation: Evaluation
    dataset: Dataset
    state: State
    rates: Callable[[int], Mapping[str, float]]  # step (from 1) -> the lr inputs; "lr" is the one that is recorded
    run_directory: RunDirectory
    loggers: Loggers
    meter: Meter
    stored_config: dict[str, Any]
    tokenizer: str | None = None  # the tokenizer's JSON
    progress: Progress = field(default_factory=Progress)
    rank: int = 0
    world: int = 1
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._stop = StopRequests()
        self._last_save = self.clock()
        self._saved = self._save_key()  # a resumed run starts from a checkpoint of its current step

    def run(self) -> Progress:
        """Runs to the end. Raises NonFiniteError, Interrupted (the state is saved), TtrainError when a save fails."""
        self.loggers.console.start(self.progress.step, self.config.steps)
        with self._stop:
            while True:
                self._evaluate_and_save()
                if self._stop.requested is not None:
                    raise self._interrupted(self._stop.requested.name)
                if self._done():
                    break
                self._train_step()
            self._finish()
        return self.progress

    def _done(self) -> bool:
        if self.progress.step >= self.config.steps:
            return True
        patience = self.config.early_stop
        if patience is None or self.progress.stale_evaluations < patience:
            return False
        self.loggers.console.say(
            f"Early stop at step {self.progress.step}: val/loss has not fallen below {self.progress.best_val_loss:.4f} "
            f"(step {self.progress.best_step}) for {patience} evaluations."
        )
        return True

    def _train_step(self) -> None:
        progress, number = self.progress, self.progress.step + 1
        self.meter.start()
        batch = self.dataset.batch("train", self.seed, number - 1, self.config.batch_size, self.rank, self.world)
        rates = self.rates(number)
        result = self.step(batch, rates, number)
        progress.seconds += self.meter.stop(result.tokens)
        progress.tokens += result.tokens
        progress.train_loss = result.loss
        finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
        if not finite or number % self.config.log_every == 0 or number == self.config.steps:
            self.loggers.log(self._step_metrics(number, result, next(iter(rates.values()))))
        if not finite:
            raise self._nonfinite(number, result)
        progress.step = number
        self.loggers.console.advance()

    def _step_metrics(self, number: int, result: StepResult, lr: float) -> Metrics:
        finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
        return {
            "step": number,
            "train/loss": result.loss,
            "lr": lr,
            "grad_norm": result.grad_norm,
            **self.meter.read(),
            "tokens": self.progress.tokens,
            "nonfinite_steps": 0 if finite else 1,
        }

    def _evaluate_and_save(self) -> None:
        """After a step, or after a resume that left this undone: what is due at the current step."""
        step, config = self.progress.step, self.config
        if step == 0:
            return
        improved = False
        if step >= config.steps or (config.eval_every and step % config.eval_every == 0):
            improved = self._evaluate()
        by_step = config.save_every is not None and step % config.save_every == 0
        by_time = config.save_minutes is not None and self.clock() - self._last_save >= 60 * config.save_minutes
        if by_step or by_time or (improved and config.keep_best):
            self._save()

    def _evaluate(self) -> bool:
        """Evaluates unless this step was; whether the loss is the best so far."""
        progress = self.progress
        if progress.evaluated_at == progress.step:
            return False
        try:
            loss = self.evaluation(lambda: self._stop.requested is not None)
        except NonFiniteError as error:
            raise NonFiniteError(self._message(str(error), progress.step)) from None
        if loss is None:
            return False
        self.loggers.log({"step": progress.step, "val/loss": loss})
        return progress.evaluated(loss, self.config.min_improvement)

    def _save(self) -> None:
        """Saves unless the disk already has this, and only then lets older checkpoints go."""
        if self._saved == self._save_key():
            return
        progress, folder = self.progress, self.run_directory.checkpoints
        content = CheckpointContent(
            progress.step, self.stored_config, progress.to_dict(), self.tokenizer, self._save_key()[1]
        )
        self.loggers.file.sync()
        try:
            save_checkpoint(folder, self.state, content)
        except NonFiniteError as error:
            raise NonFiniteError(self._message(str(error), progress.step)) from None
        prune_checkpoints(folder, self.config.keep_last, self.config.keep_best)
        self._saved, self._last_save = self._save_key(), self.clock()

    def _save_key(self) -> tuple[int, float | None]:
        """Step, and its val/loss where it was evaluated."""
        progress = self.progress
        return progress.step, progress.val_loss if progress.evaluated_at == progress.step else None

    def _finish(self) -> None:
        self._evaluate()
        self._save()

    def _interrupted(self, signal_name: str) -> Interrupted:
        if self.progress.step == 0:
            return Interrupted(f"Stopped by {signal_name} before the first step was done; there is nothing to save.")
        self._save()
        command = f"python -m ttrain resume=auto run.dir={shlex.quote(str(self.run_directory.path))}"
        return Interrupted(
            f"Stopped by {signal_name} after step {self.progress.step}; the state is saved. Continue with: {command}"
        )

    def _nonfinite(self, number: int, result: StepResult) -> NonFiniteError:
        loss_is_bad = not math.isfinite(result.loss)
        what = f"train/loss is {result.loss}" if loss_is_bad else f"grad_norm is {result.grad_norm}"
        return NonFiniteError(self._message(what, number, loss_is_finite=not loss_is_bad))

    def _message(self, what: str, step: int, *, loss_is_finite: bool = False) -> str:
        folder = self.run_directory.checkpoints
        return nonfinite_message(what, step, self.state, folder, loss_is_finite=loss_is_finite)
