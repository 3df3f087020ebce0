"""Reading with caches in ttnn's reference functions, the same calls as on a card, against the whole text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("ttnn", reason="the package ttnn is not installed")

from tests.train.sampling.test_batch import PROMPTS, opened
from tests.train.sampling.test_batch import llama as grouped
from tests.train.sampling.test_decode import CONTEXT, VOCABULARY, Opened, Reading, small_gpt, tokens
from tests.ttnn.runs import ENGINES, golden, llama
from ttrain.core.spec import DType
from ttrain.train.sampling.batch import BatchSource


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "make", [small_gpt, lambda: llama(width=16, context=CONTEXT, vocabulary=VOCABULARY)], ids=["gpt", "llama"]
)
def test_every_token_scores_as_in_the_whole_text(engine: str, make: Callable[[], Any]) -> None:
    reading, text = Reading(make(), engine, device=golden()), tokens(CONTEXT + 3)
    assert max(reading.error(text[:length][-CONTEXT:]) for length in (1, 2, 5, 64, 65, 73)) < 2e-5
    assert reading.engine.counters.captures == (3 if engine == "traced" else 0)  # two that read, and the whole text


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("changes", [{"rank": 6}, {"rank": 12}], ids=["at rank", "folded"])
def test_agillm_scores_as_the_original(changes: dict[str, int], engine: str) -> None:
    opened, text = Opened(engine, device=golden(), **changes), tokens(73)
    assert max(opened.error(text[:length][-CONTEXT:]) for length in (1, 2, 3, 6, 67, 73)) < 1e-5


def test_embedding_and_heads_may_lie_on_the_host() -> None:
    device = golden(host_resident=["embedding", "ar_head", "sat_head"])
    opened, text = Opened("traced", device=device, rank=12), tokens(20)
    assert max(opened.error(text[:length]) for length in (1, 2, 3, 6, 9, 20)) < 1e-5


def test_rejected_drafts_are_overwritten() -> None:
    reading, text = Reading(small_gpt(), "static", new=3, rows=3, device=golden()), tokens(40)
    changed = [*text[:20], *tokens(20, seed=5)]
    assert max(reading.error(given, 3) for given in (text[:30], changed[:22], text[:23], changed)) < 2e-5


def test_bf16_stays_within_its_rounding() -> None:
    model = small_gpt(DType.BF16)
    model.follow_compute()
    reading, text = Reading(model, "static", device=golden()), tokens(20)
    assert max(reading.error(text[:length]) for length in range(1, 20, 3)) < 0.1


@pytest.mark.parametrize("make", [small_gpt, grouped], ids=["gpt", "llama"])
def test_texts_of_a_batch_do_not_see_each_other(make: Callable[[], Any]) -> None:
    source = opened(make(), device=golden(), tokens=5, temperature=0.0)
    alone = [list(source.tokens(prompt, 0)) for prompt in PROMPTS[:4]]
    batch = BatchSource(source.steps, source.config, VOCABULARY, 3)
    assert [drawn for drawn, _ in batch.sample(PROMPTS[:4], [0] * 4, lambda *_: False)] == alone
