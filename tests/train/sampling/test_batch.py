"""Many texts at once: each is the text that it is alone, and scores as in a pass over all of it without caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.session import ENGINES, initial_values, open_cpu, token_batch
from tests.models.test_llama import CONTEXT as SHORT
from tests.models.test_llama import arrays, pair
from tests.train.sampling.test_decode import CONTEXT, SIZE, VOCABULARY, small_gpt, tokens
from ttrain.config.schema import Config
from ttrain.core.errors import UserError
from ttrain.engine.state import State
from ttrain.models.agillm import AGILLM
from ttrain.models.llama import Llama
from ttrain.models.settings import AGILLMConfig, LlamaConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig
from ttrain.tasks.evaluating.in_run import BuiltSteps
from ttrain.train.sampling.batch import BatchSource, TextsReader
from ttrain.train.sampling.decode import cache_tensors
from ttrain.train.sampling.draw import whole_text_scores
from ttrain.train.sampling.source import StepsByLength, TokenSource
from ttrain.train.steps.session import Session
from ttrain.train.steps.step_graph import StepGraph
from ttrain.train.task_settings import SampleConfig

GROUPED: dict[str, Any] = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 16, "hidden": 24, "window": 9}


def llama() -> Llama:
    return Llama(LlamaConfig(**GROUPED, context=CONTEXT, vocabulary=VOCABULARY, preset=None))


MODELS = {
    "gpt": small_gpt,
    "llama": llama,
    "agillm": lambda: AGILLM(AGILLMConfig(**{**SIZE, "rank": 12, "alibi": "standard"})),
}
PROMPTS = [tokens(count, seed=count) for count in (3, 1, 64, 20, 7, 66, 100, 2)]  # of which one passes the context


def opened(model: Any, engine: str = "static", values: Any = None, device: Any = None, **sample: Any) -> TokenSource:
    graph = StepGraph(model, AdamW(AdamWConfig()), rows=1)
    state = State(device or open_cpu(), graph.state_tensors(training=False))
    factor = 1 if isinstance(model, AGILLM) else 5  # so that scores differ
    for path, value in (values or {k: factor * v for k, v in initial_values(model, 7).items()}).items():
        state.write(path, value)
    session = Session(graph, state, ENGINES[engine](state.device, state))
    steps = StepsByLength(session, getattr(model, "at_length", lambda length: None))
    return TokenSource(steps, SampleConfig(**sample), model.vocabulary)


def ends(number: int, token: int) -> bool:
    return token < 4


def upto(drawn: Sequence[int]) -> list[int]:
    return list(drawn[: next((place + 1 for place, token in enumerate(drawn) if ends(0, token)), len(drawn))])


@pytest.mark.parametrize(
    ("name", "engine"), [("gpt", "static"), ("llama", "static"), ("agillm", "static"), ("llama", "traced")]
)
def test_a_text_is_the_same_alone_and_among_others(name: str, engine: str) -> None:
    """Others are shorter, longer, read in blocks with it, end before it, come from the queue, and slide."""
    source = opened(MODELS[name](), engine, tokens=30, temperature=1.5, frequency=0.3, top_p=0.95)
    alone = [upto(list(source.tokens(prompt, 5 + number))) for number, prompt in enumerate(PROMPTS)]
    assert len({len(text) for text in alone}) > 2
    for rows in (1, 5, 8):
        batch = BatchSource(source.steps, source.config, source.vocabulary, rows)
        found = batch.sample(PROMPTS, range(5, 13), ends)
        assert [drawn for drawn, _ in found] == alone, rows
    (same, _), *_ = batch.sample(PROMPTS[3:5], [8, 9], ends)  # in caches that hold other texts
    assert same == alone[3]


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_the_whole_text(name: str) -> None:
    source = opened(MODELS[name]())
    steps, model = source.steps, source.steps.model
    whole = whole_text_scores(steps.session.engine.build("logits", steps.session.graph.trace_logits), VOCABULARY)
    batch = BatchSource(steps, source.config, VOCABULARY, 3)
    reader = TextsReader(steps.get("batch", CONTEXT, lambda graph: batch.traces(model, 3, CONTEXT)), 3, CONTEXT)
    text, seen = tokens(CONTEXT), 0
    for lengths in ((5, 40, 1), (6, 41, 2), (7, 66, 10), (8, 67, 11), (30, 4, 70), (31, 5)):
        texts = {number: text[:length] for number, length in enumerate(lengths)}
        for owners, outputs in reader.read(texts):
            for row, number in enumerate(owners):
                expected, seen = whole(texts[number])[0][0], seen + 1
                error = np.abs(outputs["logits"][row] - expected).max()
                assert error < 1e-5 * max(1, np.abs(expected).max())
                total = torch.tensor(expected, dtype=torch.float64).logsumexp(0).item()
                assert outputs["log_sum_exp"][row] == pytest.approx(total, rel=1e-5)
    assert seen == 17


def test_log_probabilities_are_those_of_the_model_whatever_draws() -> None:
    source = opened(llama(), tokens=6, temperature=2.0, repetition=1.5)
    steps = source.steps
    found = list(BatchSource(steps, source.config, VOCABULARY).sample(PROMPTS[:4], range(4), lambda *_: False))
    whole = whole_text_scores(steps.session.engine.build("logits", steps.session.graph.trace_logits), VOCABULARY)
    for prompt, (drawn, likelihoods) in zip(PROMPTS, found, strict=False):
        assert likelihoods.dtype == np.float32 and len(likelihoods) == len(drawn) == 6
        for place, token in enumerate(drawn):
            scores = torch.tensor(whole([*prompt, *drawn[:place]])[0][0], dtype=torch.float64)
            assert likelihoods[place] == pytest.approx(scores.log_softmax(0)[token].item(), abs=2e-5)


@pytest.mark.parametrize("variant", ["llama3", "mistral"])
def test_greedy_texts_are_those_of_a_batch_in_transformers(variant: str) -> None:
    """Its texts are padded on the left to one length."""
    model, plain = pair(variant)
    source = opened(model, values=arrays(model, plain.state_dict()), tokens=8, temperature=0.0)
    prompts = [[token + 1 for token in tokens(count, seed=count)] for count in (9, 3, 14, 1, 16)]
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    given = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
    made = plain.generate(padded, attention_mask=(padded > 0).long(), **given)
    batch = BatchSource(source.steps, source.config, source.vocabulary, rows=3)
    assert longest + 8 == SHORT
    found = [drawn for drawn, _ in batch.sample(prompts, range(5), lambda *_: False)]
    assert found == made[:, longest:].tolist()


def test_steps_with_given_sizes_serve_every_call() -> None:
    source = opened(small_gpt(context=256), tokens=4)
    batch = BatchSource(source.steps, source.config, source.vocabulary, 3, longest=90)
    built = []
    for prompts in (PROMPTS[:2], PROMPTS[2:6]):
        assert len(list(batch.sample(prompts, range(len(prompts)), ends))) == len(prompts)
        built.append(source.steps.get("batch of 3", 128, lambda graph: pytest.fail("built again")))
    assert built[0] is built[1]


def test_caches_that_do_not_fit_are_told_with_the_number_that_may(monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(small_gpt())
    device = SimpleNamespace(memory=lambda: {"total": 10_000, "in_use": 4_000})
    monkeypatch.setattr(source.steps.session, "engine", SimpleNamespace(device=device))
    batch = BatchSource(source.steps, source.config, source.vocabulary, 4)
    with pytest.raises(UserError, match=r"sample\.batch_size=4: caches of so many texts take .* Give 2, or fewer"):
        batch.traces(source.steps.model, 4, CONTEXT)


def test_a_training_session_samples_between_its_steps() -> None:
    """From steps that are built with those that train: what is drawn follows the weights as they are now."""
    model = small_gpt()
    graph = StepGraph(model, AdamW(AdamWConfig()), rows=2)
    state = State(open_cpu(), graph.state_tensors())
    session = Session(graph, state, ENGINES["static"](state.device, state))
    session.initialize(3)
    built: dict[str, Any] = {}
    steps = BuiltSteps(session, SimpleNamespace(model=model, config=Config()), built)  # type: ignore[arg-type]
    batch = BatchSource(steps, SampleConfig(tokens=9, temperature=0.0), VOCABULARY, rows=2, longest=CONTEXT)
    further = {f"{name}_{CONTEXT}": trace for name, trace in batch.traces(model, *batch.sizes([])).items()}
    session.graph = dataclasses.replace(graph, further=further)
    state.add(cache_tensors([*further.values()]))
    built |= session.build_training()
    train = session.train_step(built, seed=1)
    for turn in range(3):
        values = {path: state.read(path) for path in model.parameters()}
        alone = opened(small_gpt(), values=values, tokens=9, temperature=0.0)
        expected = [list(alone.tokens(prompt, 0)) for prompt in PROMPTS[:4]]
        assert [drawn for drawn, _ in batch.sample(PROMPTS[:4], [0] * 4, lambda *_: False)] == expected
        train(token_batch(VOCABULARY, 2, CONTEXT, turn), {"lr": 0.05}, turn + 1)
