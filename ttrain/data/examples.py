"""Rows that an objective learns from: preferences, labelled texts, pairs, prompts. They are read whole at the start.

A row is an object of a .jsonl file or a row of a table. An objective makes the fields of a batch from it (`encode`),
when the batch is read, so that memory holds only the rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import DataError
from ttrain.core.spec import DType, TensorSpec
from ttrain.core.units import counted
from ttrain.core.waiting import waited_for
from ttrain.data.batches import Baseline, Batch, Split, places_of
from ttrain.data.chat.conversation import Chat, json_kind
from ttrain.data.chat.jinja import TokenizerTemplate
from ttrain.data.document_files import held_out_documents, tokenizer_of
from ttrain.data.settings import DocumentsConfig
from ttrain.data.sources import DocumentReader, chat_template, find_sources, has_rows
from ttrain.data.text import with_notices
from ttrain.data.tokenizer import Tokenizer

ROW = "row"  # field: the number of a row in its split, int64 [rows]


class EncodesRows(Protocol):
    """The part of an objective that makes fields of rows."""

    def encode(self, row: Mapping[str, Any], encoder: RowEncoder) -> Batch:
        """Return the fields of one row, without the axis of rows. Raises ValueError for a bad row."""

    def baseline(self, dataset: ExampleDataset) -> Baseline:
        """Return the loss of the best prediction that ignores the input."""


class TooLong(ValueError):
    """A row does not fit into the context, and such rows are left out."""


@dataclass(frozen=True)
class RowEncoder:
    """Token ids of texts and conversations, for a model of this context. Its methods raise ValueError."""

    config: DocumentsConfig
    tokenizer: Tokenizer
    end: int  # id of the token that ends a text
    context: int
    template: Any

    def text(self, text: Any) -> list[int]:
        """Return the ids of a text, with the tokens that the tokenizer puts before texts, if any, and the end token."""
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"a text is {json_kind(text) if not isinstance(text, str) else 'blank'}, not words")
        ids = self.tokenizer.with_start(self.tokenizer.encode(text))
        return ids if ids[-1] == self.end else [*ids, self.end]

    def prompt(self, prompt: Any) -> list[int]:
        """Return the ids of a prompt, which is a text, or messages up to where the reply begins."""
        if isinstance(prompt, str):
            return self.tokenizer.with_start(self.tokenizer.encode(prompt)) or [self.end]
        return list(self.tokenizer.encode(self.template.prompt(Chat.of(prompt))))

    def continued(self, prompt: Any, completion: Any) -> tuple[list[int], list[int]]:
        """Return the ids of a prompt and of its completion, texts or messages. The end token closes the completion."""
        if not completion or (isinstance(completion, str) and not completion.strip()):
            raise ValueError("a completion is empty")
        if type(prompt) is not type(completion) or not isinstance(prompt, str | list):
            raise ValueError(f"a prompt is {json_kind(prompt)}, and its completion {json_kind(completion)}")
        before = self.prompt(prompt)
        if isinstance(prompt, str):
            whole = self.tokenizer.with_start(self.tokenizer.encode(prompt + completion))
            whole = whole if prompt else [*before, *whole]
        else:
            whole = list(self.tokenizer.encode(self.template.render(Chat.of([*prompt, *completion])).text))
        closed = isinstance(prompt, list) and isinstance(self.template, TokenizerTemplate)
        return before, whole[len(before) :] + ([] if closed or whole[-1] == self.end else [self.end])

    def fit(self, prompt: Sequence[int], completion: Sequence[int]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return `tokens` and `targets`, int64 [context]. Targets are -1 except where the completion is predicted."""
        whole = self.cut([*prompt, *completion], self.context + 1)
        if len(whole) <= len(prompt):
            raise ValueError(f"its prompt has {len(prompt)} tokens and fills model.context={self.context}")
        tokens, targets = np.zeros(self.context, np.int64), np.full(self.context, -1, np.int64)
        tokens[: len(whole) - 1] = whole[:-1]
        targets[max(len(prompt) - 1, 0) : len(whole) - 1] = whole[max(len(prompt), 1) :]
        return tokens, targets

    def cut(self, ids: list[int], most: int) -> list[int]:
        """Return the ids, or with data.long_documents=cut the first `most`. Raises TooLong or ValueError for more."""
        if len(ids) <= most:
            return ids
        long = f"has {len(ids)} tokens, more than model.context={self.context} takes"
        if self.config.long_documents == "skip":
            raise TooLong(long)
        if self.config.long_documents == "split":
            raise ValueError(f"{long}; give a larger context, or data.long_documents=cut or skip")
        return ids[:most]


