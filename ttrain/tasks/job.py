"""One training run with its parts built: what task=train trains, rehearses or dry-runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ttrain.config import build
from ttrain.config.notices import notices
from ttrain.config.rates import rate_jump
from ttrain.config.schema import Config
from ttrain.core.errors import DeviceHang, Interrupted, OutOfMemory, TtrainError, UserError
from ttrain.core.units import format_count
from ttrain.core.waiting import Waiting
from ttrain.tasks.ending import sum_up, tell
from ttrain.tasks.expected import pace_of
from ttrain.train.checkpoint.retention import is_rehearsal, list_checkpoints
from ttrain.train.logging.events import Events
from ttrain.train.loop.interrupt import StopRequests
from ttrain.train.runs import resume as resuming
from ttrain.train.runs.run_directory import RunDirectory, chosen_model
from ttrain.train.runs.warm_start import WarmStart
from ttrain.train.supervise.heartbeat import Heartbeat

if TYPE_CHECKING:
    from ttrain.data.batches import Baseline, Dataset
    from ttrain.device.base import Device
    from ttrain.engine.base import Step
    from ttrain.engine.state import StateTensor
    from ttrain.models.base import Model
    from ttrain.train.checkpoint.progress import Progress
    from ttrain.train.logging.loggers import Console, Loggers
    from ttrain.train.loop.loop import Loop
    from ttrain.train.loop.saver import Saver
    from ttrain.train.runs.resume import ResumePoint
    from ttrain.train.steps.blocks import Blocks, Reading
    from ttrain.train.steps.session import Session
    from ttrain.train.steps.step import TrainStep, Turns


def tokenizer_json(dataset: Dataset) -> str | None:
    """The JSON of the data's tokenizer, where it has one."""
    return None if dataset.tokenizer is None else dataset.tokenizer.to_json()


def open_session(
    config: Config, model: Model, device: Device, training: bool, further: Sequence[StateTensor] = ()
) -> Session:
    """The model on the device, its values still unset, and `further` tensors beside it."""
    from ttrain.train.steps.session import Session
    from ttrain.train.steps.step_graph import StepGraph

    rows = config.train.batch_size // config.train.accumulation // device.chips
    if device.uniform_compute:
        model.follow_compute()
    graph = StepGraph(
        model,
        build.build_optimizer(config.optimizer),
        rows,
        config.train.accumulation,
        guarded=config.guard.nonfinite == "skip",
        watched=config.guard.activations,
        chips=device.chips,
    )
    return Session.open(
        graph, device, lambda on, state: build.build_engine(config.engine, on, state), training, further
    )


