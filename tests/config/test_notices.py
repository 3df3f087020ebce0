"""What is told when a run starts."""

from __future__ import annotations

import pytest

from ttrain.config.compose import load
from ttrain.config.notices import notices

GROWING = ("model.context=64", "train.block_schedule=[16,32,64]", "train.block_steps=10")
PAIRS = ("model=agillm", "model.preset=femto_1x")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), None),
        (("optimizer.lr=0",), "no parameter changes"),
        ((*GROWING, "train.steps=21"), None),
        ((*GROWING, "train.steps=20"), "64 tokens begin at step 21"),
        ((*PAIRS, "model.context=4"), None),
        ((*PAIRS, "model.context=3"), "sequences of 3 tokens hold no SAT window"),
        ((*PAIRS, "model.context=3", "model.objective=ar_only"), None),
        ((*PAIRS, "model.context=8", "train.block_schedule=[2,8]", "train.block_steps=1"), "sequences of 2 tokens"),
    ],
)
def test_what_is_seldom_meant_is_told(words: tuple[str, ...], told: str | None) -> None:
    found = list(notices(load(words)))
    assert len(found) == (told is not None)
    assert told is None or told in found[0]
