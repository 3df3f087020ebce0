"""A trained model that scores texts: the losses of whole batches, and the log-likelihood of single continuations."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ttrain.config import build
from ttrain.config.saved import continued
from ttrain.config.schema import Config
from ttrain.core.errors import CheckpointError, ConfigError, NonFiniteError, UserError
from ttrain.core.waiting import Waiting
from ttrain.engine.base import Trace
from ttrain.graph import Graph
from ttrain.models.identity import FUNCTION
from ttrain.train.loop.evaluate import BITS_PER_BYTE, Evaluation, EvaluationResult
from ttrain.train.protocols import Dataset, Inputs, Outputs

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
    step: int  # of the checkpoint
    rows: int
    steps: dict[str, Callable[[Inputs], Outputs]]

    def loss(self, data: Dataset, told: Callable[[int], object] = lambda rows: None) -> EvaluationResult:
        """The mean loss over all targets of held-out samples; `told` gets how many sequences are done."""
        from ttrain.models.base import preparation

        def step(inputs: Inputs) -> Outputs:
            told(self.rows)
            return self.steps["evaluate"](inputs)

        result = Evaluation(step, data, self.rows, None, preparation(self.model))()
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
    """The model of `run.dir` on the device, with the steps `evaluate` and `scores`, or the one that is wanted.

    Raises CheckpointError for a run without such a checkpoint, UserError for a device that can't do this.
    """
    from ttrain.data.end_token import with_end_token
    from ttrain.data.library_tokenizer import parse_tokenizer
    from ttrain.train.checkpoint.retention import find_checkpoint
    from ttrain.train.runs.resume import check_architecture

    assert config.run.dir is not None  # the config's checks hold it so
    checkpoint = find_checkpoint(Path(config.run.dir), config.eval.checkpoint)
    if checkpoint.tokenizer is None:
        raise CheckpointError(f"{checkpoint.path} has no tokenizer, so its model reads no text. Give another run.")
    config = continued(checkpoint.config, config, ("device", "engine", "logger"))
    rows, alone = config.eval.batch_size, getattr(config.data, "attention", "") == "document"
    config.train = dataclasses.replace(config.train, batch_size=rows, accumulation=1, length_schedule=[])
    if alone:  # a row has one document here
        config.data = dataclasses.replace(config.data, attention="sequence")  # type: ignore[call-arg]
    tokenizer = parse_tokenizer(checkpoint.tokenizer)
    model: Any = build.build_model(config, tokenizer.vocabulary)
    check_architecture(checkpoint.config, model.config, checkpoint.path, FUNCTION)
    if not hasattr(model, "logits"):
        raise ConfigError(f"model.name={model.config.name}: has no logits, so it predicts no text.")
    _, end = with_end_token(tokenizer, getattr(config.data, "end_token", None), None)
    start = None if alone or end.added else end.id
    with ExitStack() as stack:
        device = stack.enter_context(closing(build.build_device(config.device, config.precision)))
        if not device.computes or device.chips > 1:
            why = "shares a batch between chips" if device.computes else "computes no values"
            raise UserError(f"device {device.name} {why}, so task=eval can't use it. Give device=cpu or one chip.")
        if device.caution is not None:
            print(f"WARNING: {device.caution}", file=sys.stderr)
        with Waiting("Loading the model"):
            session = stack.enter_context(closing(build.build_session(config, model, device, training=False)))
            checkpoint.load(session.state, optimizer=False)
            traces: dict[str, Trace] = {
                "evaluate": session.graph.trace_evaluate,
                "scores": partial(_trace_scores, model, rows),
            }
            names = wanted or tuple(traces)
            steps = {name: session.engine.build(name, traces[name]) for name in names}
        yield Scorer(tokenizer, model, model.config.context, start, checkpoint.step, rows, dict(steps))


def _trace_scores(model: Any, rows: int, graph: Graph) -> None:
    graph.output("logits", model.logits(graph, rows, _SCORED_PER_ROW * rows))


def cross_entropy(result: EvaluationResult) -> float:
    """Of the next token, in nats: the loss, or where it is a sum of several its first term."""
    terms = (value for name, value in result.metrics.items() if name != BITS_PER_BYTE and name.endswith("/ce"))
    return next(terms, result.loss)
