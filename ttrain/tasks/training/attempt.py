"""An attempt at a run, from its directory and initial values to its summary."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, cast

from ttrain.config import build
from ttrain.core.errors import DeviceHang, Interrupted, OutOfMemory, TtrainError, UserError
from ttrain.core.waiting import Waiting
from ttrain.data.examples import ROW, ExampleDataset
from ttrain.data.text import byte_counter
from ttrain.data.tokenizer import Tokenizer
from ttrain.device.base import Device
from ttrain.engine.base import Step
from ttrain.models.base import Batch
from ttrain.objectives.grpo import GRPO
from ttrain.tasks.training.budget import with_steps
from ttrain.tasks.training.expected import pace_of
from ttrain.tasks.training.run import Run, train_on
from ttrain.train.checkpoint.checkpoint import Progress, held_out_hash
from ttrain.train.checkpoint.retention import check_space, checkpoint_bytes, list_checkpoints
from ttrain.train.forecast.limits import is_out_of_memory, memory_message
from ttrain.train.logging.loggers import Console, Loggers
from ttrain.train.logging.metrics import Events, Meter, MetricsFile, read_metrics
from ttrain.train.loop.checkpoints import Checkpoints, RunContext
from ttrain.train.loop.evaluation import Evaluation
from ttrain.train.loop.guards import LearningGuard, NonFiniteGuard, SpikeGuard
from ttrain.train.loop.interrupt import StopRequests
from ttrain.train.loop.loop import Loop
from ttrain.train.runs import summary as summaries
from ttrain.train.runs.record import continue_command
from ttrain.train.runs.run_directory import RunDirectory
from ttrain.train.sampling.rollouts import Completion, Rollouts
from ttrain.train.steps.phases import Phases, Position
from ttrain.train.steps.session import LedSteps, Session, averaged, flops_per_step
from ttrain.train.steps.step import PROBE, Rates, reads_ahead
from ttrain.train.supervise.child import Heartbeat

FIRST = "The first step is under way"


def train(run: Run, device: Device, console: Console, stop: StopRequests) -> float | None:
    """Train, and note in the run's events how that began and ended. Return the best val/loss.

    Raises OutOfMemory where memory runs out.
    """
    console.flag = None if device.caution is None else device.caution.partition(" ")[0]
    with ExitStack() as stack:
        folder = run.origin.held or stack.enter_context(closing(run.claim(device)))
        return Attempt(run, device, folder, console, stack).train(stop)


class Attempt:
    """The parts of an attempt, which are made one after the other. The stack closes them."""

    def __init__(self, run: Run, device: Device, folder: RunDirectory, console: Console, stack: ExitStack) -> None:
        self.run, self.device, self.folder, self.console, self._stack = run, device, folder, console, stack
        self.events, self.heartbeat = Events(folder.events, console.say), Heartbeat.of_process()
        self.steps: dict[str, Step] = {}
        self._led = LedSteps(self.steps, run.world) if run.world.ranks.dividing else self.steps
        self._checkpoints: Checkpoints | None = None
        self._rollouts: Rollouts | None = None  # where completions are trained on
        self._command = run.config.source.going_on() + run.rank_overrides  # starts every command that continues the run

    def train(self, stop: StopRequests) -> float | None:
        """Train to the end. Return the best val/loss."""
        run, folder, console, world = self.run, self.folder, self.console, self.run.world
        world.remember("run", str(folder.path.resolve()))
        self.heartbeat.tell(run=str(folder.path.resolve()))
        if folder.note is not None:
            console.say(folder.note)
        caution = self.device.caution
        self.events.add("started", " ".join(filter(None, [f"An attempt starts on {self.device.name}.", caution])))
        self.device.last_words.append(self._hung)
        with self._told():
            with Waiting("Placing the model and building its steps", console.say):
                session = self._stack.enter_context(closing(run.open(self.device)))
                run.evals.prepare(session, self._led)
                if isinstance(session.graph.objective, GRPO):
                    self._rollouts = Rollouts(session, self.steps, run.config, cast("Any", run.dataset), world)
                progress, began, phases = self._begin(session)
                self.heartbeat.beat()
                if run.config.train.steps is None:
                    timed = self.folder.checkpoints, self.steps, self._evaluation(progress)
                    run, told, facts = with_steps(run, session, progress, *timed)
                    self.run = run
                    self.events.tell("budget", told, progress.step, **facts)
                run.record(folder, session, self.steps, began)
                loop = self._loop(session, phases, self._stack.enter_context(self._loggers(progress)), progress, stop)
            self._checkpoints = loop.checkpoints
            loop.run()
            console.close()
            if "swap" in self.steps:
                self.steps["swap"]({})  # all is saved, and a sample is to show the averages
            world.barrier()
            if not world.leads:
                if world.ranks.dividing:
                    world.once(str)
                return progress.best_val_loss
            summary = self._summarize(progress, loop.counters())
        self.events.add("finished", loop.ending)
        sample = partial(run.print_sample, self._led.get("logits"))  # the run is done, whatever becomes of the terminal
        writes_text = bool(world.once(lambda: "text" * sample()) if world.ranks.dividing else sample())
        overrides, rate = train_on(run.rate, progress)
        again, start = (overrides + run.rank_overrides, rate), run.config.source.going_on()
        summaries.print_summary(summary, folder.path, again, writes_text=writes_text, start=start)
        return progress.best_val_loss

    def _begin(self, session: Session) -> tuple[Progress, dict[str, Any], Phases | None]:
        """Give the state its values, and build all steps.

        Return how far the run is, what its record tells of that, and what builds the steps of later phases.
        """
        run, config = self.run, self.run.config
        needed = sum(checkpoint_bytes(session.state, frozen) for frozen in (True, False))
        check_space(self.folder.path, needed)  # for two: the newest is kept until the next is verified
        origin = run.origin.begin(self.folder, session, config.run.seed, run.stored, run.dataset.description)
        progress, began, notes = origin
        for note in notes:
            self.console.say(note)
        self.heartbeat.beat()
        run.add_reference(session, self.folder)
        if len(run.phases.phases) == 1:
            self.steps.update(session.build_training())
            return progress, began, None
        phases = Phases(run.phases, session, run.shorter, self.steps)  # build_dataset made sure that lengths can change
        phases.turn(progress.step + 1)
        return progress, began, phases

    def _loop(
        self, session: Session, phases: Phases | None, loggers: Loggers, progress: Progress, stop: StopRequests
    ) -> Loop:
        """Put the loop together, and announce the run."""
        run, config, guard = self.run, self.run.config, self.run.config.guard
        for line in run.announcement(session.engine, self.folder.path, progress.step):
            self.console.say(line)
        self.folder.keep()
        meter, evaluation = self._meter(session, progress.step), self._evaluation(progress)
        held_out = run.world.once(partial(held_out_hash, run.dataset, evaluation.samples))
        context = RunContext(
            config.train, session.state, self.folder, loggers, self.events, progress, run.world, held_out, self._command
        )
        context.check_held_out()
        checkpoints = Checkpoints(context, run.content)
        start = Position(progress.read_samples, progress.read_tokens, progress.read_sources, progress.rollout)
        unknown = [name for name in getattr(run.dataset, "parts", ()) if name not in progress.read_sources]
        for name in unknown if progress.read_samples else ():
            self.console.say(f"{name} is read from its start: the checkpoint does not tell how far it was read.")
        reader, peak_rates, rollouts = run.reader(session, progress.step, start), run.rates, self._rollouts
        if rollouts is not None:
            reader = rollouts.begin(self._show, config.run.seed, run.phases, progress.step, start)

        def rates(step: int) -> Rates:
            """Return the learning rates of a step by their inputs. Rollbacks have lowered them."""
            return {name: rate * progress.lr_factor for name, rate in peak_rates(step).items()}

        # A phase is built as it begins, and completions are written.
        ahead = reads_ahead(reader, rates, config.train.last if phases is None and rollouts is None else 0)
        train_step = session.train_step(self.steps, config.run.seed, run.world, ahead, progress)
        guards = (
            NonFiniteGuard(guard, context, checkpoints, reader, train_step, list(run.model.parameters())),
            SpikeGuard(guard, context, checkpoints),
            LearningGuard(guard, context, config.optimizer.stochastic_rounding),
        )
        return Loop(
            context,
            reader,
            train_step,
            rates,
            evaluation,
            checkpoints,
            meter,
            guards,
            phases,
            stop,
            heartbeat=self.heartbeat.beat,
            counters=lambda: asdict(session.engine.counters) | asdict(self.device.counters),
        )

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Note how an attempt that fails ends. Raises OutOfMemory for whatever tells that memory ran out."""
        events, folder = self.events, self.folder
        try:
            yield
        except (Interrupted, KeyboardInterrupt) as error:  # the latter while steps are built, before the loop
            before = "Stopped by SIGINT before the steps were built; there is nothing to save."
            events.add("interrupted", str(error) or before)
            raise
        except Exception as error:
            if isinstance(error, UserError) and folder.discard():
                raise  # a mistake that only shows once all is built
            if not isinstance(error, TtrainError) and is_out_of_memory(error):
                message = memory_message(error, self.device.name, self.steps, self.run.shrinking_keys())
                events.add("failed", message)
                raise OutOfMemory(message, self.run.config.train, folder.path) from error
            step = getattr(error, "step", None)
            events.add("failed", str(error) or type(error).__name__, step, error=type(error).__name__)
            raise

    def _hung(self, hang: DeviceHang) -> None:
        """Keep what can be kept when the device never answers. A thread calls this right before the process ends."""
        self.console.close()
        if self._checkpoints is not None:
            self._checkpoints.join()
        self.heartbeat.tell(error=type(hang).__name__, message=str(hang))
        self.events.add("failed", str(hang), error=type(hang).__name__)
        newest = list_checkpoints(self.folder.checkpoints)[0][-1:]
        kept = f"The checkpoint of step {newest[0].step} is kept." if newest else "No checkpoint was saved yet."
        self.console.say(f"{kept} Continue with: {continue_command(self._command, self.folder.path)}")

    def _loggers(self, progress: Progress) -> Loggers:
        folder, console, logger, views = self.folder, self.console, self.run.config.logger, []
        if folder.leads:
            views = build.build_loggers(logger, folder.path, self.run.stored, progress.wandb_id, console.say)
        progress.wandb_id = next((view.run_id for view in views if view.run_id), progress.wandb_id)
        loggers = Loggers(MetricsFile(folder.metrics, folder.leads), console, views)
        self.events.on_event = loggers.tell
        return loggers

    def _evaluation(self, progress: Progress) -> Evaluation:
        """Return the evaluation on held-out data. It runs the newest built step."""
        dataset, world, train, steps = self.run.dataset, self.run.world, self.run.config.train, self.steps
        rows = train.batch_size // world.ranks.slices // train.gradient_accumulation
        end = dataset.description.get("end_token") or {}
        plain = dataset.tokenizer is not None and not isinstance(dataset, ExampleDataset)
        count = byte_counter(cast("Tokenizer", dataset.tokenizer), end.get("id")) if plain else None
        step, around = (lambda inputs: steps["evaluate"](inputs)), partial(averaged, steps)
        objective = self.run.objective
        each = 1 if objective.coupled is None else train.gradient_accumulation
        parts = step, dataset, rows * each, train.eval_sequences, objective.prepare(self.run.model)
        coupling = {"probe": lambda inputs: steps[PROBE](inputs), "coupled": objective.coupled, "each": rows}
        told: Any = {"say": self.console.say, "count_bytes": count, "world": world, **coupling}
        told["summary"] = objective.summary
        told["score"] = None if self._rollouts is None else partial(self._score, self._rollouts, progress)
        return Evaluation(*parts, around=around, measure=partial(self._measure, progress), **told)

    def _show(self, step: int, found: list[Completion]) -> None:
        """Append some completions of a step to samples.jsonl. A resumed run repeats those after its checkpoint."""
        rows = ({"step": step, "prompt": each.prompt, "completion": each.text, **each.numbers} for each in found)
        if self.folder.leads:
            with open(self.folder.path / "samples.jsonl", "a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def _score(self, rollouts: Rollouts, progress: Progress, batch: Batch) -> dict[str, float]:
        """Return the sums over held-out prompts of rewards, lengths, and the loss, which is minus the reward."""
        rows = batch[ROW].tolist()
        first, *_ = found = rollouts.write("val", rows, rows, greedy=True)
        if self.folder.leads:
            about = {"name": "held-out", "prompt": str(first.prompt), "text": first.text, **first.numbers}
            self.events.add("sample", f"After {first.prompt!r}: {first.text}", progress.step, **about)
        sums = {name: sum(each.numbers[name] for each in found) for name in first.numbers}
        return {"loss": -sums["reward"], **sums}

    def _measure(self, progress: Progress, due: str, stopped: Callable[[], bool]) -> dict[str, float]:
        """Measure the entries of train.evals that are due on the leading rank. Return the metrics on all ranks."""
        evals, tell = self.run.evals, partial(self.events.tell, step=progress.step)
        if not any(entry.every == due for entry in self.run.config.train.evals):
            return {}
        return dict(json.loads(self.run.world.once(lambda: json.dumps(evals.measure(due, stopped, tell)))))

    def _meter(self, session: Session, step: int) -> Meter:
        """Return the meter of the steps after step `step`, which also tells how long the run takes."""
        from ttrain.train.forecast.step_time import measured_rates

        run, config, device, say = self.run, self.run.config, self.device, self.console.say
        first = Waiting(FIRST, say)
        pace = pace_of(run, session, self.steps, step, say)
        pace.announce()
        if config.train.last > step:
            self._stack.enter_context(first)

        def timed(seconds: float) -> None:
            first.close()
            pace(seconds)

        given = config.train.peak_tflops
        rates = None if given else measured_rates(device.name, str(config.precision.compute), config.device.index)
        peak = 1e12 * given if given else None if rates is None else rates.flops
        return Meter(flops_per_step(session.graph), peak, lambda: device.memory().get("in_use", 0), timed=timed)

    def _summarize(self, progress: Progress, counters: Mapping[str, int]) -> dict[str, Any]:
        """Write summary and loss curve of a run that is done."""
        run, lines = self.run, list(read_metrics(self.folder.metrics))
        baseline = run.dataset.baseline(run.config.train.eval_sequences)  # of the very targets that evaluations count
        facts = {"model": run.model_name, "parameters": run.model.parameter_count, "steps": run.config.train.steps}
        facts |= {"unit": summaries.unit_of(run.dataset.description), "caution": self.device.caution}
        facts |= {"peak_memory_bytes": self.device.memory().get("peak", 0)}
        facts |= {"evals": [f"eval/{each.name}" for each in run.config.train.evals]}
        facts |= {"val_loss_of_average": True} if "swap" in self.steps else {}
        summary = summaries.summarize(progress, lines, run.world.ranks, (baseline.name, baseline.value), **facts)
        self.folder.write(self.folder.summary, {**summary, "engine": dict(counters)})
        summaries.draw_loss_curve(lines, self.folder.loss_curve, summary)
        return summary
