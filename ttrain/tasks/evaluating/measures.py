"""The measures of task=eval: documents that are predicted, and questions with several endings.

Documents have a loss, a perplexity and bits per byte. For a question the model chooses the likeliest ending, by the
rules of lm-evaluation-harness.
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

from ttrain.config.schema import Config
from ttrain.core.errors import ConfigError, DataError, NonFiniteError, UserError, raised_as
from ttrain.core.waiting import waited_for
from ttrain.data.corpus import FileList
from ttrain.data.settings import DocumentsConfig, TextConfig
from ttrain.data.sources import DocumentReader, find_sources, read_lines
from ttrain.data.tokenizer import named_place
from ttrain.engine.base import Step, Trace
from ttrain.graph import Graph
from ttrain.models.base import LOSS_WEIGHT, loss_weights, means, next_token_entropy, preparation
from ttrain.tasks.opening import OpenedModel, of_given
from ttrain.train.protocols import Array
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


TRACES: dict[str, Callable[[StepGraph], Trace]] = {  # of the loss of texts, and of scores at some of their positions
    "evaluate": lambda graph: graph.trace_evaluate,
    "scores": lambda graph: partial(_trace_scores, graph.model, graph.rows),
}


@dataclass(frozen=True)
class Scorer:
    """A model that scores texts, with its steps where it is on a device.

    `start` is the token before a text, None where the model knows none. Texts of about equal length are read together,
    in rows that are as long as needed. `on_texts` is called with the number of texts each time.
    """

    given: OpenedModel
    start: int | None
    steps: Any = None  # StepsByLength
    on_texts: Callable[[int], object] = lambda texts: None

    @classmethod
    def of(cls, given: OpenedModel, end_token: str | None) -> Scorer:
        """Return the scorer of a model that is on no device yet. Raises ConfigError where it predicts no text."""
        start, data = next(iter(given.tokenizer.start), end_id(given.tokenizer, end_token)), given.config.data
        if getattr(data, "attention", "") == "document":  # a row has one document here
            alone = replace(data, attention="sequence")  # type: ignore[call-arg]
            given.config, start = replace(given.config, data=alone), next(iter(given.tokenizer.start), None)
        if not hasattr(given.model, "logits"):
            raise ConfigError(f"model.name={given.model.config.name}: has no logits, so it predicts no text.")
        return cls(given, start)

    @property
    def tokenizer(self) -> Any:
        """The model's own."""
        return self.given.tokenizer

    @cached_property
    def context(self) -> int:
        """Longest text that the model reads at once."""
        return int(self.given.model.batch_specs(1)["tokens"].shape[1])

    @property
    def rows(self) -> int:
        """Texts that are read at once."""
        return int(self.steps.session.graph.rows)

    @cached_property
    def source(self) -> TokenSource:
        """Return a source that writes text as `sample` says. Raises ConfigError where the model can't do that."""
        check_sampling(self.given.model, self.given.config.sample)
        return TokenSource(self.steps, self.given.config.sample, self.tokenizer.vocabulary)

    def loss(self, texts: Sequence[Text]) -> float:
        """Return the mean cross-entropy of all targets in nats."""
        total, prepare = 0.0, preparation(self.given.model)
        for length, numbers in waited_for(self._batches(texts), "Predicting texts"):
            step = self._step("evaluate", length)
            fields, counts = prepare(self._batch([texts[number] for number in numbers], length))
            outputs = step({**fields, **loss_weights(counts)})
            found = means({name: float(value) for name, value in outputs.items()}, counts)
            total += (next_token_entropy(found) or 0.0) * counts[LOSS_WEIGHT]
            self.on_texts(len(numbers))
        if not math.isfinite(total):
            raise NonFiniteError(f"the loss of the texts is {total}")
        return total / sum(text.predicted for text in texts)

    def likelihoods(self, texts: Sequence[Text]) -> list[Likelihood]:
        """Return the likelihood of the predicted tokens of each text."""
        found: dict[int, Likelihood] = {}
        for length, numbers in waited_for(self._batches(texts), "Scoring continuations"):
            found |= zip(numbers, self._of_batch([texts[number] for number in numbers], length), strict=True)
            self.on_texts(len(numbers))
        return [found[number] for number in range(len(texts))]

    def text(self, before: list[int], continuation: list[int]) -> Text:
        """Return a context and its continuation as a text; if it is too long, only its end.

        A token with nothing before it is not predicted. Raises DataError for a continuation of such a token alone.
        """
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
        step = self._step("scores", length)
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

    def _step(self, name: str, length: int) -> Step:
        step: Step = self.steps.get(name, length, lambda graph: {name: TRACES[name](graph)})[name]
        return step


