"""A run whose config has passed all checks, and the parts that it builds on an open device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from ttrain.config import build
from ttrain.config.build import made
from ttrain.config.schema import Config
from ttrain.config.validate import section_type
from ttrain.core.tables import plain_table
from ttrain.core.units import format_count
from ttrain.data.batches import Dataset, Indexed
from ttrain.data.end_token import named_end
from ttrain.data.examples import ExampleDataset
from ttrain.device.base import Device
from ttrain.device.torch.kernels.matmul import OWN
from ttrain.engine.base import Engine, Step
from ttrain.models.base import Model
from ttrain.objectives.base import Objective
from ttrain.optim.groups import frozen_count
from ttrain.optim.settings import ScheduleConfig
from ttrain.parallel.world import World
from ttrain.tasks.evaluating.in_run import RunEvals
from ttrain.tasks.training.notices import notices
from ttrain.train.checkpoint.checkpoint import Progress
from ttrain.train.checkpoint.save import CheckpointContent
from ttrain.train.forecast.limits import shrinking_keys
from ttrain.train.forecast.plan_report import plan_report
from ttrain.train.forecast.show import product_ways, show_ways
from ttrain.train.runs import resume as resuming
from ttrain.train.runs.record import environment_record
from ttrain.train.runs.reference import add_reference
from ttrain.train.runs.run_directory import RunDirectory, part_of
from ttrain.train.runs.summary import extent_line, mixture_table
from ttrain.train.runs.warm_start import Origin
from ttrain.train.sampling.draw import ContextWindow, Continuation, Sampler, encode_prompt, whole_text_scores
from ttrain.train.sampling.source import length_class
from ttrain.train.sampling.stream import Stop, TextStream, end_id, print_text, special_tokens
from ttrain.train.steps.phases import BatchReader, PhaseSchedule, Position
from ttrain.train.steps.resident import IndexBatches, choose_resident
from ttrain.train.steps.session import Session
from ttrain.train.steps.step import Rates, Stepper, reads_ahead

_SAME = 0.1  # rates that differ by less than this share of the larger one count as equal


@dataclass(frozen=True)
class Rate:
    """The learning rate over the steps of a run."""

    peak: float
    schedule: ScheduleConfig
    steps: int

    @property
    def end(self) -> int:
        """The step at which the schedule ends."""
        return self.schedule.steps or self.steps

    def at(self, step: int) -> float:
        """The peak times the schedule at a step, counted from 1."""
        return self.peak * made("schedule", self.schedule, self.steps)(step)


def rate_jump(saved: Mapping[str, Any], rate: Rate, progress: Progress) -> str | None:
    """Return a sentence if a resumed run's rate differs from both its last and its planned rate, else None.

    `saved` is the config of the checkpoint, as plain nested dicts.
    """
    step = progress.step
    if step == 0 or step >= rate.steps:
        return None
    kind = section_type("schedule", saved["schedule"]["name"])
    schedule = rate.schedule if kind is None else kind(**saved["schedule"])  # one that is not registered any more
    before = Rate(saved["optimizer"]["lr"], schedule, saved["train"]["steps"])
    last, planned, new = before.at(step), before.at(step + 1), rate.at(step + 1)
    if _close(new, last) or _close(new, planned):
        return None
    end, old_end = rate.end, before.end
    why = f", as the schedule now ends at step {end} instead of {old_end}; schedule.steps={old_end} keeps its end"
    return (
        f"the learning rate goes from {last * progress.lr_factor:.2e} at step {step} to "
        f"{new * progress.lr_factor:.2e} at step {step + 1}{why if end != old_end else ''}."
    )


def train_on(rate: Rate, progress: Progress) -> tuple[str, str | None]:
    """Return overrides that train for as long again, and how the learning rate goes on, if that depends on them.

    The schedule keeps its end, so that the rate goes on where it is; where that is 0, it is stretched.
    """
    step, schedule = progress.step, rate.schedule
    more = 2 * max(rate.steps, step)
    kept = rate.at(step + 1)
    stretched = replace(rate, schedule=replace(schedule, steps=more)).at(step + 1)
    overrides = f"train.steps={more}"
    if _close(kept, stretched):
        return overrides, None
    factor, fixed = progress.lr_factor, schedule.steps is not None
    if kept > 0:
        return overrides + ("" if fixed else f" schedule.steps={rate.end}"), (
            f"goes on at {kept * factor:.2e}; with schedule.steps={more} it would begin at {stretched * factor:.2e}"
        )
    return overrides + (f" schedule.steps={more}" if fixed else ""), (
        f"rises from {rate.at(step) * factor:.2e} to {stretched * factor:.2e}, as the schedule then ends at step {more}"
    )


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME * max(one, other)


_CHARACTERS = 60  # at least of a held-out text that a sample continues, where there are as many
_TOKENS = 1024  # at most that are looked at for it


@dataclass(frozen=True)
class Run:
    """The parts of a run that has passed all checks that need no device."""

    config: Config
    stored: dict[str, Any]  # the config as checkpoints keep it: sizes of the model filled in
    dataset: Dataset
    model: Model
    model_name: str  # as the user chose it: nano-gpt rather than gpt
    objective: Objective
    shorter: dict[int, Model | None]  # by length: what records training on shorter sequences
    prompt: list[int] | None  # token ids of the sample at the end; None where no text can be made
    origin: Origin
    warnings: list[str]  # what has to be known before the run starts, beside the notices of the config
    world: World  # the ranks that train together
    earlier: dict[str, Any]  # the record of the attempt before
    evals: RunEvals  # of train.evals, on the rank that measures

    @property
    def rank_overrides(self) -> str:
        """Return overrides, after a space, that let a command go on with as many ranks as it can start."""
        parallel = self.config.parallel
        ranks = "" if parallel.name == "none" else f" parallel={parallel.name}"
        return ranks + ("" if parallel.processes is None else f" parallel.processes={parallel.processes}")

    def claim(self, device: Device) -> RunDirectory:
        """A directory for a run that is new, or branches off from another."""
        label = f"{self.model_name}_{device.name}_{self.config.engine.name}"
        origin = self.origin
        # What continues a run without writing into it, as a dry run does, gets a directory of its own.
        wanted = self.config.run.dir if origin.held is None else None

        def fill(run: RunDirectory) -> None:
            run.write_config(self.stored)
            if origin.point is not None and device.computes:
                origin.point = resuming.branch_off(origin.point, run)

        claimed = RunDirectory.led(self.world, lambda: RunDirectory.claim(wanted, label, fill=fill))
        assert claimed is not None
        return claimed

    def open(self, device: Device) -> Session:
        """The model on the device, with the engine."""
        config, ranks = self.config, self.world.ranks
        rows = config.train.batch_size // config.train.gradient_accumulation
        resident = choose_resident(config.data, rows, self.model, device, self.dataset)
        session = build.build_session(self.model, device, config, True, ranks, resident, self.objective)
        session.graph = replace(session.graph, writer=self._writer())
        if resident is not None:
            resident.write(session.state, cast("Indexed", self.dataset).part)
        return session

    def add_reference(self, session: Session, folder: RunDirectory | None = None) -> None:
        """See runs/reference.py; the state of the session has its values by now."""
        begun = [run for run in (folder and folder.path, self.origin.run) if run and self.origin.point is not None]
        add_reference(session, self.dataset, folder.path if folder and folder.leads else None, begun, self.world)

    def _writer(self) -> Model | None:
        """Return a model for texts as long as the sample, to write it with; None where that is the context."""
        context, config = getattr(self.dataset, "context", 0), self.config
        longest = max(len(self.prompt or ()), self.evals.longest_prompt)
        length = length_class(longest + config.sample.tokens, context)
        if length == context or self.prompt is None:
            return None
        return build.resized_model(self.model, length, config)

    def reader(self, session: Session, step: int = 0, start: Position = Position()) -> BatchReader:  # noqa: B008
        """Return the training batches after `step` steps; the first of them begins with the sample at `start`."""
        data: Any = self.dataset  # of a split that lies on the device, steps are handed only the indices of samples
        data = data if session.graph.resident is None else IndexBatches(data)
        return BatchReader(data, self.config.run.seed, self.phases, step, start)

    @property
    def rate(self) -> Rate:
        """Return the learning rate over its steps."""
        return Rate(self.config.optimizer.lr, self.config.schedule, self.config.train.last)

    @property
    def phases(self) -> PhaseSchedule:
        """Return the sizes of every step's batch."""
        facts = getattr(self.dataset, "context", None), getattr(self.dataset, "weights", ())
        return PhaseSchedule.of(self.config.train, *facts)

    @property
    def rates(self) -> Callable[[int], Rates]:
        """Learning rates of a step, counted from 1, by the names of their step inputs."""
        return build.build_rates(self.model, self.config)

    def stepper(
        self, session: Session, steps: Mapping[str, Step], last: int = 0, rates: Callable[[int], Rates] | None = None
    ) -> Stepper:
        """Run the built steps of a new run by their number, up to step `last` with inputs made ahead of time."""
        inputs = self.reader(session), rates or self.rates
        ahead = reads_ahead(*inputs, last)
        return Stepper(session.train_step(steps, self.config.run.seed, self.world, ahead), *inputs)

    def record(self, run: RunDirectory, session: Session, steps: Mapping[str, Step], attempt: dict[str, Any]) -> None:
        """Write config, environment and plan of this attempt, and what `attempt` says of it."""
        dataset, command = self.dataset, self.config.source.command()
        tokenizer_hash = None if dataset.tokenizer is None else dataset.tokenizer.hash
        facts = {**session.engine.device.describe(), "products": product_ways(session.engine)}
        environment = environment_record(self.stored, facts, dataset.description, tokenizer_hash, command)
        run.record(self.stored, {**environment, "model": self.model_name, **attempt})
        run.write(run.plan, plan_report(session.graph, session.state, steps).text())

    def announcement(self, engine: Engine, path: Path, step: int) -> Iterator[str]:
        """Yield what is trained, where and on what, and warnings about it, after `step` steps are done."""
        config, model, train = self.config, self.model, self.config.train
        device, ways = engine.device, product_ways(engine)
        parts = f"{self.model_name} with {format_count(model.parameter_count)} parameters"
        if count := frozen_count(model.parameters(), config.optimizer):
            parts += f", {format_count(count)} of them frozen,"
        place = f"device {device.name}, engine {config.chosen('engine')}, {config.chosen('precision')}"
        yield f"Training {parts} on {place}. Run: {path}"
        if ways and config.engine.name == "traced":
            yield show_ways(ways)
        schedule = self.phases
        rows = [schedule.at(number).rows for number in (1, train.last)]
        each = getattr(config.objective, "num_generations", 1) * getattr(config.objective, "num_iterations", 1)
        read = schedule.read(0, train.last).tokens // each  # so many samples are made from one row
        yield extent_line(self.dataset, train.last, rows, read, config.data.limit)
        if (mixture := mixture_table(self.dataset, train)) is not None:
            yield plain_table(mixture).rstrip()
        saved = None if self.origin.point is None else self.origin.point.checkpoint
        jump = saved and rate_jump(saved.config, self.rate, Progress.from_dict(saved.progress))
        of_device = [device.caution, self._other_bits(device, ways)]
        for warning in (*filter(None, [*of_device, jump]), *notices(config), *self.warnings):
            yield f"WARNING: {warning}"
        if step >= train.last:
            yield f"All {train.last} steps are done; give train.steps=<more> to train on."

    def _other_bits(self, device: Device, ways: Mapping[str, str]) -> str | None:
        """Return why results differ in their last bits from those of the attempt before, if they do on the CPU."""
        earlier = part_of(self.earlier, "device")
        before, now = earlier.get("threads"), getattr(device, "threads", None)
        if not earlier.get("name") == device.name == "cpu":
            return None
        others = part_of(earlier, "products")
        own = {*others.values(), *ways.values()} == {OWN}  # their sums are in one order on any number of threads
        if before not in (None, now) and not own:
            return (
                f"kernels ran with {before} thread(s) before and run with {now} now, so that results differ in their "
                f"last bits; device.threads={before} keeps the bits."
            )
        changes = Counter(f"{others[name]} -> {way}" for name, way in ways.items() if others.get(name, way) != way)
        listed = ", ".join(f"{count} {change}" for change, count in sorted(changes.items()))
        return listed and (
            f"products or attention go another way than before ({listed}), so that results differ in their last bits; "
            "what was measured on this machine is gone or another (see device.matmul, which pins who multiplies)."
        )

    def content(self, progress: Progress, val_loss: float | None) -> CheckpointContent:
        """Return the content of a checkpoint besides its tensors."""
        tokenizer = self.dataset.tokenizer
        told = (None, val_loss) if tokenizer is None else (tokenizer.to_json(), val_loss, tokenizer.config)
        return CheckpointContent(progress.step, self.stored, asdict(progress), *told)

    def print_sample(self, logits: Step | None) -> bool:
        """Print a prompt and what the model writes after it. Return False where it writes no text."""
        tokenizer = self.dataset.tokenizer
        if self.prompt is None or logits is None or tokenizer is None:
            return False
        sample = self.config.sample
        how = "" if sample.mode == "ar" else f", a token at a time (task=sample draws with sample.mode={sample.mode})"
        prompt = shown_prompt(tokenizer, self.prompt)
        of = "this prompt" if sample.prompt is not None else "this held-out text"
        after = f" after {of}{how}:\n\n{prompt}" if prompt else f"{how}:"
        print_text(f"\nA sample of what the model writes{after}\n\n")
        stop = Stop.of(tokenizer, sample.stop, named_end(self.config.data, tokenizer.config))
        window = ContextWindow(logits.inputs["tokens"].shape[1], sample.slide)
        text = Continuation(self.prompt, window, Sampler(sample), sample.tokens)
        drawn = text.drawn(whole_text_scores(logits, tokenizer.vocabulary))
        TextStream(tokenizer, self.prompt, print_text, stop, echo=False).follow(drawn)
        print(flush=True)
        return True

    def shrinking_keys(self) -> list[str]:
        """Overrides that make a step smaller, the one that changes least first."""
        config = self.config
        names = (config.precision.name, config.engine.name)
        return shrinking_keys(config.train, self.model.config, *names, config.optimizer)


