"""How a run ends, as its events, its sample and its picture tell it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.reading import events
from ttrain.cli import main
from ttrain.core.spec import DType, TensorSpec
from ttrain.data.library_tokenizer import train_bpe
from ttrain.data.tokenizer import ByteTokenizer, CharTokenizer
from ttrain.tasks.training.run import _held_out, shown_prompt
from ttrain.train.runs.run_directory import read_run
from ttrain.train.steps.session import Session

SMALL = ["device=cpu", "device.threads=1", "model.layers=1", "model.heads=2", "model.width=32", "train.batch_size=2",
         "train.eval_sequences=2", "train.peak_tflops=1", "data.path=book.txt"]  # fmt: skip
LINES = [f"{number} times the river ran over the stone and under the bridge of copper" for number in range(300)]


@pytest.fixture(autouse=True)
def here(inside: Path) -> None:
    Path("book.txt").write_text("\n".join(LINES))


def last_event() -> dict[str, Any]:
    return events("run")[-1]


def test_an_interrupt_while_steps_are_built_is_told_as_one(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Session, "build_training", lambda self: (os.kill(os.getpid(), signal.SIGINT), time.sleep(60)))
        assert main([*SMALL, "train.steps=2", "run.dir=run"]) == 130
    assert capsys.readouterr().err.endswith("ttrain: interrupted\n")
    assert last_event()["kind"] == "interrupted" and "error" not in last_event()
    info = read_run(Path("run"))
    assert info.state == "interrupted" and info.reason.startswith("Stopped by SIGINT before the steps were built")
    assert main(["task=runs", "runs.root=.", "runs.state=interrupted"]) == 0
    assert "run  interrupted" in capsys.readouterr().out
    assert main([*SMALL, "train.steps=2", "run.dir=run", "sample.tokens=1"]) == 0
    assert read_run(Path("run")).state == "finished" and last_event()["message"] == "All steps are done."


def test_an_early_stop_is_told_as_one() -> None:
    stop = ["train.steps=50", "train.eval_every=2", "train.early_stop=2", "train.min_improvement=9"]
    assert main([*SMALL, *stop, "run.dir=run", "sample.tokens=1"]) == 0
    event = last_event()
    assert event["kind"] == "finished" and event["message"].startswith("Early stop at step 6: val/loss has not fallen")
    assert read_run(Path("run")).state == "finished"


@pytest.mark.parametrize("tokenizer", ["bpe", "char"])
def test_the_sample_follows_held_out_text_that_is_shown(tokenizer: str, capsys: Any) -> None:
    data = [f"data.tokenizer={tokenizer}", "data.vocabulary_size=300", "model.context=256"]
    assert main([*SMALL, *data, "train.steps=1", "run.dir=run", "sample.tokens=3", "sample.stop=[xyz]"]) == 0
    out = capsys.readouterr().out
    head, _, rest = out.partition("\n> ")
    assert head == "\nA sample of what the model writes after this held-out text:\n"
    prompt, blank, *_ = rest.split("\n")
    held_out = "\n".join(LINES)[-len("\n".join(LINES)) // 10 - 1 :]
    assert 60 <= len(prompt) <= 80 and blank == "" and f"\n{prompt} " in f"\n{held_out}"
    assert out.count(prompt) == 1  # what the model writes is apart
    if tokenizer == "char":  # a prompt that is given is shown too
        given = ["train.steps=1", "run.dir=given", "sample.tokens=3"]
        assert main([*SMALL, *given, "sample.prompt='the river\nran '", "data.tokenizer=byte"]) == 0
        told = "\nA sample of what the model writes after this prompt:\n\n> the river\n> ran\n\n"
        assert told in capsys.readouterr().out


class Rows:
    """One held-out row."""

    fields = {"targets": TensorSpec((8,), DType.INT64)}

    def __init__(self, tokenizer: Any, text: str, learnt_from: int = 0) -> None:
        self.tokenizer = tokenizer
        tokens = np.array(tokenizer.encode(text))
        targets = np.where(np.arange(len(tokens)) + 1 >= learnt_from, np.append(tokens[1:], -1), -1)
        self._batch = {"tokens": tokens[None], "targets": targets[None]}

    def batch(self, *_: Any) -> dict[str, np.ndarray]:
        return self._batch


@pytest.mark.parametrize(
    ("text", "learnt_from", "expected"),
    [
        ("user: hi\nassistant: Hello there.", 1, "user: hi\nassistant:"),
        ("ver ran\nover the stone.", 0, "over the"),
        ("ver ran over the stone", 0, "ran over the"),
        ("word", 0, "word"),
        ("一二三四五六", 0, "一二三四五六"),
    ],
)
def test_where_a_prompt_begins_and_ends(text: str, learnt_from: int, expected: str) -> None:
    bpe: Any = train_bpe(["ver ran\nover the stone. user: hi\nassistant: Hello there."], 280)
    tokenizers: list[Any] = [bpe] if learnt_from else [bpe, CharTokenizer.of([text]), ByteTokenizer()]
    if learnt_from:
        learnt_from = len(bpe.encode(expected))
    for tokenizer in tokenizers:
        found = tokenizer.decode(_held_out(Rows(tokenizer, text, learnt_from), None))  # type: ignore[arg-type]
        assert found.strip(" ") == expected.strip(" ")


def test_the_longest_document_of_a_row_is_taken() -> None:
    row = Rows(ByteTokenizer(), "one|the longest of them all|three")
    assert bytes(_held_out(row, ord("|"))) == b"longest of them"  # type: ignore[arg-type]
    shown = [shown_prompt(ByteTokenizer(), list(text)) for text in (b"\n \n", b"A\nB")]
    assert shown == ["", "> A\n> B"]


def test_the_scores_of_a_sample_are_over_short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed for every token anew: over the whole context that would take most of a short run."""
    shapes: list[tuple[int, ...]] = []
    build = Session.build_training

    def recorded(self: Session) -> Any:
        steps = build(self)
        shapes.append(steps["logits"].inputs["tokens"].shape)
        return steps

    monkeypatch.setattr(Session, "build_training", recorded)
    for tokens, length in ((20, 64), (100, 128), (1000, 256)):
        sizes = [f"sample.tokens={tokens}", "model.context=256", "train.steps=1"]
        assert main([*SMALL, *sizes, f"run.dir=run{tokens}", "sample.prompt=the"]) == 0
        assert shapes[-1] == (1, length)
