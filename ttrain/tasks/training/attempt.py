"""One attempt of a run: from its directory and its first values to its summary."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from ttrain.config import build
from ttrain.config.notices import notices
from ttrain.config.rates import rate_jump
from ttrain.config.schema import Config
from ttrain.core.errors import DeviceHang, Interrupted, OutOfMemory, TtrainError, UserError
from ttrain.core.units import format_count
from ttrain.core.waiting import Waiting
from ttrain.tasks.training.ending import summarize, tell
from ttrain.tasks.training.expected import pace_of
from ttrain.tasks.training.setup import Setup, tokenizer_json
from ttrain.train.checkpoint.progress import Progress, held_out_hash
from ttrain.train.checkpoint.retention import check_space, list_checkpoints
from ttrain.train.logging.events import Events
from ttrain.train.loop.interrupt import StopRequests
from ttrain.train.runs.run_directory import RunDirectory
from ttrain.train.settings import LoggerConfig, TrainConfig
from ttrain.train.steps.length_schedule import DataReader, Phases
from ttrain.train.supervise.heartbeat import Heartbeat

if TYPE_CHECKING:
    from ttrain.data.batches import Dataset
    from ttrain.device.base import Device
    from ttrain.engine.base import Step
    from ttrain.models.base import Model
    from ttrain.train.logging.loggers import Console, Loggers
    from ttrain.train.logging.meter import Meter
    from ttrain.train.loop.evaluate import Evaluation
    from ttrain.train.loop.loop import Loop
    from ttrain.train.loop.nonfinite import StepSearch
    from ttrain.train.loop.saver import Saver
    from ttrain.train.steps.driver import Driver
    from ttrain.train.steps.session import Session


FIRST = "The first step is under way"


Turns = Generator[None, None, float | None]  # what yields while its device computes, and ends in the best val/loss


def train(setup: Setup, device: Device, console: Console) -> float | None:
    """Trains to the end; see `turns`."""
    turn = turns(setup, device, console, StopRequests())
    while True:
        try:
            next(turn)
        except StopIteration as end:
            best: float | None = end.value
            return best


def turns(setup: Setup, device: Device, console: Console, stop: StopRequests) -> Turns:
    """Trains, and notes in the run's events how that began and ended; returns the best val/loss.

    Yields wherever the device was given work and the host is about to wait for it. Raises OutOfMemory where memory runs
    out.
    """
    config, heartbeat = setup.config, Heartbeat.of_process()
    steps: dict[str, Step] = {}
    savers: list[Saver] = []
    console.flag = None if device.caution is None else device.caution.partition(" ")[0]
    with ExitStack() as stack:
        run = setup.origin.held or stack.enter_context(closing(new_run(setup, device)))
        events = Events(run.path)
        heartbeat.tell(run=str(run.path.resolve()))
        if run.note is not None:
            console.say(run.note)
        events.add("started", " ".join(filter(None, [f"An attempt starts on {device.name}.", device.caution])))
        device.last_words.append(partial(_hung, config, run, events, console, heartbeat, savers))
        with _told(config, setup.model.config, device.name, steps, run, events):
            session, loop = _assembled(setup, device, console, run, steps, stop, heartbeat, stack)
            savers.append(loop.saver)
            with loop.running():
                while loop.advance():
                    yield
            console.close()
            progress = loop.progress
            summary = summarize(setup, device, run, progress, asdict(session.engine.counters))
        events.add("finished", "All steps are done.")
        tell(setup, summary, run, progress, steps.get("logits"))  # it is done, whatever becomes of the terminal
    return progress.best_val_loss


def _assembled(
    setup: Setup,
    device: Device,
    console: Console,
    run: RunDirectory,
    steps: dict[str, Step],
    stop: StopRequests,
    heartbeat: Heartbeat,
    stack: ExitStack,
) -> tuple[Session, Loop]:
    """The state with its values, the built steps in `steps`, the run's record, and the loop over all of it."""
    from ttrain.train.loop.loop import Loop
    from ttrain.train.runs.summary import start_command

    config, dataset, say = setup.config, setup.dataset, console.say
    with Waiting("Placing the model and building its steps", say):
        session = stack.enter_context(closing(build.build_session(config, setup.model, device)))
        check_space(run.path, session.state)
        progress, began, notes = setup.origin.begin(run, session, config.run.seed, setup.stored, dataset.description)
        for note in notes:
            say(note)
        heartbeat.beat()
        reader = DataReader.of(config.train, getattr(dataset, "context", 1), progress.step, progress.read)
        phases = _build(config.train, dataset, setup.shorter, session, reader, steps)
    heartbeat.beat()
    record(setup, run, device, session, steps, began)
    loggers = stack.enter_context(_loggers(config.logger, setup.stored, run, progress, console))
    for line in _announcement(setup, device, run, progress):
        say(line)
    run.keep()
    pace = pace_of(config, dataset, session, steps, progress.step, say, continues=setup.origin.point is not None)
    pace.announce()
    driver = _driver(setup, device, steps, reader, phases)
    evaluation = _evaluation(config.train, setup.model, dataset, steps, say)
    loop = Loop(
        config=config.train,
        driver=driver,
        evaluation=evaluation,
        reader=reader,
        state=session.state,
        run_directory=run,
        loggers=loggers,
        meter=_meter(config, device, session, _timed(pace, say, stack, config.train.steps - progress.step)),
        stored_config=setup.stored,
        tokenizer=tokenizer_json(dataset),
        tokenizer_config=None if dataset.tokenizer is None else dataset.tokenizer.config,
        held_out=held_out_hash(dataset, evaluation.samples),
        progress=progress,
        guard=config.guard,
        rounds_stochastically=config.optimizer.stochastic_rounding,
        search=_search(setup, session, driver, progress.step),
        stop=stop,
        heartbeat=heartbeat.beat,
        counters=lambda: asdict(session.engine.counters),
        command=start_command(config.plugins),
        phases=phases,
    )
    return session, loop


