"""AGILLM read with caches, and its ways of sampling, against the original's computation of the whole text in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.models.plain_agillm import next_scores, pair_scores
from tests.models.session import ENGINES, initial_values, open_cpu
from ttrain import ops
from ttrain.core.attention_mask import CAUSAL, PAIRS
from ttrain.core.spec import DType, TensorSpec
from ttrain.data.tokenizer import CharTokenizer
from ttrain.device.base import Device
from ttrain.engine.state import State
from ttrain.graph import Graph
from ttrain.models.agillm import AGILLM
from ttrain.models.decoder import BlockInputs
from ttrain.models.settings import AGILLMConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig
from ttrain.train.sampling.decode import cache_tensors, scores_of
from ttrain.train.sampling.source import StepsByLength, TokenSource, print_source, sampling_traces
from ttrain.train.sampling.stream import Stop
from ttrain.train.steps.session import Session
from ttrain.train.steps.step_graph import StepGraph
from ttrain.train.task_settings import SampleConfig

SIZE: dict[str, Any] = {"preset": None, "layers": 2, "heads": 2, "width": 16, "context": 70, "vocabulary": 31}
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


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 31, count)]


@pytest.mark.parametrize(("fold", "engine"), [*((fold, "static") for fold in FOLDS), *(("wide", e) for e in ENGINES)])
def test_every_text_scores_as_in_the_original(fold: str, engine: str) -> None:
    """Of odd and even length, one token or several longer than before, and past the context."""
    opened, text = Opened(engine, **FOLDS[fold]), tokens(73)
    lengths = (1, 2, 3, 5, 6, 9, 12, 13, 66, 67, 70, 71, 73)
    assert max(opened.error(text[:length][-70:]) for length in lengths) < 1e-5


@pytest.mark.parametrize("changes", [{"tied": True}, {"pad_vocabulary": 32}, {"context": 7}, {"context": 2}])
def test_other_shapes(changes: dict[str, Any]) -> None:
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


def test_a_text_that_changes_is_read_again_from_there() -> None:
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


@pytest.mark.parametrize("mode", ["ar", "sat", "sat_variable", "speculative"])
def test_samples_of_every_mode_end_at_a_stop(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Against the text that is drawn without one, for a text, and for a token, whatever else the pass has drawn."""
    source = Opened(sample={"mode": mode, "tokens": 24, "count": 3}).source
    tokenizer = CharTokenizer("".join(map(chr, range(97, 97 + 31))))
    drawn = [list(source.tokens([1, 2], number)) for number in range(3)]
    texts, token = [tokenizer.decode(ids) for ids in drawn], drawn[0][8]
    word = texts[1][9:11]
    for stop, ends in (
        (Stop(texts=(word,)), [text.partition(word)[0] for text in texts]),
        (Stop(frozenset([token])), [text.partition(tokenizer.decode([token]))[0] for text in texts]),
    ):
        capsys.readouterr()
        assert print_source(source, tokenizer, [1, 2], stop) == [tokenizer.decode([1, 2]) + end for end in ends]
        assert min(map(len, ends)) < 24
