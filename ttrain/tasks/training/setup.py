"""What a run is made of before a device is touched: config, data, model, and what it begins with."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.config import build
from ttrain.config.saved import continued
from ttrain.config.schema import Config, sections, to_dict
from ttrain.core.errors import CheckpointError
from ttrain.train.checkpoint.adapters import PeftAdapter
from ttrain.train.runs import resume as resuming
from ttrain.train.runs.origin import Origin
from ttrain.train.runs.run_directory import RunDirectory, chosen_model, read_config
from ttrain.train.supervise.heartbeat import Heartbeat

if TYPE_CHECKING:
    from ttrain.data.batches import Dataset
    from ttrain.models.base import Model
    from ttrain.train.runs.resume import ResumePoint


_LATER = ("lora",)  # sections that runs of earlier versions do not have


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


def set_up(config: Config, stack: ExitStack) -> Setup:
    """A run that is continued is held before it is read, until the exit stack closes."""
    Heartbeat.of_process().beat()
    held = resuming.hold_run(config.resume, config.run.dir)
    if held is not None:
        stack.enter_context(closing(held))
    point = resuming.find_resume_point(config.resume, config.run.dir)
    if point is not None and held is not None:  # this run alone removes it
        point = dataclasses.replace(point, checkpoint=dataclasses.replace(point.checkpoint, reader=None))
    base, notes = _base(point, held)
    if base is not None:
        config = continued(base, config)
    elif config.resume == "auto":
        notes.append(f"resume=auto: {config.run.dir} holds no run yet; a new one starts, as command and defaults say.")
    if point is None:
        config = build.with_adapters(config)
    dataset = build.build_dataset(_with_tokenizer(config, point), lambda built: _check_tokenizer(point, built))
    model = build.build_model(config, dataset.vocabulary)
    stored = {**to_dict(config), "model": build.stored_model(config, model)}
    stored["run"]["dir"] = None  # a run does not know where it lies, so it can be moved
    if point is not None:
        resuming.check_architecture(point.checkpoint.config, model.config, point.checkpoint.path)
        resuming.check_adapters(point.checkpoint.config, config.lora, point.checkpoint.path)
        resuming.check_documents(point, dataset.description)
    prompt = _prompt(config, dataset)
    warm = build.build_warm_start(config, model, tokenizer_json(dataset)) if point is None else None
    adapter = None
    if point is None and config.lora.from_ is not None:
        adapter = PeftAdapter.open(config.lora.from_)
        adapter.values(model)  # that they fit is known before a device is touched
    shorter = {length: build.shorter_model(config, model, length) for length in config.train.length_schedule}
    if base is not None and point is None:
        notes += [f"Changed since the run started: {change}" for change in resuming.config_difference(base, stored)]
    name = _model_name(config, point, held)
    return Setup(config, stored, dataset, model, name, shorter, prompt, Origin(held, point, warm, adapter, notes))


def _with_tokenizer(config: Config, point: ResumePoint | None) -> Config:
    """A run that is continued needs the folder of model.from no more: its checkpoint has the tokenizer."""
    own: Any = config.data
    if point is None or getattr(config.model, "from_", None) is None or Path(getattr(own, "tokenizer", "")).is_file():
        return config
    kept = point.checkpoint.path / "tokenizer.json"
    return dataclasses.replace(config, data=dataclasses.replace(own, tokenizer=str(kept))) if kept.is_file() else config


def tokenizer_json(dataset: Dataset) -> str | None:
    """The JSON of the data's tokenizer, where it has one."""
    return None if dataset.tokenizer is None else dataset.tokenizer.to_json()


def _model_name(config: Config, point: ResumePoint | None, held: RunDirectory | None) -> str:
    """A resumed run was chosen by an earlier command."""
    if not config.source.merged:
        return str(config.source.choices.get("model", config.model.name))
    earlier = point.run if point is not None else None if held is None else held.path
    return chosen_model(earlier) or str(config.model.name)


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


def _prompt(config: Config, dataset: Dataset) -> list[int] | None:
    """Token ids of the sample's prompt, checked before training starts; None where no text can be made."""
    from ttrain.train.sampling.draw import encode_prompt

    end_token = getattr(config.data, "end_token", None)
    return None if dataset.tokenizer is None else encode_prompt(dataset.tokenizer, config.sample.prompt, end_token)
