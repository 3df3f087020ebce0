"""Rows as long as they have to be: the same numbers as over the whole context, from steps that are built seldom."""

from __future__ import annotations

import dataclasses
import types
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.session import open_cpu
from tests.train.reading import write_rows
from ttrain import load_config
from ttrain.cli import main
from ttrain.config.build import resized_model
from ttrain.config.schema import Config
from ttrain.core.errors import GraphError
from ttrain.core.spec import TensorSpec
from ttrain.engine.dynamic import DynamicEngine
from ttrain.engine.state import State, StateTensor
from ttrain.engine.static import StaticEngine
from ttrain.graph import Kind
from ttrain.models.gpt import GPT
from ttrain.tasks.evaluating.measures import opened, windows_of
from ttrain.train.sampling import source as sources
from ttrain.train.sampling.source import SHORTEST, length_class

CONTEXT = 256
MODELS = {
    "gpt": [],
    "llama": ["model=llama", "model.preset=null", "model.hidden=24", "model.kv_heads=1"],
    "agillm": ["model=agillm", "model.preset=null", "model.rank=8", "model.objective=joint"],
}
SIZES = ["model.layers=1", "model.width=16", "model.heads=2", f"model.context={CONTEXT}"]
CPU = ["device=cpu", "device.threads=1"]


@pytest.fixture(autouse=True, scope="module")
def here(shared: Path) -> None:
    words = np.random.default_rng(0).choice(["the", "cat", "dog", "sat"], 3000)
    Path("book.txt").write_text(" ".join(words))


def trained(name: str) -> str:
    if not Path(name).exists():
        quiet = ["logger=jsonl", "sample.tokens=1", "train.steps=3", "train.batch_size=2", "train.eval_sequences=1"]
        data = ["data.path=book.txt", "data.tokenizer=byte", "engine=dynamic", "optimizer.lr=0.02"]
        assert main([*quiet, *CPU, *data, *SIZES, *MODELS[name], f"run.dir={name}"]) == 0
    return name


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """Counts steps by name, and by the tokens that a row of theirs holds or the places of their caches."""
    counts: Counter[tuple[str, int]] = Counter()
    for engine in (DynamicEngine, StaticEngine):

        def build(self: Any, name: str, trace: Any, original: Any = engine.build) -> Any:
            caches = [self.state.spec(each).shape[2] for each in self.state.names(Kind.CACHE)]
            step = original(self, name, trace)
            counts[name, max([step.inputs["tokens"].shape[1], *caches])] += 1
            return step

        monkeypatch.setattr(engine, "build", build)
    return counts


def test_classes_are_few_and_hold_their_texts() -> None:
    assert [length_class(tokens, 1000) for tokens in (0, 1, 64, 65, 128, 129, 513, 999, 1000, 5000)] == [
        64, 64, 64, 128, 128, 256, 1000, 1000, 1000, 1000,
    ]  # fmt: skip
    assert length_class(3, 8) == 8 and len({length_class(tokens, 131_072) for tokens in range(131_072)}) == 12


def scored(run: str, monkeypatch: pytest.MonkeyPatch, shortest: int, engine: str) -> tuple[Any, ...]:
    """Loss, likelihoods and drawn text, with rows of at least so many tokens."""
    monkeypatch.setattr(sources, "SHORTEST", shortest)
    ids = np.random.default_rng(1).integers(97, 122, 700).tolist()
    texts = [ids[:count] for count in (5, 70, 20, 350)]
    pairs = [(ids[:count], ids[:2]) for count in (3, 100, 2, 300)]
    with opened(load_config("task=eval", f"run.dir={run}", *CPU, f"engine={engine}", "eval.batch_size=2")) as scorer:
        loss = scorer.loss([window for text in texts for window in windows_of(text, scorer.context)])
        likelihoods = [found.total for found in scorer.likelihoods([scorer.text(*pair) for pair in pairs])]
        greedy = dataclasses.replace(scorer.source.config, temperature=0, tokens=12)
        source = dataclasses.replace(scorer.source, config=greedy)
        drawn = [list(source.tokens(ids[:count], 0)) for count in (3, 100, 250, 5)]
    return loss, likelihoods, drawn


@pytest.mark.parametrize(("name", "engine"), [("gpt", "static"), ("agillm", "dynamic")])
def test_numbers_are_those_of_the_whole_context(
    name: str, engine: str, monkeypatch: pytest.MonkeyPatch, built: Counter[tuple[str, int]]
) -> None:
    run = trained(name)
    built.clear()
    found = scored(run, monkeypatch, SHORTEST, engine)
    assert {key for key in built if not key[0].startswith("read_")} == {
        (step, length) for step in ("evaluate", "scores") for length in (64, 128, 256)
    }
    assert {places for step, places in built if step.startswith("read_")} == {64, 128, 256}
    assert set(built.values()) == {1}  # none is built again, although short texts come after long ones
    built.clear()
    expected = scored(run, monkeypatch, CONTEXT, engine)
    assert {length for _, length in built} == {CONTEXT}
    assert found[0] == pytest.approx(expected[0], rel=1e-5) and found[1] == pytest.approx(expected[1], rel=1e-5)
    assert found[2] == expected[2]


