"""Reading with caches equals computing the whole text anew; and drawing tokens, against torch and against counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MethodType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Library
from tokenizers import models

from tests.models.plain_agillm import next_scores, pair_scores
from tests.models.session import ENGINES, initial_values, open_cpu
from ttrain import ops
from ttrain.core.attention_mask import CAUSAL, PAIRS
from ttrain.core.errors import ConfigError, DataError, NonFiniteError, UserError
from ttrain.core.spec import DType, TensorSpec
from ttrain.data.library_tokenizer import LibraryTokenizer, train_bpe
from ttrain.data.tokenizer import ByteTokenizer, CharTokenizer
from ttrain.device.base import Device
from ttrain.engine.state import State
from ttrain.graph import Graph
from ttrain.models.agillm import AGILLM
from ttrain.models.decoder import BlockInputs
from ttrain.models.gpt import GPT
from ttrain.models.llama import Llama
from ttrain.models.mlp import MLP
from ttrain.models.settings import AGILLMConfig, GPTConfig, LlamaConfig, MLPConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig
from ttrain.train.sampling.decode import Reader, cache_tensors, reading_traces
from ttrain.train.sampling.draw import (
    ContextWindow,
    Continuation,
    Sampler,
    encode_prompt,
    penalized,
    token_probabilities,
    whole_text_scores,
)
from ttrain.train.sampling.source import StepsByLength, TokenSource, check_sampling, print_source, sampling_traces
from ttrain.train.sampling.stream import Stop, TextStream
from ttrain.train.steps.session import Session
from ttrain.train.steps.step_graph import StepGraph
from ttrain.train.task_settings import SampleConfig

CONTEXT, VOCABULARY = 70, 31
SIZES: dict[str, Any] = {"layers": 2, "heads": 2, "width": 16, "context": CONTEXT, "vocabulary": VOCABULARY}


def small_gpt(compute: DType = DType.FP32, **changes: Any) -> GPT:
    return GPT(GPTConfig(**{**SIZES, **changes}), compute)


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
        """Return the error of the scores after the last `wanted` tokens, relative to the largest of them."""
        found = self.reader.read(text, wanted)["logits"][:wanted]
        expected = np.concatenate([self.whole(text[: len(text) - wanted + 1 + row])[0] for row in range(wanted)])
        return float(np.abs(found - expected).max() / np.abs(expected).max())


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, count)]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_token_scores_as_in_the_whole_text(engine: str) -> None:
    """Scores go from a prompt on past the context, where the window moves with every token."""
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


SIZE: dict[str, Any] = {**SIZES, "preset": None}
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
        """Return the error of every score after a text, relative to the largest."""
        readers = self.source._readers
        outputs = readers[PAIRS].read(text, 2)
        pairs, gate = pair_scores(self.content, text)
        compared = [
            (readers[CAUSAL].read(text, 1)["logits"][0], next_scores(self.content, text)),
            (outputs["logits"][:, :31], pairs),
            (outputs["gate"][0], gate),
        ]
        return max(
            float(np.abs(mine[..., :31] - theirs.numpy()).max() / theirs.abs().max()) for mine, theirs in compared
        )


@pytest.mark.parametrize(("fold", "engine"), [*((fold, "static") for fold in FOLDS), *(("wide", e) for e in ENGINES)])
def test_every_text_scores_as_in_the_original(fold: str, engine: str) -> None:
    """Texts have odd and even lengths, grow by one token or several, and pass the context."""
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
        expected = dict(step({"tokens": padded, "rows": np.array([length - 2, length - 1])}))["logits"]
        found = opened.source._readers[mask].read(text[:length], 2)["logits"][:2]
        assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_text_that_changes_is_read_again_from_there_in_pairs_too() -> None:
    opened, text = Opened(), tokens(40)
    changed = [*text[:21], *tokens(19, seed=5)]
    assert max(opened.error(given) for given in (text, changed, text[:5], changed[:22], text[:1], changed)) < 1e-5


def greedy(content: dict[str, Any], prompt: list[int], count: int, mode: str) -> list[int]:
    """Return the likeliest tokens by the original's loops without caches."""
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


