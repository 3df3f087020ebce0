"""Batches as pure functions of (split, seed, number of the first sample), so a resumed run repeats no reading.

A seed names one endless stream of samples, and every batch is a part of it. So two batches of 6 rows hold the samples
of one batch of 12, and a run may change its batch size at any step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import DataError
from ttrain.core.spec import DType, TensorSpec
from ttrain.data.counter import Words, derive_key, random_words, shuffled
from ttrain.data.settings import DataConfig
from ttrain.data.tokenizer import Ids, Tokenizer

Split = Literal["train", "val"]
Batch = dict[str, NDArray[Any]]

STREAM = "stream"  # array of a training split: ids one after another, of which sequences are cut
# Words that tell the streams of one seed apart.
_DRAWS, _EPOCHS, _HELD_OUT = 1, 2, 3

_ENTROPY_TOKENS = 1 << 26  # of a longer split the first sequences, which lie all over it, are measured
_ENTROPY_BATCH = 1 << 20  # tokens read at a time


@dataclass(frozen=True)
class Sizes:
    """The sizes that a model and an objective ask of the data; None where there is no such size."""

    context: int | None = None
    inputs: int | None = None
    outputs: int | None = None
    rows: Any = None  # the objective that reads rows, see data/examples.py
    stored: Any = None  # the config of an objective that learns stored distributions, see data/sequences/taught.py


class Baseline(NamedTuple):
    """Loss of the best prediction that ignores the input, which a trained model must beat."""

    name: str
    value: float


class Dataset(Protocol):
    """Samples to train on and held-out samples, as the training loop reads them."""

    fields: dict[str, TensorSpec]  # by name, without the leading batch dimension
    vocabulary: int | None
    tokenizer: Tokenizer | None
    description: dict[str, Any]  # JSON for the run record

    def batch(self, split: Split, seed: int, first: int, rows: int) -> Batch:
        """Return the samples [first, first + rows) of the stream: arrays of shape [rows, *field shape].

        They depend on the arguments alone, in any process. `val` ignores the seed: it runs through the held-out split
        in one fixed mixed order, again and again.
        """

    @property
    def val_samples(self) -> int:
        """Count of held-out samples, at least 1; larger numbers repeat them."""

    def baseline(self, samples: int | None = None) -> Baseline:
        """Return the baseline of the first `samples` held-out samples, None for all of them."""


class Indexed(Dataset, Protocol):
    """A dataset whose training samples have indices into arrays, so that the arrays can lie on a device.

    The arrays are the fields of all examples, in the order of their numbers. Or there is STREAM alone: the index of a
    sequence is then that of its first token.
    """

    def arrays(self, fields: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """Return the specs of the arrays for batches of these fields; all have the same number of rows."""

    def part(self, start: int, stop: int) -> Batch:
        """Return the rows [start, stop) of every array. Raises DataError for a bad id."""

    def indices(self, seed: int, first: int, rows: int) -> Words:
        """Return the indices, uint64 [rows], of the samples that `batch` returns of the training split."""


_Sequences = TypeVar("_Sequences", bound="TokenSequences")


class TokenSequences(ABC):
    """Base of datasets of tokens: sequences of `context` ids, whose length can change while a run goes on.

    Its training data is an endless stream of tokens, epoch after epoch, which sequences are cut from.
    """

    context: int
    vocabulary: int | None
    fields: dict[str, TensorSpec]
    batch: Callable[[Split, int, int, int], Batch]

    @property
    @abstractmethod
    def val_samples(self) -> int:
        """See Dataset."""

    def baseline(self, samples: int | None = None) -> Baseline:
        """Return the unigram entropy of the targets of the first `samples` held-out sequences, in nats per token."""
        count = min(self.val_samples, samples or self.val_samples, max(1, _ENTROPY_TOKENS // self.context))
        rows = max(1, _ENTROPY_BATCH // self.context)
        batches = (self.batch("val", 0, first, min(rows, count - first)) for first in range(0, count, rows))
        assert self.vocabulary is not None
        return Baseline("unigram entropy", unigram_entropy((batch["targets"] for batch in batches), self.vocabulary))

    def at(self: _Sequences, context: int, sequences: int, tokens: int) -> _Sequences:
        """Return the same data in sequences of `context` tokens, from the sequence of number `sequences` on.

        Where data is read in order, that one begins at position `tokens` of its endless stream. Sequences are at most
        as long as before.
        """
        changed = copy(self)
        changed._resize(context, sequences, tokens)
        return changed

    def position(self, seed: int, number: int) -> int:
        """Return the position in the stream that a training sequence of this length begins at."""
        return self._offset + (number - self._first) * self.context

    def _resize(self, context: int, sequences: int, tokens: int) -> None:
        self.context, self._first, self._offset = context, sequences, tokens
        sequence = TensorSpec((context,), DType.INT64)
        self.fields = {"tokens": sequence, "targets": sequence}


class TokenDataset(TokenSequences):
    """Next-token prediction: sequences of `context` ids, and as targets the ids that follow each of them.

    `train` and `val` are one-dimensional arrays of unsigned ids, in memory or memory-mapped. With order=random a
    sequence starts at any token. With order=epoch each epoch cuts the split into pieces of `context` tokens, from a
    random one of the first tokens on, and takes each piece once; shorter sequences are parts of a piece, one after
    another. Neither reads across the end of the split. With order=sequential sequences follow one another, and the
    start of the split follows its end.

    Raises DataError when a split is shorter than context + 1 tokens.
    """

    def __init__(
        self,
        train: Ids,
        val: Ids,
        context: int,
        vocabulary: int,
        config: DataConfig,
        *,
        tokenizer: Tokenizer | None = None,
        description: Mapping[str, Any] | None = None,
        check_batches: bool = False,
        held_out_advice: str | None = None,
    ) -> None:
        self.vocabulary: int | None = vocabulary
        self._ids = vocabulary
        self.tokenizer = tokenizer
        self._order, self._limit, self._check = config.order, config.limit, check_batches
        require_length("training", len(train), context, context + 1, "Give a longer corpus (data.path)")
        advice = held_out_advice or f"Raise data.held_out={config.held_out:g}, give a longer corpus"
        require_length("held-out", len(val), context, context + 1, advice)
        # Plain arrays over the same bytes: indexing a memory map as such costs several times as much.
        self._splits = {"train": train.view(np.ndarray), "val": val.view(np.ndarray)}
        self._longest = context
        self._resize(context, 0, 0)
        self.description = {
            **(description or {}),
            "tokens": {"train": len(train), "val": len(val)},
            "vocabulary": vocabulary,
            "order": config.order,
        }

    def batch(self, split: Split, seed: int, first: int, rows: int) -> Batch:
        """Return `tokens` and `targets`, int64 [rows, context]; see Dataset. Raises DataError for a bad id."""
        if split == "train":
            starts = self.indices(seed, first, rows)
        else:
            starts = held_out(sample_numbers(first, rows), self.val_samples) * np.uint64(self.context)
        return self.read(split, starts)

    def read(self, split: Split, starts: Words) -> Batch:
        """Return the sequences that begin at these places in a split. Raises DataError for a bad id."""
        ids = self._splits[split]
        rows_read = ids[(starts[:, None] + np.arange(self.context + 1, dtype=np.uint64)) % np.uint64(len(ids))]
        if self._check:
            require_ids(rows_read, self._ids, starts, f"the {split} split")
        return {"tokens": rows_read[:, :-1].astype(np.int64), "targets": rows_read[:, 1:].astype(np.int64)}

    def tokens(self, split: Split) -> int:
        """Return the number of tokens of a split."""
        return len(self._splits[split])

    @property
    def val_samples(self) -> int:
        """See Dataset."""
        return (len(self._splits["val"]) - 1) // self.context

    def arrays(self, fields: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """See Indexed. The start of the split is repeated at the end, for a sequence that reads across the end."""
        return {STREAM: TensorSpec((len(self._splits["train"]) + fields["tokens"].shape[1],), DType.INT32)}

    def part(self, start: int, stop: int) -> Batch:
        """See Indexed; the ids are int32 [stop - start]."""
        ids = self._splits["train"].take(np.arange(start, stop), mode="wrap")
        if self._check:
            require_ids(ids[None], self._ids, [start], "the train split")
        return {STREAM: ids.astype(np.int32)}

    def indices(self, seed: int, first: int, rows: int) -> Words:
        """See Indexed."""
        numbers, length = sample_numbers(first, rows, self._limit), len(self._splits["train"])
        if self._order == "random":
            return drawn(seed, numbers, length - self.context)
        places = self._places(numbers, *((self._first, self._offset) if self._limit is None else (0, 0)))
        if self._order == "sequential":
            return places % np.uint64(length)
        pieces, inside = np.divmod(places, np.uint64(self._longest))
        epochs, pieces = shuffled_epochs(seed, pieces, (length - 1) // self._longest)
        shift = random_words(derive_key(_EPOCHS, seed), epochs) % np.uint64((length - 1) % self._longest + 1)
        return pieces * np.uint64(self._longest) + shift + inside

    def position(self, seed: int, number: int) -> int:
        """See TokenSequences; with a limit the stream is not read in order."""
        if self._limit is not None:
            return super().position(seed, number)
        return int(self._places(sample_numbers(number, 1), self._first, self._offset)[0])

    def _places(self, numbers: Words, first: int, offset: int) -> Words:
        """Return where sequences begin in the stream, uint64, if that of number `first` begins at `offset`.

        The stream of order=epoch is made of pieces of the longest length; a sequence lies in one of them.
        """
        done, length = numbers - np.uint64(first), np.uint64(self.context)
        if self._order != "epoch":
            return np.uint64(offset) + done * length
        piece, inside = divmod(offset, self._longest)
        left, whole = np.uint64((self._longest - inside) // self.context), np.uint64(self._longest // self.context)
        later = done - np.minimum(done, left)
        starts: Words = (np.uint64(piece + 1) + later // whole) * np.uint64(self._longest) + later % whole * length
        return np.where(done < left, np.uint64(offset) + done * length, starts)


def sample_numbers(first: int, rows: int, limit: int | None = None) -> Words:
    """Return the numbers of the samples in a batch, uint64 [rows]; with a limit these begin again and again."""
    numbers = np.arange(first, first + rows, dtype=np.uint64)
    return numbers if limit is None else numbers % np.uint64(limit)


def places_of(config: DataConfig, split: Split, seed: int, first: int, rows: int, count: int) -> Words:
    """Return places in [0, count) of the samples of a batch: an epoch takes each once, shuffled unless in order."""
    if split == "val":
        return held_out(sample_numbers(first, rows), count)
    numbers = sample_numbers(first, rows, config.limit)
    return numbers % np.uint64(count) if config.order == "sequential" else shuffled_epochs(seed, numbers, count)[1]


def drawn(seed: int, numbers: Words, count: int) -> Words:
    """Return independent uniform draws from [0, count), one per sample number."""
    return random_words(derive_key(_DRAWS, seed), numbers) % np.uint64(count)


def shuffled_epochs(seed: int, numbers: Words, count: int) -> tuple[Words, Words]:
    """Return the epoch of each sample number, and its place in [0, count); an epoch takes every place once."""
    epochs, positions = np.divmod(numbers, np.uint64(count))
    return epochs, shuffled(random_words(derive_key(_EPOCHS, seed, count), epochs), positions, count)


def held_out(numbers: Words, count: int) -> Words:
    """Return places in [0, count) of held-out samples: one fixed shuffle, so that the first few lie all over."""
    return shuffled(np.full(numbers.shape, derive_key(_HELD_OUT), np.uint64), numbers % np.uint64(count), count)


def unigram_entropy(parts: Iterable[NDArray[np.int64]], vocabulary: int) -> float:
    """Return the entropy, in nats, of the distribution of single targets; targets below zero do not count.

    H = -sum p log p over the ids that occur, where p is an id's share of the targets.
    """
    counts = np.zeros(vocabulary, np.int64)
    for targets in parts:
        counts += np.bincount(targets[targets >= 0], minlength=vocabulary)
    shares = counts[counts > 0] / counts.sum()
    return max(0.0, float(-(shares * np.log(shares)).sum()))  # one token alone gives -0.0


def require_ids(rows: Ids, vocabulary: int, starts: Sequence[int] | Words, place: str) -> None:
    """Raise DataError for the first id outside the vocabulary; `starts` are the positions of the rows in the place."""
    outside = np.argwhere(rows >= vocabulary)
    if outside.size:
        row, column = map(int, outside[0])
        wrong = f"token {int(starts[row]) + column} of {place} has id {rows[row, column]}"
        mend = "Give data.vocabulary and data.dtype as the ids were written, or prepare the tokens again"
        raise DataError(f"{wrong}, but the vocabulary has {vocabulary} ids, from 0 on. {mend}.")


def require_length(split: str, length: int, context: int, needed: int, advice: str) -> None:
    """Raise DataError for a split of fewer tokens than are needed for a sequence."""
    if length < needed:
        most = length - needed + context
        shorter = f", or set model.context to at most {most}" if most > 0 else ""
        few = f"has {length} token(s), but model.context={context} needs at least {needed}"
        raise DataError(f"the {split} split {few}. {advice}{shorter}.")
