"""train.evals: what a run measures on files, against plain torch, and that it leaves the run as it is."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.conftest import Told
from tests.models.decoder.plain_decoder import PlainDecoder
from tests.parallel import kills
from tests.parallel.forks import Forks
from tests.train.reading import events, losses, tensors, write_rows
from ttrain import load_config
from ttrain.cli import main
from ttrain.config.build import build_model
from ttrain.data.library_tokenizer import parse_tokenizer
from ttrain.tasks.evaluating.in_run import Prompts
from ttrain.tasks.evaluating.measures import Documents
from ttrain.train.checkpoint.retention import find_checkpoint
from ttrain.train.logging.metrics import read_metrics
from ttrain.train.sampling.source import TokenSource

CONTEXT = 70  # texts are read in rows of 64 and 70 tokens
SIZES = ["model.layers=1", "model.width=16", "model.heads=2", f"model.context={CONTEXT}"]
DATA = ["data=documents", "data.sources=[rows.jsonl]", "data.tokenizer=bpe", "data.vocabulary_size=270"]
RUN = [
    *SIZES, *DATA, "logger=jsonl", "device=cpu", "device.threads=1", "engine=static", "sample.tokens=4",
    "train.steps=4", "train.peak_tflops=1", "train.batch_size=4", "train.eval_every=2", "train.log_every=1",
    "optimizer.lr=0.02", "train.ema=0.9", "guard.check_learning=null", "model.dropout=0.1",
]  # fmt: skip
TEXTS = ["a cat sat on the mat and sat", "é", " ".join(["the dog and the cat and the dog sat on the mat"] * 4)]
QUESTIONS = [
    {"ctx": "the cat", "endings": ["sat on the mat", "dog dog", "é"], "label": 0},
    {"ctx": "the dog and ", "endings": ["x", "the cat sat on the mat", "and"], "label": "1"},
    {"ctx": "a mat", "endings": ["zz", "the", "sat on the cat on the cat on the cat"], "label": 1},
    {"ctx": "the mat", "endings": ["dog and a cat", "the", "a"], "label": 2},
]
EVALS = (
    "train.evals=[{path: texts.jsonl, name: domain}, {path: questions.jsonl, kind: choices}, "
    "{path: prompts.txt, kind: samples, every: evaluation, limit: 1}]"
)


@pytest.fixture(autouse=True)
def here(shared: Path) -> None:
    words = np.random.default_rng(0).choice(["the", "cat", "dog", "sat", "on", "mat", "and"], (60, 9))
    write_rows("rows.jsonl", [{"text": " ".join(row)} for row in words])
    write_rows("texts.jsonl", [{"text": text} for text in TEXTS])
    write_rows("questions.jsonl", QUESTIONS)
    Path("prompts.txt").write_text("the cat\nthe dog\n")


def measured(run: str) -> list[dict[str, Any]]:
    lines = read_metrics(Path(run, "metrics.jsonl"))
    named = ({key: line[key] for key in line if key == "step" or key.startswith("eval/")} for line in lines)
    return [line for line in named if len(line) > 1]


def whole() -> str:
    """A run with all kinds."""
    if not Path("whole").exists():
        assert main([*RUN, EVALS, "run.dir=whole"]) == 0
    return "whole"


def plain(run: str) -> tuple[Any, Any]:
    """The averaged model in plain torch and fp64, ids -> log-probabilities [T, V], and its tokenizer."""
    checkpoint = find_checkpoint(Path(run), "last")
    tokenizer: Any = parse_tokenizer(checkpoint.tokenizer or "")
    config = build_model(load_config(*SIZES, *DATA), tokenizer.vocabulary).config
    weights = {name: torch.tensor(np.asarray(value)).double() for name, value in checkpoint.weights(True).items()}

    def scores(ids: list[int]) -> Tensor:
        return F.log_softmax(PlainDecoder(config, weights).logits(torch.tensor([ids]))[0], -1)

    return scores, tokenizer


def test_the_numbers_are_those_of_plain_torch(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the averaged weights. Text is measured at every evaluation, choices at the end."""
    scores, tokenizer = plain(whole())
    end, total, count = tokenizer.token_id("<|endoftext|>"), 0.0, 0
    for text in TEXTS:
        ids = [end, *tokenizer.encode(text)]
        for first in range(0, len(ids) - 1, CONTEXT):
            stop = min(first + CONTEXT, len(ids) - 1)
            start = max(0, stop - CONTEXT)
            found = scores(ids[start:stop])
            total -= sum(found[place - 1 - start, ids[place]].item() for place in range(first + 1, stop + 1))
        count += len(ids) - 1
    right = []
    for question in QUESTIONS:
        likelihoods = []
        for ending in question["endings"]:
            before = question["ctx"].rstrip()
            known = tokenizer.encode(before)
            ids = tokenizer.encode(f"{before}{question['ctx'][len(before) :]} {ending}")
            found = scores(ids[:-1])
            sums = sum(found[place - 1, ids[place]].item() for place in range(len(known), len(ids)))
            likelihoods.append(sums / len(ending))
        right.append(int(np.argmax(likelihoods)) == int(question["label"]))
    accuracy = float(np.mean(right))
    assert 0 < accuracy < 1
    first, second, last = measured(whole())
    assert [first["step"], second["step"], last["step"]] == [2, 4, 4]
    assert first.keys() == second.keys() == {"step", "eval/domain/perplexity", "eval/domain/bits_per_byte"}
    assert second["eval/domain/perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    size = sum(len(text.encode()) for text in TEXTS)
    assert second["eval/domain/bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-5)
    assert last == {
        "step": 4, "eval/questions/accuracy": accuracy,
        "eval/questions/centred_accuracy": pytest.approx((accuracy - 1 / 3) / (1 - 1 / 3)),
    }  # fmt: skip
    summary = json.loads(Path("whole/summary.json").read_text())
    assert summary["evals"] == {key: value for line in (second, last) for key, value in line.items() if key != "step"}
    files = ["eval.text=[texts.jsonl]", "eval.choices=questions.jsonl", "eval.out=found.json"]
    assert main(["task=eval", "run.dir=whole", "device=cpu", *files]) == 0
    assert f"\ncentred        {(accuracy - 1 / 3) / (1 - 1 / 3):.4f}" in capsys.readouterr().out
    found = json.loads(Path("found.json").read_text())
    assert found["text"]["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["choices"]["acc_norm"] == accuracy


def test_a_run_keeps_its_bits_and_shows_what_it_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "run.dir=bare"]) == 0
    assert losses(whole()) == losses("bare") and tensors(whole()) == tensors("bare")
    said = events(whole(), "sample")
    assert [(each["step"], each["name"], each["prompt"]) for each in said] == [
        (n, "prompts", "the cat") for n in (2, 4)
    ]
    text = said[1]["text"]
    sample = ["sample.prompt=the cat", "sample.tokens=4", "sample.cache=false", "device=cpu", "device.threads=1"]
    capsys.readouterr()
    assert main(["task=sample", "run.dir=whole", "engine=static", *sample]) == 0
    assert capsys.readouterr().out == f"the cat{text}\n"
    assert main(["task=report", "run.dir=whole"]) == 0
    page = Path("whole/report.html").read_text()
    assert (
        "<title>eval/domain/bits_per_byte</title>" in page and "<title>eval/questions/centred_accuracy</title>" in page
    )
    assert f"prompts, after &#39;the cat&#39;: {text[:1]}" in page


def interrupted(monkeypatch: pytest.MonkeyPatch, owner: Any, number: int) -> None:
    """A signal comes before the call of this number that measures such content."""
    measure, calls = owner.measure, []

    def signalled(self: Any, scorer: Any) -> Any:
        calls.append(self)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(self, scorer)

    monkeypatch.setattr(owner, "measure", signalled)


def test_what_a_signal_interrupts_is_measured_by_the_resume(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    expected = measured(whole())
    with monkeypatch.context() as patch:
        interrupted(patch, Documents, 2)
        assert "Stopped by SIGTERM after step 4" in told(*RUN, EVALS, "run.dir=again", code=130)
    assert measured("again") == expected[:1]
    with monkeypatch.context() as patch:
        interrupted(patch, Prompts, 1)
        ending = EVALS.replace("every: evaluation", "every: end")
        assert "Stopped by SIGTERM after step 4" in told("run.dir=again", "resume=auto", ending, code=130)
    assert measured("again") == expected[:2]
    said = told("run.dir=again", "resume=auto")
    assert measured("again") == expected and tensors("again") == tensors("whole")
    assert "Step 4: eval/questions/accuracy 0." in said and "eval/domain" not in said
    told("run.dir=again", "resume=auto")
    assert measured("again") == expected  # once is enough
    told("run.dir=again", "resume=auto", "train.evals=[{path: texts.jsonl, name: domain}]")
    found = json.loads(Path("again/summary.json").read_text())["evals"]  # not of files that are not asked for any more
    assert found == {key: value for key, value in expected[1].items() if key != "step"}


def test_a_signal_ends_a_sample_between_tokens(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    drawn: list[int] = []

    def tokens(self: Any, prompt: list[int], number: int) -> Any:
        for number in range(1000):
            drawn.append(number)
            os.kill(os.getpid(), signal.SIGTERM) if number == 2 else None
            yield prompt[0]

    monkeypatch.setattr(TokenSource, "tokens", tokens)
    entry = "train.evals=[{path: prompts.txt, kind: samples}]"
    assert "Stopped by SIGTERM after step 4" in told(*RUN, entry, "run.dir=long", code=130)
    assert len(drawn) == 3


def test_ranks_and_documents_that_do_not_see_each_other() -> None:
    """One rank measures, while the average of sharded weights stands in their place on all, who gather them."""
    own = [*RUN, EVALS, "data.attention=document", "model.dropout=0"]
    assert main([*own, "parallel.slices=2", "run.dir=alone"]) == 0
    ranks = Forks([[*own, "parallel=zero3", "run.dir=ranks"]] * 2, Path("ranks.log").absolute())
    assert ranks.wait() and ranks.codes == [0, 0], [log.read_text() for log in ranks.logs]
    assert measured("ranks") == measured("alone") != measured(whole())
    assert [each["text"] for each in events("ranks", "sample")] == [each["text"] for each in events("alone", "sample")]
    assert kills.tensors(Path("ranks")) == kills.tensors(Path("alone"))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("path: none.jsonl", "train.evals[0]: none.jsonl does not exist"),
        ("path: empty.jsonl", "train.evals[0]: empty.jsonl is empty"),
        ("path: blank.jsonl", "train.evals[0]=blank.jsonl has nothing to predict"),
        ("path: questions.jsonl", "questions.jsonl:1: "),
        ("path: empty.jsonl, kind: choices", "train.evals[0]: empty.jsonl has no questions"),
        ("path: none.jsonl, kind: choices", "train.evals[0]: cannot read none.jsonl"),
        ("path: unlabelled.jsonl, kind: choices", "unlabelled.jsonl:2: is not an object with ctx, endings and label"),
        ("path: beyond.jsonl, kind: choices", "beyond.jsonl:1: label 3 is none of its 3 endings"),
        ("path: infinite.jsonl, kind: choices", "infinite.jsonl:1: is not an object with ctx, endings and label"),
        ("path: half.jsonl, kind: choices", "half.jsonl:1: is not an object with ctx, endings and label"),
        ("path: empty.jsonl, kind: samples", "train.evals[0]=empty.jsonl: has no prompt"),
        ("path: texts.jsonl, kind: choice", "train.evals[0].kind=choice: no such choice. Did you mean 'choices'?"),
        ("path: texts.jsonl, limt: 3", "train.evals[0].limt: unknown key. Did you mean 'limit'?"),
        (
            "path: texts.jsonl}, {path: other/texts.txt",
            "train.evals[1]: path='other/texts.txt' name='texts': must have",
        ),
        ("kind: text", "train.evals[0]: path='' name='': must have a path, and a name"),
    ],
)
def test_a_file_that_can_not_be_measured_is_told_before_the_first_step(entry: str, message: str, refused: Told) -> None:
    Path("empty.jsonl").write_text("")
    Path("blank.jsonl").write_text('{"text": ""}\n')
    write_rows("unlabelled.jsonl", [QUESTIONS[0], {"ctx": "the", "endings": ["a", "b"]}])
    for name, label in {"beyond": 3, "infinite": math.inf, "half": 0.5}.items():
        write_rows(f"{name}.jsonl", [{**QUESTIONS[0], "label": label}])
    refused(message, *RUN, f"train.evals=[{{{entry}}}]", "run.dir=refused")


def test_a_list_of_other_things_is_refused(refused: Told) -> None:
    words = "train.evals=['texts.jsonl']: must be a list of mappings with path, kind, name, every, limit, got a list"
    refused(words, *RUN, "train.evals=[texts.jsonl]")
    numbers = ["model=mlp", "data=regression", "logger=jsonl", "device=cpu", "train.evals=[{path: texts.jsonl}]"]
    refused("train.evals: data=regression has no tokenizer", *numbers)
