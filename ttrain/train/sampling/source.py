"""Sample from a model on a device: the steps that a mode of sampling needs, and the text that they give."""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ttrain.core.attention_mask import CAUSAL, PAIRS
from ttrain.core.errors import ConfigError
from ttrain.data.tokenizer import Tokenizer
from ttrain.engine.base import Step, Trace
from ttrain.graph import Kind
from ttrain.models.cache import TOKENS
from ttrain.train.protocols import Array
from ttrain.train.sampling import draw
from ttrain.train.sampling.batch import BatchSource, Ends
from ttrain.train.sampling.decode import Reader, cache_tensors, reading_traces
from ttrain.train.sampling.stream import Stop, TextStream, print_text
from ttrain.train.steps.session import Session
from ttrain.train.steps.step_graph import StepGraph
from ttrain.train.task_settings import SampleConfig

SHORTEST = 64  # tokens of the first class; each other is twice as long as the one before, up to the context

Resized = Callable[[int], Any]  # length -> model over the same parameters, None where these depend on the length


def length_class(tokens: int, context: int) -> int:
    """Return the length of the rows that hold `tokens` tokens."""
    return min(context, max(SHORTEST, 1 << max(tokens - 1, 0).bit_length()))


class StepsByLength:
    """Builds steps of a session when they are asked for, and first frees those before with their memory."""

    def __init__(self, session: Session, resized: Resized) -> None:
        self.session, self.resized = session, resized
        self.model: Any = session.graph.model
        self._key: tuple[str, int] | None = None
        self._steps: Mapping[str, Step] = {}
        self.context = session.graph.model.batch_specs(1)["tokens"].shape[1]
        self._fixed = self.context > SHORTEST and resized(SHORTEST) is None

    def length(self, tokens: int) -> int:
        """Return the length of the rows that hold so many tokens: the context where the model takes no other."""
        return self.context if self._fixed else length_class(tokens, self.context)

    def get(self, name: str, length: int, traces: Callable[[StepGraph], Mapping[str, Trace]]) -> Mapping[str, Step]:
        """Return the built steps of `traces` for rows of a length that the method `length` gives.

        Steps of the newest `name` and length are kept; others are built anew.
        """
        if self._key != (name, length):
            state, engine, graph = self.session.state, self.session.engine, self.session.graph
            if length != self.context:
                graph = replace(graph, model=self.resized(length))
            recorded = traces(graph)
            before, self._steps, self._key = self._key, {}, None
            engine.close()
            state.drop(state.names(Kind.CACHE))
            if before is not None:
                gc.collect()  # the memory of steps and caches before, as graph and values refer to each other
            state.add(cache_tensors(list(recorded.values())))
            self._steps = {each: engine.build(each, trace) for each, trace in recorded.items()}
            for step in self._steps.values():
                if hasattr(step, "take_addresses"):  # all before one runs, because some engines compile then
                    step.take_addresses()
            self._key = name, length
        return self._steps


WHOLE = "logits"  # the step that computes a whole context for every token

# Per mode: the masks under which the text is read, with the tokens that are new at a time and the rows that are scored.
# A pair step reads at most three new tokens, from the start of the pair that the first of them belongs to.
_READS: dict[str, dict[str, tuple[int, int]]] = {
    "ar": {CAUSAL: (1, 1)},
    "sat": {PAIRS: (4, 2)},
    "sat_variable": {PAIRS: (4, 2)},
    "speculative": {PAIRS: (4, 2), CAUSAL: (3, 3)},
}


def check_sampling(model: Any, config: SampleConfig) -> None:
    """Raise ConfigError for a mode, cache or sample.slide that the model can't have."""
    name, mode = model.config.name, config.mode
    if mode != "ar" and getattr(model, "sat_head", None) is None:
        raise ConfigError(f"sample.mode={mode}: model.name={name} has no SAT head. Give sample.mode=ar.")
    if config.slide is not None and config.slide >= max(2, model.context):
        raise ConfigError(f"sample.slide={config.slide}: must be less than model.context={model.context}.")
    if config.cache and not hasattr(model, "extend"):
        raise ConfigError(f"sample.cache=true: model.name={name} keeps no keys and values. Give sample.cache=null.")


def sampling_traces(model: Any, config: SampleConfig, length: int | None = None) -> dict[str, dict[str, Trace]]:
    """Return the steps that the mode reads the text with, by mask and name; for `length` see reading_traces.

    There are none where every token computes a whole text.
    """
    mode = config.mode
    if mode == "ar" and (config.cache is False or not hasattr(model, "extend")):
        return {}
    return {mask: reading_traces(model, mask, *sizes, length) for mask, sizes in _READS[mode].items()}


