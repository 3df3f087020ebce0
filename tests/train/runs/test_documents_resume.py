"""Runs on documents that are killed, resumed, or find their documents changed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.reading import attempts, losses, tensors
from ttrain.cli import main

DATA = ["data=documents", "data.sources=[a.jsonl,b.jsonl]", "data.tokenizer=byte"]
QUIET = [
    "logger=jsonl", "device=cpu", "device.threads=1", "sample.tokens=1", "train.log_every=1", "train.peak_tflops=1",
    "train.eval_every=null", "train.eval_sequences=2",
]  # fmt: skip
TINY = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "train.batch_size=2"]


@pytest.fixture(autouse=True)
def documents(inside: Path) -> None:
    generator = np.random.default_rng(0)
    for name in ("a", "b"):
        lines = [{"text": f"{name}{i} " + "word " * int(generator.integers(1, 9))} for i in range(100)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_agillm_resumed_within_a_phase_has_the_same_bits() -> None:
    """Joint objective with dropout, growing sequences; what was trained after the checkpoint is trained again."""
    sizes = ["model.width=32", "model.heads=2", "model.rank=24", "model.layers=2", "model.context=24"]
    overrides = ["model=agillm", "model.preset=null", *sizes, "train.batch_size=1", *DATA, *QUIET, "schedule.steps=4"]
    overrides += ["train.length_schedule=[12,24]", "train.phase_steps=2", "train.save_every=1", "train.keep_last=9"]
    assert main([*overrides, "train.steps=4", "run.dir=whole"]) == 0
    assert main([*overrides, "train.steps=3", "run.dir=parts"]) == 0
    assert main(["resume=parts/checkpoints/step_00000001", "train.steps=4"]) == 0
    assert not [change for change in attempts("parts")[1]["changes"] if change.startswith("data")]
    trained = [[each for each in losses(run) if each[1] == "train/loss"] for run in ("parts", "whole")]
    ours, expected = tensors("parts"), tensors("whole")
    assert trained[0] == trained[1] and ours == expected and len(ours) == 3 * 35


def test_changed_documents_are_refused_and_other_ones_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DATA, *QUIET, *TINY, "data.template=robot", "run.dir=run"]) == 2
    assert "data.template=robot: is neither plain nor chatml" in capsys.readouterr().err and not Path("run").exists()
    assert main([*DATA, *QUIET, *TINY, "run.dir=run", "train.steps=2"]) == 0
    with open("a.jsonl", "a") as file:
        file.write('{"text": "one more"}\n')
    capsys.readouterr()
    before = sorted(path.name for path in Path("run").rglob("*"))
    assert main(["run.dir=run", "resume=auto", "train.steps=4"]) == 2
    error = capsys.readouterr().err
    assert "was trained on other content of a.jsonl, b.jsonl" in error and "train.init_from" in error
    assert sorted(path.name for path in Path("run").rglob("*")) == before
    other = [DATA[0], "data.sources=[a.jsonl]", DATA[2]]
    assert main(["run.dir=run", "resume=auto", "train.steps=4", *other]) == 0
    error = capsys.readouterr().err
    assert "Changed since the checkpoint: data.sources: ['a.jsonl', 'b.jsonl'] -> ['a.jsonl'];" in error
    assert "; data: sha256: " in error


def test_touched_but_equal_documents_go_on_and_other_bits_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DATA, *QUIET, *TINY, "run.dir=run", "train.steps=2"]) == 0
    os.utime("a.jsonl", ns=(1, 1))
    assert main(["run.dir=run", "resume=auto", "train.steps=4"]) == 0
    error = capsys.readouterr().err
    assert "changed since the checkpoint: data" not in error.lower() and "thread" not in error
    assert main(["run.dir=run", "resume=auto", "train.steps=5", "device.threads=2"]) == 0
    assert "kernels ran with 1 thread(s) before and run with 2 now" in capsys.readouterr().err
    record = json.loads(Path("run", "run.json").read_text())
    products = record["attempts"][-1]["device"]["products"]
    assert set(products.values()) == {"aten"}
    products[next(iter(products))] = "onednn"
    Path("run", "run.json").write_text(json.dumps(record))
    assert main(["run.dir=run", "resume=auto", "train.steps=6", "device.threads=2"]) == 0
    assert "products are made another way than before (1 onednn -> aten)" in capsys.readouterr().err
    record["attempts"][-1] |= {"device": ["cpu"], "data": 5}  # a record that somebody has edited tells nothing
    Path("run", "run.json").write_text(json.dumps(record))
    assert main(["run.dir=run", "resume=auto", "train.steps=7"]) == 0
    assert "last bits" not in capsys.readouterr().err


def test_a_plan_tells_the_phases_of_growing_sequences(capsys: Any) -> None:
    grows = ["train.length_schedule=[8,16]", "train.phase_steps=5", "plan.time=false", "train.batch_schedule=[1,2]"]
    assert main(["task=plan", *DATA, *QUIET, *TINY, *grows, "train.gradient_accumulation=2"]) == 0
    printed = capsys.readouterr().out
    assert "phases of 5 steps with sequences x tokens of 1 x 8, 2 x 16; this is the plan of the largest" in printed