def test_a_short_text_is_measured_in_short_rows(built: Counter[tuple[str, int]]) -> None:
    """A row of the whole context would take its square in memory."""
    run = trained("llama")
    Path("short.txt").write_text("the cat sat on the dog")
    rows = [{"ctx": "the cat", "endings": ["sat", "the dog sat"], "label": 0}]
    write_rows("questions.jsonl", rows)
    Path("prompts.txt").write_text("the cat\nthe dog sat\n")
    built.clear()
    assert main(["task=eval", f"run.dir={run}", "eval.text=[short.txt]", "eval.choices=questions.jsonl", *CPU]) == 0
    assert main(["task=sample", f"run.dir={run}", "sample.prompts=prompts.txt", "sample.tokens=20", *CPU]) == 0
    assert main(["task=sample", f"run.dir={run}", "sample.cache=false", "sample.tokens=20", *CPU]) == 0
    assert {length for _, length in built} == {64, 2 * 64}  # of the caches of two texts


@pytest.mark.parametrize("name", MODELS)
def test_answers_do_not_depend_on_how_many_are_written_at_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(name)
    Path("three.txt").write_text("the cat\nthe dog sat on the\nsat\n")
    several, one = ["sample.prompts=three.txt", "sample.count=2"], ["sample.prompt=the", "sample.count=3"]
    for words in (several, one):
        command, said = ["task=sample", f"run.dir={run}", "sample.tokens=20", *words, *CPU], set[str]()
        for rows in (1, 4, 32):
            capsys.readouterr()
            assert main([*command, f"sample.batch_size={rows}", "sample.stop=[at]"]) == 0
            said.add(capsys.readouterr().out)
        (answers,) = said
        assert len(answers.splitlines()) >= 6 and "at\n" not in answers


def test_a_conversation_grows_into_longer_rows(
    built: Counter[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("gpt")
    said = iter(["the cat", "the dog sat on the cat. " * 6, "the cat", "/reset", "the cat"])

    def line(_: str = "") -> str:
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", line)
    export = ["task=export", f"run.dir={run}", "export.form=huggingface", "export.dir=hf"]
    assert main(export) == 0
    capsys.readouterr()
    built.clear()
    template = ["data=documents", "data.sources=[]", "data.template=plain"]
    command = ["task=chat", "model.from=hf", *template, "sample.tokens=20", "sample.temperature=0", *CPU]
    assert main(command) == 0
    assert {length for _, length in built} == {64, 256}
    first, *_, last = capsys.readouterr().out.strip("\n").split("\n")
    assert first == last  # after a reset the same is said, from longer caches


def test_a_model_of_one_length_keeps_it(built: Counter[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained("gpt")
    monkeypatch.setattr("ttrain.config.build.resized_model", lambda *_: None)
    built.clear()
    with opened(load_config("task=eval", f"run.dir={run}", *CPU)) as scorer:
        assert scorer.loss([*windows_of(range(9), scorer.context)]) > 0
    assert built == {("evaluate", CONTEXT): 1}


def test_tensors_come_and_go() -> None:
    first, more = (StateTensor(name, TensorSpec((2, 3)), Kind.CACHE) for name in ("first", "more"))
    state = State(open_cpu(), [first])
    state.add([more])
    state.write("more", np.ones((2, 3), np.float32))
    assert state.read("more").sum() == 6 and state.names() == ["first", "more"]
    with pytest.raises(GraphError, match="two persistent tensors have the same name"):
        state.add([more])
    state.drop(["more"])
    assert state.names() == ["first"]
    with pytest.raises(GraphError, match="no persistent tensor 'more'"):
        state.placed("more")


def test_a_model_of_a_plugin_needs_no_more_than_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have neither a context of its own, nor one in its config, nor caches."""
    run = trained("gpt")
    monkeypatch.setattr(GPT, "extend", property(lambda self: self.nothing))
    monkeypatch.setattr(GPT, "at_length", property(lambda self: self.nothing))
    with opened(load_config("task=eval", f"run.dir={run}", *CPU)) as scorer:
        source = dataclasses.replace(scorer.source, config=dataclasses.replace(scorer.source.config, tokens=2))
        assert len(list(source.tokens([1], 0))) == 2 and scorer.context == CONTEXT
    bare = types.SimpleNamespace(config=types.SimpleNamespace(name="mine"))
    assert resized_model(bare, 64, Config()) is None  # type: ignore[arg-type]
