"""The measures of task=eval: documents that are predicted, and questions with several endings.

Texts have a loss, perplexity and bits per byte. Of a question the model chooses the likeliest ending, as
lm-evaluation-harness has it choose.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from ttrain.core.errors import DataError, UserError
from ttrain.data.corpus import FileList
from ttrain.data.settings import DocumentsConfig
from ttrain.data.sources import DocumentReader, find_sources, read_lines
from ttrain.data.tokenizer import named_place
from ttrain.tasks.evaluating.scorer import Scorer, windows_of

MEASURES = ("acc", "acc_norm", "acc_bytes")


class Question(NamedTuple):
    """A text, what may come after it, and which of that does."""

    context: str
    endings: tuple[str, ...]
    label: int
    place: str  # file:line


def read_questions(file: Path) -> Iterator[Question]:
    """The rows of a file. Raises DataError that names file and line for one that is no question."""
    try:
        for number, line in read_lines(file, len, trains=False):
            if line.strip():
                yield _question(line, f"{file}:{number}")
    except OSError as error:
        raise DataError(f"eval.choices: cannot read {file}: {error.strerror or error}.") from None


def _question(line: str, place: str) -> Question:
    try:
        row: Any = json.loads(line)
        context, endings, label = row["ctx"], row["endings"], int(row["label"])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise DataError(f"{place}: is not an object with ctx, endings and label, as HellaSwag has them.") from None
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
    for question in questions:
        with named_place(lambda _, place=question.place: place):  # type: ignore[misc]
            pairs += [encoded_pair(scorer.tokenizer, question.context, f" {ending}") for ending in question.endings]
    with tqdm(desc="scoring endings", total=len(pairs), unit="ending") as bar:
        totals = [found.total for found in scorer.likelihoods(pairs, bar.update)]
    right: list[list[bool]] = []
    for question in questions:
        own, totals = totals[: len(question.endings)], totals[len(question.endings) :]
        right.append(list(_right(question, own)))
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
        try:
            given.conversations()
        except UserError as error:
            raise DataError(f"{chat.place} is a conversation. {error}") from None
    texts = [document.text for document in documents]
    with named_place(lambda wanted: next(each.place for each in documents if wanted.search(each.text))):
        encoded = [np.asarray(ids) for ids in scorer.tokenizer.encode_documents(texts)]
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
