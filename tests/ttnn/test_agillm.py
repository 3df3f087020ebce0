"""AGILLM-3 on ttnn's reference functions against the fp32 CPU engine: odd sizes, both passes, a padded vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("ttnn", reason="the package ttnn is not installed")

from tests.ttnn.runs import Outcome, adamw, cosine, cpu, golden, run, sgd
from ttrain.core.spec import DType
from ttrain.models.agillm import AGILLM
from ttrain.models.settings import AGILLMConfig


def agillm(compute: DType = DType.FP32, **changes: Any) -> AGILLM:
    sizes = {"layers": 2, "heads": 4, "width": 64, "rank": 48, "context": 32, "vocabulary": 65, "pad_vocabulary": 32}
    return AGILLM(AGILLMConfig(**{**sizes, **changes}), compute)


def check(actual: Outcome, expected: Outcome) -> None:
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(actual.norms, expected.norms, rtol=1e-3)
    for mine, reference in ((actual.gradients, expected.gradients), (actual.state, expected.state)):
        for name, value in reference.items():
            assert cosine(mine[name], value) > 0.9999, name


FORMS: dict[str, dict[str, Any]] = {
    "folded, heads of 16": {},
    "unfolded": {"fold": "off"},
    "rank below a tile, 8 heads": {"heads": 8, "rank": 3},
    "one head": {"heads": 1, "rank": 16},
    "standard alibi, odd context": {"alibi": "standard", "context": 21},
    "ar only, tied, recomputed": {"objective": "ar_only", "tied": True, "recompute": "block"},
    "some windows": {"sat_max_windows": 3, "context": 40, "pad_vocabulary": None},
    "24 heads of 32": {"heads": 24, "width": 768, "rank": 96, "layers": 1},
}


@pytest.mark.parametrize("form", FORMS)
def test_steps_equal_the_cpu(form: str) -> None:
    options = FORMS[form]
    check(run(agillm(**options), sgd(), golden(), steps=2), run(agillm(**options), sgd(), cpu(), steps=2))


def test_chunks_of_the_vocabulary_equal_the_cpu() -> None:
    """So many ids that the rows of logits go in several chunks."""
    options = {"context": 96, "vocabulary": 90_000, "width": 16, "heads": 1, "rank": 16, "layers": 1, "dropout": 0.0}
    check(run(agillm(**options), adamw(), golden(), steps=1), run(agillm(**options), adamw(), cpu(), steps=1))


def test_engines_are_bit_equal() -> None:
    one, two = (run(agillm(), adamw(), golden(), engine=name, steps=3) for name in ("static", "traced"))
    assert one.losses == two.losses
    assert all(np.array_equal(one.state[name], two.state[name]) for name in one.state)


@pytest.mark.parametrize("dtype", [DType.BF16])
def test_bf16_learns(dtype: DType) -> None:
    losses = run(agillm(dtype, dropout=0.0), adamw(lr=1e-2), golden(), steps=6).losses
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