def sample_prompt(config: Config, dataset: Dataset) -> list[int] | None:
    """Return token ids, None where no text can be made. Raises UserError or DataError for a prompt that is no text."""
    tokenizer = dataset.tokenizer
    if tokenizer is None:
        return None
    if isinstance(dataset, ExampleDataset) and config.sample.prompt is None:
        return dataset.prompt()
    end = named_end(config.data, tokenizer.config)
    found = _held_out(dataset, end_id(tokenizer, end)) if config.sample.prompt is None else []
    return found or encode_prompt(tokenizer, config.sample.prompt, end)


def shown_prompt(tokenizer: Any, prompt: list[int]) -> str:
    """Return the text of a prompt as lines that are marked as quoted, empty where it is blank or a special token."""
    before = len(tokenizer.start) if prompt[: len(tokenizer.start)] == tokenizer.start else 0
    text: str = tokenizer.decode(prompt[before:])
    blank = not text.strip() or (len(prompt) == 1 and text in special_tokens(tokenizer))
    return "" if blank else "\n".join(f"> {line}".rstrip() for line in text.strip("\n").split("\n"))


def _held_out(dataset: Any, end: int | None) -> list[int]:
    """Return some tokens of the first held-out sequence, as they are learned: all before its first reply, or a line."""
    batch = dataset.batch("val", 0, 0, 1)
    tokens, learned = batch["tokens"][0].tolist(), batch["targets"][0] >= 0
    if not learned[0] and learned.any():
        return list(tokens[: int(learned.argmax()) + 1])
    parts = [list(part) for ended, part in groupby(tokens[:_TOKENS], lambda token: token == end) if not ended]
    start = dataset.tokenizer.start
    lines = [_line(dataset.tokenizer, part[len(start) :] if part[: len(start)] == start else part) for part in parts]
    line = max(lines, key=len, default=[])
    return dataset.tokenizer.with_start(line) if line else []


def _line(tokenizer: Any, tokens: Sequence[int]) -> list[int]:
    """Return tokens from the start of a line or word on, to the end of a word."""
    pieces = [tokenizer.decode([token]) for token in tokens]
    half = range(1, len(pieces) // 2)
    start = next((place for place in half if pieces[place - 1].endswith("\n")), 0)
    blank = [piece.isspace() for piece in pieces]
    begins = (place for place in half if blank[place - 1] or (pieces[place][:1].isspace() and not blank[place]))
    start = start or next(begins, 0)
    ends = [place for place in range(start + 1, len(pieces)) if pieces[place][:1].isspace()] or [len(pieces)]
    return list(tokens[start : next((end for end in ends if len("".join(pieces[start:end])) >= _CHARACTERS), ends[-1])])
