"""A run goes on at the very next sample of its data, whatever batch size each of its attempts has."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import cache_home
from ttrain.cli import main
from ttrain.data.batches import Sizes
from ttrain.data.documents import open_documents
from ttrain.data.regression import open_regression
from ttrain.data.settings import DocumentsConfig, RegressionConfig, TextConfig, TokensConfig
from ttrain.data.text import open_text
from ttrain.data.tokens import open_tokens
from ttrain.train.checkpoint.retention import find_checkpoint
from ttrain.train.forecast.out_of_memory import is_out_of_memory
from ttrain.train.steps.step import StepResult, TrainStep

QUIET = [
    "logger=jsonl", "device=cpu", "device.threads=1", "sample.tokens=1", "train.log_every=1", "train.peak_tflops=1",
    "train.eval_every=null", "train.save_every=null", "train.keep_last=9",
]  # fmt: skip
CONTEXT = 16
GPT = ["model.layers=1", "model.width=16", "model.heads=2", f"model.context={CONTEXT}"]
SIZES = Sizes(context=CONTEXT)
Open = Callable[[], Any]
SOURCES: dict[str, tuple[list[str], Open]] = {
    f"text-{order}": (
        [*GPT, "data.path=book.txt", "data.tokenizer=byte", f"data.order={order}"],
        lambda order=order: open_text(TextConfig(path="book.txt", tokenizer="byte", order=order), SIZES),
    )
    for order in ("random", "epoch", "sequential")
}
SOURCES["text-limit"] = (
    [*GPT, "data.path=book.txt", "data.tokenizer=byte", "data.limit=7"],
    lambda: open_text(TextConfig(path="book.txt", tokenizer="byte", limit=7), SIZES),
)
SOURCES["tokens-read"] = (
    [*GPT, "data=tokens", "data.path=ids.bin", "data.dtype=uint16", "data.vocabulary=200", "data.order=sequential"],
    lambda: open_tokens(TokensConfig(path="ids.bin", dtype="uint16", vocabulary=200, order="sequential"), SIZES),
)
SOURCES |= {
    f"documents-{order}": (
        [*GPT, "data=documents", "data.sources=[rows.jsonl]", "data.tokenizer=byte", f"data.order={order}"],
        lambda order=order: open_documents(
            DocumentsConfig(sources=["rows.jsonl"], tokenizer="byte", order=order), SIZES
        ),
    )
    for order in ("shuffled", "sequential")
}
SOURCES |= {
    f"regression-{order}": (
        ["model=mlp", "model.width=8", "data=regression", "data.examples=100", f"data.order={order}"],
        lambda order=order: open_regression(RegressionConfig(examples=100, order=order), Sizes(inputs=8, outputs=8)),
    )
    for order in ("random", "epoch", "sequential")
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with a text, documents and token ids of a few passes each."""
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home(tmp_path))
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    words = [f"word{number}" for number in generator.integers(0, 1000, 300)]
    Path("book.txt").write_text(" ".join(words))
    rows = [{"text": " ".join(words[number : number + 4])} for number in range(0, 300, 4)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    generator.integers(0, 200, 1500).astype("<u2").tofile("ids.bin")
    return tmp_path


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
        main([*QUIET, "run.dir=run", "resume=auto", f"train.batch_size={batch}", f"train.steps={steps}", *overrides])
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
    overrides, opened = SOURCES["documents-read"]
    grows = ["train.length_schedule=[4,8,16]", "train.phase_steps=2"]
    attempt(6, 3, *overrides, *grows)
    attempt(5, 5)
    attempt(3, 6, f"model.context={CONTEXT}", "train.length_schedule=[8,16]", "train.phase_steps=5")
    attempt(2, 8, "train.length_schedule=[]")
    shapes = [batch["tokens"].shape for batch in seen]
    assert shapes == [(6, 4), (6, 4), (6, 8), (5, 8), (5, 16), (3, 16), (2, 16), (2, 16)]
    stream = np.concatenate([batch["tokens"].ravel() for batch in seen])
    assert np.array_equal(stream, opened().at(1, 0, 0).batch("train", 1337, 0, stream.size)["tokens"].ravel())
    progress = find_checkpoint(Path("run"), "last").progress
    assert (progress["read_samples"], progress["read_tokens"]) == (sum(rows for rows, _ in shapes), stream.size)


@pytest.mark.parametrize("attention", ["sequence", "document"])
@pytest.mark.parametrize("rule", ["cut", "skip"])
def test_whole_documents_are_read_once_a_pass_over_phases_and_resumes(
    rule: str, attention: str, seen: list[dict[str, np.ndarray]]
) -> None:
    """Each attempt has sizes of its own; documents are told apart by their numbers, which no other one holds."""
    rows = [{"text": f"{number:04d}" + "." * (number * 7 % 9)} for number in range(1, 61)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = ["data=documents", "data.sources=[rows.jsonl]", "data.tokenizer=byte", f"data.long_documents={rule}"]
    attempt(3, 3, *GPT, *keys, f"data.attention={attention}", "train.length_schedule=[14,16]", "train.phase_steps=2")
    attempt(5, 5)
    grows = ["train.length_schedule=[14,15,16]", "train.batch_schedule=[2,2,4]", "train.gradient_accumulation=2"]
    attempt(4, 9, f"model.context={CONTEXT}", *grows, "train.phase_steps=3")
    attempt(4, 40, "train.length_schedule=[]", "train.batch_schedule=[]")
    text = "".join(map(chr, np.concatenate([batch["tokens"].ravel() for batch in seen]).clip(0, 127)))
    read = re.findall("[0-9]{4}", text)
    count = len(open_documents(DocumentsConfig(sources=["rows.jsonl"], tokenizer="byte"), SIZES)._ends["train"])
    passes = [read[start : start + count] for start in range(0, len(read), count)]
    assert len(passes) > 2 and all(len({*each}) == len(each) for each in passes)
    assert all({*each} == {*passes[0]} for each in passes[:-1]) and passes[0] != passes[1]


def test_a_rollback_reads_again_what_followed_the_checkpoint(
    seen: list[dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides, opened = SOURCES["text-epoch"]
    attempt(16, 2, *overrides)
    start, bad = TrainStep.__call__, [5]

    def sometimes(self: TrainStep, batch: Any, rates: Any, step: int, *given: Any) -> StepResult:
        result = start(self, batch, rates, step, *given)
        if step in bad:
            bad.remove(step)
            result.loss = float("nan")
        return result

    monkeypatch.setattr(TrainStep, "__call__", sometimes)
    attempt(4, 6, "guard.nonfinite=rollback", "train.save_every=1")
    stream = joined([opened().batch("train", 1337, 0, 48)])
    assert np.array_equal(joined(seen), np.concatenate([stream[:44], stream[40:48]]))


def test_a_batch_in_smaller_parts_after_running_out_of_memory_is_the_same_batch(
    seen: list[dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second attempt's first try fails at its third step, for which no checkpoint was saved yet."""
    overrides, opened = SOURCES["text-epoch"]
    attempt(16, 2, *overrides)
    start, short = TrainStep.__call__, [5]

    def sometimes(self: TrainStep, batch: Any, rates: Any, step: int, *given: Any) -> StepResult:
        if step in short:
            short.remove(step)
            raise MemoryError("no memory")
        return start(self, batch, rates, step, *given)

    assert is_out_of_memory(MemoryError())
    monkeypatch.setattr(TrainStep, "__call__", sometimes)
    attempt(4, 6, "recover.oom=shrink", "train.save_every=3")
    stream = joined([opened().batch("train", 1337, 0, 48)])
    assert np.array_equal(joined(seen), np.concatenate([stream[:40], stream[36:48]]))
    assert find_checkpoint(Path("run"), "last").config["train"]["gradient_accumulation"] == 2
