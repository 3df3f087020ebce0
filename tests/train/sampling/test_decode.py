"""Reading with caches equals computing the whole text anew, at every token, on every engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.plain_agillm import next_scores, pair_scores
from tests.models.session import ENGINES, initial_values, open_cpu
from ttrain import ops
from ttrain.core.attention_mask import CAUSAL, PAIRS
from ttrain.core.errors import ConfigError
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Device
from ttrain.engine.state import State
from ttrain.graph import Graph
from ttrain.models.agillm import AGILLM
from ttrain.models.decoder import BlockInputs
from ttrain.models.gpt import GPT
from ttrain.models.mlp import MLP
from ttrain.models.settings import AGILLMConfig, GPTConfig, MLPConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig
from ttrain.train.sampling.decode import Reader, cache_tensors, reading_traces, scores_of
from ttrain.train.sampling.draw import whole_text_scores
from ttrain.train.sampling.source import StepsByLength, TokenSource, check_sampling, sampling_traces
from ttrain.train.steps.session import Session
from ttrain.train.steps.step_graph import StepGraph
from ttrain.train.task_settings import SampleConfig

CONTEXT, VOCABULARY = 70, 31


def small_gpt(compute: DType = DType.FP32, **changes: Any) -> GPT:
    sizes = {"layers": 2, "heads": 2, "width": 16, "context": CONTEXT, "vocabulary": VOCABULARY}
    return GPT(GPTConfig(**{**sizes, **changes}), compute)


class Reading:
    """A model with both ways to read: through caches, and whole."""

    def __init__(self, model: Any, engine: str, new: int = 1, rows: int = 1, device: Any = None) -> None:
        graph = StepGraph(model, AdamW(AdamWConfig()), rows=1)
        traces = reading_traces(model, CAUSAL, new, rows)
        tensors = [*graph.state_tensors(training=False), *cache_tensors(list(traces.values()))]
        self.state = State(device or open_cpu(), tensors)
        for path, value in initial_values(model, 7).items():
            self.state.write(path, 5 * value)
        self.engine = ENGINES[engine](self.state.device, self.state)
        steps = [self.engine.build(name, trace) for name, trace in traces.items()]
        self.whole = whole_text_scores(self.engine.build("logits", graph.trace_logits), model.vocabulary)
        self.reader = Reader(steps, model.context)

    def error(self, text: list[int], wanted: int = 1) -> float:
        """Of the scores behind the last `wanted` tokens, relative to the largest of them."""
        found = scores_of(self.reader.read(text, wanted))[:wanted]
        expected = np.concatenate([self.whole(text[: len(text) - wanted + 1 + row])[0] for row in range(wanted)])
        return float(np.abs(found - expected).max() / np.abs(expected).max())


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, count)]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_token_scores_as_in_the_whole_text(engine: str) -> None:
    """From a prompt on past the context, where the window moves with every token."""
    reading, text = Reading(small_gpt(), engine), tokens(CONTEXT + 4)
    for prompt in (1, 3, 64, 66):
        lengths = (prompt, prompt + 1, prompt + 2, CONTEXT, CONTEXT + 3)
        assert max(reading.error(text[:length][-CONTEXT:]) for length in lengths) < 2e-5


@pytest.mark.parametrize("shape", [{"tied": False, "bias": False}, {"context": 2}, {"context": 5, "heads": 4}])
def test_other_shapes(shape: dict[str, Any]) -> None:
    model = small_gpt(**shape)
    reading, text = Reading(model, "static"), tokens(12)
    assert max(reading.error(text[:length][-model.context :]) for length in range(1, 12)) < 2e-5


def test_a_text_that_changes_is_read_again_from_there() -> None:
    """Rejected drafts, another prompt, a shorter text: what differs is overwritten."""
    reading, text = Reading(small_gpt(), "static", new=3, rows=3), tokens(CONTEXT)
    changed = [*text[:20], *tokens(20, seed=5)]
    for given in (text[:30], text[:33], changed[:22], changed[:23], text[:5], changed[:40], text[:1], text, changed):
        for wanted in {1, min(3, len(given))}:
            assert reading.error(given, wanted) < 2e-5


class Counting:
    """Steps that only note which rows they were asked for."""

    def __init__(self, count: int, rows: int, calls: list[Any], keep: bool = False) -> None:
        places = TensorSpec((count,), DType.INT64)
        self.inputs = {"tokens": TensorSpec((1, count), DType.INT64), "positions": places, "visible": places}
        self.inputs["rows"] = TensorSpec((rows,), DType.INT64)
        if keep:
            self.inputs["keep"] = TensorSpec((rows, 1), DType.FP32)
        self.calls = calls

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        assert inputs.keys() == self.inputs.keys()
        for name, spec in self.inputs.items():
            assert inputs[name].shape == spec.shape, name
        self.calls.append({name: np.asarray(value).ravel().tolist() for name, value in inputs.items()})
        return {}


def test_nothing_is_read_twice() -> None:
    calls: list[Any] = []
    reader = Reader([Counting(1, 1, calls), Counting(8, 1, calls)], 20)
    text = tokens(20)
    for length in (3, 4, 5, 14, 15):
        reader.read(text[:length], 1)
    assert [call["positions"] for call in calls] == [
        [*range(8)], [3], [4], [*range(5, 13)], [13], [14],
    ]  # fmt: skip
    assert [call["visible"][-1] for call in calls] == [8, 4, 5, 13, 14, 15]
    assert [call["rows"] for call in calls] == [[2], [0], [0], [0], [0], [0]]
    calls.clear()
    Reader([Counting(1, 1, calls), Counting(8, 1, calls)], 20, keeps=False).read(text, 1)
    assert [call["positions"] for call in calls] == [[*range(8)], [*range(8, 16)], [*range(12, 20)]]


def test_pairs_become_final_together() -> None:
    """The incomplete pair at the end of a text is read again once its second token is there."""
    calls: list[Any] = []
    reader = Reader([Counting(4, 2, calls, keep=True), Counting(8, 2, calls, keep=True)], 20, PAIRS)
    text = tokens(20)
    for length in (1, 2, 4, 5, 7, 8, 20):
        reader.read(text[:length], 2)
    assert [call["positions"][0] for call in calls] == [0, 0, 2, 2, 4, 6, 8, 16]
    assert calls[0]["keep"] == [0, 1] and calls[0]["rows"] == [0, 0] and calls[0]["visible"] == [1] * 8
    assert [call["keep"] for call in calls[1:]] == [[1, 1]] * 7
    assert calls[2]["visible"] == [4, 4, 4, 4] and calls[2]["rows"] == [0, 1]
    assert calls[3]["visible"] == [4, 4, 5, 5] and calls[3]["rows"] == [1, 2]
    assert calls[4]["visible"] == [6, 6, 7, 7] and calls[4]["rows"] == [1, 2]


def test_modes_ask_for_what_a_model_has() -> None:
    model = small_gpt()
    assert list(sampling_traces(model, SampleConfig())) == [CAUSAL]
    assert sampling_traces(model, SampleConfig(cache=False)) == {}
    with pytest.raises(ConfigError, match=r"sample\.mode=sat: model\.name=gpt has no SAT head"):
        check_sampling(model, SampleConfig(mode="sat"))
    with pytest.raises(ConfigError, match=r"sample\.cache=true: model\.name=mlp keeps no keys"):
        check_sampling(MLP(MLPConfig()), SampleConfig(cache=True))


# AGILLM and its ways of sampling, against the original's computation of the whole text in torch


SIZE: dict[str, Any] = {
    "preset": None,
    "layers": 2,
    "heads": 2,
    "width": 16,
    "context": CONTEXT,
    "vocabulary": VOCABULARY,
}
FOLDS = {"narrow": {"rank": 6}, "wide": {"rank": 12}, "wide, not folded": {"rank": 12, "fold": "off"}}


class Opened:
    """A model's readers, and the same weights as the original keeps them."""

    def __init__(
        self, engine: str = "static", sample: dict[str, Any] | None = None, device: Device | None = None, **changes: Any
    ) -> None:
        model = AGILLM(AGILLMConfig(**{**SIZE, "rank": 12, **changes}))
        config = SampleConfig(**{"mode": "speculative", **(sample or {})})
        graph = StepGraph(model, AdamW(AdamWConfig()), rows=1)
        state = State(device or open_cpu(), graph.state_tensors(training=False))
        values = initial_values(model, seed=7)
        for path, value in values.items():
            state.write(path, value)
        self.engine = ENGINES[engine](state.device, state)
        steps = StepsByLength(Session(graph, state, self.engine), lambda length: None)
        self.source = TokenSource(steps, config, model.vocabulary)
        self.source.make_room(model.context)
        self.content = {
            part: {name: torch.from_numpy(w) for name, w in weights.items()}
            if part in ("core", "ar", "sat")
            else weights
            for part, weights in model.original_file(values).items()
        }

    def error(self, text: list[int]) -> float:
        """Of every score behind a text, relative to the largest."""
        readers = self.source._readers
        outputs = readers[PAIRS].read(text, 2)
        pairs, gate = pair_scores(self.content, text)
        compared = [
            (scores_of(readers[CAUSAL].read(text, 1))[0], next_scores(self.content, text)),
            (scores_of(outputs)[:, :31], pairs),
            (scores_of(outputs, "gate")[0], gate),
        ]
        return max(
            float(np.abs(mine[..., :31] - theirs.numpy()).max() / theirs.abs().max()) for mine, theirs in compared
        )


