"""The start of an attempt: a run or checkpoint that it continues, initial values from elsewhere, or nothing.

Initial values come from another run, a checkpoint or a file of weights. Those that fit by name and shape are taken.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ttrain.core.errors import CheckpointError, UserError
from ttrain.core.files import sha256_file
from ttrain.core.names import listed
from ttrain.core.spec import DType
from ttrain.core.units import format_count
from ttrain.data.tokenizer import Tokenizer
from ttrain.engine.state import State
from ttrain.models.identity import differing
from ttrain.models.weight_checks import Weights, same_when_kept
from ttrain.nn.module import ADAPTER
from ttrain.train.checkpoint.adapters import PeftAdapter, as_for
from ttrain.train.checkpoint.checkpoint import STEMS, Checkpoint, Progress
from ttrain.train.checkpoint.hub_folder import find_folder, holds_model, read_folder
from ttrain.train.checkpoint.retention import remove_unfinished
from ttrain.train.checkpoint.weights_file import Metadata, read_file, read_metadata, same_tokenizer, weights_of
from ttrain.train.logging.metrics import cut_metrics
from ttrain.train.logging.wandb_logger import note_earlier_attempts
from ttrain.train.runs.resume import ResumePoint, find_resume_point, take_up
from ttrain.train.runs.run_directory import RunDirectory
from ttrain.train.steps.session import Session

_OF_EXPERTS = ("experts_per_token", "router", "router_normalised")  # keys of a model that say nothing without experts
_SHOWN = 20  # rows of the table of what does not fit


@dataclass(frozen=True)
class WarmStart:
    """Source of initial values, and the parameters that they fit. Values are read when they are needed.

    Saved buffers count as parameters here. `fitting` maps the parameters that are overwritten, in the model's order, to
    the shape in the source: a matrix there becomes each of a stack of experts (Komatsuzaki et al., 2023). `others` maps
    each other parameter to the shape that the source has under its name, None where it has none.
    """

    source: Path
    model: Any
    fitting: Mapping[str, tuple[int, ...]]
    others: Mapping[str, tuple[int, ...] | None]
    unused: tuple[str, ...]  # names of the source that no parameter has
    differences: tuple[str, ...] = ()  # reasons why taken values mean something else here

    def apply(self, state: State) -> None:
        """Overwrites the fitting parameters; the optimizer's tensors stay as they are."""
        for path in self.fitting:
            state.write(path, self.value(path))

    @cached_property
    def _values(self) -> Mapping[str, Any]:
        return _open(self.source, self.model)[0]

    def value(self, path: str) -> Any:
        """Return the source's own value of a fitting parameter."""
        value, shape = self._values[path], self.model.persistent()[path].shape
        return value if value.shape == shape else np.broadcast_to(value, shape)

    def check_frozen(self, trained: Container[str]) -> None:
        """Raises CheckpointError for parameters that start anew and are not `trained`: they would stay as drawn."""
        own, shapes = self.model.parameters(), self.others
        wrong = [path for path in shapes if path in own and path not in trained]
        if wrong:
            found = {path: list(shapes[path] or ()) or "not" for path in wrong}
            told = (f"{path} {list(own[path].shape)} ({found[path]} in the source)" for path in wrong)
            mend = "lora.rank=null"
            if all(own[path].trainable for path in wrong):
                mend = "take it out of optimizer.freeze, or name it in optimizer.unfreeze"
            raise CheckpointError(
                f"train.init_from={self.source}: what starts anew is frozen and would stay random: {listed(told)}. "
                f"Give sizes and tokenizer as the source has them. Or train it: {mend}."
            )

    def lines(self) -> list[str]:
        """Return lines for people: what was taken, then a row for every parameter that keeps its own initial values."""
        stored = self.model.persistent()
        shapes = {path: stored[path].shape for path in (*self.fitting, *self.others)}
        taken = sum(math.prod(shapes[path]) for path in self.fitting)
        counts = f"{len(self.fitting)} of {len(shapes)} parameters"
        values = f"{format_count(taken)} of {format_count(sum(map(math.prod, shapes.values())))} values"
        lines = [f"Warm start from {self.source}: {counts} ({values}) are taken."]
        if stacks := [path for path, shape in self.fitting.items() if shape != stored[path].shape]:
            layers = listed(dict.fromkeys(path.partition(".feed_forward.")[0] for path in stacks))
            lines[0] += f" The feed-forward of {layers} becomes each of {shapes[stacks[0]][0]} experts."
        width = max(map(len, self.others), default=0)
        for path, found in self.others.items():
            why = "not in the source" if found is None else f"has shape {list(found)} in the source"
            lines.append(f"  {path.ljust(width)}  {list(shapes[path])} starts anew: {why}")
        more = [f"  and {len(lines) - 1 - _SHOWN} more start anew"] if len(lines) - 1 > _SHOWN else []
        lines = lines[: 1 + _SHOWN] + more
        lines += [f"  not used of the source: {listed(self.unused)}"] if self.unused else []
        return lines + [f"WARNING: taken anyway: {difference}" for difference in self.differences]

    def record(self) -> dict[str, Any]:
        """Return values for the run record."""
        others = {path: None if found is None else list(found) for path, found in self.others.items()}
        differences = {"taken_anyway": list(self.differences)} if self.differences else {}
        return {"init_from": str(self.source), "taken": list(self.fitting), "started_anew": others, **differences}