@contextmanager
def opened(config: Config) -> Iterator[Scorer]:
    """Open the model of `run.dir` or `model.from` on the device. It can write text too, as `sample` says.

    Raises CheckpointError for a model that can't be read, UserError for a device that can't do this.
    """
    of_folder = config.run.dir is None
    config = replace(config, data=TextConfig()) if of_folder else config
    given = of_given(config, config.eval, "reads no text.", "Give another run.")
    named = (of_folder and given.tokenizer_config.get("bos_token")) or given.end_token
    scorer, rows = Scorer.of(given, named), config.eval.batch_size
    given.config.train = without_phases(given.config.train, batch_size=rows, gradient_accumulation=1)
    with given.on_device(chips=1) as steps:
        yield replace(scorer, steps=steps)


def _trace_scores(model: Any, rows: int, graph: Graph) -> None:
    graph.output("logits", model.logits(graph, rows, _SCORED_PER_ROW * rows))


MEASURES = ("acc", "acc_norm", "acc_bytes")


class Question(NamedTuple):
    """A context, its possible endings, and the number of the right one."""

    context: str
    endings: tuple[str, ...]
    label: int
    place: str  # file:line


def read_questions(file: Path, key: str) -> Iterator[Question]:
    """The rows of a file. Raises DataError that names file and line for one that is no question."""
    with raised_as(DataError, f"{key}: cannot read {file}"):
        for number, line in read_lines(file, len, trains=False):
            if line.strip():
                yield _question(line, f"{file}:{number}")


def _question(line: str, place: str) -> Question:
    told = f"{place}: is not an object with ctx, endings and label, as HellaSwag has them"
    with raised_as(DataError, told, of=(ValueError, LookupError, TypeError, RecursionError)):
        row: Any = json.loads(line)
        context, endings, label = row["ctx"], row["endings"], int(str(row["label"]))
    texts = [context, *(endings if isinstance(endings, list) else [None])]
    if not all(isinstance(text, str) for text in texts) or not all(texts[1:]) or len(texts) < 3:
        raise DataError(f"{place}: ctx must be text, endings a list of at least two texts that are not empty.")
    if not 0 <= label < len(endings):
        raise DataError(f"{place}: label {label} is none of its {len(endings)} endings, which count from 0.")
    return Question(context, tuple(endings), label, place)


def encoded_pair(tokenizer: Any, before: str, after: str) -> tuple[list[int], list[int]]:
    """Return the ids of a context and of what continues it, as lm-evaluation-harness does.

    Spaces at the end of the context belong to the continuation; both are tokenized together.
    """
    kept = before.rstrip()
    before, after = kept, before[len(kept) :] + after
    first = tokenizer.encode(before) if before else []
    return tokenizer.with_start(first) if before else [], tokenizer.encode(before + after)[len(first) :]


class Choices(NamedTuple):
    """Questions, for each of which a model chooses the likeliest ending."""

    source: str
    questions: list[Question]
    texts: list[Text]  # an ending each
    step: str = "scores"
    metrics: dict[str, str] = {"accuracy": "acc_norm", "centred_accuracy": "centred_accuracy"}  # in a run, and here

    @classmethod
    def read(cls, scorer: Scorer, key: str, file: Path, limit: int | None) -> Choices:
        """Read the file that a key names. Raises DataError that names file and row of a bad question."""
        questions = list(islice(read_questions(file, key), limit))
        if not questions:
            raise DataError(f"{key}: {file} has no questions.")
        texts: list[Text] = []
        for question in waited_for(questions, "Reading questions"):
            with raised_as(DataError, question.place, of=DataError):
                pairs = [encoded_pair(scorer.tokenizer, question.context, f" {ending}") for ending in question.endings]
                texts += (scorer.text(*pair) for pair in pairs)
        return cls(str(file), questions, texts)

    def measure(self, scorer: Scorer) -> dict[str, Any]:
        """Shares of questions whose right ending is the likeliest, and their standard errors.

        Centred accuracy is acc_norm as DataComp-LM's CORE has it (Li et al., 2024): 0 for guessing, 1 for all right.
        """
        totals = iter([found.total for found in scorer.likelihoods(self.texts)])
        right = [list(_right(each, list(islice(totals, len(each.endings))))) for each in self.questions]
        counted = np.array(right, np.float64)
        result: dict[str, Any] = {"source": self.source, "questions": len(self.questions)}
        for name, values in zip(MEASURES, counted.T, strict=True):
            result[name] = float(values.mean())
            spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
            result[f"{name}_stderr"] = spread / math.sqrt(len(values))
        guessed = float(np.mean([1 / len(question.endings) for question in self.questions]))
        return {**result, "centred_accuracy": (result["acc_norm"] - guessed) / (1 - guessed)}


