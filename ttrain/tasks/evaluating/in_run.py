"""Evaluations of train.evals: files are read before a device is open, and measured between the steps of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ttrain.config import build
from ttrain.config.schema import Config
from ttrain.core.errors import ConfigError, Interrupted, UserError
from ttrain.core.folders import at_home
from ttrain.core.waiting import waited_for
from ttrain.engine.base import Step, Trace
from ttrain.models.base import Model
from ttrain.tasks.evaluating.measures import TRACES, Choices, Documents, Scorer
from ttrain.tasks.opening import OpenedModel
from ttrain.tasks.sample import encoded_prompt, read_prompts
from ttrain.train.sampling.source import StepsByLength, TokenSource, written
from ttrain.train.sampling.stream import Stop
from ttrain.train.settings import RunEvalConfig
from ttrain.train.steps.session import Session
from ttrain.train.steps.step_graph import StepGraph


class BuiltSteps(StepsByLength):
    """Steps that a run builds with those that train: once a device has captured one, it takes no more."""

    def __init__(self, session: Session, given: OpenedModel, built: Mapping[str, Step]) -> None:
        super().__init__(session, lambda length: build.resized_model(given.model, length, given.config) or given.model)
        self._built = built

    def get(self, name: str, length: int, traces: Callable[[StepGraph], Mapping[str, Trace]]) -> Mapping[str, Step]:
        """Return the built steps of these names for the length, or for the context where there are none for the length.

        A sample takes the step that computes the whole text for every token.
        """
        return {each: self._built.get(f"{each}_{length}") or self._built[each] for each in traces(self.session.graph)}


class Prompts(NamedTuple):
    """Prompts that a model continues."""

    texts: list[tuple[list[int], Stop]]
    metrics: dict[str, str] = {}

    def measure(self, scorer: Scorer) -> dict[str, Any]:
        """Return pairs of prompt and text."""
        sample = replace(scorer.given.config.sample, mode="ar", cache=False)
        source, tokenizer = TokenSource(scorer.steps, sample, scorer.tokenizer.vocabulary), scorer.tokenizer
        texts = written(source, tokenizer, self.texts, [0] * len(self.texts), on_token=lambda: scorer.on_texts(0))
        prompts = waited_for(self.texts, "Writing samples")
        return {"samples": [(tokenizer.decode(ids), text) for (ids, _), text in zip(prompts, texts, strict=True)]}


@dataclass
class RunEvals:
    """The entries of train.evals with the content of their files."""

    entries: list[tuple[RunEvalConfig, Documents | Choices | Prompts]]
    scorer: Any = None

    @classmethod
    def read(cls, config: Config, model: Model, tokenizer: Any) -> RunEvals:
        """Read all files. Raises UserError that names file and row of what can't be read."""
        if not config.train.evals:
            return cls([])
        if tokenizer is None:
            raise ConfigError(f"train.evals: data={config.data.name} has no tokenizer to read text with. Leave it out.")
        given = OpenedModel(config, {}, None, None, "this run", tokenizer.config)
        given.tokenizer = tokenizer
        if getattr(config.data, "attention", "") != "document":
            given.model = model
        scorer = Scorer.of(given, given.end_token)
        return cls([(each, _read(scorer, n, each)) for n, each in enumerate(config.train.evals)], scorer)

    @property
    def notices(self) -> Iterator[str]:
        """Yield sentences about parts of the files that are not read."""
        for _, content in self.entries:
            yield from content.facts["notices"] if isinstance(content, Documents) else ()

    @property
    def longest_prompt(self) -> int:
        """Return the length of the longest prompt in tokens, 0 where there is none."""
        prompts = [each for _, each in self.entries if isinstance(each, Prompts)]
        return max((len(ids) for each in prompts for ids, _ in each.texts), default=0)

    def prepare(self, session: Session, built: Mapping[str, Step]) -> None:
        """Let a session build the steps of these evaluations, and put them in `built`. Raises UserError for a mesh."""
        if not self.entries:
            return
        if session.graph.chips > 1:
            raise UserError("train.evals: the chips of a mesh share every batch. Leave it out; task=eval runs later.")
        steps, graph = BuiltSteps(session, self.scorer.given, built), session.graph
        read = [each for _, each in self.entries if not isinstance(each, Prompts)]
        wanted = {(each.step, steps.length(len(text.ids) - 1)) for each in read for text in each.texts}
        further = {f"{x}_{n}": TRACES[x](replace(graph, model=steps.resized(n))) for x, n in sorted(wanted)}
        session.graph = replace(graph, further=further)
        self.scorer = replace(self.scorer, steps=steps)

    def measure(self, due: str, stopped: Callable[[], bool], tell: Callable[..., None]) -> dict[str, float]:
        """Return the metrics of the entries that are due, by name; `tell` samples. Raises Interrupted if `stopped`."""
        found: dict[str, float] = {}

        def on_texts(texts: int) -> None:
            if stopped():
                raise Interrupted

        for entry, content in self.entries:
            if entry.every == due:
                numbers = content.measure(replace(self.scorer, on_texts=on_texts))
                found |= {f"eval/{entry.name}/{name}": numbers[key] for name, key in content.metrics.items()}
                for prompt, text in numbers.get("samples", ()):
                    told_of = f"{entry.name}, after {prompt!r}: {text}"
                    tell("sample", told_of, name=entry.name, prompt=prompt, text=text)
        return found


def _read(scorer: Scorer, number: int, entry: RunEvalConfig) -> Documents | Choices | Prompts:
    key = f"train.evals[{number}]"
    if entry.kind == "text":
        return Documents.read(scorer, key, [entry.path], entry.limit)
    if entry.kind == "choices":
        return Choices.read(scorer, key, at_home(entry.path), entry.limit)
    return Prompts([encoded_prompt(scorer.given, *row) for row in read_prompts(entry.path, key)[: entry.limit]])
