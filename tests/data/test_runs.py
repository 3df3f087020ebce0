"""Runs read on at the very next sample, and evaluations the same held-out ones, whatever the batch sizes."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import cache_home
from tests.data.conftest import book, config_of, rows
from ttrain import load_config
from ttrain.cli import main
from ttrain.config.build import build_dataset
from ttrain.data.batches import Sizes, TokenDataset, unigram_entropy
from ttrain.data.documents import open_documents
from ttrain.data.regression import RegressionDataset, open_regression
from ttrain.data.settings import DataConfig, RegressionConfig, TextConfig
from ttrain.data.text import open_text
from ttrain.data.tokenizer import visible_bytes
from ttrain.parallel.ranks import Ranks
from ttrain.parallel.world import Numbers, World
from ttrain.train.checkpoint.retention import find_checkpoint
from ttrain.train.forecast.out_of_memory import is_out_of_memory
from ttrain.train.logging.metrics import read_metrics
from ttrain.train.loop.evaluate import Evaluation
from ttrain.train.steps.step import StepResult, TrainStep

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


class Together(World):
    """One of several ranks, which are threads."""

    def __init__(self, rank: int, count: int, barrier: threading.Barrier, given: dict[int, Sequence[Numbers]]) -> None:
        super().__init__(Ranks(rank, count, count))
        self._barrier, self._given = barrier, given

    def gather(self, records: Sequence[Numbers]) -> list[dict[str, float]]:
        self._given[self.ranks.rank] = records
        self._barrier.wait(60)
        found = [{**record} for _, given in sorted(self._given.items()) for record in given]
        self._barrier.wait(60)
        return found


@pytest.mark.parametrize(("count", "available"), [(2, 1), (2, 24), (4, 7)])
def test_ranks_read_held_out_data_in_turn_and_find_the_same(count: int, available: int) -> None:
    data, rows = ids(available), 3
    alone = Evaluation(Squares(), data, rows, None, count_bytes=len)
    expected, read = alone(), Counter[int]()
    barrier, given = threading.Barrier(count), dict[int, Sequence[Numbers]]()

    def evaluated(rank: int) -> Any:
        def batch(*place: Any) -> Any:
            read[rank] += 1
            return data.batch(*place)

        own: Any = SimpleNamespace(batch=batch, val_samples=data.val_samples)
        world = Together(rank, count, barrier, given)
        evaluation = Evaluation(Squares(), own, rows, None, count_bytes=len, world=world)
        return evaluation(), evaluation.tokens, evaluation.bytes

    with ThreadPoolExecutor(count) as pool:
        for result, tokens, size in pool.map(evaluated, range(count)):
            assert result.loss == pytest.approx(expected.loss, rel=1e-12)
            assert result.metrics.keys() == expected.metrics.keys()
            assert (tokens, size) == (alone.tokens, alone.bytes)
    turns = -(-available // (rows * count))
    assert set(read.values()) == {2 * turns}, "once to count, once to evaluate"


def evaluated(run: str, *overrides: str) -> dict[str, float]:
    """The val/... numbers of a run whose weights are the first ones."""
    assert main([*QUIET, *overrides, f"run.dir={run}"]) == 0
    (line,) = [line for line in read_metrics(Path(run, "metrics.jsonl")) if "val/loss" in line]
    return {name: value for name, value in line.items() if name.startswith("val/")}


@pytest.mark.parametrize(
    ("overrides", "names", "sequences"),
    [
        ([*GPT, *DOCUMENTS], {"val/loss", "val/bits_per_byte"}, "7"),
        ([*AGILLM, *TEXT], {"val/loss", "val/ar/ce", "val/sat/ce", "val/gate/ce", "val/bits_per_byte"}, "null"),
    ],
    ids=["documents", "agillm-text"],
)
def test_the_loss_is_the_same_for_every_batch_size(overrides: list[str], names: set[str], sequences: str) -> None:
    """One at a time, micro-batches with one left over, and a batch larger than the held-out split."""
    overrides = [*overrides, f"train.eval_sequences={sequences}"]
    one = evaluated("one", *overrides, "train.batch_size=1")
    assert one.keys() == names
    if "val/ar/ce" in one:  # the sums of several losses are not what bits are of; a byte is a token
        assert one["val/bits_per_byte"] == pytest.approx(one["val/ar/ce"] / np.log(2), rel=1e-9)
    for size, parts in ((12, 3), (100, 1)):
        sizes = [f"train.batch_size={size}", f"train.gradient_accumulation={parts}"]
        assert evaluated(f"run{size}", *overrides, *sizes) == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "tokenizer"), [("text", "char"), ("documents", "bpe"), ("documents", "byte"), ("tokens", "bpe")]
)
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
    entropy = unigram_entropy([batch["targets"]], data.vocabulary or 0)
    assert summary["baseline"] == {"name": "unigram entropy", "loss": entropy}
    assert summary["val/bits_per_byte"] == found["val/bits_per_byte"] and summary["val_metrics"] == {}


def raw(tokenizer: Any, ids: list[int]) -> bytes:
    """The bytes of tokens, which may begin and end inside a character."""
    if tokenizer.name == "bpe":
        letters = visible_bytes()
        return bytes(letters.index(letter) for i in ids for letter in tokenizer._model.id_to_token(i))
    return bytes(ids) if tokenizer.name == "byte" else tokenizer.decode(ids).encode()


QUICK = [
    "logger=jsonl", "device=cpu", "device.threads=1", "sample.tokens=1", "train.log_every=1", "train.peak_tflops=1",
    "train.eval_every=null", "train.save_every=null", "train.keep_last=9",
]  # fmt: skip
CONTEXT = 16
SIZES = Sizes(context=CONTEXT)
READS_DOCUMENTS = [*GPT, "data=documents", "data.sources=[rows.jsonl]", "data.tokenizer=byte"]
READS_TEXT = [*GPT, "data.path=book.txt", "data.tokenizer=byte"]
SOURCES: dict[str, tuple[list[str], Callable[[], Any]]] = {
    "text-epoch": ([*READS_TEXT, "data.order=epoch"], lambda: text(order="epoch")),
    "text-limit": ([*READS_TEXT, "data.limit=7"], lambda: text(limit=7)),
    "documents-shuffled": (READS_DOCUMENTS, lambda: open_documents(config_of("rows.jsonl"), SIZES)),
    "regression-random": (
        ["model=mlp", "model.width=8", "data=regression", "data.examples=100"],
        lambda: open_regression(RegressionConfig(examples=100), Sizes(inputs=8, outputs=8)),
    ),
}


def text(**options: Any) -> TokenDataset:
    return open_text(TextConfig(path="book.txt", tokenizer="byte", **options), SIZES)


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
    assert (
        main([*QUICK, "run.dir=run", "resume=auto", f"train.batch_size={batch}", f"train.steps={steps}", *overrides])
        == 0
    )


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
    overrides = [*READS_DOCUMENTS, "data.order=sequential"]
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


def test_whole_documents_are_read_once_a_pass_over_phases_and_resumes(seen: list[dict[str, np.ndarray]]) -> None:
    """Each attempt has sizes of its own; documents are told apart by their numbers, which no other one holds."""
    rows("rows.jsonl", *({"text": f"{number:04d}" + "." * (number * 7 % 9)} for number in range(1, 61)))
    keys = [*READS_DOCUMENTS, "data.long_documents=cut", "data.attention=document"]
    attempt(3, 3, *keys, "train.length_schedule=[14,16]", "train.phase_steps=2")
    attempt(5, 5)
    grows = ["train.length_schedule=[14,15,16]", "train.batch_schedule=[2,2,4]", "train.gradient_accumulation=2"]
    attempt(4, 9, f"model.context={CONTEXT}", *grows, "train.phase_steps=3")
    attempt(4, 40, "train.length_schedule=[]", "train.batch_schedule=[]")
    text = "".join(map(chr, np.concatenate([batch["tokens"].ravel() for batch in seen]).clip(0, 127)))
    read = re.findall("[0-9]{4}", text)
    count = len(open_documents(config_of("rows.jsonl"), SIZES)._ends["train"])
    passes = [read[start : start + count] for start in range(0, len(read), count)]
    assert len(passes) > 2 and all(len({*each}) == len(each) for each in passes)
    assert all({*each} == {*passes[0]} for each in passes[:-1]) and passes[0] != passes[1]


def not_a_number(compute: Callable[[], StepResult]) -> StepResult:
    result = compute()
    result.loss = float("nan")
    return result


def no_memory(compute: Callable[[], StepResult]) -> StepResult:
    assert is_out_of_memory(MemoryError())
    raise MemoryError("no memory")


@pytest.mark.parametrize(
    ("fault", "overrides", "first", "again"),
    [
        (not_a_number, ["guard.nonfinite=rollback", "train.save_every=1"], 44, 40),
        (no_memory, ["recover.oom=shrink", "train.save_every=3"], 40, 36),
    ],
)
def test_what_followed_the_checkpoint_is_read_again(
    seen: list[dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch, fault: Any, overrides: list[str], first: int,
    again: int,
) -> None:  # fmt: skip
    """After a rollback, and in smaller parts after running out of memory. The fault is that of step 5's first try."""
    attempt(16, 2, *SOURCES["text-epoch"][0])
    start, due = TrainStep.__call__, [5]

    def sometimes(self: TrainStep, batch: Any, rates: Any, step: int, *given: Any) -> StepResult:
        compute = partial(start, self, batch, rates, step, *given)
        if step not in due:
            return compute()
        due.remove(step)
        return fault(compute)

    monkeypatch.setattr(TrainStep, "__call__", sometimes)
    attempt(4, 6, *overrides)
    stream = joined([text(order="epoch").batch("train", 1337, 0, 48)])
    assert np.array_equal(joined(seen), np.concatenate([stream[:first], stream[again:48]]))
    parts = find_checkpoint(Path("run"), "last").config["train"]["gradient_accumulation"]
    assert parts == (2 if fault is no_memory else 1)
