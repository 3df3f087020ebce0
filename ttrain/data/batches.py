"""Batches as pure functions of (split, seed, number of the first sample): nothing to replay on resume.

Every batch is a part of the one endless stream of samples that a seed names, so two batches of 6 rows hold the samples
of one batch of 12, and a run may change its batch size wherever it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
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

# Words that tell the streams of one seed apart.
_DRAWS, _PASSES, _HELD_OUT = 1, 2, 3

_ENTROPY_TOKENS = 1 << 26  # a longer split is measured on as many tokens in evenly spaced runs
_ENTROPY_RUNS = 64


@dataclass(frozen=True)
class Sizes:
    """What a model asks of its data; None where it has no such size."""

    context: int | None = None
    inputs: int | None = None
    outputs: int | None = None


class Baseline(NamedTuple):
    """Loss of the best prediction that ignores the input, which a trained model must beat."""

    name: str
    value: float


class Dataset(Protocol):
    """What the training loop reads."""

    fields: dict[str, TensorSpec]  # by name, without the leading batch dimension
    vocabulary: int | None
    tokenizer: Tokenizer | None
    description: dict[str, Any]  # JSON for the run record

    def batch(self, split: Split, seed: int, first: int, rows: int) -> Batch:
        """The samples [first, first + rows) of the stream: arrays of shape [rows, *field shape].

        They are the same for the same arguments, in any process.
        `val` ignores the seed: it runs through the held-out split in one fixed mixed order, again and again.
        """
        ...

    def val_batches(self, rows: int) -> int:
        """Batches of `rows` (over all ranks) that fit in the held-out split once, at least 1.

        The remainder, fewer than `rows` samples, is left out; a split smaller than one batch repeats within it.
        """
        ...

    @property
    def baseline(self) -> Baseline: ...


class Resizable(Dataset, Protocol):
    """A dataset whose sequences can change their length while a run goes on."""

    def at(self, context: int, sequences: int, tokens: int) -> Resizable:
        """The same data in sequences of `context` tokens, from the sequence of number `sequences` on.

        `tokens` were read before that one: where data is read in order, it goes on there.
        """
        ...


_Sequences = TypeVar("_Sequences", bound="TokenSequences")


class TokenSequences:
    """What datasets of tokens share: sequences of `context` ids whose length can change on the way."""

    context: int
    fields: dict[str, TensorSpec]

    def at(self: _Sequences, context: int, sequences: int, tokens: int) -> _Sequences:
        """The same data in sequences of `context`, at most as many tokens as before; see Resizable.at.

        Where it is read in order, the sequence of number `sequences` starts at token `tokens`, so that a run that
        changes its length goes on where it was.
        """
        changed = copy(self)
        changed._resize(context, sequences, tokens)
        return changed

    def _resize(self, context: int, sequences: int, tokens: int) -> None:
        self.context, self._first, self._offset = context, sequences, tokens
        sequence = TensorSpec((context,), DType.INT64)
        self.fields = {"tokens": sequence, "targets": sequence}


class TokenDataset(TokenSequences):
    """Next-token prediction: sequences of `context` ids, and as targets the ids that follow each of them.

    `train` and `val` are one-dimensional arrays of unsigned ids, in memory or memory-mapped. With order=random
    a sequence starts at any token. With order=epoch a pass cuts the split into blocks of `context` tokens, starting at
    a random one of the first, and takes each once. No sequence of these reads across the end of its split. With
    order=read sequences follow one another, and the end of the split is followed by its start.

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
    ) -> None:
        self.vocabulary: int | None = vocabulary
        self._ids = vocabulary
        self.tokenizer = tokenizer
        self._order, self._limit, self._check = config.order, config.limit, check_batches
        _require_length("training", len(train), context, "Give a longer corpus (data.path)")
        _require_length("held-out", len(val), context, f"Raise data.held_out={config.held_out:g}, give a longer corpus")
        # Plain arrays over the same bytes: indexing a memory map as such costs several times as much.
        self._splits = {"train": train.view(np.ndarray), "val": val.view(np.ndarray)}
        self._resize(context, 0, 0)
        self.description = {
            **(description or {}),
            "tokens": {"train": len(train), "val": len(val)},
            "vocabulary": vocabulary,
            "order": config.order,
        }

    def _resize(self, context: int, sequences: int, tokens: int) -> None:
        super()._resize(context, sequences, tokens)
        windows = np.lib.stride_tricks.sliding_window_view
        self._windows = {split: windows(ids, context + 1) for split, ids in self._splits.items()}

    def batch(self, split: Split, seed: int, first: int, rows: int) -> Batch:
        """Arrays `tokens` and `targets`, int64 [rows, context]. See Dataset. Raises DataError for a bad id."""
        numbers = sample_numbers(first, rows)
        starts = self._train_starts(seed, numbers) if split == "train" else self._val_starts(numbers)
        if split == "train" and self._order == "read":
            ids = self._splits[split]
            rows_read = ids[(starts[:, None] + np.arange(self.context + 1, dtype=np.uint64)) % np.uint64(len(ids))]
        else:
            rows_read = self._windows[split][starts]
        if self._check:
            self._check_ids(split, starts, rows_read)
        return {"tokens": rows_read[:, :-1].astype(np.int64), "targets": rows_read[:, 1:].astype(np.int64)}

    def val_batches(self, rows: int) -> int:
        """See Dataset."""
        return max(1, self._blocks("val") // rows)

    @cached_property
    def baseline(self) -> Baseline:
        """Unigram entropy of the held-out split, in nats per token."""
        return Baseline("unigram entropy", unigram_entropy(self._splits["val"], self._ids))

    def _train_starts(self, seed: int, numbers: Words) -> Words:
        first, offset = np.uint64(self._first), np.uint64(self._offset)
        if self._limit is not None:
            numbers = numbers % np.uint64(self._limit)
            first = offset = np.uint64(0)
        if self._order == "read":
            places: Words = offset + (numbers - first) * np.uint64(self.context)
            return places % np.uint64(len(self._splits["train"]))
        if self._order == "random":
            return drawn(seed, numbers, len(self._windows["train"]))
        passes, blocks = shuffled_passes(seed, numbers, self._blocks("train"))
        spare = np.uint64((len(self._splits["train"]) - 1) % self.context + 1)
        return blocks * np.uint64(self.context) + random_words(derive_key(_PASSES, seed), passes) % spare

    def _val_starts(self, numbers: Words) -> Words:
        return held_out(numbers, self._blocks("val")) * np.uint64(self.context)

    def _blocks(self, split: str) -> int:
        return (len(self._splits[split]) - 1) // self.context

    def _check_ids(self, split: str, starts: Words, rows_read: Ids) -> None:
        outside = np.argwhere(rows_read >= self._ids)
        if outside.size:
            row, column = map(int, outside[0])
            where = f"token {int(starts[row]) + column} of the {split} split"
            raise outside_vocabulary(int(rows_read[row, column]), self._ids, where)


def sample_numbers(first: int, rows: int) -> Words:
    """Which samples of the stream a batch holds, uint64 [rows]."""
    return np.arange(first, first + rows, dtype=np.uint64)


def drawn(seed: int, numbers: Words, count: int) -> Words:
    """Independent uniform draws from [0, count), one per sample number."""
    return random_words(derive_key(_DRAWS, seed), numbers) % np.uint64(count)


def shuffled_passes(seed: int, numbers: Words, count: int) -> tuple[Words, Words]:
    """The pass that each sample number falls in, and its place in [0, count), each taken once per pass."""
    passes, positions = np.divmod(numbers, np.uint64(count))
    return passes, shuffled(random_words(derive_key(_PASSES, seed, count), passes), positions, count)


def held_out(numbers: Words, count: int) -> Words:
    """Places in [0, count) of held-out samples: one fixed shuffle, so that the first few are spread over the split."""
    return shuffled(np.full(numbers.shape, derive_key(_HELD_OUT), np.uint64), numbers % np.uint64(count), count)


def unigram_entropy(ids: Ids, vocabulary: int) -> float:
    """Entropy in nats of the distribution of single tokens; estimated from evenly spaced runs of a very long array."""
    counts = np.zeros(vocabulary, np.int64)
    run = _ENTROPY_TOKENS // _ENTROPY_RUNS
    for start in range(0, len(ids), run if len(ids) <= _ENTROPY_TOKENS else len(ids) // _ENTROPY_RUNS):
        counts += np.bincount(np.minimum(ids[start : start + run], vocabulary - 1), minlength=vocabulary)
    shares = counts[counts > 0] / counts.sum()
    return max(0.0, float(-(shares * np.log(shares)).sum()))  # one token alone gives -0.0


def outside_vocabulary(token: int, vocabulary: int, where: str) -> DataError:
    """The error for an id that no row of an embedding belongs to."""
    return DataError(
        f"{where} has id {token}, but the vocabulary has {vocabulary} ids (0 to {vocabulary - 1}). "
        "Give data.vocabulary and data.dtype as the ids were written, or prepare the tokens again."
    )


def _require_length(split: str, length: int, context: int, advice: str) -> None:
    if length <= context:
        shorter = f", or set model.context to at most {length - 1}" if length > 1 else ""
        raise DataError(
            f"the {split} split has {length} token(s), but model.context={context} needs at least {context + 1}. "
            f"{advice}{shorter}."
        )
