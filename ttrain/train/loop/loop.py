"""The training loop: a batch, a step, the line of metrics about it, and the objects that look at its result."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import psutil

from ttrain.core.errors import DataError, Interrupted, NonFiniteError
from ttrain.core.units import format_duration
from ttrain.core.waiting import Waiting
from ttrain.data.batches import Dataset
from ttrain.data.sequences.mixture import Mixture
from ttrain.models.base import LOSS_WEIGHT, Batch, Prepare, loss_weights, means, prepare_plain
from ttrain.parallel.world import Numbers, World
from ttrain.train.checkpoint.checkpoint import Progress
from ttrain.train.logging.metrics import Meter, Metrics, read_metrics
from ttrain.train.loop.checkpoints import Checkpoints, RunContext
from ttrain.train.loop.guards import LearningGuard, NonFiniteGuard, SpikeGuard, first_bad_state
from ttrain.train.loop.interrupt import StopRequests
from ttrain.train.protocols import Inputs, Outputs
from ttrain.train.runs.record import continue_command
from ttrain.train.settings import END, EVALUATION
from ttrain.train.steps.phases import BatchReader, Phases
from ttrain.train.steps.session import flops_per_step
from ttrain.train.steps.step import Rates, StepResult, TrainStep

BITS_PER_BYTE = "bits_per_byte"
_BYTES = "bytes"  # among counts


@dataclass(frozen=True)
class EvaluationResult:
    """The loss, and what else the model names; each the mean over its own targets of the whole split, if it has any.

    Where the targets are text, also bits_per_byte: the sum of the losses of all tokens in bits over the UTF-8 bytes of
    their text, which compares across tokenizers. A token that ends a document has a loss and no byte. Of a mixture also
    loss/<name>, the mean loss of a token of each source.
    """

    loss: float
    metrics: dict[str, float] = field(default_factory=dict)
    further: dict[str, float] = field(default_factory=dict)  # of train.evals, by whole names


@dataclass(eq=False)
class Evaluation:
    """Mean loss over held-out samples: the same ones at every step of the run and for every batch size, each once.

    The ranks of a `world` take turns at the batches, whose sums are added in the order of the batches.
    """

    step: Callable[[Inputs], Outputs]
    dataset: Dataset
    rows: int  # per call, as the step was built for
    limit: int | None  # samples; None covers the whole split
    prepare: Prepare = prepare_plain
    say: Callable[[str], None] | None = None  # is told how far an evaluation is that takes long
    count_bytes: Callable[[Batch], int] | None = None  # of a batch's targets
    world: World = field(default_factory=World)
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # open while the step runs
    # Measures the entries of train.evals that are due (EVALUATION or END). Raises Interrupted where it was stopped.
    measure: Callable[[str, Callable[[], bool]], dict[str, float]] = lambda due, stopped: {}

    def __post_init__(self) -> None:
        self.samples = min(self.limit or self.dataset.val_samples, self.dataset.val_samples)
        self.tokens = self.bytes = 0  # targets and their bytes, known after an evaluation
        self._counts: dict[str, dict[str, int]] = {}  # of each source, and of all under ""
        whole = {"": (self.dataset, self.samples)}
        parts = self.dataset.divided(self.samples) if isinstance(self.dataset, Mixture) else whole
        self._batches: list[tuple[str, Any, int, int]] = []  # of one source each, with its data, first sample and rows
        for name, (data, count) in parts.items():
            self._batches += [(name, data, at, min(self.rows, count - at)) for at in range(0, count, self.rows)]

    def __call__(self, stopped: Callable[[], bool] = lambda: False) -> EvaluationResult | None:
        """Return the loss per valid target; None if `stopped` became true on the way.

        Raises NonFiniteError, and DataError where there is no target at all.
        """
        with Waiting("Evaluating on held-out data", self.say) as waiting, self.around():
            if not self._counts and (counted := self._totals(stopped, waiting, self._count)) is not None:
                self._counts = {of: {name: int(count) for name, count in each.items()} for of, each in counted.items()}
                self.tokens, self.bytes = self._counts[""][LOSS_WEIGHT], self._counts[""].pop(_BYTES)
                if not self.tokens:
                    none = f"held-out data has no target in {self.samples} sample(s)"
                    raise DataError(f"{none}, so there is no loss of it.")
            if not self._counts:
                return None
            sums = self._totals(stopped, waiting, partial(self._sums, loss_weights(self._counts[""])))
            if sums is None:
                return None
            further = self.measure(EVALUATION, stopped)
        found = {name: value for name, value in means(sums[""], self._counts[""]).items() if value is not None}
        loss = found.pop("loss")
        if not math.isfinite(loss):
            raise NonFiniteError(f"the loss on held-out data is {loss}")
        if self.bytes:
            found[BITS_PER_BYTE] = _entropy({**found, "loss": loss}) * self.tokens / math.log(2) / self.bytes
        for name, counts in self._counts.items():
            if name and counts[LOSS_WEIGHT]:
                found[f"loss/{name}"] = _entropy(sums[name]) * self.tokens / counts[LOSS_WEIGHT]
        return EvaluationResult(loss, found, further)

    def _totals(
        self, stopped: Callable[[], bool], waiting: Waiting, of_batch: Callable[[Batch], Mapping[str, float]]
    ) -> dict[str, dict[str, float]] | None:
        """Add up the numbers of all batches, which ranks take turns at; None if `stopped` became true on any rank.

        The sums of all are under "", those of a source under its name.
        """
        totals: dict[str, dict[str, float]] = {}
        ranks, batches = self.world.ranks, self._batches
        for first in range(0, len(batches), ranks.count):
            if self.world.largest({"stopped": float(stopped())})["stopped"] > 0:
                return None
            waiting.at(first * self.rows, self.samples)
            # Samples in their order; the last batch may have fewer rows than the others.
            _, data, start, rows = batches[min(first + ranks.rank, len(batches) - 1)]
            found = self.world.gather([of_batch(data.batch("val", 0, start, rows))])
            for (source, *_), sums in zip(batches[first:], found, strict=False):
                for of in (totals.setdefault(name, {}) for name in {"", source}):
                    of.update((name, of.get(name, 0) + value) for name, value in sums.items())
        return totals

    def _count(self, batch: Batch) -> dict[str, float]:
        """Return the targets that each weight averages over, and their bytes."""
        return {**self.prepare(batch)[1], _BYTES: 0 if self.count_bytes is None else self.count_bytes(batch)}

    def _sums(self, weights: Mapping[str, float], batch: Batch) -> dict[str, float]:
        """The step's sums over a batch that may have fewer rows than the step.

        Its rows fill the step again and again. Where targets are ids, all but the first time they count for nothing;
        others can't be masked, so what counted several times is divided, once the rest is taken away.
        """
        rows = len(batch["targets"])
        full = {name: np.resize(array, (self.rows, *array.shape[1:])) for name, array in batch.items()}
        if masked := full["targets"].dtype.kind == "i":
            full["targets"][rows:] = -1
        outputs = self.step({**self.prepare(full)[0], **weights})
        sums = {name: float(value) for name, value in outputs.items() if name == "loss" or "/" in name}
        if masked or rows == self.rows:
            return sums
        times, rest = divmod(self.rows, rows)
        extra = self._sums(weights, {name: array[:rest] for name, array in batch.items()}) if rest else {}
        return {name: (value - extra.get(name, 0.0)) / times for name, value in sums.items()}


def _entropy(sums: Mapping[str, float]) -> float:
    """Return the cross-entropy among the metrics of a model; it is the loss where none is named so."""
    return next((value for name, value in sums.items() if name.endswith("/ce")), sums["loss"])


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
            progress.step, (progress.read_samples, progress.read_tokens, read) = step, self.reader.before(step + 1)
            progress.read_sources = {**read}
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
