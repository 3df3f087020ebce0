"""One attempt of a run: from its directory and its first values to its summary."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ttrain.config import build
from ttrain.config.rates import train_on
from ttrain.core.errors import DeviceHang, Interrupted, OutOfMemory, TtrainError, UserError
from ttrain.core.spec import DType
from ttrain.core.waiting import Waiting
from ttrain.tasks.training.ending import summarize
from ttrain.tasks.training.expected import pace_of
from ttrain.tasks.training.setup import Setup
from ttrain.train.checkpoint.progress import Progress, held_out_hash
from ttrain.train.checkpoint.retention import check_space, list_checkpoints
from ttrain.train.logging.events import Events
from ttrain.train.loop.interrupt import StopRequests
from ttrain.train.runs.record import continue_command
from ttrain.train.runs.run_directory import RunDirectory
from ttrain.train.runs.summary import print_summary, unit_of
from ttrain.train.settings import LoggerConfig, TrainConfig
from ttrain.train.steps.phases import DataReader, Phases
from ttrain.train.supervise.heartbeat import Heartbeat

if TYPE_CHECKING:
    from ttrain.data.batches import Dataset
    from ttrain.device.base import Device
    from ttrain.engine.base import Step
    from ttrain.models.base import Model
    from ttrain.parallel.world import World
    from ttrain.train.logging.loggers import Console, Loggers
    from ttrain.train.logging.meter import Meter
    from ttrain.train.loop.evaluate import Evaluation
    from ttrain.train.loop.loop import Loop
    from ttrain.train.loop.saver import Saver
    from ttrain.train.steps.session import Session


FIRST = "The first step is under way"


Turns = Generator[None, None, float | None]  # what yields while its device computes, and ends in the best val/loss


def turns(setup: Setup, device: Device, console: Console, stop: StopRequests) -> Turns:
    """Trains, and notes in the run's events how that began and ended; returns the best val/loss.

    Yields wherever the device was given work and the host is about to wait for it. Raises OutOfMemory where memory runs
    out.
    """
    train, start, heartbeat = setup.config.train, setup.config.source.going_on(), Heartbeat.of_process()
    steps: dict[str, Step] = {}
    savers: list[Saver] = []
    console.flag = None if device.caution is None else device.caution.partition(" ")[0]
    with ExitStack() as stack:
        run = setup.origin.held or stack.enter_context(closing(setup.claim(device)))
        events = Events(run.events)
        setup.world.remember("run", str(run.path.resolve()))
        heartbeat.tell(run=str(run.path.resolve()))
        if run.note is not None:
            console.say(run.note)
        events.add("started", " ".join(filter(None, [f"An attempt starts on {device.name}.", device.caution])))
        device.last_words.append(partial(_hung, start, run, events, console, heartbeat, savers))
        with _told(train, setup.shrinking_keys, device.name, steps, run, events):
            with Waiting("Placing the model and building its steps", console.say):
                session = stack.enter_context(closing(setup.open(device)))
                beginning = _begin(setup, session, run, steps, console.say, heartbeat.beat)
            heartbeat.beat()
            loop = _assembled(setup, session, beginning, console, run, steps, stop, heartbeat.beat, stack)
            savers.append(loop.saver)
            with loop.running():
                while loop.advance():
                    yield
            console.close()
            progress = loop.progress
            if "swap" in steps:
                steps["swap"]({})  # all is saved, and a sample is to show the averages
            setup.world.barrier()
            if not setup.world.leads:
                return progress.best_val_loss
            baseline = setup.dataset.baseline(train.eval_sequences)  # of the very targets that evaluations count
            model = (setup.model_name, setup.model.parameter_count)
            ranks = setup.world.ranks
            counts, unit, averaged = loop.counters(), unit_of(setup.dataset.description), "swap" in steps
            summary = summarize(*model, train.steps, baseline, run, device, progress, counts, unit, ranks, averaged)
        events.add("finished", "All steps are done.")
        writes_text = setup.print_sample(steps.get("logits"))  # the run is done, whatever becomes of the terminal
        overrides, rate = train_on(setup.rate, progress)
        print_summary(summary, run.path, (overrides + setup.ranks, rate), writes_text=writes_text, start=start)
    return progress.best_val_loss


class Beginning(NamedTuple):
    """Where an attempt goes on from, once the state has its values and the steps are built."""

    progress: Progress
    began: dict[str, Any]  # what the run's record tells of it
    reader: DataReader
    phases: Phases | None


def _assembled(
    setup: Setup,
    session: Session,
    beginning: Beginning,
    console: Console,
    run: RunDirectory,
    steps: dict[str, Step],
    stop: StopRequests,
    beat: Callable[[], None],
    stack: ExitStack,
) -> Loop:
    """The loop over all parts of the attempt; writes the run's record."""
    from ttrain.train.loop.loop import Loop
    from ttrain.train.loop.nonfinite import Start, StepSearch

    config, dataset, say = setup.config, setup.dataset, console.say
    (progress, began, reader, phases), device = beginning, session.engine.device
    setup.record(run, session, steps, began)
    loggers = stack.enter_context(_loggers(config.logger, setup.stored, run, progress, console))
    for line in setup.announcement(session.engine, run.path, progress.step):
        say(line)
    run.keep()
    pace = pace_of(config, dataset, session, steps, progress.step, say, continues=setup.origin.point is not None)
    pace.announce()
    timed = _timed(pace, say, stack, config.train.steps - progress.step)
    driver = setup.driver(session, steps, reader, phases if setup.shorter else None, last=config.train.steps)
    evaluation = _evaluation(config.train, setup.model, dataset, steps, say, setup.world)
    start = Start(progress.step, partial(setup.origin.set_values, session, config.run.seed))
    parameters = list(setup.model.parameters())
    return Loop(
        config=config.train,
        driver=driver,
        evaluation=evaluation,
        reader=reader,
        state=session.state,
        run_directory=run,
        loggers=loggers,
        meter=_meter(config.train.peak_tflops, config.precision.compute, config.device.index, device, session, timed),
        content=setup.content,
        held_out=held_out_hash(dataset, evaluation.samples),
        progress=progress,
        guard=config.guard,
        rounds_stochastically=config.optimizer.stochastic_rounding,
        search=StepSearch(session.state, driver.step, parameters, start, config.guard.search_seconds),
        stop=stop,
        heartbeat=beat,
        counters=lambda: asdict(session.engine.counters),
        command=config.source.going_on() + setup.ranks,
        phases=phases,
        world=setup.world,
    )


