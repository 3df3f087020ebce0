"""Make a run from the config in five functions.

They find what to resume, merge the config, open the data, build the model and check all. None of them needs the device.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal, cast

import ttrain
from ttrain.config import build
from ttrain.config.saved import continued
from ttrain.config.schema import Config, sections, to_dict
from ttrain.core.errors import CheckpointError, ConfigError, DataError
from ttrain.data.batches import Dataset, TokenDataset
from ttrain.data.examples import ExampleDataset
from ttrain.data.settings import DataConfig, DocumentsConfig, TextConfig
from ttrain.device.info import info_of
from ttrain.models.base import Model, valid_targets
from ttrain.optim.groups import check_groups, check_prefixes
from ttrain.optim.settings import ScheduleConfig
from ttrain.parallel.ranks import Ranks
from ttrain.parallel.world import World
from ttrain.tasks.evaluating.in_run import RunEvals
from ttrain.tasks.training.run import Run, sample_prompt
from ttrain.train.runs import resume as resuming
from ttrain.train.runs.record import package_versions
from ttrain.train.runs.resume import ResumePoint
from ttrain.train.runs.run_directory import RunDirectory, chosen_model, newest_attempt, read_config
from ttrain.train.runs.warm_start import Origin
from ttrain.train.sampling.source import check_sampling
from ttrain.train.steps.phases import PhaseSchedule
from ttrain.train.supervise.child import Heartbeat

_PLACES = ("source", "notices")  # keys of the description of the data that may differ between machines


def start_run(config: Config, stack: ExitStack, world: World | None = None) -> Run:
    """Return the run that a config asks for. The stack holds the lock of a run that is continued.

    Raises UserError for what can't be trained.
    """
    Heartbeat.of_process().beat()
    world = world or World()
    origin = find_origin(config, stack, world)
    config, world.ranks = merge_config(config, origin, world.ranks)
    info_of(config.device).require(config.device)
    dataset = open_data(config, origin, world)
    config = build.learned_from(config, dataset)
    model, stored = build_model(config, dataset, world)
    return check_all(config, stored, dataset, model, origin, world)


def find_origin(config: Config, stack: ExitStack, world: World) -> Origin:
    """Return the run, checkpoint or weights that the run starts from. Raises UserError, also if ranks differ."""
    if world.ranks.count > 1:
        _agree(config, world)
    held = RunDirectory.led(world, lambda: resuming.hold_run(config.resume, config.run.dir))
    if held is not None:
        stack.enter_context(closing(held))
    point = resuming.find_resume_point(config.resume, config.run.dir)
    if point is not None and held is not None:  # this run alone removes it
        point = dataclasses.replace(point, checkpoint=dataclasses.replace(point.checkpoint, reader=None))
    base, notes = _saved_config(point, held)
    if base is None and config.resume == "auto":
        notes.append(f"resume=auto: {config.run.dir} holds no run yet; a new one starts, as command and defaults say.")
    return Origin(held, point, base, notes=notes)


def merge_config(config: Config, origin: Origin, ranks: Ranks) -> tuple[Config, Ranks]:
    """Return the config of the run, its recorded one with the keys of the command line on top, and the ranks.

    Raises ConfigError where the two together break a rule.
    """
    if origin.config is not None:
        if origin.point is not None:
            resuming.check_sources(origin.config, config)
        config = continued(origin.config, config)
    ranks = config.parallel.ranks(ranks.rank, ranks.count)
    if origin.point is None:
        config = dataclasses.replace(config, lora=build.with_adapters(config.lora, config.source.explicit))
    return dataclasses.replace(config, schedule=_branched(config.schedule, config.train.steps, origin)), ranks


def open_data(config: Config, origin: Origin, world: World) -> Dataset:
    """Return the dataset. Raises DataError, and CheckpointError where its tokenizer is not that of the run."""
    data = _with_tokenizer(config.data, getattr(config.model, "from_", None), origin.point)

    def check(dataset: Dataset) -> None:
        """Check the tokenizer before the vocabulary, whose advice would not help where the text has changed."""
        if origin.point is not None:
            resuming.check_tokenizer(origin.point.checkpoint, dataset.tokenizer)

    with world.leader_first():
        dataset = build.build_dataset(dataclasses.replace(config, data=data), check)
    known, tokenizer = getattr(config.model, "from_", None) or config.train.init_from, dataset.tokenizer
    if tokenizer is not None and tokenizer.start and known is None and isinstance(data, TextConfig):
        # A new model of one long text never sees what stands before texts.
        tokenizer.config = {**tokenizer.config, "add_bos_token": False}
    world.agree("data", {key: value for key, value in dataset.description.items() if key not in _PLACES})
    return dataset


def build_model(config: Config, dataset: Dataset, world: World) -> tuple[Model, dict[str, Any]]:
    """Return the model on symbolic tensors, and the config as checkpoints keep it."""
    model = build.build_model(config, dataset.vocabulary)
    check = check_prefixes if config.source.merged else check_groups  # a run that has begun may go on as it is
    check(model.parameters(), config.optimizer)
    stored = {**to_dict(config), "model": build.resolved_model(config.model, model)}
    stored["parallel"]["slices"] = world.ranks.slices if world.ranks.slices > 1 else None
    stored["run"]["dir"] = None  # a run does not know where it lies, so it can be moved
    return model, stored


def check_all(
    config: Config, stored: dict[str, Any], dataset: Dataset, model: Model, origin: Origin, world: World
) -> Run:
    """Return the run, if its parts fit each other and its origin. Raises CheckpointError or UserError."""
    point, train = origin.point, config.train
    if point is not None:
        resuming.check_architecture(point.checkpoint.config, model.config, point.checkpoint.path)
        resuming.check_adapters(point.checkpoint.config, config.lora, point.checkpoint.path)
        resuming.check_documents(point, dataset.description)
    objective = build.build_objective(config, world.ranks.slices)
    if isinstance(dataset, ExampleDataset):
        dataset.objective = cast("Any", objective)
    if objective.frozen is not None:
        known = stored["objective"].get("frozen_hash")
        stored["objective"]["frozen_hash"] = objective.frozen.check(known, dataset.tokenizer, cast("Any", model).length)
    phases = PhaseSchedule.of(train, getattr(dataset, "context", None), getattr(dataset, "weights", ()))
    prompt, empty = sample_prompt(config, dataset), check_targets(dataset, config, phases)
    if prompt is not None:
        check_sampling(model, config.sample)
    evals = RunEvals.read(config, model, dataset.tokenizer) if world.leads or world.ranks.dividing else RunEvals([])
    if point is None:
        origin.warm = build.build_warm_start(config, model, dataset.tokenizer)
        origin.adapter = build.build_adapters(config.lora, model)
        if origin.config is not None:
            changes = resuming.config_difference(origin.config, stored)
            origin.notes += (f"Changed since the run started: {change}" for change in changes)
    shorter = {length: build.shorter_model(model, length, config) for length in train.length_schedule}
    chosen = chosen_model(origin.run) if config.source.merged else config.source.choices.get("model")
    return Run(
        config,
        stored,
        dataset,
        model,
        model_name=chosen or config.model.name,
        shorter=shorter,
        objective=objective,
        prompt=prompt,
        origin=origin,
        warnings=[*dataset.description.get("notices", ()), *empty, *evals.notices],
        world=world,
        earlier=newest_attempt(origin.run),
        evals=evals,
    )


def _saved_config(point: ResumePoint | None, held: RunDirectory | None) -> tuple[dict[str, Any] | None, list[str]]:
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
        config = read_config(run)
        if missing := [section for section in sections() if section not in config]:
            raise CheckpointError(f"{run / 'config.yaml'} is not whole: it has no {missing[0]!r}.")
    except CheckpointError as error:
        if point is not None:
            return point.checkpoint.config, [f"WARNING: {error} The config of the checkpoint is taken instead."]
        told = f"{error} {run} has no checkpoint either, so nothing tells what it trains"
        raise CheckpointError(f"{told}. Start anew with its whole command, resume=none and another run.dir.") from None
    return config, [] if point is not None else [f"{run} has no checkpoint yet; it starts again with its own config."]


def _branched(schedule: ScheduleConfig, steps: int | None, origin: Origin) -> ScheduleConfig:
    """Fill in the checkpoint's step as the start of a decay, where the schedule asks. A branch keeps its own."""
    point = origin.point
    if schedule.decay_from != 0:
        return schedule
    if point is None:
        told = "schedule.decay_from=0: is the step that a run branches off from, and this one starts anew"
        raise ConfigError(f"{told}. Give resume=<run or checkpoint>, or the number of a step.")
    known = None if origin.held is None else (origin.config or {})["schedule"].get("decay_from")
    step = known or point.checkpoint.step
    if step >= (end := schedule.steps or steps or float("inf")):  # not known before it is measured
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
        return cast("DataConfig", data)
    kept = point.checkpoint.path / "tokenizer.json"
    return cast("DataConfig", dataclasses.replace(data, tokenizer=str(kept)) if kept.is_file() else data)