def _right(question: Question, totals: Sequence[float]) -> Iterator[bool]:
    """Yield whether the right ending is the likeliest: as it is, by its characters, and by its bytes."""
    characters = [len(ending) for ending in question.endings]
    for sizes in ([1] * len(totals), characters, [len(ending.encode()) for ending in question.endings]):
        yield int(np.argmax(np.array(totals) / sizes)) == question.label


class Documents(NamedTuple):
    """Documents that a model predicts, in windows."""

    facts: dict[str, Any]  # source, counts and notices
    texts: list[Text]
    step: str = "evaluate"
    metrics: dict[str, str] = {"perplexity": "perplexity", "bits_per_byte": "bits_per_byte"}

    @classmethod
    def read(
        cls, scorer: Scorer, key: str, sources: list[str], limit: int | None,
        text_key: str = "text", stride: int | None = None,
    ) -> Documents:  # fmt: skip
        """All documents of the files that a key names. Raises DataError for what can't be read or predicted."""
        given = scorer.given
        chat_key = getattr(given.config.data, "chat_key", DocumentsConfig().chat_key)
        template = given.template or DocumentsConfig().template
        config = DocumentsConfig(sources=[*sources], text_key=text_key, chat_key=chat_key, template=template)
        files = DocumentReader(config, given.conversations() if given.template else None, learns=False)
        try:
            found = find_sources(config)
            documents = list(islice(files.in_turn(found, [len] * len(found)), limit))
        except DataError as error:
            raise DataError(str(error).replace("data.sources:", f"{key}:")) from error
        chat = next((document for document in documents if document.replies is not None), None)
        if chat is not None and given.template is None:
            with raised_as(DataError, f"{chat.place} is a conversation", of=UserError):
                given.conversations()
        texts = [document.text for document in documents]
        with named_place(lambda wanted: next(each.place for each in documents if wanted.search(each.text))):
            told = waited_for(texts, "Reading documents")
            encoded = [np.asarray(ids) for ids in scorer.tokenizer.encode_documents(told)]
        size, first = sum(len(text.encode()) for text in texts), scorer.tokenizer.byte_counts()[1]
        for number, ids in enumerate(encoded):  # without a token before it, the first of a document is only read
            if scorer.start is None or ids[:1].tolist() == [scorer.start]:  # which a template may have written
                size -= int(first[ids[0]]) if len(ids) else 0
            else:
                encoded[number] = np.concatenate([[scorer.start], ids])
        windows = [window for ids in encoded for window in windows_of(ids, scorer.context, stride)]
        tokens = sum(window.predicted for window in windows)
        if not tokens or not size:
            raise DataError(f"{key}={','.join(sources)} has nothing to predict: its documents have a token each.")
        counts = {"documents": len(texts), "tokens": tokens, "bytes": size}
        starts, notices = {"first_tokens_predicted": scorer.start is not None}, _notices(found, files, key)
        return cls({"source": sources, **counts, **starts, "notices": notices}, windows)

    def measure(self, scorer: Scorer) -> dict[str, Any]:
        """Loss, perplexity and bits per byte of all documents."""
        loss = scorer.loss(self.texts)
        bits = loss * self.facts["tokens"] / math.log(2) / self.facts["bytes"]
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return {**self.facts, "loss": loss, "perplexity": perplexity, "bits_per_byte": bits}


def _notices(found: list[FileList], reader: DocumentReader, key: str) -> list[str]:
    """Return sentences about parts of the files that are not read, or are read otherwise than their names say."""
    told = [note.replace("data.sources:", f"{key}:") for each in found for note in each.notices]
    told += [f"{key}: {note}" for note in reader.skipped.notices()]
    given, instead = "data.suffixes says which are.", f"Name them in {key} to have them read as text."
    return [note.replace(given, instead) for note in told]
