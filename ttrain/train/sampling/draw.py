"""Draw text from a model: choose tokens from scores, for one text or several in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import DataError, NonFiniteError, UserError
from ttrain.data.tokenizer import Tokenizer
from ttrain.engine.base import Step
from ttrain.train.protocols import Array
from ttrain.train.sampling.stream import end_id
from ttrain.train.task_settings import SampleConfig

Probabilities = NDArray[np.float64]
# Text -> logits [n, V] of the tokens after it, and scores [n] of a gate that says how many are drawn; None draws all.
Draft = Callable[[list[int]], tuple[Array, Array | None]]
Verify = Callable[[list[int], list[int]], Array]  # text, drafted tokens -> logits [1 + drafted, V]


_PART = 256  # probabilities that are added up at once: numpy's running sum takes longer than all else of a draw


# Purposes of a random number. Numbers for different purposes are independent, also at the same token.
TOKEN, DRAFT, ACCEPT, GATE = range(4)


class Sampler:
    """Chooses tokens from logits as the config says. A choice depends on the seed and on its place alone."""

    def __init__(self, config: SampleConfig) -> None:
        self._config = config

    def choose(self, logits: Array, stream: int, position: int, history: Sequence[int] = ()) -> int:
        """logits fp32[V] -> token id. `stream` numbers the sample, `position` the token in it, from its first new one.

        `history` is the text so far, which the penalties look at.
        """
        return self.draw(self.probabilities(logits, history), stream, position)

    def probabilities(self, logits: Array, history: Sequence[int] = ()) -> Probabilities:
        """The distribution that a token is drawn from, fp64[V]: penalties first, then see token_probabilities."""
        config = self._config
        window = history if config.penalty_window is None else history[-config.penalty_window :]
        logits = penalized(logits, window, config.repetition, config.presence, config.frequency)
        if config.temperature == 0:
            certain: Probabilities = np.zeros(len(logits))
            certain[int(np.argmax(logits))] = 1.0
            return certain
        return token_probabilities(logits, config.temperature, config.top_k, config.top_p, config.min_p)

    def draw(self, probabilities: Probabilities, stream: int, position: int, purpose: int = TOKEN) -> int:
        """An id from a distribution, which need not be normalised."""
        parts = np.add.reduceat(probabilities, np.arange(0, len(probabilities), _PART))
        ends = np.cumsum(parts)
        point = self.uniform(stream, position, purpose) * ends[-1]
        part = int(np.searchsorted(ends[:-1], point, side="right"))
        if part:
            point -= ends[part - 1]
        likely = np.flatnonzero(probabilities[part * _PART :][:_PART])
        cumulative = np.cumsum(probabilities[part * _PART + likely])
        return part * _PART + int(likely[np.searchsorted(cumulative[:-1], point, side="right")])

    def gate(self, scores: Array, stream: int, position: int) -> int:
        """A class from the scores of a gate: drawn at temperature 1, or the likeliest where the temperature is 0."""
        if self._config.temperature == 0:
            return int(np.argmax(scores))
        return self.draw(token_probabilities(scores, 1.0), stream, position, GATE)

    def uniform(self, stream: int, position: int, purpose: int) -> float:
        """A random number in [0, 1)."""
        # Philox counts blocks of four words per key, so no two (purpose, stream, position) share random numbers.
        counter = [0, purpose, stream, position]
        return float(np.random.Generator(np.random.Philox(key=self._config.seed, counter=counter)).random())


def penalized(logits: Array, window: Sequence[int], repetition: float, presence: float, frequency: float) -> Array:
    """Return logits with those of the tokens in `window` lowered.

    presence + frequency * count is taken off, then a positive logit is divided by repetition (Keskar et al., 2019) and
    another multiplied. The array given stays as it is.
    """
    if not len(window) or (repetition == 1 and presence == 0 and frequency == 0):
        return logits
    ids, counts = np.unique(np.asarray(window), return_counts=True)
    lowered = np.array(logits, np.float64)
    scores = lowered[ids] - (presence + frequency * counts)
    lowered[ids] = np.where(scores > 0, scores / repetition, scores * repetition)
    return lowered


def token_probabilities(
    logits: Array, temperature: float, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> Probabilities:
    """Distribution that tokens are drawn from: softmax(logits / temperature), cut to the likeliest, and renormalised.

    top_k keeps the k likeliest. top_p then keeps the fewest likeliest whose probabilities reach p (nucleus sampling,
    Holtzman et al., 2020). min_p then keeps those with at least p times the largest probability (Nguyen et al., 2024).
    Of equally likely tokens at the edge, those with the lower id stay.
    """
    probabilities: Probabilities = np.array(logits, np.float64)
    probabilities -= probabilities.max()  # before the division, which the smallest temperatures make overflow
    with np.errstate(over="ignore"):  # -inf has no probability, as it should
        probabilities /= temperature
        np.exp(probabilities, out=probabilities)
    probabilities /= probabilities.sum()
    cut = probabilities
    if top_k is not None or top_p is not None:  # to sort all ids takes longer than a small model's pass
        kept = min(top_k or len(probabilities), len(probabilities))
        ids = np.flatnonzero(probabilities >= np.partition(probabilities, -kept)[-kept])
        order = ids[np.argsort(-probabilities[ids], kind="stable")]
        if top_p is not None:
            sorted_probabilities = probabilities[order[:kept]]
            reached = np.cumsum(sorted_probabilities) / sorted_probabilities.sum()
            kept = min(kept, int(np.searchsorted(reached, top_p - 1e-12)) + 1)
        cut = np.zeros_like(probabilities)
        cut[order[:kept]] = probabilities[order[:kept]]
    if min_p is not None:
        cut[cut < min_p * cut.max()] = 0
    cut /= cut.sum()
    return cut


def encode_prompt(tokenizer: Tokenizer, prompt: str | None, end_token: str | None = None) -> list[int]:
    """Return the token ids of a prompt, at least one, with those that the tokenizer puts before a text.

    None stands for a line break; if the tokenizer has none, for the token that ends a document, or for id 0. An empty
    prompt stands for the token that ends a document, `end_token` or the tokenizer's own, unless the tokenizer puts
    tokens before a text. Raises UserError for an empty prompt without any such token, and DataError that names the
    characters which the tokenizer does not know.
    """
    if prompt is None:
        try:
            ids = tokenizer.encode("\n")
        except DataError:
            ids = []
        if ids and not tokenizer.decode(ids).strip():
            return tokenizer.with_start(ids)
        return [end_id(tokenizer, end_token) or 0]
    ids = tokenizer.with_start(tokenizer.encode(prompt))
    if not ids and (end := end_id(tokenizer, end_token)) is not None:
        return [end]
    if not ids:
        told = "sample.prompt is empty, and a model needs a first token"
        raise UserError(f"{told}. Give a text, or leave the key out to start from a line break.")
    return ids


@dataclass(frozen=True)
class ContextWindow:
    """The part of a text that a model sees: at most the last `context` tokens.

    A longer text loses `slide` at once, None is an eighth of the context; all is never lost.
    """

    context: int
    slide: int | None = None

    def __call__(self, text: list[int]) -> list[int]:
        slide = max(1, min(self.context // 8 if self.slide is None else self.slide, self.context - 1))
        lost = -(-max(0, len(text) - self.context) // slide) * slide
        return text[lost:]


@dataclass(frozen=True)
class Continuation:
    """`tokens` token ids that continue a prompt. Models read the part of the text that the window shows."""

    prompt: list[int]
    window: ContextWindow
    sampler: Sampler
    tokens: int
    stream: int = 0  # number of the sample

    def drawn(self, draft: Draft) -> Iterator[int]:
        """Yield the tokens that each call of `draft` scores, as many of them as its gate says."""
        history, sampler, stream = list(self.prompt), self.sampler, self.stream
        while (number := len(history) - len(self.prompt)) < self.tokens:
            logits, gate = draft(self.window(history))
            count = len(logits) if gate is None else sampler.gate(gate, stream, number) + 1
            for row in logits[: min(count, self.tokens - number)]:
                token = sampler.choose(row, stream, len(history) - len(self.prompt), history)
                history.append(token)
                yield token

    def speculative(self, draft: Draft, verify: Verify, counts: Counter[str]) -> Iterator[int]:
        """Yield tokens from the distribution of the verifier, up to three from each pair of calls.

        `counts` takes in how many tokens were `drafted`, and how many of them `accepted`.

        `draft` proposes two tokens. `verify(text, drafted)` returns the logits [1 + drafted, V] of the token after the
        text and after each drafted one. A token drafted from q is accepted with probability min(1, p / q) of the
        verifier's p; the first that is not is drawn anew from max(p - q, 0), and where all are, one more is drawn from
        p (Leviathan et al., 2023).
        """
        history, sampler, stream = list(self.prompt), self.sampler, self.stream
        while (number := len(history) - len(self.prompt)) < self.tokens:
            text = self.window(history)
            most = min(2, self.window.context - len(text), self.tokens - number)
            drafted: list[int] = []
            proposals: list[Probabilities] = []
            for row in draft(text)[0][:most] if most else ():
                proposals.append(sampler.probabilities(row, history + drafted))
                drafted.append(sampler.draw(proposals[-1], stream, number + len(drafted), DRAFT))
            counts["drafted"] += len(drafted)
            rows = verify(text, drafted)
            for place, token in enumerate(drafted):
                target, proposal, at = sampler.probabilities(rows[place], history), proposals[place], number + place
                accepted = sampler.uniform(stream, at, ACCEPT) * proposal[token] < target[token]
                if not accepted:
                    rest: Probabilities = np.maximum(target - proposal, 0)
                    token = sampler.draw(rest if rest.any() else target, stream, at)
                counts["accepted"] += accepted
                history.append(token)
                yield token
                if not accepted:
                    break
            else:
                if number + len(drafted) < self.tokens:
                    target = sampler.probabilities(rows[len(drafted)], history)
                    history.append(sampler.draw(target, stream, number + len(drafted)))
                    yield history[-1]


def whole_text_scores(step: Step, vocabulary: int) -> Draft:
    """Score one token at a time by the model's `logits` step, which computes a whole context for every token.

    The text is padded behind its last token, which a causal model does not look at.
    """
    context = step.inputs["tokens"].shape[1]

    def scores(text: list[int]) -> tuple[Array, None]:
        padded = np.zeros((1, context), np.int64)
        padded[0, : len(text)] = text
        return checked(step({"tokens": padded, "position": len(text) - 1})["logits"], vocabulary), None

    return scores


def checked(logits: Array, vocabulary: int) -> Array:
    """Logits [rows, V] cut to the tokenizer's ids: those from `vocabulary` on pad the model's output.

    Raises NonFiniteError.
    """
    array: Array = logits[:, :vocabulary]
    if not np.isfinite(array).all():
        told = "The model's logits hold NaN or Inf, so there is nothing to draw from"
        raise NonFiniteError(f"{told}. Use another checkpoint.")
    return array