def open_warm_start(
    source: str, model: Any, tokenizer: str | None = None, anyway: bool = False, whole: bool = False
) -> WarmStart:
    """Open a source of initial values for a model; `tokenizer` is that of its data. `whole` stands for model.from.

    Raises CheckpointError where it can't be read, nothing fits, or NaN is in it, if `whole` also where anything does
    not fit, and, unless `anyway`, where the values would compute something else or belong to other tokens.
    """
    key, path = ("model.from", find_folder(source, weights=True)) if whole else ("train.init_from", Path(source))
    values, metadata = _open(path, model, whole)
    parameters = model.persistent()
    fitting, others = _compared(values, parameters, f"{key}={source}")
    known = metadata.of(model)
    known = known if known.get("experts") else {key: known[key] for key in known if key not in _OF_EXPERTS}
    differences = differing(known, model.config)
    vocabulary = getattr(model.config, "vocabulary", None)
    rows = [name for name in fitting if parameters[name].shape[0] == vocabulary]
    if rows and not same_tokenizer(metadata.tokenizer, tokenizer):
        differences.append(f"its tokenizer is another one, so the rows of {', '.join(rows)} mean other tokens")
    unused = tuple(name for name in values if name not in parameters)
    start = WarmStart(path, model, fitting, others, unused, tuple(differences))
    if not fitting:
        told = "\n".join(start.lines()[1:])
        raise CheckpointError(f"{key}={source}: nothing fits this model by name and shape. Give its sizes.\n{told}")
    if differences and not anyway:
        raise CheckpointError(
            f"{key}={source} holds another model: {'; '.join(differences)}. Give these keys as they were, and its "
            "tokenizer with data.tokenizer=<its tokenizer.json> and, for data=documents, data.end_token=<one of its "
            "tokens>, or take what fits with train.init_anyway=true."
        )
    return start


def unrounded(
    values: Mapping[str, Any], model: Any, source: str | None, whole: bool
) -> tuple[Mapping[str, Any], str | None]:
    """Return a run's values with its frozen weights unrounded, and a sentence about those that stay rounded, if any.

    A run in bf16, or with a base in fewer bits, keeps frozen weights rounded; the `source` that it started from has
    them exactly. A `whole` model is that of model.from.
    """
    parameters = model.parameters()
    frozen = {path: each for path, each in parameters.items() if not each.trainable}
    narrow = [path for path, each in frozen.items() if each.code is not None or each.master is DType.BF16]
    if not narrow or source is None:
        return values, None
    given, exact = values, set[str]()
    with suppress(UserError):  # of a source that is gone or damaged
        given, _ = _open(find_folder(source, weights=True) if whole else Path(source), model)
        known = (path for path in narrow if path in given)
        exact = {path for path in known if same_when_kept(given[path], values[path])}
    found = Weights(dict.fromkeys(values), lambda path: (given if path in exact else values)[path])
    lost = f"{len(narrow) - len(exact)} of {len(narrow)}"
    told = f"{lost} frozen weights are exported as the run keeps them, in fewer bits: {source} is gone or has others."
    return found, told if len(narrow) > len(exact) else None


def _compared(
    values: Mapping[str, Any], parameters: Mapping[str, Any], given: str
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...] | None]]:
    """`fitting` and `others` of a WarmStart. Raises CheckpointError for NaN in what fits."""
    fitting, others = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...] | None]()
    for name, parameter in parameters.items():
        if name in values:
            value, wanted = values[name], tuple(parameter.shape)
            if value.shape == wanted or (len(wanted) == 3 and value.shape == wanted[1:]):
                fitting[name] = value.shape
                if not np.isfinite(value).all():
                    raise CheckpointError(f"{given}: {name} holds NaN or infinity. Give another checkpoint.")
            else:
                others[name] = value.shape
            del value  # before the next one is read
        elif ADAPTER not in name:  # those begin anew beside any model
            others[name] = None
    return fitting, others


def _open(path: Path, model: Any, whole: bool = False) -> tuple[Mapping[str, Any], Metadata]:
    """Return values by our paths, each read when it is asked for, and the metadata of the source."""
    if path.is_file() or holds_model(path):
        content = read_file(path)
        metadata = read_metadata(path, content)  # first: of another architecture no name fits
        return Weights.widened(weights_of(path, model, content, strict=whole)), metadata
    if not path.exists():
        ways = "Give a run, a checkpoint, a model folder or a file of weights"
        raise CheckpointError(f"train.init_from={path} does not exist. {ways}.")
    try:
        point = find_resume_point(str(path), None)
    except CheckpointError as error:
        raise CheckpointError(f"train.init_from: {str(error).removeprefix('resume=')}") from None
    assert point is not None  # only resume=none and auto give none
    checkpoint = point.checkpoint
    values = as_for(model, checkpoint.weights(averages=True), checkpoint.config.get("lora") or {})
    return Weights.widened(values), Metadata(checkpoint.config.get("model"), checkpoint.tokenizer)