def _begin(
    setup: Setup,
    session: Session,
    run: RunDirectory,
    steps: dict[str, Step],
    say: Callable[[str], None],
    beat: Callable[[], None],
) -> Beginning:
    """Gives the state its values, and fills `steps` with all that are built."""
    dataset, seed = setup.dataset, setup.config.run.seed
    check_space(run.path, session.state)
    progress, began, notes = setup.origin.begin(run, session, seed, setup.stored, dataset.description)
    for note in notes:
        say(note)
    beat()
    reader = setup.reader(progress.step, progress.read)
    return Beginning(
        progress, began, reader, _build(setup.config.train, dataset, setup.shorter, session, reader, steps)
    )


@contextmanager
def _told(
    train: TrainConfig,
    shrinking_keys: Callable[[], list[str]],
    device: str,
    steps: Mapping[str, Step],
    run: RunDirectory,
    events: Events,
) -> Iterator[None]:
    """Notes how an attempt that fails ends. Raises OutOfMemory for whatever tells that memory ran out."""
    from ttrain.train.forecast.out_of_memory import is_out_of_memory, memory_message

    try:
        yield
    except Interrupted as error:
        events.add("interrupted", str(error))
        raise
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, UserError) and run.discard():
            raise  # a mistake that only shows once all is built
        if not isinstance(error, TtrainError) and is_out_of_memory(error):
            failure = OutOfMemory(memory_message(error, device, steps, shrinking_keys()), train, run.path)
            events.add("failed", str(failure))
            raise failure from error
        step = getattr(error, "step", None)
        events.add("failed", str(error) or type(error).__name__, step, error=type(error).__name__)
        raise


