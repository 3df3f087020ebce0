"""Planned against measured memory of steps on long texts, where anything that is quadratic in their length shows."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.forked import run

CONTEXT = 12288
BOUND = {"fp32": 96, "bf16": 160}  # MiB beside the plan; a bool for every query and key takes 144, an fp32 number 576
SHARED = {"kv_heads": 1, "hidden": 32}
CASES: list[dict[str, Any]] = [
    {"model": "llama", "engine": "static", "sizes": SHARED},
    {"model": "llama", "engine": "static", "dtype": "bf16", "sizes": SHARED},
    {"model": "llama", "engine": "dynamic", "sizes": {**SHARED, "window": 700}},
    {"model": "llama", "engine": "static", "sizes": SHARED, "packed": True},
    {"model": "llama", "engine": "static", "sizes": {**SHARED, "dropout": 0.1}},
    {"model": "gpt", "engine": "dynamic", "sizes": {"dropout": 0.1}},
    {"model": "gpt", "engine": "traced", "dtype": "bf16", "sizes": {"dropout": 0.1}},
    {"model": "agillm", "engine": "static", "sizes": {"rank": 8, "alibi": "standard"}},
    {"model": "agillm", "engine": "traced", "sizes": {"rank": 8}, "step": "evaluate"},
    {"model": "agillm", "engine": "static", "sizes": {"rank": 8}, "step": "read", "mask": "pairs"},
    {"model": "llama", "engine": "dynamic", "dtype": "bf16", "sizes": SHARED, "step": "evaluate"},
]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the largest resident set as Linux tells it")
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_a_step_takes_what_its_plan_says(case: dict[str, Any]) -> None:
    done = run("tests.plan.peak_memory", json.dumps({**case, "sizes": {**case["sizes"], "context": CONTEXT}}))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    beside = (found["measured"] - found["planned"]) / 2**20
    assert 0 < beside < BOUND[case.get("dtype", "fp32")], found
