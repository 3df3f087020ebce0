"""A trained model that scores texts: the losses of whole batches, and the log-likelihood of single continuations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from ttrain.config.schema import Config
from ttrain.core.errors import ConfigError, DataError, NonFiniteError
from ttrain.data.settings import TextConfig
from ttrain.engine.base import Step, Trace
from ttrain.graph import Graph
from ttrain.models.base import LOSS_WEIGHT, loss_weights, means, preparation
from ttrain.tasks.opening import OpenedModel, of_folder, of_run
from ttrain.train.protocols import Array
from ttrain.train.sampling.lengths import StepsByLength
from ttrain.train.sampling.source import TokenSource, check_sampling
from ttrain.train.sampling.stream import end_id
from ttrain.train.settings import without_phases
from ttrain.train.steps.step_graph import StepGraph

_SCORED_PER_ROW = 32  # positions whose scores of the whole vocabulary come to the host at once, for each sequence


class Text(NamedTuple):
    """The ids of a text, and how many tokens at its end are predicted."""

    ids: Sequence[int] | Array
    predicted: int


def windows_of(ids: Sequence[int] | Array, context: int, stride: int | None = None) -> Iterator[Text]:
    """Cut a document into texts that predict every token but the first once, later ones `stride` tokens each.

    Each text holds as much of what comes before its targets as fits.
    """
    done, stride = 0, min(stride or context, context)  # target n is token n + 1
    while done < len(ids) - 1:
        stop = min(done + (stride if done else context), len(ids) - 1)
        yield Text(ids[max(0, stop - context) : stop + 1], stop - done)
        done = stop


class Likelihood(NamedTuple):
    """Likelihood of a continuation: its tokens' summed log-probability in nats, and whether each was the likeliest."""

    total: float
    greedy: bool


