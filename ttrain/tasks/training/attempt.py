"""One attempt of a run: from its directory and its first values to its summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from ttrain.config import build
from ttrain.core.errors import DeviceHang, Interrupted, OutOfMemory, TtrainError, UserError
from ttrain.core.waiting import Waiting
from ttrain.tasks.training.ending import summarize
from ttrain.tasks.training.expected import pace_of
from ttrain.tasks.training.rates import train_on
from ttrain.tasks.training.run import Run
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


def train(run: Run, device: Device, console: Console, stop: StopRequests) -> float | None:
    """Train, and note in the run's events how that began and ended. Return the best val/loss.

    Raises OutOfMemory where memory runs out.
    """
    config, heartbeat, world = run.config, Heartbeat.of_process(), run.world
    start = config.source.going_on()
    steps: dict[str, Step] = {}
    savers: list[Saver] = []
    console.flag = None if device.caution is None else device.caution.partition(" ")[0]
    with ExitStack() as stack:
        folder = run.origin.held or stack.enter_context(closing(run.claim(device)))
        events = Events(folder.events, console.say)
        world.remember("run", str(folder.path.resolve()))
        heartbeat.tell(run=str(folder.path.resolve()))
        if folder.note is not None:
            console.say(folder.note)
        events.add("started", " ".join(filter(None, [f"An attempt starts on {device.name}.", device.caution])))
        device.last_words.append(partial(_hung, start + run.ranks, folder, events, console, heartbeat, savers))
        with _told(config.train, run.shrinking_keys, device.name, steps, folder, events):
            with Waiting("Placing the model and building its steps", console.say):
                session = stack.enter_context(closing(run.open(device)))
                progress, began, phases = _begin(run, session, folder, steps, console.say, heartbeat.beat)
            heartbeat.beat()
            run.record(folder, session, steps, began)
            views = stack.enter_context(_loggers(config.logger, run.stored, folder, progress, console))
            loop = _loop(run, session, steps, phases, folder, views, progress, stop, stack)
            savers.append(loop.checkpoints.saver)
            loop.run()
            console.close()
            if "swap" in steps:
                steps["swap"]({})  # all is saved, and a sample is to show the averages
            world.barrier()
            if not world.leads:
                return progress.best_val_loss
            summary = summarize(run, folder, device, progress, loop.counters(), "swap" in steps)
        events.add("finished", loop.ending)
        writes_text = run.print_sample(steps.get("logits"))  # the run is done, whatever becomes of the terminal
        overrides, rate = train_on(run.rate, progress)
        again = overrides + run.ranks, rate
        print_summary(summary, folder.path, again, writes_text=writes_text, start=start)
    return progress.best_val_loss


def _begin(
    run: Run,
    session: Session,
    folder: RunDirectory,
    steps: dict[str, Step],
    say: Callable[[str], None],
    beat: Callable[[], None],
) -> tuple[Progress, dict[str, Any], Phases | None]:
    """Give the state its values, and fill `steps` with all that are built.

    Return how far the run is, what its record tells of that, and what builds the steps of later phases.
    """
    config = run.config
    check_space(folder.path, session.state)
    progress, began, notes = run.origin.begin(folder, session, config.run.seed, run.stored, run.dataset.description)
    for note in notes:
        say(note)
    beat()
    if not (config.train.length_schedule or config.train.batch_schedule):
        steps.update(session.build_training())
        return progress, began, None
    for model in run.shorter.values():
        if model is not None and session.engine.device.uniform_compute:
            model.follow_compute()
    phases = Phases(run.phases, session, run.shorter, steps)  # build_dataset made sure that its length can change
    phases.turn(progress.step + 1)
    return progress, began, phases


def _loop(
    run: Run,
    session: Session,
    steps: dict[str, Step],
    phases: Phases | None,
    folder: RunDirectory,
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

    config, guard, say = run.config, run.config.guard, loggers.console.say
    for line in run.announcement(session.engine, folder.path, progress.step):
        say(line)
    folder.keep()
    meter = _meter(run, session, steps, progress.step, say, stack)
    evaluation = _evaluation(run, steps, say)
    held_out = run.world.from_leader(partial(held_out_hash, run.dataset, evaluation.samples))
    command = config.source.going_on() + run.ranks
    context = Context(config.train, session.state, folder, loggers, progress, run.world, held_out, command)
    context.check_held_out()
    checkpoints = Checkpoints(context, run.content)
    train_step = session.train_step(steps, config.run.seed, run.world)
    reader = run.reader(session, progress.step, progress.read)
    search = StepSearch(session.state, train_step, list(run.model.parameters()))
    guards = (
        NonFiniteGuard(guard, context, checkpoints, reader, search),
        SpikeGuard(guard, context, checkpoints),
        LearningGuard(guard, context, config.optimizer.stochastic_rounding),
    )
    return Loop(
        context,
        reader,
        train_step,
        run.rates,
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
    folder: RunDirectory,
    events: Events,
) -> Iterator[None]:
    """Notes how an attempt that fails ends. Raises OutOfMemory for whatever tells that memory ran out."""
    from ttrain.train.forecast.out_of_memory import is_out_of_memory, memory_message

    try:
        yield
    except Interrupted as error:
        events.add("interrupted", str(error))
        raise
    except KeyboardInterrupt:  # while steps are built: the loop saves, and raises Interrupted
        events.add("interrupted", "Stopped by SIGINT before the steps were built; there is nothing to save.")
        raise
    except Exception as error:
        if isinstance(error, UserError) and folder.discard():
            raise  # a mistake that only shows once all is built
        if not isinstance(error, TtrainError) and is_out_of_memory(error):
            failure = OutOfMemory(memory_message(error, device, steps, shrinking_keys()), train, folder.path)
            events.add("failed", str(failure))
            raise failure from error
        step = getattr(error, "step", None)
        events.add("failed", str(error) or type(error).__name__, step, error=type(error).__name__)
        raise


def _hung(
    start: str,
    folder: RunDirectory,
    events: Events,
    console: Console,
    heartbeat: Heartbeat,
    savers: Sequence[Saver],
    hang: DeviceHang,
) -> None:
    """Keep what can be kept when the device never answers. A thread calls this right before the process ends."""
    console.close()
    for saver in savers:
        saver.join()
    heartbeat.tell(error=type(hang).__name__, message=str(hang))
    events.add("failed", str(hang), error=type(hang).__name__)
    newest = list_checkpoints(folder.checkpoints)[0][-1:]
    kept = f"The checkpoint of step {newest[0].step} is kept." if newest else "No checkpoint was saved yet."
    console.say(f"{kept} Continue with: {continue_command(start, folder.path)}")


def _loggers(
    config: LoggerConfig, stored: dict[str, Any], folder: RunDirectory, progress: Progress, console: Console
) -> Loggers:
    from ttrain.train.logging.loggers import Loggers
    from ttrain.train.logging.metrics import MetricsFile

    views = build.build_views(config, folder.path, stored, progress.wandb_id, console.say) if folder.leads else []
    progress.wandb_id = next((view.run_id for view in views if view.run_id), progress.wandb_id)
    return Loggers(MetricsFile(folder.metrics, folder.leads), console, views)


def _evaluation(run: Run, steps: Mapping[str, Step], say: Callable[[str], None]) -> Evaluation:
    """The evaluation on held-out data, by the step that was built last."""
    from ttrain.data.text import byte_counter
    from ttrain.models.base import preparation
    from ttrain.train.loop.evaluate import Evaluation
    from ttrain.train.steps.session import averaged

    dataset, world, train = run.dataset, run.world, run.config.train
    rows = train.batch_size // world.ranks.slices // train.gradient_accumulation
    end = dataset.description.get("end_token") or {}
    count = None if dataset.tokenizer is None else byte_counter(dataset.tokenizer, end.get("id"))
    step, around = (lambda inputs: steps["evaluate"](inputs)), partial(averaged, steps)
    prepare = preparation(run.model)
    return Evaluation(step, dataset, rows, train.eval_sequences, prepare, say, count, world, around=around)


def _meter(
    run: Run,
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

    config, device, first = run.config, session.engine.device, Waiting(FIRST, say)
    pace = pace_of(config, run.dataset, session, steps, step, say, continues=run.origin.point is not None)
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
