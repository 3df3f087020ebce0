"""Runs read on at the very next sample, and evaluations the same held-out ones, whatever the batch sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import cache_home
from tests.data.conftest import book, config_of
from ttrain.cli import main
from ttrain.data.batches import Sizes, TokenDataset
from ttrain.data.documents import open_documents
from ttrain.data.regression import RegressionDataset, open_regression
from ttrain.data.settings import DataConfig, RegressionConfig, TextConfig, TokensConfig
from ttrain.data.text import byte_counter, open_text
from ttrain.data.tokenizer import visible_bytes
from ttrain.data.tokens import open_tokens
from ttrain.tasks.prepare import prepare
from ttrain.train.checkpoint.retention import find_checkpoint
from ttrain.train.logging.metrics import read_metrics
from ttrain.train.loop.loop import Evaluation
from ttrain.train.steps.step import StepResult, TrainStep

QUIET = [
    "logger=jsonl", "device=cpu", "device.threads=1", "sample.tokens=1", "train.log_every=1", "train.peak_tflops=1",
    "train.save_every=null",
]  # fmt: skip
GPT = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16"]
TEXT = ["data.path=book.txt", "data.tokenizer=byte"]
AGILLM = [
    "model=agillm", "model.preset=null", "model.layers=1", "model.width=16", "model.heads=2", "model.rank=8",
    "model.context=16", "model.objective=joint",
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with a text and documents."""
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home(tmp_path))
    monkeypatch.chdir(tmp_path)
    book()
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


@settings(max_examples=50, deadline=None)
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


def evaluated(run: str, *overrides: str) -> dict[str, float]:
    """The val/... numbers of a run whose weights are the first ones."""
    still = ["train.steps=1", "optimizer.lr=0", "guard.check_learning=null"]
    assert main([*QUIET, *still, *overrides, f"run.dir={run}"]) == 0
    (line,) = [line for line in read_metrics(Path(run, "metrics.jsonl")) if "val/loss" in line]
    return {name: value for name, value in line.items() if name.startswith("val/")}


def test_the_losses_of_a_run_are_the_same_for_every_batch_size() -> None:
    """One at a time, micro-batches with one left over, and a batch larger than the held-out split."""
    overrides = [*AGILLM, *TEXT, "data.held_out=0.2", "train.eval_sequences=null"]
    one = evaluated("one", *overrides, "train.batch_size=1")
    assert one.keys() == {"val/loss", "val/ar/ce", "val/sat/ce", "val/gate/ce", "val/bits_per_byte"}
    # The sums of several losses are not what bits are of; a byte is a token.
    assert one["val/bits_per_byte"] == pytest.approx(one["val/ar/ce"] / np.log(2), rel=1e-9)
    for size, parts in ((12, 3), (100, 1)):
        sizes = [f"train.batch_size={size}", f"train.gradient_accumulation={parts}"]
        assert evaluated(f"run{size}", *overrides, *sizes) == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "tokenizer"), [("text", "char"), ("documents", "bpe"), ("documents", "byte"), ("tokens", "bpe")]
)
def test_bytes_are_those_of_the_decoded_targets(kind: str, tokenizer: str) -> None:
    """Tokens that end documents have none."""
    Path("book.txt").write_text(Path("book.txt").read_text().replace("1", "é中"))
    Path("rows.jsonl").write_text(Path("rows.jsonl").read_text().replace("word1", "wörd"), "utf-8")
    options: dict[str, Any] = {"held_out": 0.2, "tokenizer": tokenizer, "vocabulary_size": 300}
    if kind == "documents":
        data: Any = open_documents(config_of("rows.jsonl", **options), SIZES)
    elif kind == "text":
        data = text(**options)
    else:
        prepare(config_of("rows.jsonl", **options), "tokens", progress=False)
        data = open_tokens(TokensConfig(path="tokens"), SIZES)
    batch, end = data.batch("val", 0, 0, data.val_samples), data.description.get("end_token", {}).get("id")
    ids = [token for token in batch["targets"].ravel().tolist() if token >= 0 and token != end]
    assert byte_counter(data.tokenizer, end)(batch) == len(raw(data.tokenizer, ids)) > len(ids) / 2


def raw(tokenizer: Any, ids: list[int]) -> bytes:
    """The bytes of tokens, which may begin and end inside a character."""
    if tokenizer.name == "bpe":
        letters = visible_bytes()
        return bytes(letters.index(letter) for i in ids for letter in tokenizer._model.id_to_token(i))
    return bytes(ids) if tokenizer.name == "byte" else tokenizer.decode(ids).encode()


