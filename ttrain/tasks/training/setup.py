"""Where the config of a run is taken apart: its data, its model and what it begins with; on a device, the rest."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ttrain
from ttrain.config import build
from ttrain.config.notices import notices
from ttrain.config.rates import Rate, rate_jump
from ttrain.config.saved import continued
from ttrain.config.schema import Config, Source, sections, to_dict
from ttrain.core.errors import CheckpointError, ConfigError
from ttrain.core.units import format_count
from ttrain.data.settings import DataConfig
from ttrain.optim.groups import check_groups
from ttrain.optim.settings import ScheduleConfig
from ttrain.parallel.world import World
from ttrain.train.checkpoint.progress import Progress
from ttrain.train.checkpoint.save import CheckpointContent
from ttrain.train.runs import resume as resuming
from ttrain.train.runs.origin import Origin
from ttrain.train.runs.record import package_versions
from ttrain.train.runs.run_directory import (
    FollowedRun,
    RunDirectory,
    chosen_model,
    newest_attempt,
    part_of,
    read_config,
)
from ttrain.train.steps.phases import PhaseSchedule, Position, Reader
from ttrain.train.steps.step import Rates, Stepper
from ttrain.train.supervise.heartbeat import Heartbeat

if TYPE_CHECKING:
    from ttrain.data.batches import Dataset, Indexed
    from ttrain.device.base import Device
    from ttrain.engine.base import Engine, Step
    from ttrain.models.base import Model
    from ttrain.train.runs.resume import ResumePoint
    from ttrain.train.steps.session import Session


_PLACES = ("source", "notices")  # what a machine may have of its own in the description of the data
_LATER = ("lora", "ramp", "parallel")  # sections that runs of earlier versions do not have


@dataclasses.dataclass(frozen=True)
class Setup:
    """The parts of a run that has passed all checks that need no device."""

    config: Config
    stored: dict[str, Any]  # the config as checkpoints keep it: sizes of the model filled in
    dataset: Dataset
    model: Model
    model_name: str  # as the user chose it: nano-gpt rather than gpt
    shorter: dict[int, Model | None]  # by length: what records training on shorter sequences
    prompt: list[int] | None  # token ids of the sample at the end; None where no text can be made
    origin: Origin
    rate: Rate
    warnings: list[str]  # what has to be known before the run starts, beside the notices of the config
    world: World  # the ranks that train together
    earlier: dict[str, Any]  # the device of the attempt before

    @property
    def ranks(self) -> str:
        """Overrides, after a space, with which a command goes on with the run on as many ranks as it can start."""
        parallel = self.config.parallel
        ranks = "" if parallel.name == "none" else f" parallel={parallel.name}"
        return ranks + ("" if parallel.processes is None else f" parallel.processes={parallel.processes}")

    def claim(self, device: Device) -> RunDirectory:
        """A directory for a run that is new, or branches off from another."""
        label = f"{self.model_name}_{device.name}_{self.config.engine.name}"
        claimed: list[RunDirectory] = []
        origin = self.origin
        # What continues a run without writing into it, as a dry run does, gets a directory of its own.
        wanted = self.config.run.dir if origin.held is None else None

        def fill(run: RunDirectory) -> None:
            run.write_config(self.stored)
            if origin.point is not None and device.computes:
                origin.point = resuming.branch_off(origin.point, run)

        def claim() -> str:
            claimed.append(RunDirectory.claim(wanted, label, fill=fill))
            return str(claimed[0].path)

        path = self.world.once(claim)
        return claimed[0] if claimed else FollowedRun(Path(path))

    def open(self, device: Device, engine: str | None = None) -> Session:
        """The model on the device, under the run's engine or another."""
        from ttrain.train.steps.resident import choose_resident

        config, ranks = self.config, self.world.ranks
        chosen = dataclasses.replace(config.engine, name=engine or config.engine.name)
        rows = config.train.batch_size // config.train.accumulation
        resident = choose_resident(config.data, rows, self.model, device, self.dataset)
        parts = (config.train, config.optimizer, config.guard, chosen)
        session = build.build_session(self.model, device, *parts, ranks=ranks, resident=resident)
        if resident is not None:
            resident.write(session.state, cast("Indexed", self.dataset).part)
        return session

    def reader(self, session: Session, step: int = 0, start: Position = Position()) -> Reader:  # noqa: B008
        """The training batches after so many steps; the first of them begins with the sample at `start`."""
        return Reader(session.training_data(self.dataset), self.config.run.seed, self.phases, step, start)

    @property
    def phases(self) -> PhaseSchedule:
        """The sizes of every step's batch."""
        return PhaseSchedule.of(self.config.train, getattr(self.dataset, "context", 1))

    @property
    def rates(self) -> Callable[[int], Rates]:
        """Learning rates of a step, counted from 1, by the names of their step inputs."""
        return build.build_rates(self.model, *self.config.rate_parts)

    def stepper(
        self, session: Session, steps: Mapping[str, Step], last: int = 0, rates: Callable[[int], Rates] | None = None
    ) -> Stepper:
        """Run the built steps of a new run by their number, up to step `last` with inputs made ahead of time."""
        train_step = session.train_step(steps, self.config.run.seed, self.world)
        return Stepper(train_step, self.reader(session), rates or self.rates, last)

    def record(
        self,
        run: RunDirectory,
        session: Session,
        steps: Mapping[str, Step],
        attempt: dict[str, Any],
    ) -> None:
        """Writes config, environment and plan of this attempt, and what `attempt` says of it."""
        from ttrain.train.forecast.plan_report import plan_report
        from ttrain.train.forecast.show import product_ways
        from ttrain.train.runs.record import environment_record

        dataset, command = self.dataset, self.config.source.command()
        tokenizer_hash = None if dataset.tokenizer is None else dataset.tokenizer.hash
        facts = {**session.engine.device.describe(), "products": product_ways(session.engine)}
        environment = environment_record(self.stored, facts, dataset.description, tokenizer_hash, command)
        run.record(self.stored, {**environment, "model": self.model_name, **attempt})
        run.write_plan(plan_report(session.graph, session.state, steps).text())

    def announcement(self, engine: Engine, path: Path, step: int) -> Iterator[str]:
        """What is trained, where and on what, and what has to be known of it, `step` steps being done."""
        from ttrain.optim.groups import frozen_count
        from ttrain.train.forecast.show import product_ways, show_ways
        from ttrain.train.runs.summary import extent_line

        config, model, train = self.config, self.model, self.config.train
        device, ways = engine.device, product_ways(engine)
        parts = f"{self.model_name} with {format_count(model.parameter_count)} parameters"
        if count := frozen_count(model.parameters(), config.optimizer):
            parts += f", {format_count(count)} of them frozen,"
        place = f"device {device.name}, engine {config.engine.name}, {config.precision.name}"
        yield f"Training {parts} on {place}. Run: {path}"
        if config.engine.name == "traced":
            yield "The first step is compiled or captured, which takes longer than the others."
            if ways:
                yield show_ways(ways)
        schedule = self.phases
        rows = [schedule.at(number).rows for number in (1, train.steps)]
        yield extent_line(self.dataset, train.steps, rows, schedule.read(0, train.steps).tokens, config.data.limit)
        of_device = filter(None, [device.caution, self._other_bits(device, ways)])
        for warning in (*of_device, *notices(config), *self.warnings):
            yield f"WARNING: {warning}"
        if step >= train.steps:
            yield f"All {train.steps} steps are done; give train.steps=<more> to train on."

    def _other_bits(self, device: Device, ways: Mapping[str, str]) -> str | None:
        """Why results differ in their last bits from those of the attempt before, if they do on the CPU."""
        before, now = self.earlier.get("threads"), getattr(device, "threads", None)
        if not self.earlier.get("name") == device.name == "cpu":
            return None
        if before not in (None, now):
            return (
                f"kernels ran with {before} thread(s) before and run with {now} now, so that results differ in their "
                f"last bits; device.threads={before} keeps the bits."
            )
        earlier = part_of(self.earlier, "products")
        changes = Counter(f"{earlier[name]} -> {way}" for name, way in ways.items() if earlier.get(name, way) != way)
        listed = ", ".join(f"{count} {change}" for change, count in sorted(changes.items()))
        return listed and (
            f"products are made another way than before ({listed}), so that results differ in their last bits; what "
            "was measured on this machine is gone or another (see device.products, which pins who multiplies)."
        )

    def content(self, progress: Progress, val_loss: float | None) -> CheckpointContent:
        """What a checkpoint says besides its tensors."""
        tokenizer = self.dataset.tokenizer
        told = (None, val_loss) if tokenizer is None else (tokenizer.to_json(), val_loss, tokenizer.config)
        return CheckpointContent(progress.step, self.stored, progress.to_dict(), *told)

    def print_sample(self, logits: Step | None) -> bool:
        """A sample of what the model writes, where it writes text; whether it does."""
        from ttrain.data.end_token import named_end
        from ttrain.train.sampling.draw import print_samples
        from ttrain.train.sampling.stream import Stop

        tokenizer = self.dataset.tokenizer
        if self.prompt is None or logits is None or tokenizer is None:
            return False
        sample = dataclasses.replace(self.config.sample, count=1)
        how = "" if sample.mode == "ar" else f", a token at a time (task=sample draws with sample.mode={sample.mode})"
        print(f"\nA sample of what the model writes{how}:\n", flush=True)
        stop = Stop.of(tokenizer, sample.stop, named_end(self.config.data, tokenizer.config))
        print_samples(logits, tokenizer, self.prompt, sample, stop)
        return True

    def shrinking_keys(self) -> list[str]:
        """Overrides that make a step smaller, the one that changes least first."""
        from ttrain.train.forecast.out_of_memory import shrinking_keys

        config = self.config
        names = (config.precision.name, config.engine.name)
        return shrinking_keys(config.train, self.model.config, *names, config.optimizer)


