"""Drawing text from a model, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import DataError, NonFiniteError, UserError
from ttrain.train.protocols import Array, Step, Tokenizer
from ttrain.train.settings import SampleConfig

Probabilities = NDArray[np.float64]


class Sampler:
    """Chooses tokens from logits as temperature, top-k and top-p say. Choice `i` depends on (seed, stream, i) alone."""

    def __init__(self, config: SampleConfig) -> None:
        self._config = config

    def choose(self, logits: Array, stream: int, position: int) -> int:
        """logits fp32[V] -> token id. `stream` numbers the sample, `position` the token in it."""
        config = self._config
        if config.temperature == 0:
            return int(np.argmax(logits))
        probabilities = token_probabilities(logits, config.temperature, config.top_k, config.top_p)
        # Philox counts blocks of four words per key, so (stream, position) never share random numbers.
        generator = np.random.Generator(np.random.Philox(key=config.seed, counter=[0, 0, stream, position]))
        cumulative = np.cumsum(probabilities)
        return int(np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right"))


def token_probabilities(
    logits: Array, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Probabilities:
    """Distribution that tokens are drawn from: softmax(logits / temperature), cut to the likeliest, and renormalised.

    top_k keeps the k likeliest. top_p then keeps the fewest likeliest whose probabilities reach p (nucleus sampling,
    Holtzman et al., 2020). Of equally likely tokens at the edge, those with the lower id stay.
    """
    scaled = np.asarray(logits, np.float64) / temperature
    probabilities: Probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    kept = len(order) if top_k is None else min(top_k, len(order))
    if top_p is not None:
        sorted_probabilities = probabilities[order[:kept]]
        reached = np.cumsum(sorted_probabilities) / sorted_probabilities.sum()
        kept = min(kept, int(np.searchsorted(reached, top_p - 1e-12)) + 1)
    cut: Probabilities = np.zeros_like(probabilities)
    cut[order[:kept]] = probabilities[order[:kept]]
    cut /= cut.sum()
    return cut


def encode_prompt(tokenizer: Tokenizer, prompt: str | None) -> list[int]:
    """Token ids of the prompt, at least one; None stands for a line break, or id 0 where the tokenizer has none.

    Raises UserError for an empty prompt, and DataError, which names them, for characters the tokenizer never saw.
    """
    if prompt is None:
        try:
            return tokenizer.encode("\n") or [0]
        except DataError:
            return [0]
    ids = tokenizer.encode(prompt)
    if not ids:
        raise UserError(
            "sample.prompt is empty, and a model needs a first token. Give a text, or leave the key out to start from "
            "a line break."
        )
    return ids


def draw_tokens(
    step: Step, prompt: list[int], context: int, vocabulary: int, sampler: Sampler, tokens: int, stream: int = 0
) -> Iterator[int]:
    """Yields `tokens` token ids that continue the prompt.

    `step` is the model's `logits` step: tokens int64[1, context] and a position -> logits fp32[V] there. The window is
    padded behind the position, which a causal model does not look at; a longer text loses its front. Ids from
    `vocabulary` on, which pad the model's output, are never drawn.
    """
    history = list(prompt)
    for number in range(tokens):
        window = history[-context:]
        padded = np.zeros((1, context), np.int64)
        padded[0, : len(window)] = window
        logits = np.asarray(step({"tokens": padded, "position": len(window) - 1})["logits"]).reshape(-1)[:vocabulary]
        if not np.isfinite(logits).all():
            raise NonFiniteError(
                "The model's logits hold NaN or Inf, so there is nothing to draw from. Use another checkpoint."
            )
        token = sampler.choose(logits, stream, number)
        history.append(token)
        yield token


def stream_text(tokenizer: Tokenizer, prompt: list[int], drawn: Iterator[int], write: Callable[[str], None]) -> str:
    """Writes the text as tokens arrive, and returns it whole, prompt included.

    A character whose bytes are not all there yet is held back. Tokens are decoded together with those before them,
    because some tokenizers treat the start of a text differently.
    """
    pieces = [tokenizer.decode(prompt)]
    write(pieces[0])
    recent, shown = list(prompt[-1:]), tokenizer.decode(prompt[-1:])
    for token in drawn:
        recent.append(token)
        text = tokenizer.decode(recent)
        if len(text) > len(shown) and not text.endswith("\ufffd"):
            pieces.append(text[len(shown) :])
            write(pieces[-1])
            recent, shown = [token], tokenizer.decode([token])
    if rest := tokenizer.decode(recent)[len(shown) :]:
        pieces.append(rest)
        write(rest)
    return "".join(pieces)


def print_samples(step: Step, tokenizer: Tokenizer, prompt: list[int], config: SampleConfig) -> list[str]:
    """Writes `config.count` samples to stdout as their tokens are drawn, and returns them."""
    context = step.inputs["tokens"].shape[1]
    sampler, texts = Sampler(config), []
    for number in range(config.count):
        if config.count > 1:
            print(f"--- sample {number + 1} of {config.count} ---")
        drawn = draw_tokens(step, prompt, context, tokenizer.vocabulary, sampler, config.tokens, number)
        texts.append(stream_text(tokenizer, prompt, drawn, lambda text: print(text, end="", flush=True)))
        print(flush=True)
    return texts
