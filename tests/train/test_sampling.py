"""Drawing tokens, against torch and against counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from ttrain.core.errors import DataError, NonFiniteError, UserError
from ttrain.core.spec import DType, TensorSpec
from ttrain.data.tokenizer import ByteTokenizer, CharTokenizer, train_bpe
from ttrain.train.sample import Sampler, draw_tokens, encode_prompt, print_samples, stream_text, token_probabilities
from ttrain.train.settings import SampleConfig

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


def test_zero_temperature_takes_the_likeliest() -> None:
    sampler = Sampler(SampleConfig(temperature=0))
    assert {sampler.choose(LOGITS, 0, position) for position in range(20)} == {int(LOGITS.argmax())}


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


def test_the_window_moves_over_the_text() -> None:
    model = Successor()
    drawn = list(draw_tokens(model, [5, 6], 4, 8, Sampler(SampleConfig()), tokens=5))
    assert drawn == [7, 0, 1, 2, 3]
    assert model.fed == [([5, 6, 0, 0], 1), ([5, 6, 7, 0], 2), ([5, 6, 7, 0], 3), ([6, 7, 0, 1], 3), ([7, 0, 1, 2], 3)]


def test_a_long_prompt_keeps_its_end() -> None:
    model = Successor()
    assert list(draw_tokens(model, [0, 1, 2, 3, 4, 5], 4, 8, Sampler(SampleConfig()), tokens=1)) == [6]
    assert model.fed == [([2, 3, 4, 5], 3)]


def test_nan_logits_are_an_error() -> None:
    with pytest.raises(NonFiniteError, match="logits hold NaN"):
        list(draw_tokens(Successor(float("nan")), [0], 4, 8, Sampler(SampleConfig()), tokens=1))


def test_prompts() -> None:
    tokenizer = CharTokenizer("ab\n")
    assert encode_prompt(tokenizer, "ba") == [2, 1]
    assert encode_prompt(tokenizer, None) == [0]
    assert encode_prompt(CharTokenizer("ab"), None) == [0]
    with pytest.raises(DataError, match=r"never saw 'q'"):
        encode_prompt(tokenizer, "aq")
    with pytest.raises(UserError, match=r"sample\.prompt is empty"):
        encode_prompt(tokenizer, "")


@pytest.mark.parametrize("text", ["plain text, two  spaces", "ä€𝄞 mixed 日本語", "\n\n\t x"])
def test_text_is_streamed_whole_and_in_valid_pieces(text: str) -> None:
    for tokenizer in (ByteTokenizer(), CharTokenizer(text), train_bpe(["ab ab äö"], 260)):
        ids, written = tokenizer.encode(text), []
        whole = stream_text(tokenizer, ids[:2], iter(ids[2:]), written.append)
        # A prompt that ends within a character can only be shown as far as it goes.
        if "\ufffd" not in tokenizer.decode(ids[:2]):
            assert whole == "".join(written) == text
            assert "\ufffd" not in whole
        assert len(written) > 1


def test_bytes_that_end_within_a_character() -> None:
    written: list[str] = []
    assert stream_text(ByteTokenizer(), [97], iter([0xE2, 0x82]), written.append) == "a\ufffd"
    assert written == ["a", "\ufffd"]


def test_samples_are_printed_as_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = CharTokenizer("abcdefgh")
    texts = print_samples(Successor(), tokenizer, [0], SampleConfig(tokens=3, count=2))
    assert texts == ["abcd", "abcd"]
    assert capsys.readouterr().out == "--- sample 1 of 2 ---\nabcd\n--- sample 2 of 2 ---\nabcd\n"
