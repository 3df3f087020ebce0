"""The table of measured costs: decided once per machine, and kept."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ttrain.core.attention_mask import AttentionMask
from ttrain.core.spec import DType
from ttrain.device.base import Launch
from ttrain.device.torch.kernels import costs
from ttrain.device.torch.kernels.attention import chosen_way
from ttrain.device.torch.kernels.blockwise import BLOCKS
from ttrain.device.torch.kernels.common import TORCH_DTYPES, Call, Context


@pytest.fixture(autouse=True)
def empty_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTRAIN_CACHE", str(tmp_path))


class Ways:
    """Ways that take known times, by a clock that only they move, and how often one was made."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.made, self._now = seconds, 0, 0.0

    def make(self) -> dict[str, Launch]:
        self.made += 1
        return {name: partial(self._run, name) for name in self.seconds}

    def _run(self, name: str) -> None:
        self._now += self.seconds[name]

    def choose(self) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: self._now))
            return costs.fastest("something", list(self.seconds), self.make)


def test_a_clear_winner_is_remembered_for_libraries_that_may_use_the_same_instructions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    ways, slower_now = Ways(usual=0.004, other=0.001), Ways(usual=0.001, other=0.004)
    assert (ways.choose(), ways.made) == ("other", 1)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert Ways(usual=0.0041, other=0.004).choose() == "usual", "the other hardly wins"
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    assert (slower_now.choose(), slower_now.made) == ("other", 0)


@pytest.mark.parametrize(("each", "turns"), [(0.004, 5), (0.4, 3), (2.0, 1)])
def test_a_launch_of_seconds_is_timed_once(each: float, turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ways, run = Ways(usual=each), list[str]()
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: ways._now))
    launch = ways.make()["usual"]
    assert costs.seconds({"usual": lambda: (run.append("usual"), launch())}, 3, 0.05, 5)["usual"] == pytest.approx(each)
    assert len(run) == turns


def test_what_another_process_has_measured_meanwhile_counts() -> None:
    def measured() -> dict[str, float]:
        costs.KEPT.keep({f"{costs.machine()}, something": {"usual": 2.0, "other": 1.0}})
        return {"usual": 1.0, "other": 2.0}

    for _ in range(2):
        assert costs.recalled("something", ["usual", "other"], measured) == {"usual": 2.0, "other": 1.0}
    assert costs.recalled("another", ["usual", "other"], None) is None


def test_a_way_that_fails_is_never_taken() -> None:
    def failing() -> None:
        raise RuntimeError("no such primitive")

    ways: dict[str, Launch] = {"usual": partial(time.sleep, 0.001), "other": failing}
    assert costs.fastest("failing", list(ways), lambda: ways) == "usual"


@pytest.mark.parametrize(("dtype", "longest"), [(DType.FP32, 256), (DType.BF16, 4096)])
def test_attention_is_chosen_by_shape_and_dtype(dtype: DType, longest: int) -> None:
    context = Context.of(torch.device("cpu"))
    attributes = {"heads": 2, "mask": AttentionMask()}

    def explicit(time: int, **more: Any) -> bool:
        packed = torch.empty((1, time, 48), dtype=TORCH_DTYPES[dtype], device="meta"), None, None
        call = Call(context, [*packed, *packed[1:], None], [], {**attributes, **more})
        return chosen_way(call, packed) == BLOCKS

    assert explicit(longest) and not explicit(longest + 1)
    assert explicit(10**5, p=0.1) and explicit(10**5, mask=AttentionMask(window=8))