@pytest.mark.parametrize(("fold", "engine"), [*((fold, "static") for fold in FOLDS), *(("wide", e) for e in ENGINES)])
def test_every_text_scores_as_in_the_original(fold: str, engine: str) -> None:
    """Of odd and even length, one token or several longer than before, and past the context."""
    opened, text = Opened(engine, **FOLDS[fold]), tokens(73)
    lengths = (1, 2, 3, 5, 6, 9, 12, 13, 66, 67, 70, 71, 73)
    assert max(opened.error(text[:length][-70:]) for length in lengths) < 1e-5


@pytest.mark.parametrize("changes", [{"tied": True}, {"pad_vocabulary": 32}, {"context": 7}, {"context": 2}])
def test_other_shapes_of_agillm(changes: dict[str, Any]) -> None:
    opened, text = Opened(**changes), tokens(9)
    context = changes.get("context", 70)
    assert max(opened.error(text[:length][-context:]) for length in range(1, 10)) < 1e-5


@pytest.mark.parametrize("mask", [CAUSAL, PAIRS])
def test_the_standard_position_bias_counts_from_the_tokens_place(mask: str) -> None:
    """Against the pass of training, whose padding behind a text of even length is hidden."""
    opened = Opened(alibi="standard")
    model = opened.source.steps.model

    def whole(graph: Graph) -> None:
        hidden = ops.reshape(model.states(graph, 1, False, BlockInputs(mask=mask)), (70, 16))
        rows = ops.embedding(graph.input("rows", TensorSpec((2,), DType.INT64)), hidden)
        graph.output("logits", model.scores(rows) if mask == CAUSAL else model.pair_scores(rows)[0])

    step, text = opened.engine.build("whole", whole), tokens(70)
    for length in range(2, 71, 4):
        padded = np.zeros((1, 70), np.int64)
        padded[0, :length] = text[:length]
        expected = scores_of(dict(step({"tokens": padded, "rows": np.array([length - 2, length - 1])})))
        found = scores_of(opened.source._readers[mask].read(text[:length], 2))[:2]
        assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_text_that_changes_is_read_again_from_there_in_pairs_too() -> None:
    opened, text = Opened(), tokens(40)
    changed = [*text[:21], *tokens(19, seed=5)]
    assert max(opened.error(given) for given in (text, changed, text[:5], changed[:22], text[:1], changed)) < 1e-5


