"""Write many texts at once. Each has caches of its own; when one ends, the next in the queue takes its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from ttrain import ops
from ttrain.core.errors import UserError
from ttrain.core.units import format_bytes
from ttrain.engine.base import Step, Trace
from ttrain.graph import Graph
from ttrain.models.base import CachedModel
from ttrain.models.cache import PLACES, POSITIONS, TOKENS, VISIBLE
from ttrain.train.protocols import Array
from ttrain.train.sampling.decode import CHUNK, ROWS, cache_tensors, extend_trace
from ttrain.train.sampling.draw import ContextWindow, Sampler, checked
from ttrain.train.task_settings import SampleConfig

NEXT, BLOCK, LOG_SUM_EXP = "read_next", "read_block", "log_sum_exp"
Ends = Callable[[int, int], bool]  # number of a prompt, token that was drawn after it -> True if that ends the text
_DRAWING = 2  # threads: numpy's functions over a whole vocabulary run beside each other


def batch_traces(model: CachedModel, texts: int, length: int, scale: float = 1.0) -> dict[str, Trace]:
    """Return the steps that read so many texts of at most `length` tokens: a token of each, or a block of tokens.

    Their outputs are logits fp32 [texts, vocabulary] and log_sum_exp fp32 [texts] of these times `scale`.
    """

    def trace(count: int, graph: Graph) -> None:
        extend_trace(model, count, texts, texts=texts)(graph)
        graph.output(LOG_SUM_EXP, ops.log_sum_exp(graph.outputs["logits"], scale))

    block = min(max(CHUNK, 4 * texts), texts * length)
    return {NEXT: partial(trace, texts), BLOCK: partial(trace, block)}


class TextsReader:
    """Feeds texts to the steps of `batch_traces`. Each has a number below `texts`, which its caches belong to."""

    def __init__(self, steps: Mapping[str, Step], texts: int, length: int) -> None:
        self._steps, self._length = steps, length
        self._read: list[list[int]] = [[] for _ in range(texts)]

    def read(self, texts: Mapping[int, list[int]]) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """Yield the numbers of texts that are read to their ends, and outputs whose first rows are theirs.

        A text that continues the one of the same number is read from its first new token on, any other from its start.
        """
        places: list[int] = []
        for number, text in texts.items():
            before, start = self._read[number], number * self._length
            known = len(before) if len(before) < len(text) and text[: len(before)] == before else 0
            places += range(start + known, start + len(text))
            self._read[number] = text
        while places:
            step = self._steps[NEXT if len(places) <= len(self._read) else BLOCK]
            size = step.inputs[TOKENS].shape[1]
            yield self._feed(step, places[:size])
            del places[:size]

    def _feed(self, step: Step, places: list[int]) -> tuple[list[int], dict[str, Any]]:
        """Read the tokens at these places. Places behind the ends of texts fill the rest of the step."""
        size, scored, length = step.inputs[TOKENS].shape[1], step.inputs[ROWS].shape[0], self._length
        used, texts = set(places), {place // length for place in places}
        # Texts without a place here come first: a step with a token of each text is the quickest.
        idle = sorted(range(len(self._read)), key=texts.__contains__)
        spare = (number * length + position for position in reversed(range(length)) for number in idle)
        filled = islice((place for place in spare if place not in used), size - len(places))
        at = [divmod(place, length) for place in sorted((*places, *filled))]
        tokens = [text[position] if position < len(text := self._read[number]) else None for number, position in at]
        last = {number * length + len(self._read[number]) - 1 for number in texts} & used
        ends = [row for row, (number, position) in enumerate(at) if number * length + position in last]
        owners, positions = np.array(at, np.int64).T
        filler = np.array([token is None for token in tokens])
        inputs = {
            TOKENS: np.array([[token or 0 for token in tokens]], np.int64),
            POSITIONS: positions,
            PLACES: owners * length + positions,
            VISIBLE: owners * length + np.where(filler, 0, positions) + 1,  # filler sees one place, the least work
            ROWS: np.array([*ends, *[0] * (scored - len(ends))], np.int64),
        }
        outputs = step({name: value for name, value in inputs.items() if name in step.inputs})
        return [at[row][0] for row in ends], dict(outputs)


@dataclass
class _Text:
    """A text that is being written."""

    number: int  # of its prompt
    stream: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    likelihoods: list[np.float32] = field(default_factory=list)


@dataclass
class BatchSource:
    """Tokens of many texts, some of them read at a time. What is drawn for a text depends on no other.

    If `rows` and `longest` are given, so many texts are read at a time, the caches hold so many tokens, and the same
    steps, those of `traces`, serve every call. Else both follow from the texts of a call and sample.batch_size.
    """

    steps: Any  # StepsByLength
    config: SampleConfig
    vocabulary: int  # ids of the tokenizer: the model may have more
    rows: int | None = None
    longest: int | None = None
    scale: float = 1.0  # of the logits whose log-probabilities are told

    def sizes(self, prompts: Sequence[list[int]]) -> tuple[int, int]:
        """Return how many texts are read at a time, and how many tokens the caches of each hold."""
        needed = max(map(len, prompts), default=0) + self.config.tokens
        return self.rows or min(self.config.batch_size, len(prompts)), self.steps.length(self.longest or needed)

    def traces(self, model: CachedModel, rows: int, length: int) -> dict[str, Trace]:
        """Return the steps by name. Raises UserError where the device has no room for their caches."""
        traces, memory = batch_traces(model, rows, length, self.scale), self.steps.session.engine.device.memory()
        needed = sum(tensor.spec.nbytes for tensor in cache_tensors([traces[NEXT]]))
        room = total - memory.get("in_use", 0) if (total := memory.get("total")) else needed
        if needed > room and rows > 1:
            told = f"caches of so many texts take {format_bytes(needed)}, and {format_bytes(room)} are free"
            raise UserError(f"sample.batch_size={rows}: {told}. Give {rows // 2}, or fewer sample.tokens.")
        return traces

    def sample(
        self, prompts: Sequence[list[int]], numbers: Sequence[int], ends: Ends
    ) -> Iterator[tuple[list[int], Array]]:
        """Yield for each prompt in turn the tokens after it, and their log-probabilities fp32 [tokens].

        A text has sample.tokens tokens, or ends with the first one for which `ends` is true. `numbers` tell texts
        apart: a draw depends on sample.seed, the text's number and the token's place. A log-probability is that of
        the model's logits times `scale`, before penalties and temperature.
        """
        rows, length = self.sizes(prompts)
        steps = self.steps.get(f"batch of {rows}", length, lambda graph: self.traces(graph.model, rows, length))
        reader, window = TextsReader(steps, rows, length), ContextWindow(length, self.config.slide)
        queue = map(_Text, range(len(prompts)), numbers, map(list, prompts))
        texts: dict[int, _Text] = {}
        finished: dict[int, _Text] = {}
        turn = 0
        with ThreadPoolExecutor(_DRAWING) as pool:
            while turn < len(prompts):
                texts |= dict(zip([row for row in range(rows) if row not in texts], queue, strict=False))
                for owners, outputs in reader.read({row: window(_history(texts[row])) for row in sorted(texts)}):
                    self._draw([texts[row] for row in owners], outputs, pool)
                for row, text in list(texts.items()):
                    if ends(text.number, text.tokens[-1]) or len(text.tokens) == self.config.tokens:
                        finished[text.number] = texts.pop(row)
                while turn in finished:
                    text = finished.pop(turn)
                    yield text.tokens, np.array(text.likelihoods, np.float32)
                    turn += 1

    def _draw(self, texts: list[_Text], outputs: dict[str, Any], pool: ThreadPoolExecutor) -> None:
        """Append a token to each of the texts. The first rows of the outputs are theirs."""
        sampler = Sampler(self.config)
        logits = checked(outputs["logits"][: len(texts)], self.vocabulary)

        def token(row: int) -> int:
            text = texts[row]
            return sampler.choose(logits[row], text.stream, len(text.tokens), _history(text))

        for row, (text, drawn) in enumerate(zip(texts, pool.map(token, range(len(texts))), strict=True)):
            text.tokens.append(drawn)
            text.likelihoods.append(np.float32(self.scale) * logits[row, drawn] - outputs[LOG_SUM_EXP][row])


def _history(text: _Text) -> list[int]:
    return text.prompt + text.tokens
