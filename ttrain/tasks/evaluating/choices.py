"""Questions with several endings, of which the model chooses the likeliest; the measures of lm-evaluation-harness."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ttrain.core.errors import DataError
from ttrain.data.sources import read_lines
from ttrain.data.tokenizer import named_place
from ttrain.tasks.evaluating.scorer import Scorer

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
    from tqdm import tqdm

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