def _held(resume: str, run: str | None, world: World, stack: ExitStack) -> RunDirectory | None:
    """The run that is continued, held until the exit stack closes."""
    found: list[RunDirectory] = []

    def hold() -> str:
        held = resuming.hold_run(resume, run)
        if held is None:
            return ""
        found.append(stack.enter_context(closing(held)))
        return str(held.path)

    path = world.once(hold)
    return found[0] if found else FollowedRun(Path(path)) if path else None


def set_up(config: Config, stack: ExitStack, world: World | None = None) -> Setup:
    """A run that is continued is held before it is read, until the exit stack closes."""
    Heartbeat.of_process().beat()
    world = world or World()
    if world.ranks.count > 1:
        _agree(config, world)
    held = _held(config.resume, config.run.dir, world, stack)
    point = resuming.find_resume_point(config.resume, config.run.dir)
    if point is not None and held is not None:  # this run alone removes it
        point = dataclasses.replace(point, checkpoint=dataclasses.replace(point.checkpoint, reader=None))
    base, notes = _base(point, held)
    if base is not None:
        if point is not None:
            resuming.check_sources(base, config)
        config = continued(base, config)
    elif config.resume == "auto":
        notes.append(f"resume=auto: {config.run.dir} holds no run yet; a new one starts, as command and defaults say.")
    parallel, ranks = config.parallel, world.ranks
    world.ranks = dataclasses.replace(ranks, slices=parallel.slices or ranks.count, bucket_mb=parallel.bucket_mb)
    if point is None:
        config = dataclasses.replace(config, lora=build.with_adapters(config.lora, config.source.explicit))
    config = dataclasses.replace(config, schedule=_branched(config.schedule, config.train.steps, point, held, base))
    train, lora = config.train, config.lora
    folder = getattr(config.model, "from_", None)
    data, refuse = _with_tokenizer(config.data, folder, point), partial(_check_tokenizer, point)
    with world.leader_first():
        dataset = build.build_dataset(data, config.model, train.length_schedule, refuse)
    world.agree("data", {key: value for key, value in dataset.description.items() if key not in _PLACES})
    parts = config.model, config.precision, config.device, config.data, lora
    model = build.build_model(*parts, dataset.vocabulary)
    check_groups(model.parameters(), config.optimizer)
    stored = {**to_dict(config), "model": build.resolved_model(config.model, model)}
    stored["parallel"]["slices"] = world.ranks.slices if world.ranks.slices > 1 else None
    stored["run"]["dir"] = None  # a run does not know where it lies, so it can be moved
    if point is not None:
        resuming.check_architecture(point.checkpoint.config, model.config, point.checkpoint.path)
        resuming.check_adapters(point.checkpoint.config, lora, point.checkpoint.path)
        resuming.check_documents(point, dataset.description)
    prompt = _prompt(config.sample.prompt, config.data, dataset)
    sections, tokens = (config.model, train, config.optimizer), tokenizer_json(dataset)
    warm = build.build_warm_start(*sections, model, tokens) if point is None else None
    adapter = build.build_adapters(lora, model) if point is None else None
    shorter = {length: build.shorter_model(model, length, config.precision, lora) for length in train.length_schedule}
    if base is not None and point is None:
        notes += [f"Changed since the run started: {change}" for change in resuming.config_difference(base, stored)]
    name = _model_name(config.source, config.model.name, point, held)
    rate = Rate(config.optimizer.lr, config.schedule, train.steps)
    jump = None if point is None else rate_jump(point.checkpoint.config, rate, Progress.of(point.checkpoint))
    warnings = [*filter(None, [jump]), *dataset.description.get("notices", ())]
    origin = Origin(held, point, warm, adapter, notes)
    earlier = part_of(newest_attempt(None if point is None else point.run), "device")
    return Setup(config, stored, dataset, model, name, shorter, prompt, origin, rate, warnings, world, earlier)


