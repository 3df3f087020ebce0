"""task=eval against plain torch: every token predicted once, and likelihoods of endings worked out by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.conftest import cache_home
from tests.models.decoder.plain_decoder import PlainDecoder
from ttrain import load_config
from ttrain.cli import main
from ttrain.config.build import build_model
from ttrain.core.errors import DataError
from ttrain.data.library_tokenizer import parse_tokenizer
from ttrain.tasks.evaluating.measures import encoded_pair, opened, read_questions, windows_of
from ttrain.train.checkpoint.retention import find_checkpoint

CONTEXT = 12
QUIET = [
    "logger=jsonl", "device=cpu", "device.threads=1", "sample.tokens=1", "train.peak_tflops=1", "train.steps=6",
    "train.batch_size=4", "train.eval_every=null", "optimizer.lr=0.02", "engine=dynamic",
]  # fmt: skip
SIZES = ["model.layers=2", "model.width=16", "model.heads=2", f"model.context={CONTEXT}"]
DOCUMENTS = ["data=documents", "data.sources=[rows.jsonl]", "data.tokenizer=bpe", "data.vocabulary_size=270"]
TEXTS = ["a cat sat on the mat and sat", "é", "the dog and the cat and the dog sat on the mat, all of them, at once"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eval")


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home(folder))
    overrides = np.random.default_rng(0).choice(["the", "cat", "dog", "sat", "on", "mat", "and"], (60, 9))
    Path("rows.jsonl").write_text("".join(json.dumps({"text": " ".join(row)}) + "\n" for row in overrides))
    Path("texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))


def trained(name: str, *overrides: str) -> str:
    if not Path(name).exists():
        assert main([*QUIET, *overrides, f"run.dir={name}"]) == 0
    return name


def gpt() -> str:
    return trained("gpt", *SIZES, *DOCUMENTS)


def evaluated(run: str, *overrides: str) -> dict[str, Any]:
    out = f"{run}-{len(list(Path().glob('*.json')))}.json"
    assert main(["task=eval", f"run.dir={run}", "device=cpu", "device.threads=1", f"eval.out={out}", *overrides]) == 0
    return json.loads(Path(out).read_text())


def plain(run: str) -> tuple[Callable[[list[int]], Tensor], Any]:
    """The run's model in plain torch, ids -> logits [T, V], and its tokenizer."""
    checkpoint = find_checkpoint(Path(run), "last")
    tokenizer = parse_tokenizer(checkpoint.tokenizer or "")
    config = load_config(*SIZES, *DOCUMENTS)
    ours: Any = build_model(*config.model_parts, tokenizer.vocabulary)
    weights = {name: torch.tensor(np.asarray(value)) for name, value in checkpoint.weights().items()}
    return lambda ids: PlainDecoder(ours.config, weights).logits(torch.tensor([ids]))[0], tokenizer


def log_probability(model: Callable[[list[int]], Tensor], before: list[int], after: list[int]) -> tuple[float, bool]:
    """One token after the other, each from the context that fits."""
    total, greedy = 0.0, True
    for number, token in enumerate(after):
        scores = F.log_softmax(model([*before, *after[:number]])[-1], -1)
        total, greedy = total + scores[token].item(), greedy and int(scores.argmax()) == token
    return total, greedy


# texts


@pytest.mark.parametrize("stride", [1, 3, 12])
@pytest.mark.parametrize("length", [0, 1, 2, 12, 13, 14, 25, 40])
def test_every_token_but_the_first_is_predicted_once(length: int, stride: int) -> None:
    texts = list(windows_of(range(length), 12, stride))
    assert [target for text in texts for target in text.ids[-text.predicted :]] == list(range(1, length))
    assert all(len(text.ids) == min(12, text.ids[-1]) + 1 for text in texts)


