"""task=eval against plain torch: every token predicted once, and likelihoods of endings worked out by hand."""

from __future__ import annotations

import abc
import io
import json
import math
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.conftest import Told
from tests.models.decoder.plain_decoder import PlainDecoder
from tests.train.reading import write_rows
from ttrain import load_config
from ttrain.cli import main
from ttrain.config.build import build_model
from ttrain.core.errors import DataError, UserError
from ttrain.data.library_tokenizer import parse_tokenizer, train_bpe
from ttrain.tasks.evaluating.measures import encoded_pair, opened, read_questions, windows_of
from ttrain.tasks.sample import _rows
from ttrain.train.checkpoint.retention import find_checkpoint

CONTEXT = 12
QUIET = [
    "logger=jsonl", "device=cpu", "device.threads=1", "sample.tokens=1", "train.peak_tflops=1", "train.steps=6",
    "train.batch_size=4", "train.eval_every=null", "optimizer.lr=0.02", "engine=dynamic",
]  # fmt: skip
SIZES = ["model.layers=2", "model.width=16", "model.heads=2", f"model.context={CONTEXT}"]
DOCUMENTS = ["data=documents", "data.sources=[rows.jsonl]", "data.tokenizer=bpe", "data.vocabulary_size=270"]
TEXTS = ["a cat sat on the mat and sat", "é", "the dog and the cat and the dog sat on the mat, all of them, at once"]


@pytest.fixture(autouse=True)
def here(shared: Path) -> None:
    words = np.random.default_rng(0).choice(["the", "cat", "dog", "sat", "on", "mat", "and"], (60, 9))
    write_rows("rows.jsonl", [{"text": " ".join(row)} for row in words])
    write_rows("texts.jsonl", [{"text": text} for text in TEXTS])


def trained(name: str, *overrides: str) -> str:
    if not Path(name).exists():
        assert main([*QUIET, *overrides, f"run.dir={name}"]) == 0
    return name


def gpt() -> str:
    return trained("gpt", *SIZES, *DOCUMENTS, "sample.repetition=3")


def evaluated(run: str, *overrides: str) -> dict[str, Any]:
    out = f"{run}-{len(list(Path().glob('*.json')))}.json"
    assert main(["task=eval", f"run.dir={run}", "device=cpu", "device.threads=1", f"eval.out={out}", *overrides]) == 0
    return json.loads(Path(out).read_text())


def plain(run: str) -> tuple[Callable[[list[int]], Tensor], Any]:
    """The run's model in plain torch, ids -> logits [T, V], and its tokenizer."""
    checkpoint = find_checkpoint(Path(run), "last")
    tokenizer = parse_tokenizer(checkpoint.tokenizer or "")
    config = load_config(*SIZES, *DOCUMENTS)
    ours: Any = build_model(config, tokenizer.vocabulary)
    weights = {name: torch.tensor(np.asarray(value)) for name, value in checkpoint.weights().items()}
    return lambda ids: PlainDecoder(ours.config, weights).logits(torch.tensor([ids]))[0], tokenizer


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
        assert main([*command, *adapters, "--json"]) == 0
        document, said = capsys.readouterr()
        assert " of huggingface" in said and ("with the adapters of peft" in said) == bool(adapters)
        told = json.loads(document)
        assert told == {**json.loads(Path(told["out"]).read_text()), "out": told["out"]}
    found = [json.loads(file.read_text()) for file in sorted(Path("outputs/eval").glob("*/*_huggingface*/*.json"))]
    assert [each["adapters"] for each in found] == [None, "peft", "peft"] and found[1]["text"] == found[2]["text"]
    assert found[0]["text"]["loss"] != found[1]["text"]["loss"] and "task=eval" in found[0]["command"]
    before = list(Path("outputs/eval").glob("*/*"))
    assert main([*command, "eval.text=[none.txt]"]) == 2 and list(Path("outputs/eval").glob("*/*")) == before


