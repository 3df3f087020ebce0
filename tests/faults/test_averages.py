"""Runs that average their weights: resumed, begun and ended on a resume, evaluated and exported with and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.faults.conftest import Train
from tests.faults.test_parts_of_runs import equal, stored
from ttrain.train.logging.metrics import read_metrics

EMA = "train.ema=0.5"


def exported(train: Train, run: str, average: bool, file: str) -> dict[str, np.ndarray]:
    given = [f"run.dir={run}", "export.form=ttrain", f"export.file={file}"]
    assert train("task=export", *given, *([] if average else ["export.average=false"])) == 0
    return load_file(file)


@pytest.mark.parametrize("how", [[EMA], [EMA, "precision=bf16", "optimizer=muon"], ["optimizer=schedule_free"]])
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(train: Train, how: list[str]) -> None:
    given = [*how, "schedule=constant", "train.eval_every=1"]  # evaluating changes nothing
    assert train("run.dir=whole", *how, "schedule=constant") == train("run.dir=parts", *given, "train.steps=3") == 0
    assert train("run.dir=parts", "resume=auto", "train.steps=8") == 0
    assert equal("whole", "parts")
    kept = stored("whole")
    averages = {name.removesuffix("/average"): value for name, (_, value) in kept.items() if name.endswith("/average")}
    assert averages.keys() == {name for name in kept if "/" not in name}
    for average in (True, False):
        for name, value in exported(train, "whole", average, f"{average}.safetensors").items():
            assert np.array_equal(value, averages[name] if average else kept[name][1])


def test_an_evaluation_reads_the_averages(train: Train) -> None:
    """A run that goes on from the averages as its weights has their loss before it changes them."""
    assert train("run.dir=a", EMA, "train.steps=4") == 0
    losses = [line["val/loss"] for line in read_metrics(Path("a/metrics.jsonl")) if "val/loss" in line]
    loss = {}
    for average in (True, False):
        exported(train, "a", average, "w.safetensors")
        assert train(f"run.dir={average}", "train.init_from=w.safetensors", "optimizer.lr=0", "train.steps=1") == 0
        loss[average] = [x["val/loss"] for x in read_metrics(Path(f"{average}/metrics.jsonl")) if "val/loss" in x][-1]
    assert losses[-1] == loss[True] != loss[False]


def test_they_begin_and_end_with_any_attempt(train: Train, capsys: Any) -> None:
    assert train("run.dir=plain", "train.steps=3") == 0
    assert train("run.dir=on", "resume=plain", EMA, "optimizer.lr=0", "train.steps=4") == 0
    assert "so they start as the weights are" in capsys.readouterr().err
    on = stored("on")
    assert all(np.array_equal(on[name][1], on[f"{name}/average"][1]) for name in on if "/" not in name)
    assert train("run.dir=off", "resume=on", "train.ema=null", "train.steps=5") == 0
    assert "Averages of the weights are kept no more" in capsys.readouterr().err
    assert not any(name.endswith("/average") for name in stored("off"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([EMA, "optimizer=schedule_free"], "keeps an average of its own"),
        (["optimizer=schedule_free", "optimizer.average_after=5", "train.steps=5"], "must be below train.steps=5"),
        ([EMA, "precision=bf16_true"], "train.ema=0.5: an average needs weights in fp32"),
        (["optimizer=schedule_free", "precision=bf16_true"], "optimizer=schedule_free: an average needs weights"),
        (["optimizer=adafactor", "optimizer.state_dtype=bf16"], "they change too little in a step for bf16"),
    ],
)
def test_what_can_not_be_averaged_is_refused(train: Train, given: list[str], message: str, capsys: Any) -> None:
    assert train("run.dir=a", *given) == 2 and message in capsys.readouterr().err
