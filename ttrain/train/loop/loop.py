"""The training loop: a batch, a step, the line of metrics about it, and the objects that look at its result."""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil

from ttrain.core.errors import Interrupted, NonFiniteError
from ttrain.core.units import format_duration
from ttrain.engine.state import State
from ttrain.graph import Kind
from ttrain.objectives.rewards import BadReward
from ttrain.parallel.world import Numbers
from ttrain.train.checkpoint.checkpoint import Progress
from ttrain.train.logging.metrics import Meter, Metrics, read_metrics
from ttrain.train.loop.checkpoints import Checkpoints, RunContext
from ttrain.train.loop.evaluation import Evaluation
from ttrain.train.loop.guards import LearningGuard, NonFiniteGuard, SpikeGuard, first_bad_state
from ttrain.train.loop.interrupt import StopRequests
from ttrain.train.runs.record import continue_command
from ttrain.train.settings import END
from ttrain.train.steps.phases import BatchReader, Phases
from ttrain.train.steps.session import flops_per_step
from ttrain.train.steps.step import Rates, StepResult, TrainStep


def layer_norms(state: State) -> dict[str, float]:
    """Return the norms of the weights of each block, and of each other part of the model, as norm/<part>.

    All ranks have to call it.
    """
    squares: dict[str, float] = {}
    for name in state.names(Kind.PARAMETER):
        part = re.match(r"[^.]*(\.\d+)?", name)[0]  # type: ignore[index]
        squares[part] = squares.get(part, 0.0) + float(np.square(state.read(name), dtype=np.float64).sum())
    return {f"norm/{part}": math.sqrt(total) for part, total in squares.items()}


