"""A trained model that scores texts: the losses of whole batches, and the log-likelihood of single continuations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from ttrain.config.schema import Config
from ttrain.core.errors import ConfigError, DataError, NonFiniteError
from ttrain.data.settings import TextConfig
from ttrain.engine.base import Step, Trace
from ttrain.graph import Graph
from ttrain.models.base import preparation
from ttrain.tasks.evaluating.windows import Texts
from ttrain.tasks.opening import OpenedModel, of_folder, of_run
from ttrain.train.loop.evaluate import BITS_PER_BYTE, Evaluation, EvaluationResult
from ttrain.train.protocols import Inputs, Outputs
from ttrain.train.sampling.lengths import StepsByLength
from ttrain.train.sampling.source import TokenSource, check_sampling
from ttrain.train.sampling.stream import end_id
from ttrain.train.settings import without_phases
from ttrain.train.steps.step_graph import StepGraph

_SCORED_PER_ROW = 32  # positions whose scores of the whole vocabulary come to the host at once, for each sequence


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

    def loss(self, data: Texts, told: Callable[[int], object] = lambda rows: None, what: str = "text") -> float:
        """Return the mean cross-entropy of all targets in nats; `told` gets how many rows are done.

        Raises DataError where there is no target.
        """
        total, targets = 0.0, 0
        for part in data.parts(self.steps.length):
            step = self._step("evaluate", part.context, lambda graph: graph.trace_evaluate)

            def counted(inputs: Inputs, step: Step = step) -> Outputs:
                told(self.rows)
                return step(inputs)

            evaluation = Evaluation(counted, part, self.rows, None, preparation(self.given.model), what=what)
            result = evaluation()
            assert result is not None
            total, targets = total + cross_entropy(result) * evaluation.tokens, targets + evaluation.tokens
        if not targets:
            raise DataError(f"{what} has no target, so there is no loss of it.")
        return total / targets

    def likelihoods(
        self, pairs: Sequence[tuple[list[int], list[int]]], told: Callable[[int], object] = lambda pairs: None
    ) -> list[Likelihood]:
        """Return the likelihood of the continuation in each (context, continuation).

        Of a text that is too long for the model, the end counts.

        A first token with nothing before it is not predicted. Raises DataError for a continuation of that alone.
        """
        texts = [self._text(*pair) for pair in pairs]
        lengths = [self.steps.length(len(text) - 1) for text, _ in texts]
        found: dict[int, Likelihood] = {}
        for length in sorted(set(lengths)):
            own = [number for number, each in enumerate(lengths) if each == length]
            for first in range(0, len(own), self.rows):
                batch = own[first : first + self.rows]
                found |= zip(batch, self._of_batch([texts[number] for number in batch], length), strict=True)
                told(len(batch))
        return [found[number] for number in range(len(pairs))]

    def _text(self, before: list[int], continuation: list[int]) -> tuple[list[int], int]:
        """Return what of a context and its continuation the model reads, and how many tokens of it are predicted."""
        before = before or ([] if self.start is None else [self.start])
        text = [*before, *continuation][-self.context - 1 :]
        if not continuation or len(text) < 2:
            alone = "its context is empty, and this model has no token that begins a text"
            empty = alone if continuation else "it is empty"
            raise DataError(f"{self.tokenizer.decode(continuation)!r} can't be scored: {empty}. Give a text there.")
        return text, min(len(continuation), len(text) - 1)

    def _of_batch(self, texts: Sequence[tuple[list[int], int]], length: int) -> Iterator[Likelihood]:
        most = _SCORED_PER_ROW * self.rows
        step = self._step("scores", length, lambda graph: partial(_trace_scores, graph.model, self.rows))
        tokens = np.zeros((self.rows, length), np.int64)  # what stands behind a text is not seen by it
        owners, positions, targets = list[int](), list[int](), list[int]()
        for row, (text, count) in enumerate(texts):
            tokens[row, : len(text) - 1] = text[:-1]
            scored = range(len(text) - count, len(text))
            owners += [row] * count
            positions += [row * length + place - 1 for place in scored]
            targets += [text[place] for place in scored]
        sums, greedy = np.zeros(len(texts)), np.ones(len(texts), bool)
        for at in range(0, len(positions), most):
            rows, wanted = np.array(owners[at : at + most]), np.array(targets[at : at + most])
            inputs = {"tokens": tokens, "position": np.resize(np.array(positions[at : at + most]), most)}
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
    given, start = _from_folder(config) if config.run.dir is None else _from_run(config)
    model, rows = given.model, config.eval.batch_size
    if not hasattr(model, "logits"):
        raise ConfigError(f"model.name={model.config.name}: has no logits, so it predicts no text.")
    given.config.train = without_phases(given.config.train, batch_size=rows, gradient_accumulation=1)
    with given.on_device(chips=1) as steps:
        yield Scorer(given, steps, rows, start)


def _from_run(config: Config) -> tuple[OpenedModel, int | None]:
    """The model, and the token before a text."""
    needs = "reads no text. Give another run."
    given = of_run(config, config.eval, ("device", "engine", "logger", "sample"), needs)
    if getattr(given.config.data, "attention", "") == "document":  # a row has one document here
        given.config.data = dataclasses.replace(given.config.data, attention="sequence")  # type: ignore[call-arg]
        return given, next(iter(given.tokenizer.start), None)
    return given, next(iter(given.tokenizer.start), end_id(given.tokenizer, given.end_token))


def _from_folder(config: Config) -> tuple[OpenedModel, int | None]:
    given = of_folder(dataclasses.replace(config, data=TextConfig()), "reads no text.")
    named = given.tokenizer_config.get("bos_token") or given.end_token
    return given, next(iter(given.tokenizer.start), end_id(given.tokenizer, named))


def _trace_scores(model: Any, rows: int, graph: Graph) -> None:
    graph.output("logits", model.logits(graph, rows, _SCORED_PER_ROW * rows))


def cross_entropy(result: EvaluationResult) -> float:
    """Return the cross-entropy of the next token in nats: the loss, or its first term where it is a sum of several."""
    terms = (value for name, value in result.metrics.items() if name != BITS_PER_BYTE and name.endswith("/ce"))
    return next(terms, result.loss)
