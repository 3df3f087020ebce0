"""Evaluations count the same held-out samples, each once, whatever the batch size."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import cache_home
from ttrain import load_config
from ttrain.cli import main
from ttrain.config.build import build_dataset
from ttrain.data.batches import Sizes, TokenDataset, unigram_entropy
from ttrain.data.documents import open_documents
from ttrain.data.regression import RegressionDataset, open_regression
from ttrain.data.settings import DataConfig, DocumentsConfig, RegressionConfig, TextConfig
from ttrain.data.text import open_text
from ttrain.data.tokenizer import visible_bytes
from ttrain.parallel.ranks import Ranks
from ttrain.parallel.world import Numbers, World
from ttrain.train.checkpoint.checkpoint import read_checkpoint
from ttrain.train.logging.metrics import read_metrics
from ttrain.train.loop.evaluate import Evaluation

QUIET = [
    "logger=jsonl", "device=cpu", "device.threads=1", "sample.tokens=1", "train.log_every=1", "train.peak_tflops=1",
    "train.steps=1", "train.save_every=null", "optimizer.lr=0", "guard.check_learning=null",
]  # fmt: skip
GPT = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16"]
TEXT = ["data.path=book.txt", "data.tokenizer=byte", "data.held_out=0.2"]
AGILLM = [
    "model=agillm", "model.preset=null", "model.layers=1", "model.width=16", "model.heads=2", "model.rank=8",
    "model.context=16", "model.objective=joint",
]  # fmt: skip
DOCUMENTS = ["data=documents", "data.sources=[rows.jsonl]", "data.tokenizer=byte", "data.held_out=0.2"]
REGRESSION = ["model=mlp", "model.width=8", "data=regression", "data.examples=100", "data.held_out=0.23"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with a text and documents."""
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home(tmp_path))
    monkeypatch.chdir(tmp_path)
    words = [f"word{number}" for number in np.random.default_rng(0).integers(0, 1000, 300)]
    Path("book.txt").write_text(" ".join(words))
    rows = [{"text": " ".join(words[number : number + 4])} for number in range(0, 300, 4)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


class Squares:
    """A step whose sums are of functions of single rows. Notes how many rows it was given."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, inputs: Any) -> dict[str, float]:
        targets = np.asarray(inputs["targets"], np.float64)
        self.rows.append(len(targets))
        counted = targets[targets >= 0] if inputs["targets"].dtype.kind == "i" else targets
        weight = inputs["loss_weight"]
        return {"loss": weight * float((counted**2).sum()), "a/b": weight * float(np.abs(counted).sum()), "other": 7.0}


def ids(count: int) -> TokenDataset:
    held = np.random.default_rng(0).integers(0, 50, 3 * count + 1).astype(np.uint16)
    return TokenDataset(held, held, 3, 50, DataConfig())


def examples(count: int) -> RegressionDataset:
    return open_regression(RegressionConfig(examples=count + 10, held_out=count / (count + 10)), Sizes(None, 2, 2))


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from([ids, examples]),
    available=st.integers(1, 40),
    rows=st.integers(1, 70),
    samples=st.one_of(st.none(), st.integers(1, 60)),
)
def test_every_sample_counts_once(kind: Any, available: int, rows: int, samples: int | None) -> None:
    data, step = kind(available), Squares()
    assert data.val_samples == available
    found = Evaluation(step, data, rows, samples)()
    counted = data.batch("val", 0, 0, min(available, samples or available))["targets"].astype(np.float64)
    assert found is not None and set(step.rows) == {rows}
    assert found.loss == pytest.approx((counted**2).mean(), rel=1e-9)
    assert found.metrics == {"a/b": pytest.approx(np.abs(counted).mean(), rel=1e-9)}


class Together(World):
    """One of several ranks, which are threads."""

    def __init__(self, rank: int, count: int, barrier: threading.Barrier, given: dict[int, Sequence[Numbers]]) -> None:
        super().__init__(Ranks(rank, count, count))
        self._barrier, self._given = barrier, given

    def gather(self, records: Sequence[Numbers]) -> list[dict[str, float]]:
        self._given[self.ranks.rank] = records
        self._barrier.wait(60)
        found = [{**record} for rank in range(self.ranks.count) for record in self._given[rank]]
        self._barrier.wait(60)
        return found


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("available", [1, 7, 24])
def test_ranks_read_held_out_data_in_turn_and_find_the_same(count: int, available: int) -> None:
    data, rows = ids(available), 3
    alone = Evaluation(Squares(), data, rows, None, count_bytes=len)
    expected = alone()
    read: dict[int, int] = Counter()

    def evaluated(rank: int, barrier: threading.Barrier, given: dict[int, Sequence[Numbers]]) -> Any:
        def batch(*place: Any) -> Any:
            read[rank] += 1
            return data.batch(*place)

        own = SimpleNamespace(batch=batch, val_samples=data.val_samples)
        world = Together(rank, count, barrier, given)
        evaluation = Evaluation(Squares(), own, rows, None, count_bytes=len, world=world)  # type: ignore[arg-type]
        return evaluation(), evaluation.tokens, evaluation.bytes

    barrier, given = threading.Barrier(count), dict[int, Sequence[Numbers]]()
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(lambda rank: evaluated(rank, barrier, given), range(count)))
    for result, tokens, size in found:
        assert (
            result.loss == pytest.approx(expected.loss, rel=1e-12) and result.metrics.keys() == expected.metrics.keys()
        )
        assert (tokens, size) == (alone.tokens, alone.bytes)
    turns = -(-available // (rows * count))
    assert set(read.values()) == {2 * turns}, "once to count, once to evaluate"


def evaluated(run: str, *overrides: str) -> dict[str, float]:
    """The val/... numbers of a run whose weights are the first ones."""
    assert main([*QUIET, *overrides, f"run.dir={run}"]) == 0
    (line,) = [line for line in read_metrics(Path(run, "metrics.jsonl")) if "val/loss" in line]
    return {name: value for name, value in line.items() if name.startswith("val/")}


@pytest.mark.parametrize("sequences", ["null", "7"])
@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([*GPT, *TEXT], {"val/loss", "val/bits_per_byte"}),
        ([*GPT, *DOCUMENTS], {"val/loss", "val/bits_per_byte"}),
        ([*AGILLM, *TEXT], {"val/loss", "val/ar/ce", "val/sat/ce", "val/gate/ce", "val/bits_per_byte"}),
        ([*AGILLM, *DOCUMENTS], {"val/loss", "val/ar/ce", "val/sat/ce", "val/gate/ce", "val/bits_per_byte"}),
        (REGRESSION, {"val/loss"}),
    ],
    ids=["text", "documents", "agillm-text", "agillm-documents", "regression"],
)
def test_the_loss_is_the_same_for_every_batch_size(overrides: list[str], names: set[str], sequences: str) -> None:
    """One at a time, one batch left over, micro-batches, and a batch larger than the held-out split."""
    overrides = [*overrides, f"train.eval_sequences={sequences}"]
    one = evaluated("one", *overrides, "train.batch_size=1")
    assert one.keys() == names
    for number, sizes in enumerate((["6"], ["12", "train.gradient_accumulation=3"], ["100"])):
        assert evaluated(f"run{number}", *overrides, f"train.batch_size={sizes[0]}", *sizes[1:]) == pytest.approx(
            one, rel=1e-6
        )


def test_the_loss_of_examples_against_numpy() -> None:
    found = evaluated("run", *REGRESSION, "train.batch_size=16", "train.eval_sequences=null")
    (folder,) = Path("run/checkpoints").glob("step_*")
    weights = read_checkpoint(folder).weights()
    data = open_regression(RegressionConfig(examples=100, held_out=0.23), Sizes(inputs=8, outputs=8))
    batch = data.examples(np.arange(77, 100, dtype=np.uint64))
    x, layers = batch["inputs"].astype(np.float64), len(weights) // 2
    for layer in range(layers):
        x = x @ weights[f"layers.{layer}.weight"].T + weights[f"layers.{layer}.bias"]
        x = x if layer == layers - 1 else np.maximum(x, 0)
    assert found["val/loss"] == pytest.approx(((x - batch["targets"]) ** 2).mean(), rel=1e-6)


@pytest.mark.parametrize("sequences", [None, 5])
def test_the_unigram_entropy_of_the_summary_is_of_the_same_targets(sequences: int | None) -> None:
    given = "null" if sequences is None else sequences
    for name, overrides, data in (
        ("text", TEXT, lambda: open_text(TextConfig(path="book.txt", tokenizer="byte", held_out=0.2), Sizes(16))),
        (
            "documents",
            DOCUMENTS,
            lambda: open_documents(DocumentsConfig(sources=["rows.jsonl"], tokenizer="byte", held_out=0.2), Sizes(16)),
        ),
    ):
        evaluated(name, *GPT, *overrides, "train.batch_size=4", f"train.eval_sequences={given}")
        summary = json.loads(Path(name, "summary.json").read_text())
        opened = data()
        targets = opened.batch("val", 0, 0, sequences or opened.val_samples)["targets"]
        assert summary["baseline"] == {"name": "unigram entropy", "loss": unigram_entropy([targets], 257)}


@pytest.mark.parametrize("tokenizer", ["byte", "char", "bpe"])
@pytest.mark.parametrize("kind", ["text", "documents", "tokens"])
def test_bits_per_byte_are_of_the_decoded_targets(kind: str, tokenizer: str) -> None:
    """All losses in bits, those of end tokens too, over the bytes of what is predicted; end tokens have none."""
    book = Path("book.txt").read_text()
    Path("book.txt").write_text(book.replace("1", "é中"))
    Path("rows.jsonl").write_text(Path("rows.jsonl").read_text().replace("word1", "wörd"), "utf-8")
    given = ["data.held_out=0.2", f"data.tokenizer={tokenizer}", "data.vocabulary_size=300"]
    overrides = (
        ["data.path=book.txt", *given] if kind == "text" else ["data=documents", "data.sources=[rows.jsonl]", *given]
    )
    if kind == "tokens":
        assert main(["task=prepare", *overrides, "prepare.dir=tokens"]) == 0
        overrides = ["data=tokens", "data.path=tokens"]
    found = evaluated("run", *GPT, *overrides, "train.batch_size=5", "train.eval_sequences=null")
    config = load_config(*overrides, *GPT)
    data = build_dataset(config.data, config.model, [])
    batch, end = data.batch("val", 0, 0, data.val_samples), (data.description.get("end_token") or {}).get("id")
    text, count = b"", 0
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        part: list[int] = []
        for token in [*targets, end]:
            count += token is not None and token >= 0
            if token == end:
                text, part = text + raw(data.tokenizer, part), []
            elif token >= 0:
                part.append(token)
        count -= end is not None
        assert tokens[1:] == targets[:-1]
    assert found["val/bits_per_byte"] == pytest.approx(found["val/loss"] * count / np.log(2) / len(text), rel=1e-9)
    summary = json.loads(Path("run", "summary.json").read_text())
    assert summary["val/bits_per_byte"] == found["val/bits_per_byte"] and summary["val_metrics"] == {}


def raw(tokenizer: Any, ids: list[int]) -> bytes:
    """The bytes of tokens, which may begin and end inside a character."""
    if tokenizer.name == "bpe":
        letters = visible_bytes()
        return bytes(letters.index(letter) for i in ids for letter in tokenizer._model.id_to_token(i))
    return bytes(ids) if tokenizer.name == "byte" else tokenizer.decode(ids).encode()


def test_the_sums_of_several_losses_are_not_what_bits_are_of() -> None:
    found = evaluated("run", *AGILLM, *TEXT, "train.batch_size=4", "train.eval_sequences=null")
    assert found["val/bits_per_byte"] == pytest.approx(found["val/ar/ce"] / np.log(2), rel=1e-9)  # a byte is a token
