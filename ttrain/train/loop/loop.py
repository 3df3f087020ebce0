"""The training loop: steps, evaluations, saves, and the ways in which a run ends."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ttrain.core.errors import Interrupted, NonFiniteError, RankFailed
from ttrain.engine.state import State
from ttrain.graph.kinds import Kind
from ttrain.parallel.world import World
from ttrain.train.checkpoint.progress import Progress
from ttrain.train.checkpoint.retention import newest_complete
from ttrain.train.checkpoint.save import CheckpointContent
from ttrain.train.logging.events import Events
from ttrain.train.logging.loggers import Loggers
from ttrain.train.logging.meter import Meter
from ttrain.train.logging.metrics import Metrics
from ttrain.train.loop.evaluate import Evaluation
from ttrain.train.loop.guards import LearningCheck, SpikeDetector
from ttrain.train.loop.interrupt import StopRequests
from ttrain.train.loop.nonfinite import StepSearch, first_bad_state, nonfinite_message
from ttrain.train.loop.saver import Saver
from ttrain.train.protocols import SAVED_KINDS
from ttrain.train.runs.record import START, continue_command
from ttrain.train.runs.run_directory import RunDirectory
from ttrain.train.settings import GuardConfig, TrainConfig
from ttrain.train.steps.driver import Driver
from ttrain.train.steps.phases import DataReader, Phase, Phases
from ttrain.train.steps.session import flops_per_step
from ttrain.train.steps.step import StepResult, StepUnderWay
from ttrain.train.supervise.heartbeat import first_step_note, seconds_since_start


@dataclass
class Loop:
    """Trains from `progress.step` to `config.steps`.

    Everything that varies from step to step is a function of the seed, the step and what was read before it, so a run
    that was stopped after any step and resumed from its checkpoint continues exactly.
    """

    config: TrainConfig
    driver: Driver
    evaluation: Evaluation
    reader: DataReader
    state: State
    run_directory: RunDirectory
    loggers: Loggers
    meter: Meter
    content: Callable[[Progress, float | None], CheckpointContent]  # what a checkpoint of this val/loss says
    held_out: str = ""  # SHA-256 of the data that evaluations are of
    progress: Progress = field(default_factory=Progress)
    guard: GuardConfig = field(default_factory=GuardConfig)
    rounds_stochastically: bool = False  # updates that are smaller than a rounding error are not lost
    search: StepSearch | None = None  # names the first bad tensor of a step
    phases: Phases | None = None  # where training sequences or batches grow
    stop: StopRequests = field(default_factory=StopRequests)
    heartbeat: Callable[[], None] = lambda: None  # tells whoever watches that this process is alive
    counters: Callable[[], dict[str, int]] = dict  # what the engine has built so far
    world: World = field(default_factory=World)
    command: str = START  # what a command that continues the run begins with
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.events = Events(self.run_directory.events)
        self._say = self.loggers.console.say
        self.saver = Saver(self.run_directory, self.state, self.config, self.events, self._say, self.world)
        self._last_save = self.clock()
        self._stop: int = 0  # number of the signal by which all ranks are to stop
        self._measure()
        self._resumed_from(self.progress.step)
        self._spikes = SpikeDetector(self.guard)
        self._started, self._skips = False, 0  # skips in a row
        self._under_way: StepUnderWay | None = None
        self.driver.lr_factor = self.progress.lr_factor
        if self.phases is not None:
            self.phases.turned = self._grown
        self._learning: LearningCheck | None = None
        self._check_after = self.guard.check_learning

    def run(self) -> Progress:
        """Runs to the end.

        Raises NonFiniteError, Interrupted (the state is saved), and TtrainError where saves fail repeatedly or updates
        change nothing.
        """
        with self.running():
            while self.advance():
                pass
        return self.progress

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around all calls of `advance`: requests by signal are noted, and at the end what was to be saved is there."""
        self.loggers.console.start(self.progress.step, self.config.steps)
        try:
            with self.stop:
                yield
        finally:
            self.saver.join()

    def advance(self) -> bool:
        """Goes on until the device was given work and the host is about to wait for it; False once all is done."""
        while True:
            if self._under_way is None:
                self._evaluate_and_save()
                if self._stop:
                    raise self._interrupted(signal.Signals(self._stop).name)
                if self._done():
                    self._finish()
                    return False
                self._under_way = self._begin(self.progress.step + 1)
            if self._under_way.advance():
                return True
            result, self._under_way = self._under_way.finish(), None
            self._end(self.progress.step + 1, result)
            self.progress.seconds += self.meter.rest()

    def _resumed_from(self, step: int) -> None:
        """The state is that of the run's checkpoint of this step."""
        self._saved, self.saver.step = self._save_key(), step or None

    def _measure(self) -> None:
        """Lets go of what was measured on other held-out data."""
        note = self.progress.measure_on(self.held_out)
        if note is not None:
            self._warn("held_out", note, self.progress.step)

    def _warn(self, kind: str, note: str, step: int, **facts: Any) -> None:
        self.events.add(kind, note, step, **facts)
        self._say(f"WARNING: {note}")

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

    def _begin(self, number: int) -> StepUnderWay:
        """A step, before anything of it is launched."""
        self.heartbeat()
        if self._check_after is not None:
            self._learning = LearningCheck(self.state, self._check_after, self.rounds_stochastically)
            self._check_after = None
        if self.phases is not None:
            self.phases.turn(number)
        self.meter.start()
        return self.driver.start(number)

    def _end(self, number: int, result: StepResult) -> None:
        """What a step's numbers ask for."""
        progress, rates = self.progress, self.driver.rates_of(number)
        progress.seconds += self.meter.stop(result.tokens)
        progress.tokens += result.tokens
        if math.isfinite(result.loss):
            progress.train_loss = result.loss
        if not result.finite or number % self.config.log_every == 0 or number == self.config.steps:
            self.loggers.log(self._step_metrics(number, result, rates))
        if not result.finite:
            if self._recovered(number, result):
                return
        elif self._spiked(number, result.loss):
            return
        else:
            self._skips = 0
        progress.step, progress.read = number, self.reader.before(number + 1)
        self.loggers.console.advance()
        if not self._started:
            self._started = True
            seconds, counts = seconds_since_start(), self.counters()
            note = first_step_note(seconds, counts)
            self.events.add("first_step", note, number, seconds=round(seconds, 3), engine=counts)
            self._say(note)
        if self._learning is not None:
            rate = min(rates.values()) if result.finite else 0.0
            doubts = self._learning.after(number, rate, result.grad_norm)
            self._learning = self._learning if doubts is None else None
            if doubts:
                self._warn("not_moving", doubts, number)

    def _grown(self, number: int, phase: Phase) -> None:
        """A step reads other sizes than the one before."""
        assert self.phases is not None
        self.heartbeat()
        self.meter.restart(flops_per_step(self.phases.session.graph))
        note = f"From step {number} on, a step trains on {phase.text()}."
        self.events.add("phase", note, number, length=phase.length, rows=phase.rows)
        self._say(note)

    def _recovered(self, number: int, result: StepResult) -> bool:
        """What the guard does about a step that is not finite: True after a rollback, False after a skipped update.

        Raises NonFiniteError where the run has to stop.
        """
        what = str(result.bad)
        tensor = None if self.search is None else self.search.in_gradients()
        found = "" if tensor is None else f" From the loss backwards, the first bad gradient is {tensor}."
        if self.guard.nonfinite == "rollback" and self._roll_back(number, f"Step {number}: {what}.{found}"):
            return True
        if result.applied or self.guard.nonfinite != "skip":
            raise NonFiniteError(self._message(what, number, self._first_bad(number, result.applied)), step=number)
        self._skips += 1
        self.progress.skipped_steps += 1
        note = f"Step {number}: {what}; its update is skipped.{found}"
        self._warn("skipped", note, number, tensor=tensor)
        if self._skips >= self.guard.max_skips:
            message = self._message(what, number, self._first_bad(number, applied=False))
            raise NonFiniteError(f"{self._skips} updates in a row were skipped. {message}", step=number)
        return False

    def _first_bad(self, number: int, applied: bool) -> str:
        """A sentence about the first bad tensor of a step. The state is of no more use afterwards."""
        search = self.search
        if search is None:
            return first_bad_state(self.state, Kind.GRADIENT, Kind.PARAMETER, Kind.OPTIMIZER)
        gradient = search.in_gradients()
        try:
            if applied and not self._go_back(search, number):
                after = "" if gradient is None else f"From the loss backwards, the first bad gradient is {gradient}."
                return f"{search.note}{after}".strip()
            if self.phases is not None:  # repeated steps may be of an earlier one
                self.phases.turn(number)
            tensor = search.in_step(*self.driver.inputs(number), number)
        except RankFailed:
            raise
        except Exception as error:  # the message about the step matters more
            return f"The search for the first bad tensor failed: {error or type(error).__name__}."
        if tensor is None:
            return "When the step was repeated, all was finite: the device does not compute the same twice."
        return f"The first tensor with NaN or Inf is {tensor}."

    def _go_back(self, search: StepSearch, number: int) -> bool:
        """Gives the state the values from before a step that was applied; whether that was possible."""
        self.saver.join()
        self.world.barrier()
        checkpoint, _ = newest_complete(self.run_directory.checkpoints)

        def stopped() -> bool:
            return self.world.largest({"stop": float(self.stop.requested is not None)})["stop"] > 0

        seconds = self.world.broadcast(self.progress.seconds / number)
        return search.go_back(number, checkpoint, lambda step: self._begin(step).finish(), seconds, stopped)

    def _spiked(self, number: int, loss: float) -> bool:
        """Looks for a spike of the loss; whether the run was rolled back for it."""
        if self.guard.spike == "ignore" or not self._spikes.is_spike(loss):
            return False
        note = f"Step {number}: train/loss {loss:.4f} is a spike; its recent median is {self._spikes.usual():.4f}."
        if self.guard.spike == "rollback" and self._roll_back(number, note):
            return True
        self._warn("spike", note, number)
        return False

    def _roll_back(self, number: int, why: str) -> bool:
        """Goes back to the newest checkpoint with a lower learning rate; False where there is none to go back to."""
        self.saver.join()
        self.world.barrier()
        checkpoint, _ = newest_complete(self.run_directory.checkpoints)
        factor, rollbacks = self.progress.lr_factor * self.guard.lr_factor, self.progress.rollbacks + 1
        if checkpoint is None or rollbacks > self.guard.max_rollbacks:
            return False
        checkpoint.load(self.state)
        stored = Progress.of(checkpoint).to_dict()
        stored |= {"lr_factor": factor, "rollbacks": rollbacks, "wandb_id": self.progress.wandb_id}
        for name, value in stored.items():
            setattr(self.progress, name, value)
        self.driver.lr_factor = factor
        dropped = self.loggers.file.cut(checkpoint.step, self.progress.evaluated_at == checkpoint.step)
        note = (
            f"{why} Rolled back to step {checkpoint.step} with {factor:g} times the learning rate; {dropped} lines "
            f"after it were removed from {self.run_directory.metrics.name}."
        )
        self._warn("rollback", note, number, to=checkpoint.step, lr_factor=factor)
        self._measure()
        self._resumed_from(checkpoint.step)
        self._skips, self._learning, self._check_after = 0, None, None
        self._spikes.forget()
        self.loggers.console.close()
        self.loggers.console.start(self.progress.step, self.config.steps)
        return True

    def _step_metrics(self, number: int, result: StepResult, rates: Mapping[str, float]) -> Metrics:
        return {
            "step": number,
            "train/loss": result.loss,
            **result.metrics,
            "lr": next(iter(rates.values())),
            **rates,
            "grad_norm": result.grad_norm,
            **self.meter.read(),
            "tokens": self.progress.tokens,
            "seconds": round(self.progress.seconds, 3),
            "nonfinite_steps": 0 if result.finite else 1,
            **({} if result.activation_norm is None else {"activation_norm": result.activation_norm}),
        }

    def _evaluate_and_save(self) -> None:
        """After a step, or after a resume that left this undone: what is due at the current step.

        An evaluation may take long, so what is to be saved is saved before it, and told of the loss afterwards.
        """
        step, config = self.progress.step, self.config
        with self._saving():
            self.saver.poll()
        by_time, asked = self._asked()
        if step == 0:
            return
        last = step >= config.steps
        by_step = config.save_every is not None and step % config.save_every == 0
        if asked:
            note = f"Saving step {step}, as SIGUSR1 asked."
            self.events.add("asked", note, step)
            self._say(note)
        due = last or by_step or by_time or asked
        if due:
            self._save(wait=last)
        evaluates = last or (config.eval_every is not None and step % config.eval_every == 0)
        improved = evaluates and self._evaluate()
        kept = self.world.broadcast(self.saver.step == step)
        if kept if due else improved and config.keep_best:  # one that failed is tried when next due
            self._save()

    def _asked(self) -> tuple[bool, bool]:
        """Whether a save is due by the clock, and by SIGUSR1; notes by which signal to stop. The same on all ranks."""
        minutes = self.config.save_minutes
        due = minutes is not None and self.clock() - self._last_save >= 60 * minutes
        asked = {"stop": self.stop.requested or 0, "due": due and self.world.leads, "save": self.stop.take_save()}
        found = self.world.largest(asked)
        self._stop = int(found["stop"])
        return found["due"] > 0, found["save"] > 0

    def _evaluate(self) -> bool:
        """Evaluates unless this step was; whether the loss is the best so far."""
        progress = self.progress
        if progress.evaluated_at == progress.step:
            return False
        try:
            result = self.evaluation(self._stopped)
        except NonFiniteError as error:
            message = self._message(str(error), progress.step, first_bad_state(self.state, *SAVED_KINDS))
            raise NonFiniteError(message, step=progress.step) from None
        if result is None:
            self._asked()
            return False
        further = {f"val/{name}": value for name, value in result.metrics.items()}
        self.loggers.log({"step": progress.step, "val/loss": result.loss, **further})
        return progress.evaluated(result.loss, self.config.min_improvement)

    def _stopped(self) -> bool:
        """Asked between the batches of an evaluation."""
        self.heartbeat()
        return self.stop.requested is not None

    def _save(self, *, wait: bool = False) -> None:
        """Starts a save unless the disk already has this; with `wait` it is done on return."""
        if wait:
            with self._saving():
                self.saver.finish()
        if self._saved == self._save_key() and not self.world.broadcast(self.saver.failed):
            return
        progress, key = self.progress, self._save_key()
        with self._saving():
            self.saver.save(self.content(progress, key[1]), wait=wait)
        self._saved, self._last_save = key, self.clock()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """A state that is not finite is told as a step that is not."""
        try:
            yield
        except NonFiniteError as error:
            step = self.progress.step if error.step is None else error.step
            raise NonFiniteError(self._message(str(error), step, ""), step=step) from None

    def _save_key(self) -> tuple[int, float | None]:
        """Step, and its val/loss where it was evaluated."""
        progress = self.progress
        return progress.step, progress.val_loss if progress.evaluated_at == progress.step else None

    def _finish(self) -> None:
        self._evaluate()
        self._save(wait=True)

    def _interrupted(self, signal_name: str) -> Interrupted:
        if self.progress.step == 0:
            return Interrupted(f"Stopped by {signal_name} before the first step was done; there is nothing to save.")
        self._save(wait=True)
        command = continue_command(self.command, self.run_directory.path)
        return Interrupted(
            f"Stopped by {signal_name} after step {self.progress.step}; the state is saved. Continue with: {command}"
        )

    def _message(self, what: str, step: int, found: str) -> str:
        self.saver.join()  # so that the newest checkpoint is there
        return nonfinite_message(what, step, found, self.run_directory.checkpoints, self.command)