@dataclass(frozen=True)
class WeightSource:
    """A whole model on the disk by our keys: a folder of Transformers, or the newest checkpoint of a run."""

    path: Path
    model: Mapping[str, Any]
    tokenizer: str | None  # its JSON
    checkpoint: Checkpoint | None = None

    @staticmethod
    def find(given: str) -> WeightSource:
        """Find a folder, hub name, run or checkpoint. Raises UserError for anything else."""
        path = Path(given)
        if path.is_dir() and not holds_model(path):
            point = find_resume_point(given, None)
            assert point is not None  # only resume=none and auto give none
            checkpoint = point.checkpoint
            return WeightSource(checkpoint.path, checkpoint.config["model"], checkpoint.tokenizer, checkpoint)
        path = find_folder(given, weights=True)
        told = read_metadata(path, {})
        return WeightSource(path, told.model or {}, told.tokenizer)

    def values(self, model: Any) -> Mapping[str, Any]:
        """Return values by the model's paths, of a run its averages; each is read when it is asked for."""
        return _open(self.path, model, whole=True)[0]

    @property
    def digest(self) -> str:
        """SHA-256 of names and contents of all files of weights."""
        named = self.checkpoint and {self.path / name for name in self.checkpoint.files_of(*STEMS)}
        files = named or {tensor.path for tensor in read_folder(self.path).values()}
        hashes = [(file.name, sha256_file(file)) for file in sorted(files)]
        return hashlib.sha256(repr(hashes).encode()).hexdigest()

    def has_ids_of(self, tokenizer: Tokenizer | None) -> bool:
        """True if both tokenizers have the same ids of tokens; one that is not known is like any other."""
        both = [json.loads(each) for each in (self.tokenizer, tokenizer and tokenizer.to_json()) if each]
        added = [sorted((token["id"], token["content"]) for token in each.get("added_tokens") or ()) for each in both]
        return len(both) < 2 or (
            added[0] == added[1] and both[0]["model"].get("vocab") == both[1]["model"].get("vocab")
        )


@dataclass
class Origin:
    """Sources of the state, the progress and the files of an attempt."""

    held: RunDirectory | None = None  # the run that this attempt continues
    point: ResumePoint | None = None
    config: dict[str, Any] | None = None  # the recorded config that the command line changes; None for a new run
    warm: WarmStart | None = None  # where a new run takes its initial values from
    adapter: PeftAdapter | None = None  # where a new run takes the values of its adapters from
    notes: list[str] = field(default_factory=list)  # to tell when the attempt starts

    @property
    def run(self) -> Path | None:
        """The folder of the run that it goes on from, this one or another."""
        return self.point.run if self.point is not None else None if self.held is None else self.held.path

    def set_values(self, session: Session, seed: int) -> tuple[str, ...]:
        """Give the state its initial values, a new run's optimizer tensors are zero. Return what to tell of it."""
        if session.graph.objective.frozen is not None:
            session.graph.objective.frozen.write(session.state)
        if self.point is not None:
            return self.point.checkpoint.load(session.state)
        session.initialize(seed, () if self.warm is None else self.warm.fitting)
        if self.warm is not None:
            self.warm.apply(session.state)
        if self.adapter is not None:
            state, warm = session.state, self.warm  # the state may hold the source's weights in fewer bits
            of_source = {} if warm is None else dict.fromkeys(warm.fitting, warm.value)
            self.adapter.apply(state, session.graph.model, lambda path: of_source.get(path, state.read)(path))
        return ()

    def begin(
        self, run: RunDirectory, session: Session, seed: int, stored: dict[str, Any], data: dict[str, Any]
    ) -> tuple[Progress, dict[str, Any], list[str]]:
        """Set the state, and make the run's files go on from it. Return progress, what to record, and what to tell."""
        progress = Progress() if self.point is None else Progress.from_dict(self.point.checkpoint.progress)
        if not run.leads:
            self.set_values(session, seed)
            return progress, {}, []
        remove_unfinished(run.checkpoints)
        note_earlier_attempts(run.path)
        notes = [*self.notes, *self.set_values(session, seed)]
        if self.point is not None:
            attempt, told = take_up(self.point, run, progress.evaluated_at == progress.step, stored, data)
            return progress, attempt, [*told, *notes]
        cut_metrics(run.metrics, 0)
        attempt = {} if self.warm is None else self.warm.record()
        notes += [] if self.warm is None else self.warm.lines()
        if self.adapter is not None:
            attempt["adapters_from"] = str(self.adapter.folder)
            notes.append(f"Adapters start as those of {self.adapter.folder}.")
        return progress, attempt, notes