def _hung(
    start: str,
    run: RunDirectory,
    events: Events,
    console: Console,
    heartbeat: Heartbeat,
    savers: Sequence[Saver],
    hang: DeviceHang,
) -> None:
    """Told by a thread when the device never answers, right before the process ends: what can be kept is."""
    console.close()
    for saver in savers:
        saver.join()
    heartbeat.tell(error=type(hang).__name__, message=str(hang))
    events.add("failed", str(hang), error=type(hang).__name__)
    newest = list_checkpoints(run.checkpoints)[0][-1:]
    kept = f"The checkpoint of step {newest[0].step} is kept." if newest else "No checkpoint was saved yet."
    console.say(f"{kept} Continue with: {continue_command(start, run.path)}")


def _build(
    config: TrainConfig,
    dataset: Any,
    shorter: Mapping[int, Model | None],
    session: Session,
    reader: DataReader,
    steps: dict[str, Step],
) -> Phases | None:
    """Builds all steps; returns what changes the sizes of training batches, None where they stay what they are."""
    if not (config.length_schedule or config.batch_schedule):
        steps.update(session.build_training())
        return None
    for model in shorter.values():
        if model is not None and session.engine.device.uniform_compute:
            model.follow_compute()
    phases = Phases(reader, session, dataset, shorter, steps)  # build_dataset made sure that its length can change
    phases.turn(reader.step + 1)
    return phases


def _loggers(
    config: LoggerConfig, stored: dict[str, Any], run: RunDirectory, progress: Progress, console: Console
) -> Loggers:
    from ttrain.train.logging.loggers import Loggers
    from ttrain.train.logging.metrics import MetricsFile

    views = build.build_views(config, run.path, stored, progress.wandb_id, console.say) if run.leads else []
    progress.wandb_id = next((view.run_id for view in views if view.run_id), progress.wandb_id)
    return Loggers(MetricsFile(run.metrics, run.leads), console, views)


def _evaluation(
    config: TrainConfig,
    model: Model,
    dataset: Dataset,
    steps: Mapping[str, Step],
    say: Callable[[str], None],
    world: World,
) -> Evaluation:
    """Of the step that was built last."""
    from ttrain.data.text import byte_counter
    from ttrain.models.base import preparation
    from ttrain.train.loop.evaluate import Evaluation
    from ttrain.train.steps.session import averaged

    rows, prepare = config.batch_size // world.ranks.slices // config.accumulation, preparation(model)
    end = dataset.description.get("end_token") or {}
    count = None if dataset.tokenizer is None else byte_counter(dataset.tokenizer, end.get("id"))
    samples = config.eval_sequences
    step, around = (lambda inputs: steps["evaluate"](inputs)), partial(averaged, steps)
    return Evaluation(step, dataset, rows, samples, prepare, say, count, world, around=around)


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


def _meter(
    peak_tflops: float | None,
    compute: DType,
    index: int,
    device: Device,
    session: Session,
    timed: Callable[[float], None],
) -> Meter:
    from ttrain.train.forecast.peak import measured_rates
    from ttrain.train.logging.meter import Meter
    from ttrain.train.steps.session import flops_per_step

    rates = None if peak_tflops else measured_rates(device.name, str(compute), index)
    peak = 1e12 * peak_tflops if peak_tflops else None if rates is None else rates.flops
    return Meter(flops_per_step(session.graph), peak, lambda: device.memory().get("in_use", 0), timed=timed)
