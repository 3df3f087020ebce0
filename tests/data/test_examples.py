"""Rows that an objective reads: which there are, what they become, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ttrain.core.errors import DataError
from ttrain.data.batches import Baseline, Sizes
from ttrain.data.documents import open_documents
from ttrain.data.examples import ExampleDataset, RowEncoder
from ttrain.data.settings import DocumentsConfig

ROWS = [{"prompt": f"{number}+1=", "completion": str(number + 1)} for number in range(40)]
END = 256  # the first id behind the bytes


class Completions:
    """Learns the completion of each row."""

    def encode(self, row: Any, encoder: RowEncoder) -> dict[str, Any]:
        tokens, targets = encoder.fit(*encoder.continued(row.get("prompt", ""), row.get("completion")))
        return {"tokens": tokens, "targets": targets}

    def baseline(self, dataset: ExampleDataset) -> Baseline:
        return Baseline("none", 0.0)


def opened(folder: Path, rows: Any = ROWS, context: int = 12, **given: Any) -> ExampleDataset:
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    config = DocumentsConfig(sources=[str(file)], tokenizer="byte", **given)
    found = open_documents(config, Sizes(context=context, rows=Completions()))
    assert isinstance(found, ExampleDataset)
    return found


def test_every_row_is_trained_on_once_an_epoch_or_held_out(tmp_path: Path) -> None:
    data = opened(tmp_path, held_out=0.2)
    train, held = len(data.rows["train"]), data.val_samples
    assert (train, held) == (32, 8)
    assert sorted(map(str, [*data.rows["train"], *data.rows["val"]])) == sorted(map(str, ROWS))
    one, other = (data.batch("train", 7, epoch * train, train)["row"] for epoch in (0, 1))
    assert sorted(one) == sorted(other) == list(range(train))
    assert list(one) != list(other)
    parts = np.concatenate([data.batch("train", 7, first, 4)["row"] for first in range(0, 2 * train, 4)])
    assert np.array_equal(parts, np.concatenate([one, other]))
    assert sorted(data.batch("val", 0, 0, held)["row"]) == list(range(held))


def test_the_targets_are_the_completion_and_its_end(tmp_path: Path) -> None:
    data = opened(tmp_path, order="sequential")
    batch = data.batch("train", 0, 0, 3)
    for row, tokens, targets in zip(data.rows["train"], batch["tokens"], batch["targets"], strict=False):
        before, after = row["prompt"].encode(), [*row["completion"].encode(), END]
        assert list(tokens[: len(before) + len(after) - 1]) == [*before, *after[:-1]]
        assert list(targets) == [-1] * (len(before) - 1) + after + [-1] * (13 - len(before) - len(after))


def test_messages_go_through_the_template(tmp_path: Path) -> None:
    said = {"prompt": [{"role": "user", "content": "hi"}], "completion": [{"role": "assistant", "content": "yo"}]}
    other = {"prompt": [{"role": "user", "content": "ho"}], "completion": [{"role": "assistant", "content": "no"}]}
    data = opened(tmp_path, [said, other], context=40, held_out=0.5)
    batch = data.batch("train", 0, 0, 1)
    text = bytes(batch["tokens"][0][batch["tokens"][0] > 0].tolist()).decode()
    learned = [token for token in batch["targets"][0].tolist() if token >= 0]
    reply = data.rows["train"][0]["completion"][0]["content"]
    assert text == f"User: {data.rows['train'][0]['prompt'][0]['content']}\nAssistant: {reply}"
    assert learned == [*f" {reply}".encode(), END]


def test_long_rows_are_refused_cut_or_left_out(tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": "long: ", "completion": "x" * 20}]
    with pytest.raises(
        DataError, match=r"rows.jsonl:41: has 27 tokens, more than model.context=12 takes; give a larger"
    ):
        opened(tmp_path, rows)
    assert sum(map(len, opened(tmp_path, rows, long_documents="cut").rows.values())) == 41
    left = opened(tmp_path, rows, long_documents="skip")
    assert sum(map(len, left.rows.values())) == 40
    assert "1 row longer than model.context=12 left out." in left.description["notices"]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("{", "rows.jsonl:41: not JSON: "),
        ("[1]", "rows.jsonl:41: is a list, not an object"),
        ({"prompt": "a", "completion": " "}, "rows.jsonl:41: a completion is empty"),
        ({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}, "rows.jsonl:41: a prompt is a text"),
        ({"prompt": "a", "completion": 4}, "rows.jsonl:41: a prompt is a text, and its completion a number"),
        ('{"prompt": "\\ud800", "completion": "b"}', r"rows.jsonl:41: has '\ud800', half of a surrogate pair"),
    ],
)
def test_a_bad_row_is_named_or_left_out(tmp_path: Path, row: Any, told: str) -> None:
    with pytest.raises(DataError) as error:
        opened(tmp_path, [*ROWS, row])
    assert told in str(error.value)
    assert "data.bad_rows=skip" in str(error.value)
    skipped = opened(tmp_path, [*ROWS, row], bad_rows="skip")
    assert sum(map(len, skipped.rows.values())) == 40
    assert any("1 bad row(s) are left out" in notice for notice in skipped.description["notices"])


def test_rows_of_tables_have_all_their_columns(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    config = DocumentsConfig(sources=[str(tmp_path / "rows.parquet")], tokenizer="byte")
    data = open_documents(config, Sizes(context=12, rows=Completions()))
    assert sorted(map(str, [*data.rows["train"], *data.rows["val"]])) == sorted(map(str, ROWS))


def test_text_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(DataError, match="has no rows"):
        open_documents(DocumentsConfig(sources=[str(tmp_path / "a.txt")]), Sizes(context=12, rows=Completions()))