def greedy(content: dict[str, Any], prompt: list[int], count: int, mode: str) -> list[int]:
    """What the likeliest tokens are, by the original's loops without caches."""
    text = list(prompt)
    while len(text) < len(prompt) + count:
        if mode in ("ar", "speculative"):
            text.append(int(next_scores(content, text).argmax()))
            continue
        pairs, gate = pair_scores(content, text)
        emitted = 1 + int(gate.argmax()) if mode == "sat_variable" else 2
        text += [int(token) for token in pairs.argmax(-1)[:emitted]]
    return text[len(prompt) : len(prompt) + count]


@pytest.mark.parametrize("keeps", [None, False], ids=["cached", "not cached"])
@pytest.mark.parametrize("mode", ["ar", "sat", "sat_variable", "speculative"])
def test_greedy_texts_are_those_of_the_original(mode: str, keeps: bool | None) -> None:
    opened = Opened(sample={"mode": mode, "temperature": 0.0, "tokens": 24, "cache": keeps})
    for prompt in (1, 2, 5):
        start = tokens(prompt, seed=prompt)
        assert list(opened.source.tokens(start, 0)) == greedy(opened.content, start, 24, mode)


def test_cached_keys_are_as_wide_as_scores_need() -> None:
    widths = {}
    for fold, changes in FOLDS.items():
        model = AGILLM(AGILLMConfig(**{**SIZE, **changes}))
        traces = sampling_traces(model, SampleConfig())[CAUSAL]
        specs = {tensor.name: tensor.spec for tensor in cache_tensors(list(traces.values()))}
        assert len(specs) == 4 and all(spec.dtype is DType.FP32 for spec in specs.values())
        assert specs["blocks.1.attention/causal_values"].shape == (1, 2, 70, 8)
        widths[fold] = specs["blocks.1.attention/causal_keys"].shape[3]
    assert widths == {"narrow": 6, "wide": 8, "wide, not folded": 12}
