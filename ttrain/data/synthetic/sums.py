"""Sums made on the spot, such as 37+85=122: text to pretrain on, and rows with a prompt and its answer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import DataError, raised_as
from ttrain.data.batches import Sizes, TokenDataset
from ttrain.data.counter import derive_key, random_words, shuffled
from ttrain.data.examples import ExampleDataset, RowEncoder
from ttrain.data.settings import DocumentsConfig, SumsConfig
from ttrain.data.sources import chat_template
from ttrain.data.text import require_context
from ttrain.data.tokenizer import CharTokenizer

_HELD_OUT, _ORDER = 21, 22  # words that tell streams apart
END = "\n"  # after each sum


def open_sums(config: SumsConfig, sizes: Sizes) -> TokenDataset | ExampleDataset:
    """Open the sums of each split as a text, in a mixed order, or as rows where an objective reads these.

    Raises DataError where a split is too small, and for rows that the objective can't use.
    """
    context, tokenizer = require_context(config.name, sizes), CharTokenizer("0123456789+=" + END)
    tokenizer.config = {"eos_token": END}
    operands = {split: divmod(numbers, config.largest + 1) for split, numbers in _split(config).items()}
    rows = {
        split: [(f"{x}+{y}", {"prompt": f"{x}+{y}=", "answer": f"{x + y}"}) for x, y in zip(*pairs, strict=True)]
        for split, pairs in operands.items()
    }
    told = {"source": f"sums of two numbers up to {config.largest}", "tokenizer": tokenizer.description}
    if sizes.rows is None:
        texts = ["".join(f"{row['prompt']}{row['answer']}{END}" for _, row in some) for some in rows.values()]
        train, val = (np.array(tokenizer.encode(text), tokenizer.dtype) for text in texts)
        return TokenDataset(train, val, context, tokenizer.vocabulary, config, tokenizer=tokenizer, description=told)
    reading = DocumentsConfig(limit=config.limit)
    encoder = RowEncoder(reading, tokenizer, tokenizer.encode(END)[0], context, chat_template(reading))
    with raised_as(DataError, "data=sums", "Give rows that the objective reads, with data=documents.", ValueError):
        sizes.rows.encode(max((row for _, row in rows["train"]), key=lambda row: len(row["prompt"])), encoder)
        return ExampleDataset(rows, encoder, sizes.rows, {**told, "examples": {x: len(y) for x, y in rows.items()}})


def _split(config: SumsConfig) -> dict[str, NDArray[np.uint64]]:
    """Return the numbers of the sums of each split in a mixed order: one operand times data.largest + 1 plus the other.

    A sum is held out by the hash of its operands, whatever their order: no training sum tells its answer.
    """
    base = np.uint64(config.largest + 1)
    count = int(base) ** 2
    numbers = shuffled(np.full(count, derive_key(_ORDER), np.uint64), np.arange(count, dtype=np.uint64), count)
    low, high = np.sort(np.divmod(numbers, base), axis=0)
    chosen = random_words(derive_key(_HELD_OUT), low * base + high) < np.uint64(config.held_out * 2.0**64)
    if not 0 < chosen.sum() < count:
        raise DataError(f"data.held_out={config.held_out:g} leaves a split of sums empty. Give a larger data.largest.")
    return {"train": numbers[~chosen], "val": numbers[chosen]}