@dataclass
class TokenSource:
    """Tokens of samples, from steps that are built for texts as long as the longest so far."""

    steps: StepsByLength
    config: SampleConfig
    vocabulary: int  # ids of the tokenizer: the model may have more
    counts: Counter[str] = field(default_factory=Counter)  # of tokens that were drafted and accepted
    _readers: dict[str, Reader] = field(default_factory=dict)
    _whole: draw.Draft | None = None
    _length: int = 0  # of the longest text
    _built: Mapping[str, Step] | None = None

    def make_room(self, tokens: int) -> None:
        """Build the steps for texts of so many tokens, or of the context where that is less, if there are none yet."""
        length = max(self._length, self.steps.length(tokens))
        built = self.steps.get(f"sample {self.config.mode}", length, partial(self._traces, length))
        if self._length == length and self._built is built:
            return
        keeps, self._length, self._built = self.config.cache is not False, length, built
        reads = sampling_traces(self.steps.model, self.config, length)
        self._readers = {
            mask: Reader([built[name] for name in traces], length, mask, keeps) for mask, traces in reads.items()
        }
        self._whole = None if reads else draw.whole_text_scores(built[WHOLE], self.vocabulary)

    def _traces(self, length: int, graph: StepGraph) -> dict[str, Trace]:
        """Return all steps by name, for texts of the length that the graph is for."""
        reads = sampling_traces(graph.model, self.config, length)
        named = {name: trace for traces in reads.values() for name, trace in traces.items()}
        return named or {WHOLE: graph.trace_logits}

    def tokens(self, prompt: list[int], number: int) -> Iterator[int]:
        """Yield the ids of one sample, which continue the prompt; `number` tells samples apart."""
        config = self.config
        self.make_room(len(prompt) + config.tokens)
        window = draw.ContextWindow(self._length, config.slide)
        text = draw.Continuation(prompt, window, draw.Sampler(config), config.tokens, number)
        if config.mode == "speculative":
            return text.speculative(self._draft, self._verify, self.counts)
        return text.drawn(self._whole or (self._next if config.mode == "ar" else self._draft))

    def sample(self, prompts: Sequence[list[int]], numbers: Sequence[int], ends: Ends) -> Iterator[list[int]]:
        """Yield the tokens after each prompt in turn, see BatchSource; several texts are written at once in mode ar."""
        config = self.config
        several = config.mode == "ar" and min(config.batch_size, len(prompts)) > 1
        if several and sampling_traces(self.steps.model, config):
            batch = BatchSource(self.steps, config, self.vocabulary)
            yield from (tokens for tokens, _ in batch.sample(prompts, numbers, ends))
            return
        for number, (prompt, stream) in enumerate(zip(prompts, numbers, strict=True)):
            tokens: list[int] = []
            for token in self.tokens(prompt, stream):
                tokens.append(token)
                if ends(number, token):
                    break
            yield tokens

    def weight_bytes(self) -> int:
        """Bytes of the weights that a new token multiplies with; 0 where that is not known, as without a plan."""
        step = min((self._built or {}).values(), key=lambda each: each.inputs[TOKENS].shape[1], default=None)
        if step is None or step.plan is None or self.config.mode != "ar":
            return 0
        read = {}
        for node in (node for node in step.plan.graph.nodes if node.op.name != "embedding"):
            for x in (x for x in node.values if x.kind in (Kind.PARAMETER, Kind.COPY)):
                read[x] = x.spec.nbytes
                if node.op.name == "grouped_matmul":  # of all experts those that its rows pass
                    read[x] = read[x] * min(node.values[0].spec.shape[0], x.spec.shape[0]) // x.spec.shape[0]
        return sum(read.values())

    def _next(self, text: list[int]) -> tuple[Array, None]:
        return self._verify(text, []), None

    def _verify(self, text: list[int], drafted: list[int]) -> Array:
        return draw.checked(self._readers[CAUSAL].read(text + drafted, 1 + len(drafted))["logits"], self.vocabulary)

    def _draft(self, text: list[int]) -> tuple[Array, Array | None]:
        outputs = self._readers[PAIRS].read(text, 2)
        gate = outputs["gate"][0] if self.config.mode == "sat_variable" else None
        return draw.checked(outputs["logits"], self.vocabulary), gate


def written(
    source: TokenSource, tokenizer: Tokenizer, prompts: Sequence[tuple[list[int], Stop]], numbers: Sequence[int],
    echo: bool = False, on_token: Callable[[], object] = lambda: None, write: Callable[[str], object] = len,
) -> Iterator[str]:  # fmt: skip
    """Yield the text after each prompt in turn, with `echo` behind the prompt.

    `on_token` is called for every token; `write` gets each text while it is written.
    """
    streams = [TextStream(tokenizer, ids, write, stop, echo) for ids, stop in prompts]

    def ends(number: int, token: int) -> bool:
        on_token()
        return streams[number].push(token)

    for stream, _ in zip(streams, source.sample([ids for ids, _ in prompts], numbers, ends), strict=True):
        yield stream.close()


def print_source(
    source: TokenSource, tokenizer: Tokenizer, prompt: list[int], stop: Stop,
    reading_rate: Callable[[], float | None] = lambda: None,
) -> list[str]:  # fmt: skip
    """Write `sample.count` samples to stdout and their speed to stderr, and return the texts.

    One is shown while it is written. `reading_rate` gives the byte/s at which weights can be read, which bounds its
    speed.
    """
    count, texts, times = source.config.count, [], list[float]()
    note: Callable[[], object] = lambda: times.append(time.perf_counter())  # noqa: E731
    given = [(prompt, stop)] * count, range(count), True, note
    for text in written(source, tokenizer, *given, print_text if count == 1 else len):
        texts.append(text)
        print_text("\n" if count == 1 else f"--- sample {len(texts)} of {count} ---\n{text}\n")
    # The first token comes after reading the prompt, and after compiling.
    tokens, taken = max(len(times) - 1, 0), times[-1] - times[0] if times else 0.0
    accepted, drafted = source.counts["accepted"], source.counts["drafted"]
    speed = f"{tokens / taken:.1f} tokens/s" if taken else "too few tokens to time"
    told = f"After the first: {tokens} tokens in {taken:.2f} s, {speed}."
    if count == 1 and taken and (rate := reading_rate()) and (weights := source.weight_bytes()):
        most = rate / weights
        told += f" Reading the weights allows {most:.1f} tokens/s; this is {tokens / taken / most:.0%} of it."
    if drafted:
        told += f" {accepted} of {drafted} drafted tokens were accepted ({100 * accepted / drafted:.0f} %)."
    print(told, file=sys.stderr, flush=True)
    return texts
