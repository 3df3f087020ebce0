"""Sums made on the spot, such as 37+85=122: text to pretrain on, and rows with a prompt and its answer."""

from __future__ import annotations

from typing import Any

import numpy as np

from ttrain.core.errors import DataError, raised_as
from ttrain.data.batches import Batch, Sizes, Split, TokenSequences, drawn, sample_numbers
from ttrain.data.counter import Words, derive_key, random_words, shuffled
from ttrain.data.examples import ExampleDataset, RowEncoder
from ttrain.data.settings import DocumentsConfig, SumsConfig
from ttrain.data.sources import chat_template
from ttrain.data.text import require_context
from ttrain.data.tokenizer import CharTokenizer, Tokenizer

_HELD_OUT, _ORDER = 21, 22  # words that tell streams apart
END = "\n"  # after each sum
_SHORTEST = len("0+0=0\n")
_ROWS = 100_000  # at most that an objective reads of a split


class Sums:
    """All sums of two numbers up to `largest` by split, each in a mixed order: numbers that hold both operands.

    A sum is held out by the hash of its operands, whatever their order: no training sum tells its answer. Raises
    DataError where a split would be empty.
    """

    def __init__(self, largest: int, held_out: float) -> None:
        self._base, count = largest + 1, (largest + 1) ** 2
        numbers = shuffled(np.full(count, derive_key(_ORDER), np.uint64), np.arange(count, dtype=np.uint64), count)
        low, high = np.sort(np.divmod(numbers, np.uint64(self._base)), axis=0)
        hashes = random_words(derive_key(_HELD_OUT), low * np.uint64(self._base) + high)
        chosen = hashes < np.uint64(held_out * 2.0**64)
        self.numbers = {"train": numbers[~chosen], "val": numbers[chosen]}
        if not all(map(len, self.numbers.values())):
            told = f"data.held_out={held_out:g} leaves one of the splits of {count} sums empty"
            raise DataError(f"{told}. Give a larger data.largest, or another share.")

    def row(self, number: int) -> dict[str, str]:
        """Return a sum as `prompt` and `answer`."""
        one, other = divmod(number, self._base)
        return {"prompt": f"{one}+{other}=", "answer": str(one + other)}

    def text(self, number: int) -> str:
        """Return a sum with its end."""
        return "".join((*self.row(number).values(), END))


class SumsDataset(TokenSequences):
    """Sequences of sums, each from the start of one; the last sum is cut. See data.batches.Dataset."""

    def __init__(self, config: SumsConfig, context: int, sums: Sums) -> None:
        self._sums, self._limit = sums, config.limit
        self.tokenizer: Tokenizer | None = sums_tokenizer()
        self.vocabulary: int | None = self.tokenizer.vocabulary
        self.description = {
            **described(config, sums),
            "tokens": {split: sum(len(sums.text(n)) for n in some.tolist()) for split, some in sums.numbers.items()},
            "tokenizer": self.tokenizer.description,
        }
        self._resize(context, 0, 0)

    def batch(self, split: Split, seed: int, first: int, rows: int) -> Batch:
        """Return `tokens` and `targets`, int64 [rows, context]; see Dataset. Training sums are drawn independently."""
        numbers, sums = sample_numbers(first, rows), self._sums.numbers[split]
        each, count = self._each, len(sums)
        if split == "train" and self._limit is not None:
            numbers = numbers % np.uint64(self._limit)
        places: Words = numbers[:, None] * np.uint64(each) + np.arange(each, dtype=np.uint64)  # [rows, each]
        chosen = sums[drawn(seed, places, count) if split == "train" else places % np.uint64(count)]
        assert self.tokenizer is not None
        texts = ("".join(map(self._sums.text, row))[: self.context + 1] for row in chosen.tolist())
        ids = np.array([self.tokenizer.encode(text) for text in texts], np.int64)
        return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}

    @property
    def val_samples(self) -> int:
        """See Dataset: as many sequences as the held-out sums fill once."""
        return max(1, len(self._sums.numbers["val"]) // self._each)

    @property
    def _each(self) -> int:
        """Sums that a sequence has at most."""
        return self.context // _SHORTEST + 1


def sums_tokenizer() -> Tokenizer:
    """Return the tokenizer of the characters that sums have; END ends a text."""
    tokenizer = CharTokenizer("0123456789+=" + END)
    tokenizer.config = {"eos_token": END}
    return tokenizer


def described(config: SumsConfig, sums: Sums) -> dict[str, Any]:
    """Return the entry of the data in a run's record."""
    counts = {split: len(numbers) for split, numbers in sums.numbers.items()}
    return {"source": f"sums of two numbers up to {config.largest}", "sums": counts}


def open_sums(config: SumsConfig, sizes: Sizes) -> SumsDataset | ExampleDataset:
    """Open the sums as text, or as rows of an objective. Raises DataError, see Sums, and for rows that it can't use."""
    context, sums = require_context(config.name, sizes), Sums(config.largest, config.held_out)
    if sizes.rows is None:
        return SumsDataset(config, context, sums)
    tokenizer, limits = sums_tokenizer(), DocumentsConfig(limit=config.limit)
    encoder = RowEncoder(limits, tokenizer, tokenizer.encode(END)[0], context, chat_template(limits))
    rows = {
        split: [(f"data=sums: {sums.text(n).strip()}", sums.row(n)) for n in numbers[:_ROWS].tolist()]
        for split, numbers in sums.numbers.items()
    }
    counts = {split: len(some) for split, some in rows.items()}
    told = {**described(config, sums), "examples": counts, "tokenizer": tokenizer.description}
    with raised_as(DataError, "data=sums", "Give rows that the objective reads, with data=documents.", ValueError):
        return ExampleDataset(rows, encoder, sizes.rows, told)