def new_run(setup: Setup, device: Device) -> RunDirectory:
    """A directory for a run that is new, or branches off from another."""
    label = f"{setup.model_name}_{device.name}_{setup.config.engine.name}"
    return setup.origin.claim(setup.config.run.dir, label, setup.stored, branches=device.computes)


@contextmanager
def _told(
    config: Config, model: Any, device: str, steps: Mapping[str, Step], run: RunDirectory, events: Events
) -> Iterator[None]:
    """Notes how an attempt that fails ends. Raises OutOfMemory for whatever tells that memory ran out."""
    from ttrain.train.forecast.out_of_memory import is_out_of_memory, memory_message, shrinking_keys

    try:
        yield
    except Interrupted as error:
        events.add("interrupted", str(error))
        raise
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, UserError) and run.discard():
            raise  # a mistake that only shows once all is built
        if not isinstance(error, TtrainError) and is_out_of_memory(error):
            names = (config.precision.name, config.engine.name)
            keys = shrinking_keys(config.train, model, *names, config.optimizer)
            failure = OutOfMemory(memory_message(error, device, steps, keys), config.train, run.path)
            events.add("failed", str(failure))
            raise failure from error
        step = getattr(error, "step", None)
        events.add("failed", str(error) or type(error).__name__, step, error=type(error).__name__)
        raise


def _hung(
    config: Config,
    run: RunDirectory,
    events: Events,
    console: Console,
    heartbeat: Heartbeat,
    savers: Sequence[Saver],
    hang: DeviceHang,
) -> None:
    """Told by a thread when the device never answers, right before the process ends: what can be kept is."""
    from ttrain.train.runs.summary import continue_command

    console.close()
    for saver in savers:
        saver.join()
    heartbeat.tell(error=type(hang).__name__, message=str(hang))
    events.add("failed", str(hang), error=type(hang).__name__)
    newest = list_checkpoints(run.checkpoints)[0][-1:]
    kept = f"The checkpoint of step {newest[0].step} is kept." if newest else "No checkpoint was saved yet."
    console.say(f"{kept} Continue with: {continue_command(config.plugins, run.path)}")


def _build(
    config: TrainConfig,
    dataset: Any,
    shorter: Mapping[int, Model | None],
    session: Session,
    reader: DataReader,
    steps: dict[str, Step],
) -> Phases | None:
    """Builds all steps; returns what changes the length of training sequences, None where they keep the context."""
    if not config.length_schedule:
        steps.update(session.build_training())
        return None
    for model in shorter.values():
        if model is not None and session.engine.device.uniform_compute:
            model.follow_compute()
    phases = Phases(reader, session, dataset, shorter, steps)  # build_dataset made sure that its length can change
    phases.turn(reader.step + 1)
    return phases


def record(
    setup: Setup,
    run: RunDirectory,
    device: Device,
    session: Session,
    steps: Mapping[str, Step],
    attempt: dict[str, Any],
) -> None:
    """Writes config, environment and plan of this attempt, and what `attempt` says of it."""
    from ttrain.train.forecast.plan_report import plan_report
    from ttrain.train.runs.record import environment_record

    dataset, arguments = setup.dataset, list(setup.config.source.overrides)
    tokenizer_hash = None if dataset.tokenizer is None else dataset.tokenizer.hash
    environment = environment_record(setup.stored, device.describe(), dataset.description, tokenizer_hash, arguments)
    run.record(setup.stored, {**environment, "model": setup.model_name, **attempt})
    run.write_plan(plan_report(session.graph, session.state, steps).text())