@dataclass(frozen=True)
class Scorer:
    """A model on a device. `start` is the token before a text, None where the model knows none.

    Texts are read in rows that are as long as they have to be, some of about equal length at a time.
    """

    given: OpenedModel
    steps: StepsByLength
    rows: int
    start: int | None

    @property
    def tokenizer(self) -> Any:
        """The model's own."""
        return self.given.tokenizer

    @property
    def context(self) -> int:
        """Longest text that the model reads at once."""
        return self.steps.context

    @cached_property
    def source(self) -> TokenSource:
        """Return a source that writes text as `sample` says. Raises ConfigError where the model can't do that."""
        check_sampling(self.given.model, self.given.config.sample)
        return TokenSource(self.steps, self.given.config.sample, self.tokenizer.vocabulary)

    def loss(self, texts: Sequence[Text], told: Callable[[int], object] = lambda texts: None) -> float:
        """Return the mean cross-entropy of all targets in nats; `told` gets how many texts were read."""
        total, prepare = 0.0, preparation(self.given.model)
        for length, numbers in self._batches(texts):
            step = self._step("evaluate", length, lambda graph: graph.trace_evaluate)
            fields, counts = prepare(self._batch([texts[number] for number in numbers], length))
            outputs = step({**fields, **loss_weights(counts)})
            found = means({name: float(value) for name, value in outputs.items()}, counts)
            # Where the loss is a sum of several terms, the first one is that of the next token.
            mean = next((value for name, value in found.items() if name.endswith("/ce")), found["loss"])
            total += (mean or 0.0) * counts[LOSS_WEIGHT]
            told(len(numbers))
        if not math.isfinite(total):
            raise NonFiniteError(f"the loss of the texts is {total}")
        return total / sum(text.predicted for text in texts)

    def likelihoods(
        self, pairs: Sequence[tuple[list[int], list[int]]], told: Callable[[int], object] = lambda pairs: None
    ) -> list[Likelihood]:
        """Return the likelihood of the continuation in each (context, continuation).

        Of a text that is too long for the model, the end counts.

        A first token with nothing before it is not predicted. Raises DataError for a continuation of that alone.
        """
        texts = [self._text(*pair) for pair in pairs]
        found: dict[int, Likelihood] = {}
        for length, numbers in self._batches(texts):
            found |= zip(numbers, self._of_batch([texts[number] for number in numbers], length), strict=True)
            told(len(numbers))
        return [found[number] for number in range(len(pairs))]

    def _text(self, before: list[int], continuation: list[int]) -> Text:
        """Return what of a context and its continuation the model reads."""
        before = before or ([] if self.start is None else [self.start])
        text = [*before, *continuation][-self.context - 1 :]
        if not continuation or len(text) < 2:
            alone = "its context is empty, and this model has no token that begins a text"
            empty = alone if continuation else "it is empty"
            raise DataError(f"{self.tokenizer.decode(continuation)!r} can't be scored: {empty}. Give a text there.")
        return Text(text, min(len(continuation), len(text) - 1))

    def _batches(self, texts: Sequence[Text]) -> Iterator[tuple[int, list[int]]]:
        """Yield the numbers of texts that are read together, from the shortest on, and the length of their rows."""
        lengths = [self.steps.length(len(text.ids) - 1) for text in texts]
        for length, group in groupby(sorted(range(len(texts)), key=lengths.__getitem__), lengths.__getitem__):
            own = list(group)
            yield from ((length, own[first : first + self.rows]) for first in range(0, len(own), self.rows))

    def _batch(self, texts: Sequence[Text], length: int) -> dict[str, Array]:
        """Return `tokens` and `targets`, int64 [rows, length]; a target is -1 where nothing is to be predicted."""
        tokens, targets = np.zeros((self.rows, length), np.int64), np.full((self.rows, length), -1, np.int64)
        for row, (ids, predicted) in enumerate(texts):
            end = len(ids) - 1
            tokens[row, :end] = ids[:-1]
            targets[row, end - predicted : end] = ids[-predicted:]
        return {"tokens": tokens, "targets": targets}

    def _of_batch(self, texts: Sequence[Text], length: int) -> Iterator[Likelihood]:
        most = _SCORED_PER_ROW * self.rows
        step = self._step("scores", length, lambda graph: partial(_trace_scores, graph.model, self.rows))
        batch = self._batch(texts, length)
        owners, places = np.nonzero(batch["targets"] >= 0)
        sums, greedy = np.zeros(len(texts)), np.ones(len(texts), bool)
        for at in range(0, len(owners), most):
            rows, columns = owners[at : at + most], places[at : at + most]
            wanted = batch["targets"][rows, columns]
            inputs = {"tokens": batch["tokens"], "position": np.resize(rows * length + columns, most)}
            found = np.asarray(step(inputs)["logits"], np.float32)[: len(rows), : self.given.model.vocabulary]
            if not np.isfinite(found).all():
                raise NonFiniteError("the model's scores hold NaN or infinity")
            best = found.max(1)
            picked = found[np.arange(len(rows)), wanted]
            totals = best + np.log(np.exp(found - best[:, None]).sum(1, dtype=np.float64))
            np.add.at(sums, rows, picked - totals)
            np.logical_and.at(greedy, rows, found.argmax(1) == wanted)
        yield from (Likelihood(float(total), bool(each)) for total, each in zip(sums, greedy, strict=True))

    def _step(self, name: str, length: int, trace: Callable[[StepGraph], Trace]) -> Step:
        return self.steps.get(name, length, lambda graph: {name: trace(graph)})[name]


@contextmanager
def opened(config: Config) -> Iterator[Scorer]:
    """The model of `run.dir` or `model.from` on the device; text can be drawn as well, as `sample` says.

    Raises CheckpointError for a model that can't be read, UserError for a device that can't do this.
    """
    if config.run.dir is None:
        given = of_folder(dataclasses.replace(config, data=TextConfig()), "reads no text.")
        named = given.tokenizer_config.get("bos_token") or given.end_token
    else:
        always = ("device", "engine", "logger", "sample")
        given = of_run(config, config.eval, always, "reads no text. Give another run.")
        named = given.end_token
    start = next(iter(given.tokenizer.start), end_id(given.tokenizer, named))
    if getattr(given.config.data, "attention", "") == "document":  # a row has one document here
        given.config.data = dataclasses.replace(given.config.data, attention="sequence")  # type: ignore[call-arg]
        start = next(iter(given.tokenizer.start), None)
    model, rows = given.model, config.eval.batch_size
    if not hasattr(model, "logits"):
        raise ConfigError(f"model.name={model.config.name}: has no logits, so it predicts no text.")
    given.config.train = without_phases(given.config.train, batch_size=rows, gradient_accumulation=1)
    with given.on_device(chips=1) as steps:
        yield Scorer(given, steps, rows, start)


def _trace_scores(model: Any, rows: int, graph: Graph) -> None:
    graph.output("logits", model.logits(graph, rows, _SCORED_PER_ROW * rows))