def _branched(
    schedule: ScheduleConfig, steps: int, point: ResumePoint | None, held: RunDirectory | None, base: Any
) -> ScheduleConfig:
    """With the step that a decay begins from, where that is the one of the checkpoint. A branch keeps its own."""
    if schedule.decay_from != 0:
        return schedule
    if point is None:
        raise ConfigError(
            "schedule.decay_from=0: is the step that a run branches off from, and this one starts anew. Give "
            "resume=<run or checkpoint>, or the number of a step."
        )
    known = None if held is None else base["schedule"].get("decay_from")
    step = known or point.checkpoint.step
    if step >= (end := schedule.steps or steps):
        raise ConfigError(
            f"schedule.decay_from=0: is step {step} here, and the schedule ends at step {end}. Give more train.steps."
        )
    return dataclasses.replace(schedule, decay_from=step)


def _agree(config: Config, world: World) -> None:
    """Raises UserError where ranks run other versions or have other configs, what belongs to a machine aside."""
    shown = to_dict(config)
    shown["device"] = {key: value for key, value in shown["device"].items() if key not in ("index", "threads")}
    shown["parallel"] = {key: value for key, value in shown["parallel"].items() if key != "processes"}
    world.agree("version", {"ttrain": ttrain.__version__, **package_versions()})
    world.agree("config", shown)


