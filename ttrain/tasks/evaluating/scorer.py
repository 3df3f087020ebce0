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
from ttrain.data.settings import TextConfig
from ttrain.engine.base import Trace
from ttrain.graph import Graph
from ttrain.models.identity import FUNCTION
from ttrain.nn.settings import LoraConfig
from ttrain.train.loop.evaluate import BITS_PER_BYTE, Evaluation, EvaluationResult
from ttrain.train.protocols import Dataset, Inputs, Outputs
from ttrain.train.sampling.decode import cache_tensors
from ttrain.train.sampling.source import Source, sampling_traces
from ttrain.train.sampling.stream import end_id

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
    rows: int
    steps: dict[str, Callable[[Inputs], Outputs]]
    source: Source | None = None  # of text, where that is wanted

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


@dataclass
class _Given:
    """A model before it is on a device. `load` gives a state its values."""

    config: Config
    model: Any
    tokenizer: Any
    start: int | None
    step: int | None
    origin: str
    load: Callable[[Any], object]


@contextmanager
def opened(config: Config, *wanted: str) -> Iterator[Scorer]:
    """The model of `run.dir` or `model.from` on the device, with the steps `evaluate` and `scores`, or those wanted.

    Where `text` is wanted it can be drawn as well, as `sample` says.

    Raises CheckpointError for a model that can't be read, UserError for a device that can't do this.
    """
    given = _from_folder(config) if config.run.dir is None else _from_run(config, config.run.dir)
    model, rows = given.model, config.eval.batch_size
    if not hasattr(model, "logits"):
        raise ConfigError(f"model.name={model.config.name}: has no logits, so it predicts no text.")
    config = given.config
    config.train = dataclasses.replace(config.train, batch_size=rows, accumulation=1, length_schedule=[])
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
        origin, context = given.origin, model.config.context
        yield Scorer(given.tokenizer, model, context, given.start, given.step, origin, rows, dict(steps), source)


def _from_run(config: Config, run: str) -> _Given:
    from ttrain.data.end_token import named_end
    from ttrain.data.library_tokenizer import parse_tokenizer
    from ttrain.train.checkpoint.retention import find_checkpoint
    from ttrain.train.runs.resume import check_adapters, check_architecture

    checkpoint = find_checkpoint(Path(run), config.eval.checkpoint)
    if checkpoint.tokenizer is None:
        raise CheckpointError(f"{checkpoint.path} has no tokenizer, so its model reads no text. Give another run.")
    config = continued(checkpoint.config, config, ("device", "engine", "logger", "sample"))
    alone = getattr(config.data, "attention", "") == "document"
    if alone:  # a row has one document here
        config.data = dataclasses.replace(config.data, attention="sequence")  # type: ignore[call-arg]
    tokenizer = parse_tokenizer(checkpoint.tokenizer)
    model = build.build_model(*config.model_parts, tokenizer.vocabulary)
    check_architecture(checkpoint.config, model.config, checkpoint.path, FUNCTION)
    check_adapters(checkpoint.config, config.lora, checkpoint.path)
    start = None if alone else end_id(tokenizer, named_end(config.data, checkpoint.tokenizer_config))
    load = partial(checkpoint.load, optimizer=False)
    return _Given(config, model, tokenizer, start, checkpoint.step, run, load)


def _from_folder(config: Config) -> _Given:
    from ttrain.data.end_token import CONFIG_FILE, configured_end, read_tokenizer_config, token_text
    from ttrain.data.library_tokenizer import parse_tokenizer
    from ttrain.tasks.export import with_added
    from ttrain.train.checkpoint.hub_folder import find_folder
    from ttrain.train.checkpoint.weights_file import read_file, read_metadata, read_parameters

    folder = find_folder(config.model.from_, weights=True)  # the config's checks hold it so
    content = read_file(folder)
    text = read_metadata(folder, content).tokenizer
    if text is None:
        raise CheckpointError(f"{folder} has no tokenizer.json, so its model reads no text. Bring the whole folder.")
    tokenizer = parse_tokenizer(text)
    given, config = config, dataclasses.replace(config, lora=LoraConfig(), data=TextConfig())
    model = build.build_model(*config.model_parts, tokenizer.vocabulary)
    values = with_added(given, read_parameters(folder, model, content), tokenizer.vocabulary)

    def load(state: Any) -> None:
        for name, value in values.items():
            state.write(name, value)

    first = token_text(read_tokenizer_config(folder / CONFIG_FILE).get("bos_token"))
    start = end_id(tokenizer, first or configured_end(folder / CONFIG_FILE))
    return _Given(config, model, tokenizer, start, None, str(folder), load)


def _trace_scores(model: Any, rows: int, graph: Graph) -> None:
    graph.output("logits", model.logits(graph, rows, _SCORED_PER_ROW * rows))


def cross_entropy(result: EvaluationResult) -> float:
    """Of the next token, in nats: the loss, or where it is a sum of several its first term."""
    terms = (value for name, value in result.metrics.items() if name != BITS_PER_BYTE and name.endswith("/ce"))
    return next(terms, result.loss)