def _loggers(
    config: LoggerConfig, stored: dict[str, Any], run: RunDirectory, progress: Progress, console: Console
) -> Loggers:
    from ttrain.train.logging.loggers import Loggers
    from ttrain.train.logging.metrics import MetricsFile

    views = build.build_views(config, run.path, stored, progress.wandb_id, console.say)
    progress.wandb_id = next((view.run_id for view in views if view.run_id), progress.wandb_id)
    return Loggers(MetricsFile(run.metrics), console, views)


def _announcement(setup: Setup, device: Device, run: RunDirectory, progress: Progress) -> Iterator[str]:
    """What is trained, where and on what, and what has to be known of it."""
    from ttrain.optim.groups import frozen_count
    from ttrain.train.runs.summary import extent_line
    from ttrain.train.steps.length_schedule import LengthSchedule

    config, model, dataset, train = setup.config, setup.model, setup.dataset, setup.config.train
    parts = f"{setup.model_name} with {format_count(model.parameter_count)} parameters"
    if count := frozen_count(model.parameters(), config.optimizer):
        parts += f", {format_count(count)} of them frozen,"
    place = f"device {device.name}, engine {config.engine.name}, {config.precision.name}"
    yield f"Training {parts} on {place}. Run: {run.path}"
    if config.engine.name == "traced":
        yield "The first step is compiled or captured, which takes longer than the others."
    schedule = LengthSchedule.of(train)
    tokens = None if schedule is None else schedule.tokens(train.steps) * train.batch_size
    yield extent_line(dataset, train.steps, train.batch_size, tokens, config.data.limit)
    point = setup.origin.point
    jump = None if point is None else rate_jump(point.checkpoint.config, config, progress)
    cautions = filter(None, [device.caution])
    for notice in (*cautions, *notices(config), *filter(None, [jump]), *dataset.description.get("notices", ())):
        yield f"WARNING: {notice}"
    if progress.step >= train.steps:
        yield f"All {train.steps} steps are done; give train.steps=<more> to train on."


def _driver(
    setup: Setup, device: Device, steps: Mapping[str, Step], reader: DataReader, phases: Phases | None
) -> Driver:
    config, parts = setup.config, (setup.config, setup.model, device, steps)
    if phases is None:
        return build.build_driver(*parts, reader.batches(setup.dataset, config.run.seed), last=config.train.steps)
    return build.build_driver(*parts, phases.batches(config.run.seed), phases.prepare)


def _evaluation(
    config: TrainConfig, model: Model, dataset: Dataset, steps: Mapping[str, Step], say: Callable[[str], None]
) -> Evaluation:
    """Of the step that was built last."""
    from ttrain.data.text import byte_counter
    from ttrain.models.base import preparation
    from ttrain.train.loop.evaluate import Evaluation

    rows, prepare = config.batch_size // config.accumulation, preparation(model)
    end = dataset.description.get("end_token") or {}
    count = None if dataset.tokenizer is None else byte_counter(dataset.tokenizer, end.get("id"))
    samples = config.eval_sequences
    return Evaluation(lambda inputs: steps["evaluate"](inputs), dataset, rows, samples, prepare, say, count)


def _search(setup: Setup, session: Session, driver: Driver, step: int) -> StepSearch:
    from ttrain.train.loop.nonfinite import Start, StepSearch

    seed = setup.config.run.seed
    start = Start(step, lambda: setup.origin.set_values(session, seed))
    return StepSearch(
        session.state, driver.step, list(setup.model.parameters()), start, setup.config.guard.search_seconds
    )


def _timed(
    pace: Callable[[float], None], say: Callable[[str], None], stack: ExitStack, steps: int
) -> Callable[[float], None]:
    """Told how long every step took; the first one, where any of `steps` are left, is not waited for any more."""
    first = Waiting(FIRST, say)
    if steps > 0:
        stack.enter_context(first)

    def timed(seconds: float) -> None:
        first.close()
        pace(seconds)

    return timed


def _meter(config: Config, device: Device, session: Session, timed: Callable[[float], None]) -> Meter:
    from ttrain.train.forecast.peak import measured_rates
    from ttrain.train.logging.meter import Meter
    from ttrain.train.steps.session import flops_per_step

    given, dtype = config.train.peak_tflops, str(config.precision.compute)
    rates = None if given else measured_rates(device.name, dtype, config.device.index)
    peak = 1e12 * given if given else None if rates is None else rates.flops
    return Meter(flops_per_step(session.graph), peak, lambda: device.memory().get("in_use", 0), timed=timed)