@dataclass
class Loop:
    """Trains from `context.progress.step` to `context.config.last`.

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
        # A first step may compile, so it counts as the second does. A run may be off by a twentieth without a word.
        self._counted, self._times, self._off = 0.0, iter((0, 2)), 0.05
        self._signal = 0  # number of the signal that stops all ranks
        self._asked: Numbers = {}  # what ranks asked with the last step
        # One that is alone need not wait for a step to be heard.
        self.train_step.asks = self._wishes if self.context.world.ranks.count > 1 else dict
        self.ending = "All steps are done."  # says why the run ended

    def run(self) -> Progress:
        """Train to the end.

        Raises NonFiniteError, Interrupted (the state is saved), and TtrainError where saves fail repeatedly or updates
        change nothing.
        """
        context = self.context
        context.loggers.console.start(context.progress.step, context.config.last)
        self._counted = time.monotonic()
        try:
            with self.stop:
                for step in self._steps():
                    batch, rates = self.reader(step), self.rates(step)
                    result = self.train_step(batch, rates, step)
                    self._after(step, result, rates)
        except BadReward:  # on all ranks
            self.checkpoints.save(wait=True)
            raise
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
            if progress.step >= context.config.last or self._stopped_early():
                self._evaluate()
                self.checkpoints.save(wait=True)
                self._measure_at_end()
                self._count()
                self._tell_pace(0)
                return
            step = progress.step + 1
            self.heartbeat()
            self._turn(step)
            self.meter.start()
            yield step

    def _after(self, step: int, result: StepResult, rates: Rates) -> None:
        """Log a step and ask the guards. A step counts unless one of them went back to a checkpoint."""
        context, progress = self.context, self.context.progress
        self._asked = result.asked
        self._log(step, result, rates)
        if any(guard(step, result, rates) for guard in self.guards):
            for guard in self.guards:
                guard.forget()
            context.loggers.console.close()
            context.loggers.console.start(progress.step, context.config.last)
        else:
            progress.read_samples, progress.read_tokens, read, progress.rollout = self.reader.before(step + 1)
            progress.step, progress.read_sources = step, {**read}
            context.loggers.console.advance()
            if not self._started:
                self._started = True
                self._tell_start(step)
        progress.seconds += self.meter.rest()
        self._count(next(self._times, 1))

    def _count(self, times: int = 1) -> None:
        """Count the time since the last call into what train.minutes counts."""
        now = time.monotonic()
        self.context.progress.spent += times * (now - self._counted)
        self._counted = now

    def _tell_pace(self, least: float) -> None:
        """Tell how far the run is off train.minutes by its pace so far, if by `least` or more of them. 0 is its end."""
        config, progress, read = self.context.config, self.context.progress, self.reader.schedule.read
        if config.minutes and (progress.step < config.last or not least):
            share = read(0, progress.step).tokens / read(0, config.last).tokens
            off = progress.spent / (60 * config.minutes * share) - 1
            if abs(off) >= least:
                self._off, used = 2 * abs(off), f"{abs(off):.1%} {'less' if off < 0 else 'more'} time than planned"
                told = f"train.minutes={config.minutes:g}: {used} up to step {progress.step:,} of {config.last:,}."
                self.context.events.tell("pace", told, progress.step, off=round(off, 4))

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
        self._counted, self._times = time.monotonic(), iter((0, 2))

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
        last, every = step >= context.config.last, context.config.eval_every
        due = last or by_time or asked or checkpoints.due(step)
        if due:
            checkpoints.save(wait=last)
        evaluates = last or (every is not None and step % every == 0)
        improved = evaluates and self._evaluate()
        best = improved and context.config.keep_best
        if context.world.broadcast(checkpoints.step == step) if due else best:  # one that failed is tried when next due
            checkpoints.save()

    def _evaluate(self) -> bool:
        """Evaluate unless the current step was; return True where the loss is the best so far."""
        context, progress = self.context, self.context.progress
        if progress.evaluated_at == progress.step:
            return False
        try:
            result = self.evaluation(self._interrupts_evaluation)
        except Interrupted:
            result = None
        except NonFiniteError as error:
            found = first_bad_state(context.state)
            raise self.checkpoints.nonfinite(str(error), progress.step, found) from None
        if result is None:  # a signal came meanwhile
            self._ask()
            return False
        self._count()
        self._tell_pace(self._off)
        further = {f"val/{name}": value for name, value in result.metrics.items()}
        if context.world.broadcast(context.loggers.draws):
            further |= layer_norms(context.state)
        context.loggers.log({"step": progress.step, "val/loss": result.loss, **further, **result.further})
        return progress.evaluated(result.loss, context.config.min_improvement)

    def _measure_at_end(self) -> None:
        """Measure what train.evals has for the end, unless an earlier attempt did. The state is saved by then."""
        context, step = self.context, self.context.progress.step
        keys = tuple(f"eval/{each.name}/" for each in context.config.evals if each.every == END)
        lines = [line for line in read_metrics(context.run.metrics) if line["step"] == step] if keys else []
        if not keys or context.world.broadcast(any(key.startswith(keys) for line in lines for key in line)):
            return
        try:
            with self.evaluation.around():
                found = self.evaluation.measure(END, self._interrupts_evaluation)
        except Interrupted:
            self._ask()
            raise self._interrupted(signal.Signals(self._signal).name) from None
        if found:
            context.loggers.log({"step": step, **found})

    def _interrupts_evaluation(self) -> bool:
        """Give a sign of life between two batches of an evaluation, and return whether the run is to stop."""
        self.heartbeat()
        return self.stop.requested is not None

    def _ask(self) -> tuple[bool, bool]:
        """Take saves due by the clock and by SIGUSR1, and the signal to stop: all ranks get one answer.

        It came with the last step, or is asked for where there was none.
        """
        found, self._asked = self._asked or self.context.world.largest(self._wishes()), {}
        self._signal = int(found["stop"])
        return found["due"] > 0, found["save"] > 0

    def _wishes(self) -> Numbers:
        due = self.context.world.leads and self.checkpoints.due_by_time()
        return {"stop": self.stop.requested or 0, "due": due, "save": self.stop.take_save()}

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
        if result.finite and step % config.log_every and step != config.last:
            return
        line: Metrics = {
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
            **self.reader.metrics(step),
        }
        further = {"activation_norm": result.activation_norm, "loss_scale": result.loss_scale}
        line |= {name: value for name, value in further.items() if value is not None}
        self.context.loggers.log(line)
