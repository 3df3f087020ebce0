"""Models of ttrain for lm-evaluation-harness, which brings the tasks: `pip install 'ttrain[lm-eval]'`."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from tqdm import tqdm

from ttrain.api import load_config
from ttrain.core.errors import UserError, raised_as
from ttrain.tasks.evaluating.measures import encoded_pair, opened, windows_of
from ttrain.train.sampling.source import written
from ttrain.train.sampling.stream import Stop

with raised_as(ImportError, "lm-evaluation-harness can't be loaded", "Run: pip install 'ttrain[lm-eval]'", ImportError):
    from lm_eval.api.model import LM

_GENERATED = 256  # tokens, where a task does not say how many


class TtrainLM(LM):  # type: ignore[misc]
    """The model of a run or of a folder of Transformers, as `lm_eval.simple_evaluate(model=...)` takes it.

    It scores as task=eval and writes as task=sample. Context and continuation are tokenized as by the harness's own
    models. A text without a context follows the token that ends a document, or a folder's bos_token.
    """

    def __init__(self, *words: str, batch_size: int | str | None = None, **keys: Any) -> None:
        """`words` are overrides: `run.dir=<run>` or `model.from=<folder>`, device=cpu, eval.batch_size=16.

        The harness gives them by name, and batch_size. Raises TtrainError where the model can't be opened.
        """
        super().__init__()
        given = [f"{name}={value}" for name, value in keys.items() if value is not None and name != "max_batch_size"]
        rows = [] if batch_size is None else [f"eval.batch_size={batch_size}"]
        config = load_config("task=eval", "sample.temperature=0", *given, *rows, *words)
        self._stack = ExitStack()
        self._scorer = self._stack.enter_context(opened(config))

    def close(self) -> None:
        """Gives the device back."""
        self._stack.close()

    @property
    def tokenizer_name(self) -> str:
        """Tells tokenizers apart in the harness's caches."""
        return str(self._scorer.tokenizer.hash)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-probability of each (context, continuation) in nats, and whether greedy decoding would write it."""
        scorer = self._scorer
        texts = [scorer.text(*encoded_pair(scorer.tokenizer, *request.args)) for request in requests]
        with self._bar(requests, disable_tqdm) as bar:
            found = dataclasses.replace(scorer, on_texts=bar.update).likelihoods(texts)
        pairs = zip(requests, found, strict=True)
        return [self._kept("loglikelihood", request, tuple(each)) for request, each in pairs]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each text, every token predicted once from windows of the context."""
        scorer, start = self._scorer, [] if self._scorer.start is None else [self._scorer.start]
        encoded = [scorer.tokenizer.encode(*request.args) for request in requests]
        texts = [ids if ids[:1] == start else [*start, *ids] for ids in encoded]
        found: dict[int, float] = {}
        with self._bar(requests, disable_tqdm) as bar:
            for number in sorted(range(len(texts)), key=lambda each: len(texts[each])):  # so steps are built seldom
                windows = list(windows_of(texts[number], scorer.context))
                total = -scorer.loss(windows) * (len(texts[number]) - 1) if windows else 0.0
                found[number] = self._kept("loglikelihood_rolling", requests[number], total)
                bar.update(1)
        return [found[number] for number in range(len(requests))]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what the model writes after each context, up to a stop; greedily unless a request asks to draw."""
        found: dict[int, str] = {}
        alike = defaultdict[str, list[int]](list)  # numbers of requests by their settings
        for number, request in enumerate(requests):
            alike[json.dumps(request.args[1], sort_keys=True)].append(number)
        with self._bar(requests, disable_tqdm) as bar:
            for numbers in alike.values():
                asked = dict(requests[numbers[0]].args[1])
                texts = self._generated([requests[number].args[0] for number in numbers], asked)
                for number, text in zip(numbers, texts, strict=True):
                    found[number] = self._kept("generate_until", requests[number], text)
                    bar.update(1)
        return [found[number] for number in range(len(requests))]

    def _generated(self, contexts: Sequence[str], asked: dict[str, Any]) -> Iterator[str]:
        scorer, until = self._scorer, asked.pop("until", None) or []
        tokens, draws = asked.pop("max_gen_toks", _GENERATED), asked.pop("do_sample", False)
        cuts = {name: asked.pop(name) for name in ("temperature", "top_k", "top_p", "min_p") if name in asked}
        if asked:
            raise UserError(f"generate_until: ttrain knows no {', '.join(map(repr, asked))}. Leave it out of the task.")
        cuts = {"temperature": 1.0, **cuts} if draws else {"temperature": 0.0}
        sample = dataclasses.replace(scorer.source.config, tokens=tokens, batch_size=scorer.rows, **cuts)
        source = dataclasses.replace(scorer.source, config=sample)
        stop = Stop.of(scorer.tokenizer, [until] if isinstance(until, str) else until)
        encoded = [scorer.tokenizer.with_start(scorer.tokenizer.encode(context)) for context in contexts]
        prompts = [(ids or [scorer.start or 0], stop) for ids in encoded]
        return written(source, scorer.tokenizer, prompts, [0] * len(prompts))

    def _kept(self, kind: str, request: Any, found: Any) -> Any:
        """Return an answer, after the harness has noted it in its cache."""
        self.cache_hook.add_partial(kind, request.args, found)
        return found

    @staticmethod
    def _bar(requests: Sequence[Any], hidden: bool) -> Any:
        return tqdm(desc="ttrain", total=len(requests), disable=hidden)
