"""A checkpoint knows nothing of the device: written on the CPU it loads here, and back, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ttnn", reason="the package ttnn is not installed")

from tests.ttnn.runs import Outcome, adamw, cpu, golden, gpt, run
from ttrain.engine.state import State
from ttrain.graph import Kind
from ttrain.train.checkpoint.checkpoint import read_checkpoint
from ttrain.train.checkpoint.save import CheckpointContent, save_checkpoint
from ttrain.train.steps.step_graph import StepGraph

SIZES = {"vocabulary": 97, "width": 96, "context": 33, "layers": 1}


def state_of(outcome: Outcome) -> State:
    state: State = outcome.engine.state
    return state


def content(step: int) -> CheckpointContent:
    return CheckpointContent(step=step, config={}, progress={}, tokenizer=None)


def values(state: State) -> dict[str, np.ndarray]:
    return {name: state.read(name) for name in state.names(Kind.PARAMETER, Kind.OPTIMIZER)}


def same(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> bool:
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


def test_from_the_cpu_and_back(tmp_path: Path) -> None:
    trained = state_of(run(gpt(**SIZES), adamw(), cpu()))
    first = save_checkpoint(tmp_path / "cpu", trained, content(3))
    fresh: Any = gpt(**SIZES)
    fresh.follow_compute()
    device = golden()
    loaded = State(device, StepGraph(fresh, adamw(), rows=2).state_tensors())
    read_checkpoint(first.path).load(loaded)
    assert same(values(trained), values(loaded))
    second = save_checkpoint(tmp_path / "tt", loaded, content(3))
    names = sorted(path.name for path in first.path.glob("*.safetensors"))
    assert names == sorted(path.name for path in second.path.glob("*.safetensors"))
    assert all((first.path / name).read_bytes() == (second.path / name).read_bytes() for name in names)


def test_into_a_run_whose_state_already_lies_in_stacks(tmp_path: Path) -> None:
    trained = state_of(run(gpt(**SIZES), adamw(), cpu()))
    checkpoint = save_checkpoint(tmp_path / "cpu", trained, content(3))
    other = state_of(run(gpt(**SIZES), adamw(), golden(), steps=1))
    checkpoint.load(other)
    assert same(values(trained), values(other))