CONTEXT = 16
SIZES = Sizes(context=CONTEXT)
DOCUMENTS = [*GPT, "data=documents", "data.sources=[rows.jsonl]", "data.tokenizer=byte"]
SOURCES: dict[str, tuple[list[str], Callable[[], Any]]] = {
    "text-epoch": ([*GPT, *TEXT, "data.order=epoch"], lambda: text(order="epoch")),
    "text-limit": ([*GPT, *TEXT, "data.limit=7"], lambda: text(limit=7)),
    "documents-shuffled": (DOCUMENTS, lambda: open_documents(config_of("rows.jsonl"), SIZES)),
    "regression-random": (
        ["model=mlp", "model.width=8", "data=regression", "data.examples=100"],
        lambda: open_regression(RegressionConfig(examples=100), Sizes(inputs=8, outputs=8)),
    ),
}


def text(**options: Any) -> TokenDataset:
    return open_text(TextConfig(path="book.txt", **{"tokenizer": "byte", **options}), SIZES)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, np.ndarray]]:
    """Every batch that a step was given."""
    batches: list[dict[str, np.ndarray]] = []
    start = TrainStep.__call__

    def recorded(self: TrainStep, batch: Any, *given: Any) -> StepResult:
        batches.append({name: np.asarray(array) for name, array in batch.items()})
        return start(self, batch, *given)

    monkeypatch.setattr(TrainStep, "__call__", recorded)
    return batches


def joined(batches: list[dict[str, np.ndarray]]) -> np.ndarray:
    """What the steps read, sample after sample."""
    name = "tokens" if "tokens" in batches[0] else "inputs"
    return np.concatenate([batch[name] for batch in batches])


def attempt(batch: int, steps: int, *overrides: str) -> None:
    """Runs `run` up to a step with a batch size, from wherever it is."""
    sizes = [f"train.batch_size={batch}", f"train.steps={steps}", "train.keep_last=9", "train.eval_every=null"]
    assert main([*QUIET, *sizes, *overrides, "run.dir=run", "resume=auto"]) == 0


@pytest.mark.parametrize("source", SOURCES)
def test_legs_of_several_batch_sizes_read_one_stream(source: str, seen: list[dict[str, np.ndarray]]) -> None:
    """16, 4 and 20 a step, the last in micro-batches: samples 0 to 47, 48 to 59 and 60 to 99 of the stream."""
    overrides, opened = SOURCES[source]
    attempt(16, 3, *overrides)
    attempt(4, 6)
    attempt(20, 8, "train.gradient_accumulation=5")
    assert [len(next(iter(batch.values()))) for batch in seen] == [16] * 3 + [4] * 3 + [20] * 2
    assert np.array_equal(joined(seen), joined([opened().batch("train", 1337, 0, 100)]))
    progress = find_checkpoint(Path("run"), "last").progress
    assert progress["read_samples"] == 100
    assert progress["read_tokens"] == 100 * (CONTEXT if "tokens" in seen[0] else 1)


def test_growing_sequences_go_on_at_the_next_token(seen: list[dict[str, np.ndarray]]) -> None:
    """Over phases, with other batch sizes, another schedule and none."""
    overrides = [*DOCUMENTS, "data.order=sequential"]
    grows = ["train.length_schedule=[4,8,16]", "train.phase_steps=2"]
    attempt(6, 3, *overrides, *grows)
    attempt(5, 5)
    attempt(3, 6, f"model.context={CONTEXT}", "train.length_schedule=[8,16]", "train.phase_steps=5")
    attempt(2, 8, "train.length_schedule=[]")
    shapes = [batch["tokens"].shape for batch in seen]
    assert shapes == [(6, 4), (6, 4), (6, 8), (5, 8), (5, 16), (3, 16), (2, 16), (2, 16)]
    stream = np.concatenate([batch["tokens"].ravel() for batch in seen])
    opened = open_documents(config_of("rows.jsonl", order="sequential"), SIZES)
    assert np.array_equal(stream, opened.at(1, 0, 0).batch("train", 1337, 0, stream.size)["tokens"].ravel())
    progress = find_checkpoint(Path("run"), "last").progress
    assert (progress["read_samples"], progress["read_tokens"]) == (sum(rows for rows, _ in shapes), stream.size)