def _with_tokenizer(data: Any, folder: str | None, point: ResumePoint | None) -> DataConfig:
    """A run that is continued needs the `folder` of model.from no more: its checkpoint has the tokenizer."""
    if point is None or folder is None or Path(getattr(data, "tokenizer", "")).is_file():
        return cast(DataConfig, data)
    kept = point.checkpoint.path / "tokenizer.json"
    return cast(DataConfig, dataclasses.replace(data, tokenizer=str(kept)) if kept.is_file() else data)


def tokenizer_json(dataset: Dataset) -> str | None:
    """The JSON of the data's tokenizer, where it has one."""
    return None if dataset.tokenizer is None else dataset.tokenizer.to_json()


def _model_name(source: Source, registered: str, point: ResumePoint | None, held: RunDirectory | None) -> str:
    """A resumed run was chosen by an earlier command."""
    if not source.merged:
        return source.choices.get("model", registered)
    earlier = point.run if point is not None else None if held is None else held.path
    return chosen_model(earlier) or registered


def _base(point: ResumePoint | None, held: RunDirectory | None) -> tuple[dict[str, Any] | None, list[str]]:
    """The config that the command line changes, and what to tell of it; None for a new run.

    A run that is continued has its own, also where it has no checkpoint yet. That of a checkpoint is taken where the
    checkpoint itself was named, or where its run's is lost. Raises CheckpointError where there is neither.
    """
    run = held.path if held is not None else None if point is None else point.run
    if point is not None and (point.named or run is None):
        return point.checkpoint.config, []
    if run is None:
        return None, []
    try:
        config = _whole_config(run)
    except CheckpointError as error:
        if point is not None:
            return point.checkpoint.config, [f"WARNING: {error} The config of the checkpoint is taken instead."]
        raise CheckpointError(
            f"{error} {run} has no checkpoint either, so nothing tells what it trains. Start anew with its whole "
            f"command, resume=none and another run.dir."
        ) from None
    return config, [] if point is not None else [f"{run} has no checkpoint yet; it starts again with its own config."]


def _whole_config(run: Path) -> dict[str, Any]:
    """The config of a run. Raises CheckpointError where it is missing or only a part of it is there."""
    config = read_config(run)
    if missing := [section for section in sections() if section not in (*config, *_LATER)]:
        raise CheckpointError(f"{run / 'config.yaml'} is not whole: it has no {missing[0]!r}.")
    return config


def _check_tokenizer(point: ResumePoint | None, dataset: Dataset) -> None:
    """Comes before checks of the vocabulary, whose advice would not help where it is the text that changed."""
    if point is None:
        return
    from ttrain.data.library_tokenizer import parse_tokenizer

    # As it is read now: older checkpoints keep settings of a file that are off by now.
    stored = None if point.checkpoint.tokenizer is None else parse_tokenizer(point.checkpoint.tokenizer).to_json()
    resuming.check_tokenizer(stored, tokenizer_json(dataset), point.checkpoint.path)


def _prompt(text: str | None, data: DataConfig, dataset: Dataset) -> list[int] | None:
    """Token ids of the sample's prompt, checked before training starts; None where no text can be made."""
    from ttrain.data.end_token import named_end
    from ttrain.train.sampling.draw import encode_prompt

    tokenizer = dataset.tokenizer
    return None if tokenizer is None else encode_prompt(tokenizer, text, named_end(data, tokenizer.config))
