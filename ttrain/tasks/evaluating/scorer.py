"""A trained model that scores texts: the losses of whole batches, and the log-likelihood of single continuations."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ttrain.config import build
from ttrain.config.schema import Config
from ttrain.core.errors import ConfigError, NonFiniteError, UserError
from ttrain.core.waiting import Waiting
from ttrain.data.settings import TextConfig
from ttrain.engine.base import Trace
from ttrain.graph import Graph
from ttrain.tasks.opening import OpenedModel, of_folder, of_run
from ttrain.train.loop.evaluate import BITS_PER_BYTE, Evaluation, EvaluationResult
from ttrain.train.protocols import Dataset, Inputs, Outputs
from ttrain.train.sampling.decode import cache_tensors
from ttrain.train.sampling.source import Source, sampling_traces
from ttrain.train.sampling.stream import end_id
from ttrain.train.settings import without_phases

_SCORED_PER_ROW = 32  # positions whose scores of the whole vocabulary come to the host at once, for each sequence


class Likelihood(NamedTuple):
    """Of a continuation: the sum of its tokens' log-probabilities in nats, and whether each was the likeliest."""

    total: float
    greedy: bool


@dataclass(frozen=True)
class Scorer:
    """A model on a device. `start` is the token before a text, None where the model knows none."""

    tokenizer: Any
    model: Any
    context: int
    start: int | None
    step: int | None  # of the checkpoint, where it is one
    origin: str  # the run, or the folder of weights
    precision: str
    rows: int
    steps: dict[str, Callable[[Inputs], Outputs]]
    source: Source | None = None  # of text, where that is wanted

    def loss(
        self, data: Dataset, told: Callable[[int], object] = lambda rows: None, what: str = "text"
    ) -> EvaluationResult:
        """The mean loss over all targets of held-out samples; `told` gets how many sequences are done."""
        from ttrain.models.base import preparation

        def step(inputs: Inputs) -> Outputs:
            told(self.rows)
            return self.steps["evaluate"](inputs)

        result = Evaluation(step, data, self.rows, None, preparation(self.model), what=what)()
        assert result is not None
        return result

    def likelihoods(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[Likelihood]:
        """Of the continuation of each (context, continuation); of what is too long for the model the end counts.

        A first token with nothing before it is not predicted.
        """
        for first in range(0, len(pairs), self.rows):
            yield from self._of_batch(pairs[first : first + self.rows])

    def _of_batch(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[Likelihood]:
        tokens = np.zeros((self.rows, self.context), np.int64)  # what stands behind a text is not seen by it
        owners, positions, targets = list[int](), list[int](), list[int]()
        for row, (before, continuation) in enumerate(pairs):
            before = before or ([] if self.start is None else [self.start])
            text = [*before, *continuation][-self.context - 1 :]
            tokens[row, : len(text) - 1] = text[:-1]
            scored = range(len(text) - min(len(continuation), len(text) - 1), len(text))
            owners += [row] * len(scored)
            positions += [row * self.context + place - 1 for place in scored]
            targets += [text[place] for place in scored]
        sums, greedy, most = np.zeros(len(pairs)), np.ones(len(pairs), bool), _SCORED_PER_ROW * self.rows
        for at in range(0, len(positions), most):
            rows, wanted = np.array(owners[at : at + most]), np.array(targets[at : at + most])
            inputs = {"tokens": tokens, "position": np.resize(np.array(positions[at : at + most]), most)}
            found = np.asarray(self.steps["scores"](inputs)["logits"], np.float32)[: len(rows), : self.model.vocabulary]
            if not np.isfinite(found).all():
                raise NonFiniteError("the model's scores hold NaN or infinity")
            best = found.max(1)
            picked = found[np.arange(len(rows)), wanted]
            totals = best + np.log(np.exp(found - best[:, None]).sum(1, dtype=np.float64))
            np.add.at(sums, rows, picked - totals)
            np.logical_and.at(greedy, rows, found.argmax(1) == wanted)
        yield from (Likelihood(float(total), bool(each)) for total, each in zip(sums, greedy, strict=True))


@contextmanager
def opened(config: Config, *wanted: str) -> Iterator[Scorer]:
    """The model of `run.dir` or `model.from` on the device, with the steps `evaluate` and `scores`, or those wanted.

    Where `text` is wanted it can be drawn as well, as `sample` says.

    Raises CheckpointError for a model that can't be read, UserError for a device that can't do this.
    """
    given, start = _from_folder(config) if config.run.dir is None else _from_run(config)
    model, rows = given.model, config.eval.batch_size
    if not hasattr(model, "logits"):
        raise ConfigError(f"model.name={model.config.name}: has no logits, so it predicts no text.")
    config = given.config
    config.train = without_phases(config.train, batch_size=rows, accumulation=1)
    with ExitStack() as stack:
        device = stack.enter_context(closing(build.build_device(config.device, config.precision)))
        if not device.computes or device.chips > 1:
            why = "shares a batch between chips" if device.computes else "computes no values"
            raise UserError(f"device {device.name} {why}, so task=eval can't use it. Give device=cpu or one chip.")
        if device.caution is not None:
            print(f"WARNING: {device.caution}", file=sys.stderr)
        with Waiting("Loading the model"):
            reads = sampling_traces(model, config.sample) if "text" in wanted else {}
            caches = cache_tensors([trace for several in reads.values() for trace in several.values()])
            session = build.build_session(model, device, *config.step_parts, training=False, further=caches)
            stack.enter_context(closing(session))
            given.load(session.state)
            traces: dict[str, Trace] = {"evaluate": session.graph.trace_evaluate}
            traces["scores"] = partial(_trace_scores, model, rows)
            steps = {name: session.engine.build(name, traces[name]) for name in traces if name in (wanted or traces)}
            source = Source(model, config.sample, given.tokenizer.vocabulary, reads) if "text" in wanted else None
            if source is not None:
                source.build(session.engine.build, session.graph.trace_logits)
        of = (given.step, given.origin, config.precision.name)
        yield Scorer(given.tokenizer, model, model.config.context, start, *of, rows, dict(steps), source)


def _from_run(config: Config) -> tuple[OpenedModel, int | None]:
    """The model, and the token before a text."""
    needs = "reads no text. Give another run."
    given = of_run(config, config.eval, ("device", "engine", "logger", "sample"), needs)
    if getattr(given.config.data, "attention", "") == "document":  # a row has one document here
        given.config.data = dataclasses.replace(given.config.data, attention="sequence")  # type: ignore[call-arg]
        return given, None
    return given, end_id(given.tokenizer, given.end_token)


def _from_folder(config: Config) -> tuple[OpenedModel, int | None]:
    given = of_folder(dataclasses.replace(config, data=TextConfig()), "reads no text.")
    return given, end_id(given.tokenizer, given.tokenizer_config.get("bos_token") or given.end_token)


def _trace_scores(model: Any, rows: int, graph: Graph) -> None:
    graph.output("logits", model.logits(graph, rows, _SCORED_PER_ROW * rows))


def cross_entropy(result: EvaluationResult) -> float:
    """Of the next token, in nats: the loss, or where it is a sum of several its first term."""
    terms = (value for name, value in result.metrics.items() if name != BITS_PER_BYTE and name.endswith("/ce"))
    return next(terms, result.loss)