@pytest.mark.parametrize(("stride", "rows"), [("null", 8), ("5", 3), ("1", 64)])
def test_perplexity_is_that_of_plain_torch(stride: str, rows: int) -> None:
    """Token by token from the same windows: the end token comes before a document and is not predicted."""
    found = evaluated(gpt(), "eval.text=[texts.jsonl]", f"eval.stride={stride}", f"eval.batch_size={rows}")["text"]
    model, tokenizer = plain("gpt")
    end = tokenizer.token_id("<|endoftext|>")
    total, count = 0.0, 0
    step = CONTEXT if stride == "null" else int(stride)
    for text in TEXTS:
        ids = [end, *tokenizer.encode(text)]
        done = 1
        while done < len(ids):
            stop = min(len(ids), done + (step if done > 1 else CONTEXT))
            start = max(0, stop - 1 - CONTEXT)
            scores = F.log_softmax(model(ids[start : stop - 1]), -1)
            total -= sum(scores[place - 1 - start, ids[place]].item() for place in range(done, stop))
            count, done = count + stop - done, stop
    size = sum(len(text.encode()) for text in TEXTS)
    assert (found["documents"], found["tokens"], found["bytes"]) == (3, count, size)
    assert found["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-5)


def test_without_a_token_between_documents_the_first_is_only_read() -> None:
    Path("book.txt").write_text("the cat sat on the mat. " * 40)
    run = trained("char", *SIZES, "data.path=book.txt", "data.tokenizer=byte")
    Path("part.txt").write_text("éthe cat sat on the mat")
    found = evaluated(run, "eval.text=[part.txt]")["text"]
    assert not found["first_tokens_predicted"] and found["tokens"] == found["bytes"] == 24 - 1
    assert found["bits_per_byte"] == pytest.approx(math.log2(found["perplexity"]))
    assert main(["task=eval", f"run.dir={run}", "eval.text=[part.txt]", "device=cpu"]) == 0
    (file,) = Path("outputs/eval").glob("*/*_char/results.json")
    again = json.loads(file.read_text())["text"]  # with other threads and another engine
    assert again.pop("loss") == pytest.approx(found.pop("loss"), rel=1e-6) and again.keys() == found.keys()


def test_what_is_not_read_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mixed").mkdir()
    Path("mixed/one.txt").write_text("the cat sat")
    Path("mixed/two.dat").write_text("the dog sat")
    Path("mixed/three.jsonl").write_text('{"text": " "}\n{"text": "the mat"}\n')
    (others, blank) = evaluated(gpt(), "eval.text=[mixed]")["text"]["notices"]
    assert others.startswith("eval.text: 1 file(s) of mixed are not read") and "mixed/two.dat" in others
    assert "data." not in others and blank == "eval.text: 1 blank document(s) are left out."
    said = capsys.readouterr().out
    assert f"note           {others}" in said and blank in said
    assert evaluated(gpt(), "eval.text=[mixed/one.txt,mixed/two.dat]")["text"]["notices"] == []


def test_each_evaluation_has_a_folder_that_names_what_was_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    gpt()
    run = trained("adapted", *SIZES, *DOCUMENTS, "lora.rank=2", "train.init_from=gpt", "optimizer.lr=0.1")
    for form in ("peft", "huggingface"):
        source = run if form == "peft" else gpt()
        assert main(["task=export", f"run.dir={source}", f"export.form={form}", f"export.dir={form}"]) == 0
    command = ["task=eval", "model.from=huggingface", "eval.text=[texts.jsonl]", "device=cpu"]
    capsys.readouterr()
    for adapters in ([], ["lora.from=peft"], ["lora.from=peft"]):
        assert main([*command, *adapters]) == 0
        said = capsys.readouterr().out
        assert " of huggingface" in said and ("with the adapters of peft" in said) == bool(adapters)
    found = [json.loads(file.read_text()) for file in sorted(Path("outputs/eval").glob("*/*_huggingface*/*.json"))]
    assert [each["adapters"] for each in found] == [None, "peft", "peft"] and found[1]["text"] == found[2]["text"]
    assert found[0]["text"]["loss"] != found[1]["text"]["loss"] and "task=eval" in found[0]["command"]
    before = list(Path("outputs/eval").glob("*/*"))
    assert main([*command, "eval.text=[none.txt]"]) == 2 and list(Path("outputs/eval").glob("*/*")) == before


def test_characters_that_the_tokenizer_never_saw_are_named_with_their_place(capsys: pytest.CaptureFixture[str]) -> None:
    Path("book.txt").write_text("the cat sat on the mat. " * 40)
    run = trained("letters", *SIZES, "data.path=book.txt", "train.steps=1")
    Path("two.jsonl").write_text('{"text": "the cat"}\n{"text": "the Cat"}\n')
    assert main(["task=eval", f"run.dir={run}", "eval.text=[two.jsonl]", "device=cpu"]) == 2
    assert "two.jsonl:2: the char tokenizer of 11 ids never saw 'C'" in capsys.readouterr().err
    given = ask({"ctx": "the", "endings": ["cat", "mat"], "label": 0}, {"ctx": "t", "endings": ["X", "a"], "label": 0})
    assert main(["task=eval", f"run.dir={run}", given, "device=cpu"]) == 2
    assert "questions.jsonl:2: the char tokenizer of 11 ids never saw 'X'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("agillm", ["model=agillm", "model.preset=null", "model.rank=8", "model.objective=joint"]),
        ("llama", ["model=llama", "model.preset=null", "model.hidden=24"]),
        ("alone", ["data.attention=document"]),
    ],
)
def test_losses_and_likelihoods_of_other_models_agree(kind: str, overrides: list[str]) -> None:
    """What a batch of windows loses is what its tokens lose one continuation at a time."""
    run = trained(kind, *DOCUMENTS, *SIZES, *overrides)
    words = ["task=eval", f"run.dir={run}", "eval.text=[texts.jsonl]", "device=cpu", "engine=dynamic"]
    with opened(load_config(*words)) as scorer:
        assert (scorer.start is None) == (kind == "alone")
        before = [] if scorer.start is None else [scorer.start]
        ids = [[*before, *scorer.tokenizer.encode(text)][: CONTEXT + 1] for text in TEXTS]
        pairs = [(part[:place], part[place : place + 1]) for part in ids for place in range(1, len(part))]
        assert len(pairs) > scorer.rows
        loss = scorer.loss([text for part in ids for text in windows_of(part, CONTEXT)])
        total = sum(found.total for found in scorer.likelihoods(pairs))
    assert total == pytest.approx(-len(pairs) * loss, rel=1e-5)


