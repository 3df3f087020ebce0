"""The adapter for lm-evaluation-harness, behind its interface: against task=eval, task=sample and likelihoods."""

from __future__ import annotations

import abc
import json
import math
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conftest import cache_home
from ttrain.cli import main
from ttrain.core.errors import UserError

TRAINED = [
    "model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "data=documents",
    "data.sources=[rows.jsonl]", "data.tokenizer=bpe", "data.vocabulary_size=270", "logger=jsonl", "device=cpu",
    "device.threads=1", "sample.tokens=1", "train.peak_tflops=1", "train.steps=30", "train.batch_size=4",
    "train.eval_every=null", "optimizer.lr=0.02", "sample.repetition=3", "engine=dynamic",
]  # fmt: skip
TEXTS = ["the cat sat on the mat and sat on the dog, all at once, and the cat", "the dog"]


class _LM(abc.ABC):
    """What lm_eval.api.model.LM asks of a model, for machines without the harness."""

    def __init__(self) -> None:
        self.cache_hook: Any = SimpleNamespace(add_partial=lambda kind, arguments, found: None)

    @abc.abstractmethod
    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]: ...

    @abc.abstractmethod
    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]: ...

    @abc.abstractmethod
    def generate_until(self, requests: list[Any]) -> list[str]: ...


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("harness")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", cache_home(folder))
        try:
            import lm_eval.api.model  # noqa: F401  # the real one where it is
        except ImportError:
            modules: dict[str, Any] = {
                name: ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model")
            }
            modules["lm_eval.api.model"].LM = _LM
            for name, module in modules.items():
                patch.setitem(sys.modules, name, module)
        words = np.random.default_rng(0).choice(["the", "cat", "dog", "sat", "on", "mat", "and"], (60, 9))
        Path("rows.jsonl").write_text("".join(json.dumps({"text": " ".join(row)}) + "\n" for row in words))
        assert main([*TRAINED, "run.dir=run"]) == 0
        from ttrain.tasks.evaluating.harness import TtrainLM

        model = TtrainLM("device=cpu", "device.threads=1", batch_size=3, **{"run.dir": "run"})
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
    Path("texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    assert main(["task=eval", "run.dir=run", "device=cpu", "eval.text=[texts.jsonl]", "eval.out=found.json"]) == 0
    found = json.loads(Path("found.json").read_text())["text"]
    each = language_model.loglikelihood_rolling(asked(*((text,) for text in TEXTS)), disable_tqdm=True)
    assert -sum(each) == pytest.approx(found["loss"] * found["tokens"], rel=1e-5)
    assert -sum(each) / math.log(2) / len("".join(TEXTS)) == pytest.approx(found["bits_per_byte"], rel=1e-5)
    assert language_model.loglikelihood_rolling(asked(("",)), disable_tqdm=True) == [0.0]


def test_what_is_written_greedily_is_greedy(language_model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    request = ("the cat", {"until": ["\n\n"], "max_gen_toks": 7})
    (text,) = language_model.generate_until(asked(request), disable_tqdm=True)
    words = ["sample.prompt=the cat", "sample.temperature=0", "sample.tokens=7", "sample.repetition=1"]
    capsys.readouterr()
    assert main(["task=sample", "run.dir=run", "device=cpu", *words]) == 0
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