@dataclasses.dataclass
class Job:
    """One training run with its parts built. What its methods open, the exit stack closes."""

    config: Config
    stored: dict[str, Any]  # the config as checkpoints keep it: sizes of the model filled in
    dataset: Dataset
    model: Model
    prompt: list[int] | None
    point: ResumePoint | None
    heartbeat: Heartbeat
    shorter: dict[int, Model | None]  # by length: what records training on shorter sequences
    warm: WarmStart | None  # where a new run takes its first values from
    held: RunDirectory | None  # the run that this one continues
    notes: list[str]  # of its config, to tell when it starts
    steps: dict[str, Step] = dataclasses.field(default_factory=dict)
    saver: Saver | None = None  # of the loop, once it runs
    stop: StopRequests = dataclasses.field(default_factory=StopRequests)
    device: Device = dataclasses.field(init=False)
    console: Console = dataclasses.field(init=False)

    def place(self, device: Device, console: Console) -> None:
        """Where it runs, and what the user sees; before anything else is called."""
        self.device, self.console = device, console
        console.flag = None if device.caution is None else device.caution.partition(" ")[0]

    def turns(self, stack: ExitStack) -> Turns[float | None]:
        """Trains, and notes in the run's events how that began and ended; returns the best val/loss.

        Yields where the device computes. Raises OutOfMemory where memory runs out.
        """
        from ttrain.train.forecast.out_of_memory import is_out_of_memory

        run = self.held or stack.enter_context(closing(self._new_run()))
        events = Events(run.path)
        self.heartbeat.tell(run=str(run.path.resolve()))
        if run.note is not None:
            self.console.say(run.note)
        events.add("started", " ".join(filter(None, [f"A leg starts on {self.device.name}.", self.device.caution])))
        self.device.last_words.append(lambda hang: self._hung(hang, run, events))
        try:
            progress = yield from self.train(stack, run, events)
        except Interrupted as error:
            events.add("interrupted", str(error))
            raise
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, UserError) and run.discard():
                raise  # a mistake that only shows once all is built
            if not isinstance(error, TtrainError) and is_out_of_memory(error):
                failure = self._out_of_memory(error, run)
                events.add("failed", str(failure))
                raise failure from error
            step = getattr(error, "step", None)
            events.add("failed", str(error) or type(error).__name__, step, error=type(error).__name__)
            raise
        events.add("finished", "All steps are done.")
        tell(self, run, progress)  # the run is done, whatever becomes of the terminal
        return progress.best_val_loss

    def _hung(self, hang: DeviceHang, run: RunDirectory, events: Events) -> None:
        """Told by a thread when the device never answers, right before the process ends: what can be kept is."""
        from ttrain.train.runs.summary import continue_command

        self.console.close()
        if self.saver is not None:
            self.saver.join()
        self.heartbeat.tell(error=type(hang).__name__, message=str(hang))
        events.add("failed", str(hang), error=type(hang).__name__)
        newest = list_checkpoints(run.checkpoints)[0][-1:]
        kept = f"The checkpoint of step {newest[0].step} is kept." if newest else "No checkpoint was saved yet."
        self.console.say(f"{kept} Continue with: {continue_command(self.config.plugins, run.path)}")

    def _out_of_memory(self, error: BaseException, run: RunDirectory) -> OutOfMemory:
        from ttrain.train.forecast.out_of_memory import memory_message, shrinking_keys

        config = self.config
        names = (config.precision.name, config.engine.name)
        keys = shrinking_keys(config.train, self.model.config, *names, config.optimizer)
        message = memory_message(error, self.device.name, self.steps, keys)
        return OutOfMemory(message, config.train, run.path)

    def train(self, stack: ExitStack, run: RunDirectory, events: Events) -> Turns[Progress]:
        from ttrain.train.checkpoint.retention import check_space
        from ttrain.train.steps.blocks import Reading

        with Waiting("Placing the model and building its steps", self.console.say):
            session = stack.enter_context(closing(open_session(self.config, self.model, self.device, training=True)))
            check_space(run.path, session.state)
            progress, leg = self._start(session, run)
            self.heartbeat.beat()
            reading = Reading.of(self.config.train, getattr(self.dataset, "context", 1), progress.step, progress.read)
            blocks = self._blocks(session, reading)
            if blocks is None:
                self.steps = session.build_training()
            else:
                self.steps = blocks.steps
                blocks.turn(progress.step + 1)
        steps = self.steps
        self.heartbeat.beat()
        self.record(session, run, leg, steps)
        loggers = stack.enter_context(self._loggers(run, progress))
        self._announce(run, progress)
        run.keep()
        pace = pace_of(self, session, progress.step)
        pace.announce()
        first = stack.enter_context(Waiting("The first step is under way", self.console.say))

        def timed(seconds: float) -> None:
            first.close()
            pace(seconds)

        loop = self._loop(session, reading, blocks, run, loggers, progress, timed)
        self.saver = loop.saver
        yield from loop.turns()
        self.console.close()
        sum_up(self, session, run, progress)
        return progress

    def rehearse(self, stack: ExitStack) -> None:
        """Some steps on a device that only tells what steps cost."""
        from ttrain.tasks.rehearse import rehearse

        run = self.held if self.held is not None and is_rehearsal(self.held.path) else None
        rehearse(self, run or stack.enter_context(closing(self._new_run())))

    def dry_run(self, stack: ExitStack) -> None:
        """Builds all steps and launches one on a device that computes nothing; leaves nothing behind."""
        session = stack.enter_context(closing(open_session(self.config, self.model, self.device, training=True)))
        steps = session.build_training()
        batch = self.dataset.batch("train", self.config.run.seed, 0, self.config.train.batch_size)
        self.train_step(steps)(batch, self.rates()(1), 1)
        self.console.say(
            f"Dry run: device {self.device.name} computes no values. Every step was built and one was launched; "
            f"nothing was trained or saved."
        )

    @cached_property
    def baseline(self) -> Baseline:
        """Of the very targets that evaluations count."""
        return self.dataset.baseline(self.config.train.eval_sequences)

    @property
    def model_name(self) -> str:
        """As the user chose it: nano-gpt rather than gpt. A resumed run was chosen by an earlier command."""
        if self.config.source.merged:
            held = None if self.held is None else self.held.path
            earlier = held if self.point is None else self.point.run
            return chosen_model(earlier) or str(self.config.model.name)
        return str(self.config.source.choices.get("model", self.config.model.name))

    def _new_run(self) -> RunDirectory:
        """A directory for a run that is new, or branches off from another."""
        wanted = None if self.held is not None else self.config.run.dir  # a rehearsal writes into no run that trains
        label = f"{self.model_name}_{self.device.name}_{self.config.engine.name}"
        return RunDirectory.claim(wanted, label, fill=self._fill)

    def _fill(self, run: RunDirectory) -> None:
        run.write_config(self.stored)
        if self.point is not None and self.device.computes:
            self.point = resuming.branch_off(self.point, run)

    def _start(self, session: Session, run: RunDirectory) -> tuple[Progress, dict[str, Any]]:
        """Sets the state, and returns how far the run is and what to record of the resume."""
        from ttrain.train.checkpoint.progress import Progress
        from ttrain.train.checkpoint.retention import remove_unfinished
        from ttrain.train.logging.metrics import cut_metrics
        from ttrain.train.logging.wandb_history import note_earlier_legs

        remove_unfinished(run.checkpoints)
        note_earlier_legs(run.path)
        fitted = self._first_values(session)
        if self.point is None:
            cut_metrics(run.metrics, 0)
            for note in self.notes:
                self.console.say(note)
            return Progress(), self._tell_warm_start()
        progress, leg, notes = resuming.take_up(self.point, run, self.stored, self.dataset.description)
        for note in (*notes, *self.notes, *fitted):
            self.console.say(note)
        return progress, leg

    def _tell_warm_start(self) -> dict[str, Any]:
        """Says what was taken from elsewhere; what to record of it."""
        if self.warm is None:
            return {}
        for line in self.warm.lines():
            self.console.say(line)
        return self.warm.record()

    def _first_values(self, session: Session) -> tuple[str, ...]:
        """The state as this leg begins with it; the optimizer's tensors of a new run are zero. What to tell of it."""
        if self.point is not None:
            return self.point.checkpoint.load(session.state)
        session.initialize(self.config.run.seed)
        if self.warm is not None:
            self.warm.apply(session.state)
        return ()

    def record(self, session: Session, run: RunDirectory, leg: dict[str, Any], steps: dict[str, Step]) -> None:
        """Writes config, environment and plan of this leg, and what `leg` says of it."""
        from ttrain.train.forecast.plan_report import plan_report
        from ttrain.train.runs.record import environment_record

        tokenizer_hash = None if self.dataset.tokenizer is None else self.dataset.tokenizer.hash
        arguments = list(self.config.source.overrides)
        description = self.dataset.description
        record = environment_record(self.stored, self.device.describe(), description, tokenizer_hash, arguments)
        run.record(self.stored, {**record, "model": self.model_name, **leg})
        run.write_plan(plan_report(session.graph, session.state, steps).text())

    def _loggers(self, run: RunDirectory, progress: Progress) -> Loggers:
        from ttrain.train.logging.loggers import Loggers
        from ttrain.train.logging.metrics import MetricsFile

        views = build.build_views(self.config.logger, run.path, self.stored, progress.wandb_id, self.console.say)
        progress.wandb_id = next((view.run_id for view in views if view.run_id), progress.wandb_id)
        return Loggers(MetricsFile(run.metrics), self.console, views)

    def _announce(self, run: RunDirectory, progress: Progress) -> None:
        from ttrain.optim.groups import frozen_count

        parts = f"{self.model_name} with {format_count(self.model.parameter_count)} parameters"
        if count := frozen_count(self.model.parameters(), self.config.optimizer):
            parts += f", {format_count(count)} of them frozen,"
        place = f"device {self.device.name}, engine {self.config.engine.name}, {self.config.precision.name}"
        self.console.say(f"Training {parts} on {place}. Run: {run.path}")
        if self.config.engine.name == "traced":
            self.console.say("The first step is compiled or captured, which takes longer than the others.")
        self.console.say(self._data_line())
        jump = None if self.point is None else rate_jump(self.point.checkpoint.config, self.config, progress)
        cautions = filter(None, [self.device.caution])
        told = (*cautions, *notices(self.config), *filter(None, [jump]), *self.dataset.description.get("notices", ()))
        for notice in told:
            self.console.say(f"WARNING: {notice}")
        if progress.step >= self.config.train.steps:
            self.console.say(f"All {self.config.train.steps} steps are done; give train.steps=<more> to train on.")

    def _data_line(self) -> str:
        from ttrain.train.runs.summary import extent_line
        from ttrain.train.steps.blocks import BlockSchedule

        train = self.config.train
        schedule = BlockSchedule.of(train)
        tokens = None if schedule is None else schedule.tokens(train.steps) * train.batch_size
        return extent_line(self.dataset, train.steps, train.batch_size, tokens, self.config.data.limit)

    def _loop(
        self,
        session: Session,
        reading: Reading,
        blocks: Blocks | None,
        run: RunDirectory,
        loggers: Loggers,
        progress: Progress,
        timed: Callable[[float], None],
    ) -> Loop:
        from ttrain.models.base import preparation
        from ttrain.train.checkpoint.progress import held_out_hash
        from ttrain.train.loop.evaluate import Evaluation
        from ttrain.train.loop.loop import Loop
        from ttrain.train.loop.nonfinite import Start, StepSearch
        from ttrain.train.runs.summary import start_command
        from ttrain.train.steps.blocks import Newest

        config = self.config.train
        rows = config.batch_size // config.accumulation
        evaluation = Evaluation(
            Newest(self.steps, "evaluate"),
            self.dataset,
            rows,
            config.eval_sequences,
            preparation(self.model),
            self.console.say,
        )
        step = self.train_step(self.steps, blocks)
        return Loop(
            config=config,
            seed=self.config.run.seed,
            step=step,
            evaluation=evaluation,
            dataset=reading.opened(self.dataset, progress.step + 1),
            reading=reading,
            state=session.state,
            rates=self.rates(),
            run_directory=run,
            loggers=loggers,
            meter=self._meter(session, timed),
            stored_config=self.stored,
            tokenizer=tokenizer_json(self.dataset),
            held_out=held_out_hash(self.dataset, evaluation.samples),
            progress=progress,
            guard=self.config.guard,
            search=StepSearch(
                session.state,
                step,
                list(self.model.parameters()),
                Start(progress.step, lambda: self._first_values(session)),
                self.config.guard.search_seconds,
            ),
            stop=self.stop,
            heartbeat=self.heartbeat.beat,
            counters=lambda: session.engine.counters.as_dict(),
            command=start_command(self.config.plugins),
            blocks=blocks,
        )

    def _blocks(self, session: Session, reading: Reading) -> Blocks | None:
        """What changes the length of training sequences on the way; None where they keep the model's context."""
        from ttrain.train.steps.blocks import Blocks

        if not self.config.train.block_schedule:
            return None
        for model in self.shorter.values():
            if model is not None and self.device.uniform_compute:
                model.follow_compute()
        dataset: Any = self.dataset  # build_dataset has made sure that its length can change
        return Blocks(reading, session, dataset, self.shorter)

    def train_step(self, steps: dict[str, Step], blocks: Blocks | None = None) -> TrainStep:
        """What runs one optimizer step with the built steps."""
        from ttrain.models.base import preparation
        from ttrain.train.steps.step import TrainStep

        prepare = preparation(self.model) if blocks is None else blocks.prepare
        accumulation, overlaps = self.config.train.accumulation, self.device.overlaps
        return TrainStep(steps, accumulation, self.config.run.seed, prepare=prepare, overlaps=overlaps)

    def rates(self) -> Callable[[int], dict[str, float]]:
        """Step, counted from 1 -> every learning-rate input."""
        from ttrain.optim.groups import learning_rates

        schedule = build.build_schedule(self.config.schedule, self.config.train.steps)
        return learning_rates(self.model.parameters(), self.config.optimizer, schedule)

    def _meter(self, session: Session, timed: Callable[[float], None]) -> Any:
        from ttrain.train.forecast.peak import measured_rates
        from ttrain.train.logging.meter import Meter
        from ttrain.train.steps.session import flops_per_step

        given, dtype = self.config.train.peak_tflops, str(self.config.precision.compute)
        rates = None if given else measured_rates(self.device.name, dtype, self.config.device.index)
        peak = 1e12 * given if given else None if rates is None else rates.flops
        return Meter(flops_per_step(session.graph), peak, lambda: self.device.memory().get("in_use", 0), timed=timed)