# questions

QUESTIONS = [
    {"ctx": "the cat", "endings": ["sat on the mat", "dog dog", "é"], "label": 0},
    {"ctx": "the dog and ", "endings": ["x", "the cat sat on the mat and the dog sat on it too"], "label": "1"},
    {"ctx": "", "endings": ["the", "zzzzzzz zzz"], "label": 0},
    {
        "ctx": "the cat and the dog and the cat and the dog sat on a mat and",
        "endings": ["the dog", "mat"],
        "label": 1,
    },
]


def ask(*rows: Any) -> str:
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return "eval.choices=questions.jsonl"


def test_choices_are_those_of_likelihoods_by_hand() -> None:
    model, tokenizer = plain(gpt())
    end = tokenizer.token_id("<|endoftext|>")
    right: dict[str, list[bool]] = {"acc": [], "acc_norm": [], "acc_bytes": []}
    expected = []
    for question in QUESTIONS:
        before, found = question["ctx"], []
        for ending in question["endings"]:
            whole = tokenizer.encode(before.rstrip() + before[len(before.rstrip()) :] + " " + ending)
            first = tokenizer.encode(before.rstrip()) if before.strip() else []
            after, known = whole[len(first) :], (first or [end])
            text = [*known, *after][-CONTEXT - 1 :]
            kept = min(len(after), len(text) - 1)
            scores = F.log_softmax(model(text[:-1]), -1)
            found.append(sum(scores[place - 1, text[place]].item() for place in range(len(text) - kept, len(text))))
        expected += found
        for name, sizes in (
            ("acc", [1] * len(found)),
            ("acc_norm", [len(ending) for ending in question["endings"]]),
            ("acc_bytes", [len(ending.encode()) for ending in question["endings"]]),
        ):
            best = max(range(len(found)), key=lambda index: found[index] / sizes[index])
            right[name].append(best == int(question["label"]))
    given = evaluated("gpt", ask(*QUESTIONS), "eval.batch_size=3")["choices"]
    assert given["questions"] == 4
    for name, values in right.items():
        assert given[name] == np.mean(values)
        assert given[f"{name}_stderr"] == pytest.approx(np.std(values, ddof=1) / 2)
    overrides = ["task=eval", "run.dir=gpt", "eval.choices=x", "device=cpu", "engine=dynamic", "eval.batch_size=3"]
    pairs = [encoded_pair(tokenizer, q["ctx"], f" {ending}") for q in QUESTIONS for ending in q["endings"]]
    with opened(load_config(*overrides)) as scorer:
        likelihoods = scorer.likelihoods(pairs)
    assert [found.total for found in likelihoods] == pytest.approx(expected, rel=1e-5)
    for (before, after), found in zip(pairs, likelihoods, strict=True):
        if len(before) + len(after) <= CONTEXT:
            total, greedy = log_probability(model, before or [end], after)
            assert total == pytest.approx(found.total, rel=1e-5) and greedy == found.greedy


