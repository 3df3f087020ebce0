"""Sums made on the spot: right answers, splits that share none, and batches that depend on their numbers alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ttrain.core.errors import DataError
from ttrain.data.batches import Baseline, Sizes, TokenDataset
from ttrain.data.examples import ExampleDataset, RowEncoder
from ttrain.data.settings import SumsConfig
from ttrain.data.synthetic.sums import open_sums


class Prompts:
    """Learns what ends a prompt."""

    def encode(self, row: Any, encoder: RowEncoder) -> dict[str, Any]:
        tokens, targets = encoder.fit(encoder.prompt(row["prompt"]), [encoder.end])
        return {"tokens": tokens, "targets": targets}

    def baseline(self, dataset: ExampleDataset) -> Baseline:
        return Baseline("none", 0.0)


def text_of(largest: int = 20, context: int = 24) -> TokenDataset:
    found = open_sums(SumsConfig(largest=largest), Sizes(context=context))
    assert isinstance(found, TokenDataset)
    return found


def operands(data: TokenDataset, split: Any, rows: int = 400) -> set[tuple[int, ...]]:
    """Return the operands of all whole sums of so many sequences, the smaller one first. Checks the answers."""
    batch, found = data.batch(split, 3, 0, rows), set()
    assert data.tokenizer is not None
    assert np.array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    for row in batch["tokens"]:
        for line in data.tokenizer.decode(row).split("\n")[1:-1]:
            sum_, _, answer = line.partition("=")
            one, other = map(int, sum_.split("+"))
            assert one + other == int(answer)
            found.add((min(one, other), max(one, other)))
    return found


def test_sequences_hold_right_sums_and_no_held_out_one_is_trained_on() -> None:
    data = text_of()
    train, held = operands(data, "train"), operands(data, "val")
    assert len(train) > 100
    assert len(held) > 10
    assert not train & held
    assert max(map(max, train)) == 20


def test_batches_depend_on_the_seed_and_their_place_alone() -> None:
    data = text_of()
    whole, second = data.batch("train", 5, 0, 6), text_of().batch("train", 5, 4, 2)
    assert np.array_equal(whole["tokens"][4:], second["tokens"])
    assert not np.array_equal(whole["tokens"], data.batch("train", 6, 0, 6)["tokens"])
    assert np.array_equal(data.batch("val", 5, 0, 4)["tokens"], data.batch("val", 6, 0, 4)["tokens"])


def test_rows_are_prompts_with_answers_and_the_same_splits() -> None:
    rows = open_sums(SumsConfig(largest=20), Sizes(context=24, rows=Prompts()))
    assert isinstance(rows, ExampleDataset)
    assert rows.tokenizer is not None
    row = rows.rows["train"][int(rows.batch("train", 1, 0, 1)["row"][0])]
    assert str(sum(map(int, row["prompt"].rstrip("=").split("+")))) == row["answer"]
    held = {tuple(sorted(map(int, each["prompt"][:-1].split("+")))) for each in rows.rows["val"]}
    assert not held & operands(text_of(), "train")
    assert rows.encoder.end == rows.tokenizer.encode("\n")[0]


@pytest.mark.parametrize("held_out", [0.001, 0.9999])
def test_a_split_without_a_sum_is_told(held_out: float) -> None:
    with pytest.raises(DataError, match=r"data.held_out=.*empty.*Give a larger data.largest"):
        open_sums(SumsConfig(largest=2, held_out=held_out), Sizes(context=24))
