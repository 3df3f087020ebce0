"""One attempt of a run: from its directory and its first values to its summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from ttrain.config import build
from ttrain.config.rates import train_on
from ttrain.core.errors import DeviceHang, Interrupted, OutOfMemory, TtrainError, UserError
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
from ttrain.train.runs.summary import print_summary
from ttrain.train.settings import LoggerConfig, TrainConfig
from ttrain.train.steps.phases import Phases
from ttrain.train.supervise.heartbeat import Heartbeat

if TYPE_CHECKING:
    from ttrain.device.base import Device
    from ttrain.engine.base import Step
    from ttrain.train.logging.loggers import Console, Loggers
    from ttrain.train.logging.meter import Meter
    from ttrain.train.loop.evaluate import Evaluation
    from ttrain.train.loop.loop import Loop
    from ttrain.train.loop.saver import Saver
    from ttrain.train.steps.session import Session


FIRST = "The first step is under way"


def train(setup: Setup, device: Device, console: Console, stop: StopRequests) -> float | None:
    """Train, and note in the run's events how that began and ended. Return the best val/loss.

    Raises OutOfMemory where memory runs out.
    """
    config, heartbeat, world = setup.config, Heartbeat.of_process(), setup.world
    start = config.source.going_on()
    steps: dict[str, Step] = {}
    savers: list[Saver] = []
    console.flag = None if device.caution is None else device.caution.partition(" ")[0]
    with ExitStack() as stack:
        run = setup.origin.held or stack.enter_context(closing(setup.claim(device)))
        events = Events(run.events, console.say)
        world.remember("run", str(run.path.resolve()))
        heartbeat.tell(run=str(run.path.resolve()))
        if run.note is not None:
            console.say(run.note)
        events.add("started", " ".join(filter(None, [f"An attempt starts on {device.name}.", device.caution])))
        device.last_words.append(partial(_hung, start, run, events, console, heartbeat, savers))
        with _told(config.train, setup.shrinking_keys, device.name, steps, run, events):
            with Waiting("Placing the model and building its steps", console.say):
                session = stack.enter_context(closing(setup.open(device)))
                progress, began, phases = _begin(setup, session, run, steps, console.say, heartbeat.beat)
            heartbeat.beat()
            setup.record(run, session, steps, began)
            views = stack.enter_context(_loggers(config.logger, setup.stored, run, progress, console))
            loop = _loop(setup, session, steps, phases, run, views, progress, stop, stack)
            savers.append(loop.checkpoints.saver)
            loop.run()
            console.close()
            if "swap" in steps:
                steps["swap"]({})  # all is saved, and a sample is to show the averages
            world.barrier()
            if not world.leads:
                return progress.best_val_loss
            summary = summarize(setup, run, device, progress, loop.counters(), "swap" in steps)
        events.add("finished", "All steps are done.")
        writes_text = setup.print_sample(steps.get("logits"))  # the run is done, whatever becomes of the terminal
        overrides, rate = train_on(setup.rate, progress)
        again = overrides + setup.ranks, rate
        print_summary(summary, run.path, again, writes_text=writes_text, start=start)
    return progress.best_val_loss


def _begin(
    setup: Setup,
    session: Session,
    run: RunDirectory,
    steps: dict[str, Step],
    say: Callable[[str], None],
    beat: Callable[[], None],
) -> tuple[Progress, dict[str, Any], Phases | None]:
    """Give the state its values, and fill `steps` with all that are built.

    Return how far the run is, what its record tells of that, and what builds the steps of later phases.
    """
    config = setup.config
    check_space(run.path, session.state)
    progress, began, notes = setup.origin.begin(run, session, config.run.seed, setup.stored, setup.dataset.description)
    for note in notes:
        say(note)
    beat()
    if not (config.train.length_schedule or config.train.batch_schedule):
        steps.update(session.build_training())
        return progress, began, None
    for model in setup.shorter.values():
        if model is not None and session.engine.device.uniform_compute:
            model.follow_compute()
    phases = Phases(setup.phases, session, setup.shorter, steps)  # build_dataset made sure that its length can change
    phases.turn(progress.step + 1)
    return progress, began, phases


def _loop(
    setup: Setup,
    session: Session,
    steps: dict[str, Step],
    phases: Phases | None,
    run: RunDirectory,
    loggers: Loggers,
    progress: Progress,
    stop: StopRequests,
    stack: ExitStack,
) -> Loop:
    """Put the loop together, and announce the run."""
    from ttrain.train.loop.checkpoints import Checkpoints
    from ttrain.train.loop.context import Context
    from ttrain.train.loop.evaluator import Evaluator
    from ttrain.train.loop.guards import LearningGuard, SpikeGuard
    from ttrain.train.loop.loop import Loop
    from ttrain.train.loop.nonfinite import StepSearch
    from ttrain.train.loop.nonfinite_guard import NonFiniteGuard
    from ttrain.train.loop.step_log import StepLog

    config, guard, say = setup.config, setup.config.guard, loggers.console.say
    for line in setup.announcement(session.engine, run.path, progress.step):
        say(line)
    run.keep()
    meter = _meter(setup, session, steps, progress.step, say, stack)
    evaluation = _evaluation(setup, steps, say)
    held_out = held_out_hash(setup.dataset, evaluation.samples)
    command = config.source.going_on() + setup.ranks
    context = Context(config.train, session.state, run, loggers, progress, setup.world, held_out, command)
    context.check_held_out()
    checkpoints = Checkpoints(context, setup.content)
    train_step = session.train_step(steps, config.run.seed, setup.world)
    reader = setup.reader(session, progress.step, progress.read)
    search = StepSearch(session.state, train_step, list(setup.model.parameters()))
    guards = (
        NonFiniteGuard(guard, context, checkpoints, reader, search),
        SpikeGuard(guard, context, checkpoints),
        LearningGuard(guard, context, config.optimizer.stochastic_rounding),
    )
    return Loop(
        context,
        reader,
        train_step,
        setup.rates,
        Evaluator(context, evaluation, checkpoints),
        checkpoints,
        StepLog(context, meter),
        guards,
        phases,
        stop,
        heartbeat=Heartbeat.of_process().beat,
        counters=lambda: asdict(session.engine.counters),
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


def _loggers(
    config: LoggerConfig, stored: dict[str, Any], run: RunDirectory, progress: Progress, console: Console
) -> Loggers:
    from ttrain.train.logging.loggers import Loggers
    from ttrain.train.logging.metrics import MetricsFile

    views = build.build_views(config, run.path, stored, progress.wandb_id, console.say) if run.leads else []
    progress.wandb_id = next((view.run_id for view in views if view.run_id), progress.wandb_id)
    return Loggers(MetricsFile(run.metrics, run.leads), console, views)


def _evaluation(setup: Setup, steps: Mapping[str, Step], say: Callable[[str], None]) -> Evaluation:
    """The evaluation on held-out data, by the step that was built last."""
    from ttrain.data.text import byte_counter
    from ttrain.models.base import preparation
    from ttrain.train.loop.evaluate import Evaluation
    from ttrain.train.steps.session import averaged

    dataset, world, train = setup.dataset, setup.world, setup.config.train
    rows = train.batch_size // world.ranks.slices // train.accumulation
    end = dataset.description.get("end_token") or {}
    count = None if dataset.tokenizer is None else byte_counter(dataset.tokenizer, end.get("id"))
    step, around = (lambda inputs: steps["evaluate"](inputs)), partial(averaged, steps)
    prepare = preparation(setup.model)
    return Evaluation(step, dataset, rows, train.eval_sequences, prepare, say, count, world, around=around)


def _meter(
    setup: Setup,
    session: Session,
    steps: Mapping[str, Step],
    step: int,
    say: Callable[[str], None],
    stack: ExitStack,
) -> Meter:
    """Times the steps after step `step`, and says how long the run takes."""
    from ttrain.train.forecast.peak import measured_rates
    from ttrain.train.logging.meter import Meter
    from ttrain.train.steps.session import flops_per_step

    config, device, first = setup.config, session.engine.device, Waiting(FIRST, say)
    pace = pace_of(config, setup.dataset, session, steps, step, say, continues=setup.origin.point is not None)
    pace.announce()
    if config.train.steps > step:
        stack.enter_context(first)

    def timed(seconds: float) -> None:
        first.close()
        pace(seconds)

    given = config.train.peak_tflops
    rates = None if given else measured_rates(device.name, str(config.precision.compute), config.device.index)
    peak = 1e12 * given if given else None if rates is None else rates.flops
    return Meter(flops_per_step(session.graph), peak, lambda: device.memory().get("in_use", 0), timed=timed)