class ExampleDataset:
    """Rows of two splits, encoded as an objective says. See data.batches.Dataset."""

    def __init__(
        self, rows: Mapping[str, list[tuple[str, Any]]], encoder: RowEncoder, objective: EncodesRows,
        description: dict[str, Any],
    ) -> None:  # fmt: skip
        """`rows` have a place, such as file:line, and a content."""
        arranged: Any = getattr(objective, "arranged", list)
        self.rows = {split: arranged([row for _, row in part]) for split, part in rows.items()}
        self.places = {split: [place for place, _ in part] for split, part in rows.items()}
        self.encoder, self.objective, self.description = encoder, objective, description
        self.known: dict[str, dict[str, NDArray[Any]]] = {split: {} for split in rows}  # fields of all rows
        self.tokenizer: Tokenizer | None = encoder.tokenizer
        self.vocabulary: int | None = encoder.tokenizer.vocabulary
        first = self.batch("val", 0, 0, 1)
        self.fields = {
            name: TensorSpec(array.shape[1:], next(each for each in DType if each.in_torch == str(array.dtype)))
            for name, array in first.items()
        }

    def batch(self, split: Split, seed: int, first: int, rows: int) -> Batch:
        """Return the objective's fields, and `row` int64 [rows]; see data.batches.Dataset."""
        places = places_of(self.encoder.config, split, seed, first, rows, len(self.rows[split]))
        return self.read(split, places.astype(np.int64))

    def read(self, split: Split, places: NDArray[np.int64]) -> Batch:
        """Return the fields of some rows by their numbers in a split."""
        each = [self.objective.encode(self.rows[split][place], self.encoder) for place in places.tolist()]
        found = {name: np.stack([one[name] for one in each]) for name in each[0]}
        return {**found, **{name: values[places] for name, values in self.known[split].items()}, ROW: places}

    @property
    def val_samples(self) -> int:
        """See data.batches.Dataset."""
        return len(self.rows["val"])

    def prompt(self) -> list[int] | None:
        """Return the ids of the prompt of a held-out row; None where rows have none."""
        row = self.rows["val"][0]
        return self.encoder.prompt(row["prompt"]) if row.get("prompt") else None

    def baseline(self, samples: int | None = None) -> Baseline:
        """Return the objective's baseline for all held-out rows; see data.batches.Dataset."""
        return self.objective.baseline(self)


class _RowReader(DocumentReader):
    """Reads rows as documents whose text is their content in JSON."""

    def _content(self, row: Any) -> str:
        if not isinstance(row, dict):
            raise ValueError(f"is {json_kind(row)}, not an object")
        return json.dumps(row, ensure_ascii=False)


def open_examples(config: DocumentsConfig, context: int, objective: EncodesRows) -> ExampleDataset:
    """Open the rows of a config's sources for an objective. Raises DataError that names file and row of a bad one."""
    sources = find_sources(config)
    if plain := [file for source in sources for file in source.files if not has_rows(file)]:
        raise DataError(f"data.sources: {plain[0]} has no rows. Give .jsonl, .parquet or .arrow files.")
    digest = hashlib.sha256()
    reader = _RowReader(config, chat_template(config), columns=None)
    found = list(reader.in_turn(sources, [digest.update] * len(sources)))
    rows = [(each.place, json.loads(each.text)) for each in found]
    if not rows:
        raise DataError("data.sources has no rows. Give files with an object in each line.")
    tokenizer, end = tokenizer_of(config, (text for _, row in rows for text in _texts(row)))[1:]
    encoder = RowEncoder(config, tokenizer, end.id, context, chat_template(config))
    if hasattr(objective, "read"):
        objective.read([row for _, row in rows])
    kept, long = _usable(rows, encoder, objective, reader)
    hashes = [int.from_bytes(hashlib.blake2b(found[at].text.encode(), digest_size=8).digest(), "big") for at in kept]
    held = held_out_documents(np.array(hashes, np.uint64), config.held_out)
    split = {"train": [rows[at] for at in np.array(kept)[~held]], "val": [rows[at] for at in np.array(kept)[held]]}
    described = {
        "source": [source.given for source in sources],
        "files": sum(len(source.files) for source in sources),
        "bytes": sum(source.size for source in sources),
        "examples": {name: len(part) for name, part in split.items()},
        "sha256": digest.hexdigest(),
        "tokenizer": tokenizer.description,
        "end_token": vars(end),
    }
    left_out = [f"{counted(long, 'row')} longer than model.context={context} left out."] if long else []
    told = [notice for source in sources for notice in source.notices]
    described = with_notices(described, [*told, *reader.skipped.notices(), *left_out])
    return ExampleDataset(split, encoder, objective, described)


def _usable(
    rows: list[tuple[str, Any]], encoder: RowEncoder, objective: EncodesRows, reader: DocumentReader
) -> tuple[list[int], int]:
    """Return the numbers of the rows that can be encoded, and how many are too long. Raises DataError for a bad one."""
    kept, long = [], 0
    for number, (place, row) in enumerate(waited_for(rows, "Reading rows", lambda each: each[0])):
        try:
            objective.encode(row, encoder)
            kept.append(number)
        except TooLong:
            long += 1
        except ValueError as error:
            reader.refuse(f"{place}: {error}")
    if not kept:
        raise DataError(f"data.sources: none of {counted(len(rows), 'row')} can be used.")
    return kept, long


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a row, from which a tokenizer is learned."""
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(each)