# drawing tokens


LOGITS = np.random.default_rng(3).normal(0, 2, 23).astype(np.float32)


def torch_probabilities(logits: np.ndarray, temperature: float, top_k: int | None, top_p: float | None) -> np.ndarray:
    """The usual implementation: mask with -inf, softmax again."""
    import torch

    scores = torch.tensor(logits, dtype=torch.float64) / temperature
    if top_k is not None:
        scores[scores < torch.topk(scores, min(top_k, len(scores))).values[-1]] = -torch.inf
    if top_p is not None:
        ordered, order = torch.sort(scores, descending=True)
        before = torch.softmax(ordered, 0).cumsum(0) - torch.softmax(ordered, 0)
        scores[order[before >= top_p]] = -torch.inf
    return torch.softmax(scores, 0).numpy()


@pytest.mark.parametrize("temperature", [0.1, 0.8, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [None, 1, 5, 23, 99])
@pytest.mark.parametrize("top_p", [None, 0.01, 0.5, 0.9, 1.0])
def test_distribution_equals_torch(temperature: float, top_k: int | None, top_p: float | None) -> None:
    found = token_probabilities(LOGITS, temperature, top_k, top_p)
    np.testing.assert_allclose(found, torch_probabilities(LOGITS, temperature, top_k, top_p), rtol=1e-9, atol=1e-15)
    assert found.sum() == pytest.approx(1)


def test_ties_at_the_edge_keep_the_lower_id() -> None:
    assert token_probabilities(np.zeros(4, np.float32), 1.0, top_k=2).tolist() == [0.5, 0.5, 0, 0]
    assert token_probabilities(np.zeros(4, np.float32), 1.0, top_p=0.5).tolist() == [0.5, 0.5, 0, 0]


def test_min_p_is_relative_to_the_likeliest_token() -> None:
    logits = np.log(np.array([0.5, 0.26, 0.2, 0.04])).astype(np.float32)
    np.testing.assert_allclose(token_probabilities(logits, 1.0, min_p=0.5), [0.5 / 0.76, 0.26 / 0.76, 0, 0], rtol=1e-6)
    assert token_probabilities(logits, 1.0, min_p=1.0).tolist() == [1, 0, 0, 0]
    cut = token_probabilities(logits, 1.0, top_k=3, top_p=0.6, min_p=0.6)
    assert cut.tolist() == [1, 0, 0, 0]  # top_p leaves two tokens, of which min_p leaves one


def penalties_by_hand(
    logits: list[float], window: list[int], repetition: float, presence: float, frequency: float
) -> list[float]:
    """One token at a time: first what is taken off, then the factor."""
    lowered = list(logits)
    for token in set(window):
        score = logits[token] - presence - frequency * window.count(token)
        lowered[token] = score / repetition if score > 0 else score * repetition
    return lowered


@pytest.mark.parametrize(("repetition", "presence", "frequency"), [(1, 0, 0), (2, 0, 0), (1, 0.6, 0), (1.3, 0.5, 1.0)])
@pytest.mark.parametrize("window", [[], [0], [2, 2, 1, 2], [0, 1, 2, 3, 3]])
def test_penalties_lower_what_occurred(window: list[int], repetition: float, presence: float, frequency: float) -> None:
    logits = [2.0, 0.4, -1.0, 3.5, 0.0]
    expected = penalties_by_hand(logits, window, repetition, presence, frequency)
    given = np.array(logits, np.float32)
    np.testing.assert_allclose(penalized(given, window, repetition, presence, frequency), expected, rtol=1e-6)
    assert given.tolist() == np.array(logits, np.float32).tolist()


def test_penalties_look_at_the_newest_tokens_only() -> None:
    logits = np.array([3.0, 2.5, 2.0], np.float32)
    for window, expected in ((1, 1), (2, 2), (None, 0)):
        sampler = Sampler(SampleConfig(temperature=0, presence=1.1, penalty_window=window))
        assert sampler.choose(logits, 0, 0, history=[2, 1, 0]) == expected


def test_huge_logits_do_not_overflow() -> None:
    assert token_probabilities(np.array([3e38, -3e38, 0], np.float32), 1e-3).tolist() == [1, 0, 0]


def test_choices_follow_the_distribution_and_repeat_for_a_seed() -> None:
    sampler = Sampler(SampleConfig(temperature=1.0, seed=5))
    drawn = [sampler.choose(LOGITS, 0, position) for position in range(6000)]
    counts = np.bincount(drawn, minlength=23) / 6000
    expected = token_probabilities(LOGITS, 1.0)
    assert np.abs(counts - expected).max() < 5 * np.sqrt(0.25 / 6000)
    again = Sampler(SampleConfig(temperature=1.0, seed=5))
    assert [again.choose(LOGITS, 0, position) for position in range(50)] == drawn[:50]
    for other, stream in ((Sampler(SampleConfig(temperature=1.0, seed=6)), 0), (again, 1)):
        assert [other.choose(LOGITS, stream, position) for position in range(50)] != drawn[:50]


class Successor:
    """A model whose likeliest next token is the last one plus 1 (mod 8); remembers what it was fed."""

    inputs = {"tokens": TensorSpec((1, 4), DType.INT64), "position": TensorSpec((), DType.INT64)}

    def __init__(self, value: float = 50.0) -> None:
        self.fed: list[tuple[list[int], int]] = []
        self.value = value

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        tokens, position = inputs["tokens"], inputs["position"]
        assert tokens.shape == (1, 4) and tokens.dtype == np.int64
        self.fed.append((tokens[0].tolist(), position))
        logits = np.zeros((1, 12), np.float32)
        logits[0, (tokens[0, position] + 1) % 8] = self.value
        logits[0, 8:] = 1e9  # ids beyond the tokenizer's: padding of the output
        return {"logits": logits}


@pytest.mark.parametrize(("slide", "lengths"), [(1, [3, 4, 4, 4, 4]), (2, [3, 4, 3, 4, 3]), (3, [3, 4, 2, 3, 4])])
def test_a_text_may_lose_several_tokens_at_once(slide: int, lengths: list[int]) -> None:
    model = Successor()
    scores, window = whole_text_scores(model, 8), ContextWindow(4, slide)
    drawn = Continuation([5, 6, 7], window, Sampler(SampleConfig()), tokens=5).drawn(scores)
    assert list(drawn) == [0, 1, 2, 3, 4]
    assert [position + 1 for _, position in model.fed] == lengths
    assert all(fed[position] == (7 + number) % 8 for number, (fed, position) in enumerate(model.fed))


def test_the_window_is_never_empty() -> None:
    for context, slide, expected in ((64, None, 8), (4, None, 1), (1, None, 1), (8, 99, 7), (1, 5, 1), (8, 3, 3)):
        window = ContextWindow(context, slide)
        assert len(window([*range(context + 1)])) == context + 1 - expected
        assert all(1 <= len(window(list(range(length)))) <= context for length in range(1, 40))


def test_a_long_prompt_keeps_its_end() -> None:
    model = Successor()
    text = Continuation([*range(6)], ContextWindow(4), Sampler(SampleConfig()), 1)
    assert list(text.drawn(whole_text_scores(model, 8))) == [6]
    assert model.fed == [([2, 3, 4, 5], 3)]


def test_nan_logits_are_an_error() -> None:
    scores = whole_text_scores(Successor(float("nan")), 8)
    with pytest.raises(NonFiniteError, match="logits hold NaN"):
        list(Continuation([0], ContextWindow(4), Sampler(SampleConfig()), tokens=1).drawn(scores))


def test_prompts() -> None:
    tokenizer = CharTokenizer("ab\n")
    assert encode_prompt(tokenizer, "ba") == [2, 1]
    assert encode_prompt(tokenizer, None) == [0]
    assert encode_prompt(CharTokenizer("ab"), None) == [0]
    with pytest.raises(DataError, match=r"never saw 'q'"):
        encode_prompt(tokenizer, "aq")
    with pytest.raises(UserError, match=r"sample\.prompt is empty"):
        encode_prompt(tokenizer, "")


@pytest.mark.parametrize(
    ("names", "special", "unknown", "expected"),
    [
        ("<s> </s> <unk>", ["<s>", "</s>"], "<unk>", 1),  # the token between documents
        ("<s> <unk> c", ["<s>"], "<unk>", 0),
        ("<unk> c d", [], "<unk>", 0),
    ],
)
def test_a_tokenizer_without_line_breaks_starts_from_no_text_that_is_shown(
    names: str, special: list[str], unknown: str, expected: int
) -> None:
    vocabulary = {name: number for number, name in enumerate([*names.split(), "a", "b"])}
    library = Library(models.WordLevel(vocabulary, unk_token=unknown))
    library.add_special_tokens(special)
    tokenizer = LibraryTokenizer(library.to_str())
    prompt = encode_prompt(tokenizer, None)
    assert prompt == [expected]
    text = TextStream(tokenizer, prompt, lambda text: None, Stop.of(tokenizer, []), True).follow(iter([3, 4]))
    assert text.split() == ["a", "b"]


def test_an_empty_prompt_is_the_end_of_a_document_where_the_tokenizer_has_one() -> None:
    tokenizer = train_bpe(["ab ab"], 260).with_token("<|endoftext|>")
    assert encode_prompt(tokenizer, "") == [tokenizer.token_id("<|endoftext|>")]
    both = tokenizer.with_token("</s>")
    assert encode_prompt(both, "", "</s>") == [both.token_id("</s>")]
    with pytest.raises(UserError, match=r"sample\.prompt is empty"):
        encode_prompt(both, "")  # either could be meant


@pytest.mark.parametrize("text", ["plain text, two  spaces", "ä€𝄞 mixed 日本語", "\n\n\t x"])
def test_text_is_streamed_whole_and_in_valid_pieces(text: str) -> None:
    for tokenizer in (ByteTokenizer(), CharTokenizer(text), train_bpe(["ab ab äö"], 260)):
        ids, written = tokenizer.encode(text), []
        whole = TextStream(tokenizer, ids[:2], written.append, Stop(), True).follow(iter(ids[2:]))
        # A prompt that ends within a character can only be shown as far as it goes.
        if "\ufffd" not in tokenizer.decode(ids[:2]):
            assert whole == "".join(written) == text
            assert "\ufffd" not in whole
        assert len(written) > 1


def test_bytes_that_end_within_a_character() -> None:
    written: list[str] = []
    assert TextStream(ByteTokenizer(), [97], written.append, Stop(), True).follow(iter([0xE2, 0x82])) == "a\ufffd"
    assert written == ["a", "\ufffd"]


def test_the_second_token_of_a_pair_sees_the_first_in_its_penalties() -> None:
    def draft(text: list[int]) -> tuple[np.ndarray, None]:
        return np.array([[3.0, 2.0, 1.0]] * 2, np.float32), None

    sampler = Sampler(SampleConfig(temperature=0, presence=5.0, penalty_window=1))
    assert list(Continuation([2], ContextWindow(8), sampler, 4).drawn(draft)) == [0, 1, 0, 1]


TABLE = np.random.default_rng(8).normal(0, 1.5, (4, 4)).astype(np.float32)  # logits by the last token
DRAFTS = np.random.default_rng(9).normal(0, 1.5, (4, 2, 4)).astype(np.float32)


def draft_rows(text: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return DRAFTS[text[-1]], np.zeros(2)


def table_rows(text: list[int], drafted: list[int]) -> np.ndarray:
    return TABLE[[text[-1], *drafted]]


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return chi-square in standard deviations from its mean."""
    degrees = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - degrees) / np.sqrt(2 * degrees)


@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.95, "frequency": 0.5}])
def test_speculative_text_has_the_distribution_of_the_verifier(settings: dict[str, Any]) -> None:
    """All texts of three tokens over a vocabulary of four, against the product of the probabilities."""
    sampler, start, runs = Sampler(SampleConfig(seed=11, **settings)), [1, 2], 1500
    expected = {}
    for text in np.ndindex(4, 4, 4):
        history, probability = list(start), 1.0
        for token in text:
            probability *= sampler.probabilities(TABLE[history[-1]], history)[token]
            history.append(token)
        if probability:
            expected[text] = runs * probability
    acceptance, counts = Counter[str](), dict.fromkeys(expected, 0)
    for stream in range(runs):
        text = Continuation(start, ContextWindow(99), sampler, 3, stream)
        counts[tuple(text.speculative(draft_rows, table_rows, acceptance))] += (
            1  # a text that the verifier never writes is a KeyError
        )
    frequent = [text for text, count in expected.items() if count > 4]
    rare = [text for text in expected if text not in frequent]
    found = [counts[text] for text in frequent] + [sum(counts[text] for text in rare)] * bool(rare)
    wanted = [expected[text] for text in frequent] + [sum(expected[text] for text in rare)] * bool(rare)
    assert abs(chi_square(np.array(found), np.array(wanted))) < 4
    assert 0.2 < acceptance["accepted"] / acceptance["drafted"] < 0.8


def test_a_draft_that_equals_the_verifier_is_always_accepted() -> None:
    acceptance, calls = Counter[str](), []

    def verify(text: list[int], drafted: list[int]) -> np.ndarray:
        calls.append(len(drafted))
        return np.stack([LOGITS] * (1 + len(drafted)))

    def draft(text: list[int]) -> tuple[np.ndarray, np.ndarray]:
        return np.stack([LOGITS] * 2), np.zeros(2)

    text = Continuation([0], ContextWindow(8), Sampler(SampleConfig()), 13)
    assert len(list(text.speculative(draft, verify, acceptance))) == 13
    # Three tokens a call while two drafts fit into the context, then one a call from the moved window.
    assert calls == [2, 2, 1, *[0] * 5]
    assert acceptance["accepted"] == acceptance["drafted"] == 5


def cut_at(text: str, stops: list[str]) -> str:
    """The text before the stop that ends first; of two that end there, the longer."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@pytest.mark.parametrize("stops", [["b"], ["ab", "bba"], ["aab", "ab", "c"], ["abcabc"], ["cc", "ccc"], ["z"]])
def test_a_text_ends_before_its_first_stop_however_it_comes(stops: list[str]) -> None:
    """Pieces of any size, stops over the border of two; what was written is never taken back."""
    generator = np.random.default_rng(3)
    overrides = ["".join(generator.choice(list("abc"), size)) for size in (1, 1, 1, 2, 3, 4)]

    class Words:
        start: Sequence[int] = ()

        def decode(self, ids: list[int]) -> str:
            return "".join(overrides[i] for i in ids)

    for _ in range(50):
        ids, written = [int(i) for i in generator.integers(0, len(overrides), 12)], []
        whole = TextStream(Words(), [0], written.append, Stop(texts=tuple(stops)), True).follow(iter(ids))
        assert whole == "".join(written) == overrides[0] + cut_at("".join(overrides[i] for i in ids), stops)


def test_a_sample_ends_at_the_end_of_a_document_or_at_a_named_token() -> None:
    tokenizer = train_bpe(["ab ab"], 260).with_token("<|endoftext|>").with_token("<|user|>")
    end, user = tokenizer.token_id("<|endoftext|>"), tokenizer.token_id("<|user|>")
    plain, named = Stop.of(tokenizer, []), Stop.of(tokenizer, ["<|user|>", "b"])
    assert (plain, named) == (Stop(frozenset([end])), Stop(frozenset([end, user]), ("b",)))
    drawn = [*tokenizer.encode("ab"), end, *tokenizer.encode("ab")]
    assert TextStream(tokenizer, tokenizer.encode("a"), lambda text: None, plain, True).follow(iter(drawn)) == "aab"
    assert TextStream(tokenizer, tokenizer.encode("a"), lambda text: None, named, True).follow(iter([user, end])) == "a"
    assert TextStream(tokenizer, [end], lambda text: None, plain, True).follow(iter(drawn)) == "ab"  # an empty prompt
    assert Stop.of(CharTokenizer("ab"), ["<|user|>"]) == Stop(texts=("<|user|>",))  # no token of it
    assert Stop.of(CharTokenizer("ab"), [r"a\n"]) == Stop(texts=("a\n",))  # as a command line passes a line break on


def test_nothing_is_drawn_after_a_stop(capsys: pytest.CaptureFixture[str]) -> None:
    config, tokenizer = SampleConfig(count=2, batch_size=1), CharTokenizer("abcdefgh")
    text = Continuation([0], ContextWindow(4), Sampler(config), 7)
    tokens = lambda prompt, number: text.drawn(whole_text_scores(Successor(), 8))  # noqa: E731
    source = cast(TokenSource, SimpleNamespace(config=config, counts=Counter[str](), tokens=tokens))
    source.sample = MethodType(TokenSource.sample, source)  # type: ignore[method-assign]
    texts = print_source(source, tokenizer, [0], Stop(frozenset([6]), ("de",)))
    assert texts == ["abc", "abc"]
    assert capsys.readouterr().out == "--- sample 1 of 2 ---\nabc\n--- sample 2 of 2 ---\nabc\n"
    asked: list[int] = []
    drawn = (asked.append(token) or token for token in range(1, 8))
    told = TextStream(tokenizer, [0], lambda text: None, Stop(frozenset([3])), True).follow(drawn)
    assert told == "abc" and asked == [1, 2, 3]


def test_the_speed_is_told_beside_that_of_reading_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    source = Opened(sample={"mode": "ar", "tokens": 3}).source
    sizes = {path: parameter.spec.nbytes for path, parameter in source.steps.model.parameters().items()}
    tokenizer = CharTokenizer("".join(map(chr, range(33, 33 + source.vocabulary))))
    print_source(source, tokenizer, [1], Stop(), lambda: 2.0 * source.weight_bytes())
    looked_up, unused = "embedding.weight", "sat_head"
    assert source.weight_bytes() == sum(n for path, n in sizes.items() if path != looked_up and unused not in path)
    assert "Reading the weights allows 2.0 tokens/s; this is " in capsys.readouterr().err


def test_a_new_token_reads_the_experts_that_it_passes() -> None:
    experts = {"experts": 4, "experts_per_token": 1, "expert_width": 24, "tied": False}
    model = Llama(LlamaConfig(**SIZES, hidden=24, preset=None, **experts))
    graph = StepGraph(model, AdamW(AdamWConfig()), rows=1)
    state = State(open_cpu(), graph.state_tensors(training=False))
    steps = StepsByLength(Session(graph, state, ENGINES["static"](state.device, state)), lambda length: None)
    source = TokenSource(steps, SampleConfig(), VOCABULARY)
    source.make_room(CONTEXT)
    specs = {path: spec for path, spec in model.specs().items() if path != "embedding.weight"}
    assert source.weight_bytes() == sum(spec.nbytes // (4 if spec.rank == 3 else 1) for spec in specs.values())
