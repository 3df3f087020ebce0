"""The measures of task=eval: documents that are predicted, and questions with several endings.

Texts have a loss, perplexity and bits per byte. Of a question the model chooses the likeliest ending, as
lm-evaluation-harness has it choose.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from ttrain.config.schema import Config
from ttrain.core.errors import ConfigError, DataError, NonFiniteError, UserError, raised_as
from ttrain.core.waiting import waited_for
from ttrain.data.corpus import FileList
from ttrain.data.settings import DocumentsConfig, TextConfig
from ttrain.data.sources import DocumentReader, find_sources, read_lines
from ttrain.data.tokenizer import named_place
from ttrain.engine.base import Step, Trace
from ttrain.graph import Graph
from ttrain.models.base import LOSS_WEIGHT, loss_weights, means, preparation
from ttrain.tasks.opening import OpenedModel, of_folder, of_run
from ttrain.train.protocols import Array
from ttrain.train.sampling.source import StepsByLength, TokenSource, check_sampling
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
        given = of_folder(replace(config, data=TextConfig()), "reads no text.")
        named = given.tokenizer_config.get("bos_token") or given.end_token
    else:
        always = ("device", "engine", "logger", "sample")
        given = of_run(config, config.eval, always, "reads no text. Give another run.")
        named = given.end_token
    start = next(iter(given.tokenizer.start), end_id(given.tokenizer, named))
    if getattr(given.config.data, "attention", "") == "document":  # a row has one document here
        given.config.data = replace(given.config.data, attention="sequence")  # type: ignore[call-arg]
        start = next(iter(given.tokenizer.start), None)
    model, rows = given.model, config.eval.batch_size
    if not hasattr(model, "logits"):
        raise ConfigError(f"model.name={model.config.name}: has no logits, so it predicts no text.")
    given.config.train = without_phases(given.config.train, batch_size=rows, gradient_accumulation=1)
    with given.on_device(chips=1) as steps:
        yield Scorer(given, steps, rows, start)


def _trace_scores(model: Any, rows: int, graph: Graph) -> None:
    graph.output("logits", model.logits(graph, rows, _SCORED_PER_ROW * rows))


MEASURES = ("acc", "acc_norm", "acc_bytes")


class Question(NamedTuple):
    """A text, what may come after it, and which of that does."""

    context: str
    endings: tuple[str, ...]
    label: int
    place: str  # file:line


def read_questions(file: Path) -> Iterator[Question]:
    """The rows of a file. Raises DataError that names file and line for one that is no question."""
    with raised_as(DataError, f"eval.choices: cannot read {file}"):
        for number, line in read_lines(file, len, trains=False):
            if line.strip():
                yield _question(line, f"{file}:{number}")


def _question(line: str, place: str) -> Question:
    told = f"{place}: is not an object with ctx, endings and label, as HellaSwag has them"
    with raised_as(DataError, told, of=(ValueError, LookupError, TypeError, RecursionError)):
        row: Any = json.loads(line)
        context, endings, label = row["ctx"], row["endings"], int(row["label"])
    texts = [context, *(endings if isinstance(endings, list) else [None])]
    if not all(isinstance(text, str) for text in texts) or not all(texts[1:]) or len(texts) < 3:
        raise DataError(f"{place}: ctx must be text, endings a list of at least two texts that are not empty.")
    if not 0 <= label < len(endings):
        raise DataError(f"{place}: label {label} is none of its {len(endings)} endings, which count from 0.")
    return Question(context, tuple(endings), label, place)


def encoded_pair(tokenizer: Any, before: str, after: str) -> tuple[list[int], list[int]]:
    """Ids of a context and of what continues it, as lm-evaluation-harness parts them.

    Blanks at the end of the context belong to the continuation; both are tokenized together.
    """
    kept = before.rstrip()
    before, after = kept, before[len(kept) :] + after
    first = tokenizer.encode(before) if before else []
    return tokenizer.with_start(first) if before else [], tokenizer.encode(before + after)[len(first) :]


def measure_choices(scorer: Scorer, file: Path, limit: int | None) -> dict[str, Any]:
    """Shares of questions whose right ending is the likeliest, and their standard errors."""
    questions = list(islice(read_questions(file), limit))
    if not questions:
        raise DataError(f"eval.choices: {file} has no questions.")
    pairs: list[tuple[list[int], list[int]]] = []
    for question in waited_for(questions, "Reading questions"):
        with named_place(lambda _, place=question.place: place):  # type: ignore[misc]
            pairs += [encoded_pair(scorer.tokenizer, question.context, f" {ending}") for ending in question.endings]
    with tqdm(desc="scoring endings", total=len(pairs), unit="ending") as bar:
        totals = iter([found.total for found in scorer.likelihoods(pairs, bar.update)])
    right = [list(_right(each, list(islice(totals, len(each.endings))))) for each in questions]
    counted = np.array(right, np.float64)
    result: dict[str, Any] = {"source": str(file), "questions": len(questions)}
    for name, values in zip(MEASURES, counted.T, strict=True):
        result[name] = float(values.mean())
        spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
        result[f"{name}_stderr"] = spread / math.sqrt(len(values))
    return result


def _right(question: Question, totals: Sequence[float]) -> Iterator[bool]:
    """Yield whether the right ending is the likeliest: as it is, by its characters, and by its bytes."""
    characters = [len(ending) for ending in question.endings]
    for sizes in ([1] * len(totals), characters, [len(ending.encode()) for ending in question.endings]):
        yield int(np.argmax(np.array(totals) / sizes)) == question.label


def measure_texts(
    scorer: Scorer, sources: list[str], text_key: str, limit: int | None, stride: int | None
) -> dict[str, Any]:
    """Loss, perplexity and bits per byte of all documents of files. Raises DataError for what can't be read."""
    given = scorer.given
    chat_key = getattr(given.config.data, "chat_key", DocumentsConfig().chat_key)
    template = given.template or DocumentsConfig().template
    config = DocumentsConfig(sources=sources, text_key=text_key, chat_key=chat_key, template=template)
    found = find_sources(config)
    reader = DocumentReader(config, given.conversations() if given.template else None, learns=False)
    documents = list(islice(reader.in_turn(found, [len] * len(found)), limit))
    chat = next((document for document in documents if document.replies is not None), None)
    if chat is not None and given.template is None:
        with raised_as(DataError, f"{chat.place} is a conversation", of=UserError):
            given.conversations()
    texts = [document.text for document in documents]
    with named_place(lambda wanted: next(each.place for each in documents if wanted.search(each.text))):
        encoded = [np.asarray(ids) for ids in scorer.tokenizer.encode_documents(waited_for(texts, "Reading documents"))]
    size, first = sum(len(text.encode()) for text in texts), scorer.tokenizer.byte_counts()[1]
    for number, ids in enumerate(encoded):  # without a token before it, the first of a document is only read
        if scorer.start is None or ids[:1].tolist() == [scorer.start]:  # which a template may have written
            size -= int(first[ids[0]]) if len(ids) else 0
        else:
            encoded[number] = np.concatenate([[scorer.start], ids])
    windows = [window for ids in encoded for window in windows_of(ids, scorer.context, stride)]
    tokens = sum(window.predicted for window in windows)
    if not tokens or not size:
        raise DataError(f"eval.text={','.join(sources)} has nothing to predict: its documents have a token each.")
    with tqdm(total=len(windows), desc="predicting text", unit="seq") as bar:
        loss = scorer.loss(windows, bar.update)
    return {
        "source": sources,
        "documents": len(texts),
        "tokens": tokens,
        "bytes": size,
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": loss * tokens / math.log(2) / size,
        "first_tokens_predicted": scorer.start is not None,
        "notices": _notices(found, reader),
    }


def _notices(found: list[FileList], reader: DocumentReader) -> list[str]:
    """Return sentences about what of eval.text is not read, or is read otherwise than its name says."""
    told = [note.replace("data.sources:", "eval.text:") for each in found for note in each.notices]
    told += [f"eval.text: {note}" for note in reader.skipped.notices()]
    key, instead = "data.suffixes says which are.", "Name them in eval.text to have them read as text."
    return [note.replace(key, instead) for note in told]
