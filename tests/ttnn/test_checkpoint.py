"""A checkpoint knows nothing of the device: written on the CPU it loads here, and back, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ttnn", reason="the package ttnn is not installed")

from tests.ttnn.runs import adamw, cpu, golden, gpt, run
from ttrain.engine.state import State
from ttrain.graph import Kind
from ttrain.train.checkpoint.checkpoint import read_checkpoint
from ttrain.train.checkpoint.save import CheckpointContent, save_checkpoint
from ttrain.train.steps.step_graph import StepGraph

SIZES = {"vocabulary": 97, "width": 96, "context": 33, "layers": 1}
CONTENT = CheckpointContent(step=3, config={}, progress={}, tokenizer=None)


def check_same(one: State, two: State) -> None:
    names = one.names(Kind.PARAMETER, Kind.OPTIMIZER)
    assert names == two.names(Kind.PARAMETER, Kind.OPTIMIZER)
    assert all(np.array_equal(one.read(name), two.read(name)) for name in names)


@pytest.mark.parametrize("hosted", [[], ["embedding"]], ids=["on the card", "partly in host memory"])
def test_from_the_cpu_and_back(tmp_path: Path, hosted: list[str]) -> None:
    trained: State = run(gpt(**SIZES), adamw(), cpu(), steps=1).engine.state
    first = save_checkpoint(tmp_path / "cpu", trained, CONTENT)
    model: Any = gpt(**SIZES)
    model.follow_compute()
    loaded = State(golden(host_resident=hosted), StepGraph(model, adamw(), rows=2).state_tensors())
    read_checkpoint(first.path).load(loaded)
    check_same(trained, loaded)
    second = save_checkpoint(tmp_path / "tt", loaded, CONTENT)
    names = sorted(path.name for path in first.path.glob("*.safetensors"))
    assert names == sorted(path.name for path in second.path.glob("*.safetensors"))
    assert all((first.path / name).read_bytes() == (second.path / name).read_bytes() for name in names)


def test_into_a_run_whose_state_already_lies_in_stacks(tmp_path: Path) -> None:
    trained: State = run(gpt(**SIZES), adamw(), cpu(), steps=2).engine.state
    other: State = run(gpt(**SIZES), adamw(), golden(), steps=1).engine.state
    save_checkpoint(tmp_path / "cpu", trained, CONTENT).load(other)
    check_same(trained, other)