_ROWS, _TOKENS = 4096, 1 << 20  # at most that are looked at,
_MORE = 16  # and times as many where none of these has a target


def empty_rows(dataset: Dataset, split: Literal["train", "val"], seed: int, rows: int) -> tuple[int, int]:
    """Look at the first `rows` samples of a split, or at as many of them as take about a second.

    More are looked at where none of those has a target. Return how many were, and how many of them have none.
    """
    length = max(dataset.fields["targets"].size, 1)
    at_once = max(1, min(64, _TOKENS // length))
    most, done, empty = max(at_once, min(_ROWS, _TOKENS // length)), 0, 0
    while done < min(rows, most if done > empty else _MORE * most):
        count = min(at_once, rows - done)
        batch = dataset.batch(split, seed, done, count)
        empty += sum(not valid_targets({"targets": row}) for row in batch["targets"])
        done += count
    return done, empty


def check_targets(dataset: Dataset, config: Config, schedule: PhaseSchedule) -> list[str]:
    """Return what to tell of rows without a target. Raises DataError where no row that a run reads has one."""
    if isinstance(dataset, TokenDataset | ExampleDataset) or dataset.fields["targets"].dtype.is_floating:
        return []  # all have targets
    found, data, train, seed = [], config.data, config.train, config.run.seed
    samples = schedule.read(0, train.steps or train.phase_steps).samples
    for length in dict.fromkeys(phase.length for phase in schedule.phases):
        shorter: Any = dataset.at(length, 0, 0) if train.length_schedule else dataset  # type: ignore[attr-defined]
        look = empty_rows(shorter, "train", seed, samples)
        of = f"training sequences of {length} tokens" if train.length_schedule else "training sequences"
        found += _told(look, samples, of, "nothing is learned of them", data)
    held_out = min(dataset.val_samples, train.eval_sequences or dataset.val_samples)
    more = ", or give a larger " + ("data.held_out" if held_out == dataset.val_samples else "train.eval_sequences")
    look = empty_rows(dataset, "val", seed, held_out)
    return [*found, *_told(look, held_out, "held-out sequences", "val/loss says nothing of them", data, more)]


def _told(look: tuple[int, int], samples: int, of: str, so: str, data: DataConfig, more: str = "") -> list[str]:
    rows, empty = look
    if not empty:
        return []
    why, fix = _reason(data)
    first = "" if rows == samples else "first "
    if empty < rows:
        count = f"{empty:,} of the {first}{rows:,} {of} that are read"
        return [f"{count} have no target, so {so}: {why}. To mend it, {fix}."]
    told = f"none of the {first}{rows:,} {of} that are read has a target, so there would be no loss: {why}"
    raise DataError(f"{told}. To go on, {fix}{more}.")


def _reason(data: DataConfig) -> tuple[str, str]:
    """Return why a row has no target, and what helps."""
    if isinstance(data, DocumentsConfig) and data.loss_on == "replies":
        whole = "" if data.long_documents == "skip" else ", or leave longer documents out with data.long_documents=skip"
        return "no part of a reply lies in them (data.loss_on=replies)", f"give a larger model.context{whole}"
    if isinstance(data, DocumentsConfig) and data.attention == "document":
        return (
            "each of their documents has one token (data.attention=document)",
            "leave such documents out, or give data.attention=sequence",
        )
    return f"data={data.name} gives no target of zero or more", "look at the targets of its batches"
