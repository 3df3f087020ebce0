"""The training loop: a batch, a step, the line of metrics about it, and the objects that look at its result."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import psutil

from ttrain.core.errors import Interrupted, NonFiniteError
from ttrain.core.units import format_duration
from ttrain.train.checkpoint.checkpoint import Progress
from ttrain.train.logging.metrics import Meter, Metrics
from ttrain.train.loop.checkpoints import Checkpoints, RunContext
from ttrain.train.loop.evaluate import Evaluation
from ttrain.train.loop.guards import LearningGuard, NonFiniteGuard, SpikeGuard, first_bad_state
from ttrain.train.loop.interrupt import StopRequests
from ttrain.train.runs.record import continue_command
from ttrain.train.steps.phases import BatchReader, Phases
from ttrain.train.steps.session import flops_per_step
from ttrain.train.steps.step import Rates, StepResult, TrainStep


@dataclass
class Loop:
    """Trains from `context.progress.step` to `context.config.steps`.

    Everything that varies from step to step is a function of the seed, the step and what was read before it. So a run
    that was stopped after any step and resumed from its checkpoint continues exactly.
    """

    context: RunContext
    reader: BatchReader
    train_step: TrainStep
    rates: Callable[[int], Rates]  # learning rates of a step by their inputs
    evaluation: Evaluation
    checkpoints: Checkpoints
    meter: Meter  # times the steps
    guards: Sequence[NonFiniteGuard | SpikeGuard | LearningGuard] = ()
    phases: Phases | None = None  # where training sequences or batches grow
    stop: StopRequests = field(default_factory=StopRequests)
    heartbeat: Callable[[], None] = lambda: None  # tells whoever watches that this process is alive
    counters: Callable[[], dict[str, int]] = dict  # what the engine has built so far

    def __post_init__(self) -> None:
        self._started = False
        self._signal = 0  # number of the signal that stops all ranks
        self.ending = "All steps are done."  # says why the run ended

    def run(self) -> Progress:
        """Train to the end.

        Raises NonFiniteError, Interrupted (the state is saved), and TtrainError where saves fail repeatedly or updates
        change nothing.
        """
        context = self.context
        context.loggers.console.start(context.progress.step, context.config.steps)
        try:
            with self.stop:
                for step in self._steps():
                    batch, rates = self.reader(step), self.rates(step)
                    result = self.train_step(batch, rates, step)
                    self._after(step, result, rates)
        finally:
            self.checkpoints.join()
        return context.progress

    def _steps(self) -> Iterator[int]:
        """The numbers of the steps to run. Between them comes what is due: saves, evaluations, and the end."""
        context, progress = self.context, self.context.progress
        while True:
            self._save_and_evaluate()
            if self._signal:
                raise self._interrupted(signal.Signals(self._signal).name)
            if progress.step >= context.config.steps or self._stopped_early():
                self._evaluate()
                self.checkpoints.save(wait=True)
                return
            step = progress.step + 1
            self.heartbeat()
            self._turn(step)
            self.meter.start()
            yield step

    def _after(self, step: int, result: StepResult, rates: Rates) -> None:
        """Log a step and ask the guards. A step counts unless one of them went back to a checkpoint."""
        context, progress = self.context, self.context.progress
        self._log(step, result, rates)
        if any(guard(step, result, rates) for guard in self.guards):
            for guard in self.guards:
                guard.forget()
            context.loggers.console.close()
            context.loggers.console.start(progress.step, context.config.steps)
        else:
            progress.step, (progress.read_samples, progress.read_tokens) = step, self.reader.before(step + 1)
            context.loggers.console.advance()
            if not self._started:
                self._started = True
                self._tell_start(step)
        progress.seconds += self.meter.rest()

    def _tell_start(self, step: int) -> None:
        """Tell how long the start took, imports included, and the kernels that it compiled or found compiled."""
        seconds, counts = time.time() - psutil.Process().create_time(), self.counters()
        built, cached = counts.get("kernels_built", 0), counts.get("kernels_cached", 0)
        kernels = f" ({built} kernels compiled, {cached} from the cache)" if built or cached else ""
        note = f"First step {format_duration(seconds)} after the start{kernels}."
        self.context.events.tell("first_step", note, step, seconds=round(seconds, 3), engine=counts)

    def _turn(self, step: int) -> None:
        """Build the steps of another phase where this step begins one."""
        phase = None if self.phases is None else self.phases.turn(step)
        if phase is None or self.phases is None:
            return
        self.heartbeat()
        self.meter.restart(flops_per_step(self.phases.session.graph))
        note = f"From step {step} on, a step trains on {phase.text()}."
        self.context.events.tell("phase", note, step, length=phase.length, rows=phase.rows)

    def _save_and_evaluate(self) -> None:
        """Do what is due after the current step, also where a resumed run had left it undone.

        An evaluation may take long, so the save comes before it. The checkpoint is told of the loss afterwards.
        """
        context, step, checkpoints = self.context, self.context.progress.step, self.checkpoints
        checkpoints.poll()
        by_time, asked = self._ask()
        if step == 0:
            return
        if asked:
            context.events.tell("asked", f"Saving step {step}, as SIGUSR1 asked.", step)
        last, every = step >= context.config.steps, context.config.eval_every
        due = last or by_time or asked or checkpoints.due(step)
        if due:
            checkpoints.save(wait=last)
        evaluates = last or (every is not None and step % every == 0)
        improved = evaluates and self._evaluate()
        kept = context.world.broadcast(checkpoints.step == step)
        if kept if due else improved and context.config.keep_best:  # one that failed is tried when next due
            checkpoints.save()

    def _evaluate(self) -> bool:
        """Evaluate unless the current step was; return True where the loss is the best so far."""
        context, progress = self.context, self.context.progress
        if progress.evaluated_at == progress.step:
            return False
        try:
            result = self.evaluation(self._interrupts_evaluation)
        except NonFiniteError as error:
            found = first_bad_state(context.state)
            raise self.checkpoints.nonfinite(str(error), progress.step, found) from None
        if result is None:  # a signal came meanwhile
            self._ask()
            return False
        further = {f"val/{name}": value for name, value in result.metrics.items()}
        context.loggers.log({"step": progress.step, "val/loss": result.loss, **further})
        return progress.evaluated(result.loss, context.config.min_improvement)

    def _interrupts_evaluation(self) -> bool:
        """Give a sign of life between two batches of an evaluation, and return whether the run is to stop."""
        self.heartbeat()
        return self.stop.requested is not None

    def _ask(self) -> tuple[bool, bool]:
        """Ask all ranks for saves due by the clock and by SIGUSR1, and for the signal to stop. All get one answer."""
        world = self.context.world
        due = world.leads and self.checkpoints.due_by_time()
        found = world.largest({"stop": self.stop.requested or 0, "due": due, "save": self.stop.take_save()})
        self._signal = int(found["stop"])
        return found["due"] > 0, found["save"] > 0

    def _stopped_early(self) -> bool:
        progress, patience = self.context.progress, self.context.config.early_stop
        if patience is None or progress.stale_evaluations < patience:
            return False
        self.ending = (
            f"Early stop at step {progress.step}: val/loss has not fallen below {progress.best_val_loss:.4f} "
            f"(step {progress.best_step}) for {patience} evaluations."
        )
        self.context.loggers.console.say(self.ending)
        return True

    def _interrupted(self, signal_name: str) -> Interrupted:
        step = self.context.progress.step
        if step == 0:
            return Interrupted(f"Stopped by {signal_name} before the first step was done; there is nothing to save.")
        self.checkpoints.save(wait=True)
        command = continue_command(self.context.command, self.context.run.path)
        return Interrupted(f"Stopped by {signal_name} after step {step}; the state is saved. Continue with: {command}")

    def _log(self, step: int, result: StepResult, rates: Rates) -> None:
        """Count a step, and log it every `train.log_every` steps, at the end, or where it is not finite."""
        progress, config = self.context.progress, self.context.config
        progress.seconds += self.meter.stop(result.tokens)
        progress.tokens += result.tokens
        if result.loss is not None and math.isfinite(result.loss):
            progress.train_loss = result.loss
        if not result.finite or step % config.log_every == 0 or step == config.steps:
            self.context.loggers.log(self._metrics(step, result, rates))

    def _metrics(self, step: int, result: StepResult, rates: Rates) -> Metrics:
        progress = self.context.progress
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
