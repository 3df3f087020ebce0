"""Documents cut into windows: every token is predicted once, from as much before it as asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ttrain.core.errors import DataError
from ttrain.core.names import listed
from ttrain.data.settings import DocumentsConfig
from ttrain.data.sources import Reader, Source, find_sources
from ttrain.data.tokenizer import Ids, named_place
from ttrain.tasks.evaluating.scorer import Scorer, cross_entropy
from ttrain.train.protocols import Array


@dataclass(frozen=True)
class Window:
    """Part of a document: tokens [start, stop) are read, and those after places `first` to stop - 1 predicted."""

    document: int
    start: int
    stop: int
    first: int


def windows_of(length: int, context: int, stride: int, document: int = 0) -> Iterator[Window]:
    """Of a document of so many tokens, of which the first is only read: later windows predict `stride` tokens each.

    Every window holds as much of what comes before its targets as fits.
    """
    done = 0  # targets that are predicted; target n is token n + 1
    while done < length - 1:
        stop = min(done + (stride if done else context), length - 1)
        yield Window(document, max(0, stop - context), stop, done)
        done = stop


class Texts:
    """Documents as held-out samples: rows of `context` tokens, with targets -1 where nothing is to be predicted."""

    def __init__(self, documents: Sequence[Ids], context: int, stride: int | None = None) -> None:
        self.description: dict[str, Any] = {}
        self._documents, self._context = documents, context
        stride = min(stride or context, context)
        self._windows = [
            window for number, ids in enumerate(documents) for window in windows_of(len(ids), context, stride, number)
        ]

    @property
    def val_samples(self) -> int:
        """How many windows there are."""
        return len(self._windows)

    def batch(self, split: str, seed: int, first: int, rows: int) -> dict[str, Array]:
        """Arrays `tokens` and `targets`, int64 [rows, context]."""
        tokens, targets = np.zeros((rows, self._context), np.int64), np.full((rows, self._context), -1, np.int64)
        for row, window in enumerate(self._windows[first : first + rows]):
            ids = self._documents[window.document]
            tokens[row, : window.stop - window.start] = ids[window.start : window.stop]
            places = slice(window.first - window.start, window.stop - window.start)
            targets[row, places] = ids[window.first + 1 : window.stop + 1]
        return {"tokens": tokens, "targets": targets}


def measure_texts(
    scorer: Scorer, sources: list[str], text_key: str, limit: int | None, stride: int | None
) -> dict[str, Any]:
    """Loss, perplexity and bits per byte of all documents of files. Raises DataError for what can't be read."""
    from tqdm import tqdm

    config = DocumentsConfig(sources=sources, text_key=text_key)
    found = find_sources(config)
    reader = Reader(config)
    documents = list(islice(reader.in_turn(found, [len] * len(found)), limit))
    texts = [document.text for document in documents]
    with named_place(lambda wanted: next(each.place for each in documents if wanted.search(each.text))):
        encoded = [np.asarray(ids) for ids in scorer.tokenizer.encode_documents(texts)]
    size = sum(len(text.encode()) for text in texts)
    if scorer.start is not None:
        encoded = [np.concatenate([[scorer.start], ids]) for ids in encoded]
    else:  # the first token of each document is only read
        first = scorer.tokenizer.byte_counts()[1]
        size -= sum(int(first[ids[0]]) for ids in encoded if len(ids))
    data = Texts(encoded, scorer.context, stride)
    tokens = sum(max(0, len(ids) - 1) for ids in encoded)
    if not tokens or not size:
        raise DataError(f"eval.text={','.join(sources)} has nothing to predict: its documents have a token each.")
    with tqdm(total=data.val_samples, desc="predicting text", unit="seq") as bar:
        result = scorer.loss(data, lambda rows: bar.update(min(rows, data.val_samples - bar.n)), listed(sources))
    loss = cross_entropy(result)
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


def _notices(found: list[Source], reader: Reader) -> list[str]:
    """What of eval.text is not read, or read otherwise than its name says."""
    told = [note.replace("data.sources:", "eval.text:") for each in found for note in each.notices]
    blank = reader.skipped.blank
    told += [f"eval.text: {blank} blank document(s) are left out."] if blank else []
    key, instead = "data.suffixes says which are.", "Name them in eval.text to have them read as text."
    return [note.replace(key, instead) for note in told]