def test_an_ending_that_nothing_predicts_has_no_likelihood(capsys: pytest.CaptureFixture[str]) -> None:
    """A likelihood of 1 would make it the best ending."""
    run = trained("plain", *SIZES, "data.path=rows.jsonl", "data.tokenizer=byte", "train.steps=1")
    given = ask({"ctx": "the", "endings": ["a", "b"], "label": 0})
    assert evaluated(run, given)["choices"]["questions"] == 1
    with opened(load_config("task=eval", f"run.dir={run}", given, "device=cpu", "engine=dynamic")) as scorer:
        assert scorer.start is None
        assert [found.total < 0 for found in scorer.likelihoods([([], [65, 66]), ([65], [66])])] == [True, True]
        with pytest.raises(DataError, match="'A' can't be scored: its context is empty"):
            scorer.likelihoods([([], [65, 66]), ([], [65])])
        with pytest.raises(DataError, match="'' can't be scored: it is empty"):
            scorer.likelihoods([([66], [])])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"ctx": "x", "endings": ["a", "b"]}, "questions.jsonl:2: is not an object with ctx, endings and label"),
        ({"ctx": "x", "endings": ["a", "b"], "label": 2}, "label 2 is none of its 2 endings"),
        ({"ctx": "x", "endings": ["a", "b"], "label": -1}, "label -1 is none of its 2 endings"),
        ({"ctx": "x", "endings": ["a"], "label": 0}, "a list of at least two texts"),
        ({"ctx": "x", "endings": ["a", ""], "label": 0}, "that are not empty"),
        ({"ctx": 5, "endings": ["a", "b"], "label": 0}, "ctx must be text"),
        ({"ctx": "x", "endings": ["a", None], "label": 0}, "ctx must be text, endings a list"),
        ([], "is not an object"),
    ],
)
def test_rows_that_are_no_questions(row: Any, message: str) -> None:
    ask(QUESTIONS[0], row)
    with pytest.raises(DataError) as caught:
        list(read_questions(Path("questions.jsonl")))
    assert "questions.jsonl:2: " in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval.text=[texts.jsonl]"], "task=eval: needs a trained model"),
        (["run.dir=gpt"], "task=eval: nothing to measure"),
        (["run.dir=gpt", "model.from=x", "eval.text=[texts.jsonl]"], "model.from=x"),
        (["run.dir=gpt", "eval.text=[nowhere.txt]"], "nowhere.txt does not exist"),
        (["run.dir=gpt", "eval.choices=nowhere.jsonl"], "eval.choices: cannot read nowhere.jsonl"),
        (["run.dir=gpt", "eval.text=[texts.jsonl]", "eval.checkpoint=9"], "gpt has no checkpoint of step 9"),
        (["run.dir=nothing", "eval.text=[texts.jsonl]"], "nothing is not a run"),
        (["run.dir=gpt", "eval.text=[texts.jsonl]", "device=null"], "computes no values"),
        (["run.dir=gpt", "eval.text=[texts.jsonl]", "eval.out=rows.jsonl/x"], "can't be written"),
    ],
)
def test_what_can_not_be_measured(overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    gpt()
    assert main(["task=eval", "device=cpu", *overrides]) == 2
    assert message in capsys.readouterr().err