def test_characters_that_the_tokenizer_never_saw_are_named_with_their_place(refused: Told) -> None:
    Path("book.txt").write_text("the cat sat on the mat. " * 40)
    run = trained("letters", *SIZES, "data.path=book.txt", "train.steps=1")
    Path("two.jsonl").write_text('{"text": "the cat"}\n{"text": "the Cat"}\n')
    command = ["task=eval", f"run.dir={run}", "device=cpu"]
    refused("two.jsonl:2: the char tokenizer of 11 ids never saw 'C'", *command, "eval.text=[two.jsonl]")
    given = ask({"ctx": "the", "endings": ["cat", "mat"], "label": 0}, {"ctx": "t", "endings": ["X", "a"], "label": 0})
    refused("questions.jsonl:2: the char tokenizer of 11 ids never saw 'X'", *command, given)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("agillm", ["model=agillm", "model.preset=null", "model.rank=8", "model.objective=joint"]),
        ("llama", ["model=llama", "model.preset=null", "model.hidden=24"]),
        ("alone", ["data.attention=document"]),
    ],
)
def test_losses_and_likelihoods_of_other_models_agree(kind: str, overrides: list[str]) -> None:
    """The loss of a batch of windows is that of its tokens, one continuation at a time."""
    run = trained(kind, *DOCUMENTS, *SIZES, *overrides)
    words = ["task=eval", f"run.dir={run}", "eval.text=[texts.jsonl]", "device=cpu", "engine=dynamic"]
    with opened(load_config(*words)) as scorer:
        assert (scorer.start is None) == (kind == "alone")
        before = [] if scorer.start is None else [scorer.start]
        ids = [[*before, *scorer.tokenizer.encode(text)][: CONTEXT + 1] for text in TEXTS]
        pairs = [(part[:place], part[place : place + 1]) for part in ids for place in range(1, len(part))]
        assert len(pairs) > scorer.rows
        loss = scorer.loss([text for part in ids for text in windows_of(part, CONTEXT)])
        total = sum(found.total for found in scorer.likelihoods([scorer.text(*pair) for pair in pairs]))
    assert total == pytest.approx(-len(pairs) * loss, rel=1e-5)


# questions

QUESTIONS = [
    {"ctx": "the cat", "endings": ["sat on the mat", "dog dog", "é"], "label": 0},
    {"ctx": "the dog and ", "endings": ["x", "the cat sat on the mat and the dog sat on it too"], "label": "1"},
    {"ctx": "", "endings": ["the", "zzzzzzz zzz"], "label": 0},
    {"ctx": "the cat and the dog and the cat and the dog sat on a mat and", "endings": ["the dog", "mat"], "label": 1},
]


def ask(*rows: Any) -> str:
    return f"eval.choices={write_rows('questions.jsonl', rows)}"


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
        likelihoods = scorer.likelihoods([scorer.text(*pair) for pair in pairs])
    assert [found.total for found in likelihoods] == pytest.approx(expected, rel=1e-5)


def test_an_ending_that_nothing_predicts_has_no_likelihood() -> None:
    """A likelihood of 1 would make it the best ending."""
    run = trained("plain", *SIZES, "data.path=rows.jsonl", "data.tokenizer=byte", "train.steps=1")
    given = ask({"ctx": "the", "endings": ["a", "b"], "label": 0})
    assert evaluated(run, given)["choices"]["questions"] == 1
    with opened(load_config("task=eval", f"run.dir={run}", given, "device=cpu", "engine=dynamic")) as scorer:
        assert scorer.start is None
        texts = [scorer.text([], [65, 66]), scorer.text([65], [66])]
        assert [found.total < 0 for found in scorer.likelihoods(texts)] == [True, True]
        with pytest.raises(DataError, match="'A' can't be scored: its context is empty"):
            scorer.text([], [65])
        with pytest.raises(DataError, match="'' can't be scored: it is empty"):
            scorer.text([66], [])


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
        list(read_questions(Path("questions.jsonl"), "eval.choices"))
    assert "questions.jsonl:2: " in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval.text=[texts.jsonl]"], "task=eval: needs a trained model"),
        (["run.dir=gpt"], "task=eval: nothing to measure"),
        (["run.dir=gpt", "model.from=x", "eval.text=[texts.jsonl]"], "model.from=x"),
        (["run.dir=gpt", "eval.text=[nowhere.txt]"], "nowhere.txt does not exist"),
        (["run.dir=gpt", "eval.choices=nowhere.jsonl"], "eval.choices: cannot read nowhere.jsonl"),
        (["run.dir=nothing", "eval.text=[texts.jsonl]"], "nothing is not a run"),
        (["run.dir=gpt", "eval.text=[texts.jsonl]", "device=null"], "computes no values"),
        (["run.dir=gpt", "eval.text=[texts.jsonl]", "eval.out=rows.jsonl/x"], "can't be written"),
    ],
)
def test_what_can_not_be_measured(overrides: list[str], message: str, refused: Told) -> None:
    gpt()
    refused(message, "task=eval", "device=cpu", *overrides)


# the adapter for lm-evaluation-harness


class _LM(abc.ABC):
    """The interface lm_eval.api.model.LM, for machines without the harness."""

    def __init__(self) -> None:
        self.cache_hook: Any = SimpleNamespace(add_partial=lambda kind, arguments, found: None)

    @abc.abstractmethod
    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]: ...

    @abc.abstractmethod
    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]: ...

    @abc.abstractmethod
    def generate_until(self, requests: list[Any]) -> list[str]: ...


