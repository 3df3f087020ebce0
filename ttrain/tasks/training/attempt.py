"""An attempt at a run, from its directory and initial values to its summary; replicas are several side by side.

They share a chip: each has a sub-device, steps take turns, and the device computes all. A replica has a run directory
of its own, which is that of a plain run: it resumes, samples and reports like one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ttrain.config import build
from ttrain.config.schema import Config
from ttrain.config.validate import rule_problems
from ttrain.core.errors import ConfigError, DeviceHang, Interrupted, OutOfMemory, TtrainError, UserError
from ttrain.core.units import counted, format_duration
from ttrain.core.waiting import Waiting
from ttrain.data.text import byte_counter
from ttrain.device.base import Device
from ttrain.device.info import info_of
from ttrain.engine.base import Step
from ttrain.models.base import preparation
from ttrain.tasks.training.dry_run import dry_run
from ttrain.tasks.training.expected import changed, pace_of, steps_within
from ttrain.tasks.training.run import Run, train_on
from ttrain.tasks.training.start import start_run
from ttrain.train.checkpoint.checkpoint import UNFINISHED, Progress, held_out_hash, read_manifest, step_name
from ttrain.train.checkpoint.retention import check_space, checkpoint_bytes, list_checkpoints
from ttrain.train.checkpoint.save import host_copy, save_checkpoint
from ttrain.train.forecast.limits import is_out_of_memory, memory_message
from ttrain.train.logging.loggers import Console, Loggers
from ttrain.train.logging.metrics import Events, Meter, MetricsFile, read_metrics
from ttrain.train.loop.checkpoints import Checkpoints, RunContext
from ttrain.train.loop.guards import LearningGuard, NonFiniteGuard, SpikeGuard
from ttrain.train.loop.interrupt import StopRequests
from ttrain.train.loop.loop import Evaluation, Loop
from ttrain.train.runs import summary as summaries
from ttrain.train.runs.record import continue_command
from ttrain.train.runs.run_directory import RunDirectory
from ttrain.train.settings import END, ReplicasConfig
from ttrain.train.steps.phases import Phases, Position
from ttrain.train.steps.session import Session, averaged, flops_per_step
from ttrain.train.steps.step import Rates, reads_ahead
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
    """The parts of an attempt, as one after the other is made. The stack closes them."""

    def __init__(self, run: Run, device: Device, folder: RunDirectory, console: Console, stack: ExitStack) -> None:
        self.run, self.device, self.folder, self.console, self._stack = run, device, folder, console, stack
        self.events, self.heartbeat = Events(folder.events, console.say), Heartbeat.of_process()
        self.steps: dict[str, Step] = {}
        self._checkpoints: Checkpoints | None = None
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
                run.evals.prepare(session, self.steps)
                progress, began, phases = self._begin(session)
                self.heartbeat.beat()
                if run.config.train.steps is None:
                    run = self.run = self._with_steps(session, phases, progress)
                run.record(folder, session, self.steps, began)
                loop = self._loop(session, phases, self._stack.enter_context(self._loggers(progress)), progress, stop)
            self._checkpoints = loop.checkpoints
            loop.run()
            console.close()
            if "swap" in self.steps:
                self.steps["swap"]({})  # all is saved, and a sample is to show the averages
            world.barrier()
            if not world.leads:
                return progress.best_val_loss
            summary = self._summarize(progress, loop.counters())
        self.events.add("finished", loop.ending)
        writes_text = run.print_sample(self.steps.get("logits"))  # the run is done, whatever becomes of the terminal
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
        if len(run.phases.phases) == 1:
            self.steps.update(session.build_training())
            return progress, began, None
        phases = Phases(run.phases, session, run.shorter, self.steps)  # build_dataset made sure that lengths can change
        phases.turn(progress.step + 1)
        return progress, began, phases

    def _with_steps(self, session: Session, phases: Phases | None, progress: Progress) -> Run:
        """Return the run with as many steps as the rest of train.minutes allows. They are timed; the state stays as is.

        The leading rank's times count for all. Raises ConfigError where other keys ask for more steps.
        """
        run, start, minutes = self.run, time.perf_counter(), self.run.config.train.minutes or 0

        def seconds(work: Callable[[], object]) -> float:
            began = time.perf_counter()
            work()
            return run.world.broadcast(max(time.perf_counter() - began, 1e-9))

        def measure_files(due: str, stopped: Callable[[], bool]) -> dict[str, float]:
            run.world.once(lambda: str(run.evals.measure(due, stopped, lambda *told, **facts: None)))
            return {}

        with TemporaryDirectory(prefix=UNFINISHED, dir=self.folder.checkpoints) as scratch:
            copying = seconds(lambda: host_copy(session.state))
            save = seconds(lambda: save_checkpoint(Path(scratch), session.state, run.content(progress, None)))
            evaluation = replace(self._evaluation(progress), measure=measure_files)
            replace(evaluation, limit=evaluation.rows)()  # what compiles is not timed
            evaluated, ended = seconds(evaluation), seconds(partial(measure_files, END, bool))
            timed = replace(run, config=changed(run.config, {"train.steps": 1}))
            # Where there are phases, one batch is read, as the next phase takes other steps.
            step, first, by = timed.stepper(session, self.steps, 0 if phases else 2**62), progress.step + 1, not phases
            seconds(partial(step, first))
            one = seconds(partial(step, first + by))
            times = 1 + int(min(3 * minutes, 10) / one)  # last a twentieth of the minutes, at most 10 s
            one = seconds(lambda: [step(first + by * number) for number in range(times)]) / times
            read_manifest(Path(scratch, step_name(progress.step))).load(session.state)
        beside = run.config.train.async_save and self.device.name != "cpu"  # whose cores a save takes from steps
        parts = one, evaluated, copying if beside else save, save + ended
        steps = steps_within(run.config, progress.spent, progress.step, parts)
        config = changed(run.config, {"train.steps": steps})
        told = f"train.minutes={minutes:g} allows {counted(steps, 'step')}"
        if problems := rule_problems(config):
            raise ConfigError(f"{told}. {' '.join(problems)}")
        shown = map(format_duration, (one, evaluated, save, time.perf_counter() - start))
        told += " of {}, with evaluations of {} and saves of {}. Not counted: {} of measuring.".format(*shown)
        self.events.tell("budget", told, progress.step, last=steps, seconds=parts)
        return replace(run, config=config, stored={**run.stored, "train": {**run.stored["train"], "steps": steps}})

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
            config.train, session.state, self.folder, loggers, progress, run.world, held_out, self._command
        )
        context.check_held_out()
        checkpoints = Checkpoints(context, run.content)
        start = Position(progress.read_samples, progress.read_tokens, progress.read_sources)
        for name in {*getattr(run.dataset, "parts", ())} - {*progress.read_sources} if progress.read_samples else ():
            self.console.say(f"{name} is read from its start: the checkpoint does not tell how far it was read.")
        reader, peak_rates = run.reader(session, progress.step, start), run.rates

        def rates(step: int) -> Rates:
            """Return the learning rates of a step by their inputs. Rollbacks have lowered them."""
            return {name: rate * progress.lr_factor for name, rate in peak_rates(step).items()}

        ahead = reads_ahead(reader, rates, config.train.last if phases is None else 0)  # a phase is built as it begins
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
        """Return the evaluation on held-out data, by the step that was built last."""
        dataset, world, train, steps = self.run.dataset, self.run.world, self.run.config.train, self.steps
        rows = train.batch_size // world.ranks.slices // train.gradient_accumulation
        end = dataset.description.get("end_token") or {}
        count = None if dataset.tokenizer is None else byte_counter(dataset.tokenizer, end.get("id"))
        step, around = (lambda inputs: steps["evaluate"](inputs)), partial(averaged, steps)
        prepare = preparation(self.run.model)
        parts = step, dataset, rows, train.eval_sequences, prepare, self.console.say, count, world
        return Evaluation(*parts, around=around, measure=partial(self._measure, progress))

    def _measure(self, progress: Progress, due: str, stopped: Callable[[], bool]) -> dict[str, float]:
        """Measure what is due of train.evals on the leading rank, and return the metrics on all."""
        evals, tell = self.run.evals, partial(self.events.tell, step=progress.step)
        if not any(entry.every == due for entry in self.run.config.train.evals):
            return {}
        return dict(json.loads(self.run.world.once(lambda: json.dumps(evals.measure(due, stopped, tell)))))

    def _meter(self, session: Session, step: int) -> Meter:
        """Return what times the steps after step `step`, and says how long the run takes."""
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


def run(config: Config) -> float | None:
    """Trains all replicas; the best val/loss of any. Raises a failure once the others have ended too."""
    with ExitStack() as stack:
        runs = [start_run(each, stack) for each in replica_configs(config)]
        device = stack.enter_context(closing(build.build_device(config.device, config.precision)))
        parts = device.replicas()
        # All are at the same step, so one bar is enough.
        consoles = [build.build_console(config.logger, name_of(number), number == 0) for number in range(len(runs))]
        if not device.computes:
            for run, part, console in zip(runs, parts, consoles, strict=True):
                dry_run(run, part, console.say)
                console.say(f"Note: {part.describe()['note']}.")
            return None

        def failed(number: int, error: Exception) -> None:
            consoles[number].say(f"ended by {type(error).__name__}; the other replicas go on.")

        stop = stack.enter_context(StopRequests())  # handlers are set by the main thread alone
        baton = Baton(len(parts))
        for number, part in enumerate(parts):
            part.turn = partial(baton.pass_on, number)
        trained = [partial(train, *each, stop) for each in zip(runs, parts, consoles, strict=True)]
        results = side_by_side(trained, baton, failed)
    losses = [loss for loss in results if loss is not None]
    return min(losses, default=None)


def replica_configs(config: Config) -> list[Config]:
    """Return the config that each replica would be given as a plain run."""
    info, given, configs = info_of(config.device), config.replicas, []
    count = info.replicas(config.device)
    seeds = given.seed or [config.run.seed + number for number in range(count)]
    rates = given.lr or [config.optimizer.lr] * count
    explicit = {key for key, values in (("run.seed", given.seed), ("optimizer.lr", given.lr)) if values}
    source = replace(config.source, explicit=config.source.explicit | explicit)
    shared: dict[str, Any] = {"device": info.replica(config.device), "replicas": ReplicasConfig(), "source": source}
    for number, name in enumerate(map(name_of, range(count))):
        folder = None if config.run.dir is None else str(Path(config.run.dir) / name)
        own = Path(config.resume) / name  # where resume= names a folder of several; else all start from one checkpoint
        changes = {"run.seed": seeds[number], "run.dir": folder, "optimizer.lr": rates[number]}
        resume = str(own) if own.is_dir() else config.resume
        configs.append(replace(changed(config, changes), resume=resume, **shared))
    return configs


def name_of(number: int) -> str:
    """Return the name of a replica, also that of its folder below run.dir."""
    return f"replica-{number}"


class Baton:
    """Lets one of several threads run at a time. The one that has the baton hands it to the next one that is left."""

    def __init__(self, count: int) -> None:
        self._turns = {number: threading.Semaphore(int(number == 0)) for number in range(count)}

    def take(self, number: int) -> None:
        """Wait until this thread has the baton."""
        self._turns[number].acquire()

    def pass_on(self, number: int) -> None:
        """Give the others a turn each, and take the baton back."""
        self._next(number).release()
        self.take(number)

    def leave(self, number: int) -> None:
        """Hand the baton on for good."""
        following = self._next(number)
        del self._turns[number]
        following.release()

    def _next(self, number: int) -> threading.Semaphore:
        left = list(self._turns)
        return self._turns[left[(left.index(number) + 1) % len(left)]]


def side_by_side(
    runs: Sequence[Callable[[], float | None]],
    baton: Baton,
    failed: Callable[[int, Exception], None] = lambda number, error: None,
) -> list[float | None]:
    """Run each in a thread, one at a time, as the baton goes. Return what they return, in their order.

    `failed` is told of every failure; one is raised once the others have ended too.
    """

    def body(number: int) -> float | None:
        baton.take(number)
        try:
            return runs[number]()
        except Exception as error:
            failed(number, error)
            raise
        finally:
            baton.leave(number)

    with ThreadPoolExecutor(len(runs), "replica") as threads:
        ends = [threads.submit(body, number) for number in range(len(runs))]
    failures = [error for end in ends if (error := end.exception()) is not None]
    if failures and all(isinstance(error, Interrupted) for error in failures):
        raise Interrupted("\n".join(map(str, failures)))
    if failures:
        raise next(error for error in failures if not isinstance(error, Interrupted))
    return [end.result() for end in ends]