@pytest.fixture
def language_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    try:
        import lm_eval.api.model  # noqa: F401  # the real one where it is
    except ImportError:
        for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["lm_eval.api.model"].LM = _LM  # type: ignore[attr-defined]
    from ttrain.tasks.evaluating.harness import TtrainLM

    model = TtrainLM("device=cpu", "device.threads=1", batch_size=3, **{"run.dir": gpt()})
    yield model
    model.close()


def asked(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


def test_the_sum_of_likelihoods_is_that_of_the_whole(language_model: Any) -> None:
    """A text within the context: word by word, as a whole, and rolling, where the first word follows nothing."""
    parts = ["the", "the cat", "the cat sat", "the cat sat on"]
    kept: list[Any] = []
    language_model.cache_hook = SimpleNamespace(add_partial=lambda *given: kept.append(given))
    pairs = [(before, after[len(before) :]) for before, after in pairwise(parts)]
    *each, whole, alone = language_model.loglikelihood(
        asked(*pairs, ("the", " cat sat on"), ("", "the cat sat on")), disable_tqdm=True
    )
    assert sum(total for total, _ in each) == pytest.approx(whole[0], rel=1e-5)
    assert whole[1] == all(greedy for _, greedy in each)
    rolling = language_model.loglikelihood_rolling(asked(("the cat sat on",)), disable_tqdm=True)
    assert rolling == [pytest.approx(alone[0], rel=1e-5)]
    assert [given[:2] for given in kept[-2:]] == [
        ("loglikelihood", ("", "the cat sat on")), ("loglikelihood_rolling", ("the cat sat on",)),
    ]  # fmt: skip


def test_rolling_likelihoods_are_those_of_task_eval(language_model: Any) -> None:
    found = evaluated("gpt", "eval.text=[texts.jsonl]")["text"]
    each = language_model.loglikelihood_rolling(asked(*((text,) for text in TEXTS)), disable_tqdm=True)
    assert -sum(each) == pytest.approx(found["loss"] * found["tokens"], rel=1e-5)
    assert -sum(each) / math.log(2) / len("".join(TEXTS).encode()) == pytest.approx(found["bits_per_byte"], rel=1e-5)
    assert language_model.loglikelihood_rolling(asked(("",)), disable_tqdm=True) == [0.0]


def test_what_is_written_greedily_is_greedy(language_model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    request = ("the cat", {"until": ["\n\n"], "max_gen_toks": 7})
    (text,) = language_model.generate_until(asked(request), disable_tqdm=True)
    words = ["sample.prompt=the cat", "sample.temperature=0", "sample.tokens=7", "sample.repetition=1"]
    capsys.readouterr()
    assert main(["task=sample", "run.dir=gpt", "device=cpu", *words]) == 0
    assert capsys.readouterr().out == f"the cat{text}\n" and text
    ((_, greedy), (_, other)) = language_model.loglikelihood(asked(("the cat", text), ("the cat", " zz")))
    assert greedy and not other
    until = text[2:4]
    short, drawn, again = language_model.generate_until(
        asked(
            ("the cat", {"until": until, "max_gen_toks": 7}),
            ("the cat", {"do_sample": True, "temperature": 3.0, "max_gen_toks": 20}),
            ("the cat", {"temperature": 3.0, "max_gen_toks": 7}),
        )
    )
    assert short == text[: text.index(until)] and again == text and not drawn.startswith(text)
    with pytest.raises(UserError, match="knows no 'num_beams'"):
        language_model.generate_until(asked(("the cat", {"num_beams": 2})))


def test_without_the_harness_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name == "ttrain.tasks.evaluating.harness":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ImportError, match=r"pip install 'ttrain\[lm-eval\]'"):
        import ttrain.tasks.evaluating.harness  # noqa: F401


# conversations, against Transformers and rows that are written by hand


CHATS = [
    [{"role": "user", "content": f"the cat {number}"}, {"role": "assistant", "content": "sat on the mat"}]
    for number in range(12)
]
CHAT_TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}> {{ m.content }}</s>\n{% endfor %}"
SMALL = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=64", "train.steps=2", "device=cpu",
         "train.batch_size=2", "train.eval_sequences=2", "device.threads=1", "sample.tokens=1"]  # fmt: skip


@pytest.fixture
def chats(inside: Path) -> None:
    write_rows("chats.jsonl", [{"talk": chat} for chat in CHATS])


def measured(*overrides: str) -> dict[str, Any]:
    assert main(["task=eval", "device=cpu", "device.threads=1", "eval.out=out.json", *overrides]) == 0
    return dict(json.loads(Path("out.json").read_text())["text"])


def train(*overrides: str) -> None:
    data = ["data=documents", "data.sources=[chats.jsonl]", "data.chat_key=talk", "data.held_out=0.3"]
    assert main([*SMALL, *data, "data.long_documents=cut", "run.dir=run", *overrides]) == 0


OWN = "{role} says {content}|"


@pytest.mark.parametrize(("template", "message"), [("plain", "{Role}: {content}\n"), (OWN, OWN)])
def test_chats_are_rendered_as_the_run_did(chats: None, template: str, message: str) -> None:
    train("data.tokenizer=byte", f"data.template='{template}'")
    texts = ["".join(message.format(Role=m["role"].capitalize(), **m) for m in chat).rstrip("\n") for chat in CHATS]
    found = measured("run.dir=run", "eval.text=[chats.jsonl]")
    expected = measured("run.dir=run", f"eval.text=[{write_rows('texts.jsonl', [{'text': text} for text in texts])}]")
    assert found["bytes"] == sum(len(text) for text in texts)
    same = ("tokens", "bytes", "loss", "bits_per_byte", "documents")
    assert [found[key] for key in same] == [expected[key] for key in same]
    silent = [{"talk": [chat[0], {**chat[1], "weight": 0}]} for chat in CHATS]  # nothing is learned here
    assert measured("run.dir=run", f"eval.text=[{write_rows('silent.jsonl', silent)}]")["loss"] == found["loss"]


def test_chats_are_rendered_by_the_template_of_a_folder(chats: None) -> None:
    """The result is that of Transformers; a BOS that the template writes is not doubled."""
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    made: Any = train_bpe([json.dumps(CHATS)], 300)
    Path("tokenizer.json").write_text(made.with_token("<s>").with_token("</s>").to_json())
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    Path("tokenizer_config.json").write_text(json.dumps(config))
    train("data.tokenizer=tokenizer.json", "data.template=tokenizer", "model=llama", "model.hidden=24", *SMALL)
    assert main(["task=export", "run.dir=run", "export.form=huggingface", "export.dir=hf"]) == 0
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file="tokenizer.json", **config)
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in CHATS]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    write_rows("messages.jsonl", [{"messages": chat} for chat in CHATS])
    for model, chats in (("run.dir=run", "chats.jsonl"), ("model.from=hf", "messages.jsonl")):
        found = measured(model, f"eval.text=[{chats}]")
        if model == "model.from=hf":  # a text follows bos_token, which is there once
            assert found["tokens"] == sum(len(each) - 1 for each in ids)
            assert found["bytes"] == sum(len(text) - len("<s>") for text in texts)
        expected = measured(model, f"eval.text=[{write_rows('texts.jsonl', [{'text': text} for text in texts])}]")
        assert (found["loss"], found["tokens"]) == (expected["loss"], expected["tokens"])


def test_a_model_without_a_template_reads_no_chats(chats: None, told: Told) -> None:
    Path("book.txt").write_text("the cat sat on the mat. " * 60)
    assert main([*SMALL, "data.path=book.txt", "data.tokenizer=byte", "run.dir=text"]) == 0
    write_rows("messages.jsonl", [{"text": "the cat"}, {"messages": CHATS[0]}])
    said = told("task=eval", "run.dir=text", "eval.text=[messages.jsonl]", "device=cpu", code=2)
    assert "messages.jsonl:2 is a conversation: text: has no template" in said


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_only_a_line_feed_ends_a_row_of_prompts(chats: None, name: str) -> None:
    rows = ["one\u2028two", "form\x0cfeed", "next\x85line", "a\rb", "\x1cgroup\x1e", "last"]
    lines = [json.dumps({"prompt": row}, ensure_ascii=False) if name.endswith("l") else row for row in rows]
    for end in ("\n", "\r\n"):
        Path(name).write_bytes(("\ufeff" + end.join(lines) + end + end).encode())
        assert [row[1] for row in _rows(Path(name), "sample.prompts")] == rows
    assert [row[0] for row in _rows(Path(name), "sample.prompts")] == [f"{name}:{number}" for number in range(1, 7)]
    Path(name).write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=rf"^sample\.prompts: {name}:1 is .*UTF-16 does. Convert it to UTF-8\.$"):
        list(_rows(Path(name), "sample.prompts"))


def test_lines_of_a_chat_end_at_line_feeds(chats: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from ttrain.tasks import chat

    said: list[str] = []
    given = "\ufeffone\rtwo\u2028three\r\n/reset\n\x85four".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), "utf-8"))
    monkeypatch.setattr(chat._Conversation, "answer", lambda self, line: said.append(line))
    train("data.tokenizer=byte", "data.template=chatml")
    chat.run(load_config("task=chat", "run.dir=run", "device=cpu"))
    assert said == ["one\rtwo\u2028three", "\x85four"]
