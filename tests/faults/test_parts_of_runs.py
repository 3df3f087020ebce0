"""Runs whose parts are trained differently, kept in bf16 or averaged: resumed, changed on resume, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.faults.conftest import Train
from ttrain.train.checkpoint.retention import find_checkpoint
from ttrain.train.logging.metrics import read_metrics

PURE = ["precision=bf16_true", "optimizer.stochastic_rounding=true"]
EMA = "train.ema=0.5"
KEPT = {
    "moments, bf16 compute": ["optimizer.state_dtype=bf16", "precision=bf16"],
    "moments of muon": ["optimizer=muon", "optimizer.state_dtype=bf16", "precision=bf16"],
    "all": PURE,
    "weights alone": [*PURE, "optimizer.state_dtype=fp32"],
}
AVERAGED = {
    "weights": [EMA],
    "masters of muon": [EMA, "precision=bf16", "optimizer=muon"],
    "iterates": ["optimizer=schedule_free"],
}


def stored(run: str) -> dict[str, tuple[str, Any]]:
    """dtype and values of every tensor of the newest checkpoint."""
    from safetensors import safe_open

    found = {}
    for file in find_checkpoint(Path(run), "last").path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                found[name] = (shard.get_slice(name).get_dtype(), shard.get_tensor(name).float().numpy())
    return found


def equal(one: str, two: str) -> bool:
    left, right = stored(one), stored(two)
    return left.keys() == right.keys() and all(
        left[name][0] == right[name][0] and np.array_equal(left[name][1], right[name][1]) for name in left
    )


def exported(train: Train, run: str, average: bool, file: str) -> dict[str, np.ndarray]:
    given = [f"run.dir={run}", "export.form=ttrain", f"export.file={file}"]
    assert train("task=export", *given, *([] if average else ["export.average=false"])) == 0
    return load_file(file)


@pytest.mark.parametrize(("how", "engine"), [*((how, "static") for how in KEPT | AVERAGED), ("all", "dynamic")])
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(train: Train, how: str, engine: str) -> None:
    overrides = [*(KEPT | AVERAGED)[how], f"engine={engine}", "schedule=constant"]
    parts = ["run.dir=parts", *overrides, "train.eval_every=1"]  # evaluating changes nothing
    assert train("run.dir=whole", *overrides) == train(*parts, "train.steps=3") == 0
    assert train("run.dir=parts", "resume=auto", "train.steps=8") == 0
    assert equal("whole", "parts")
    whole = stored("whole")
    if how in KEPT:
        narrow = {"F32": how == "weights alone", "BF16": how != "weights alone"}
        assert all(narrow[dtype] for name, (dtype, _) in whole.items() if "/" in name)
        weights = {dtype for name, (dtype, _) in whole.items() if "/" not in name}
        assert weights == ({"F32"} if "moments" in how else {"BF16"})
        return
    assert {name.removesuffix("/average") for name in whole if name.endswith("/average")} == {
        name for name in whole if "/" not in name
    }
    for average in (True, False):
        for name, value in exported(train, "whole", average, f"{average}.safetensors").items():
            assert np.array_equal(value, whole[f"{name}/average" if average else name][1])


def test_another_dtype_on_resume(train: Train) -> None:
    """fp32 -> bf16 rounds to nearest, bf16 -> fp32 keeps the numbers; both are told."""
    assert train("run.dir=wide", "train.steps=2") == 0
    told = train.told("run.dir=narrow", "resume=wide", "optimizer.state_dtype=bf16", "train.steps=2")
    assert "optimizer.state_dtype: None -> bf16" in told
    assert train("run.dir=more", "resume=wide", "optimizer.state_dtype=bf16", "train.steps=4") == 0
    assert train("run.dir=back", "resume=more", "optimizer.state_dtype=fp32", "train.steps=6") == 0
    dtypes = [{d for name, (d, _) in stored(run).items() if "/" in name} for run in ("wide", "more", "back")]
    assert dtypes == [{"F32"}, {"BF16"}, {"F32"}]


def test_learning_rates_of_all_groups_are_seen_and_one_can_change_on_resume(train: Train, capsys: Any) -> None:
    overrides = [
        "schedule=constant",
        "optimizer.lr=5e-5",
        "optimizer.lr_multipliers={layers.2: 4.0, layers.1.bias: 2.0}",
    ]
    assert train("run.dir=a", *overrides, "train.steps=4") == 0
    lines = [line for line in read_metrics(Path("a/metrics.jsonl")) if "lr" in line]
    for line in lines:
        rates = {key: line[key] for key in line if key.startswith("lr")}
        assert rates == pytest.approx({"lr": 5e-5, "lr/layers.2": 2e-4, "lr/layers.1.bias": 1e-4})
    printed = capsys.readouterr()
    assert "learning rates" in printed.out and "lr 5.00e-05, layers.2 2.00e-04" in printed.out
    assert json.loads(Path("a/summary.json").read_text())["learning_rates"]["lr/layers.2"] == pytest.approx(2e-4)
    assert train("run.dir=same", "resume=a", "train.steps=5") == 0
    code = train(
        "run.dir=head", "resume=a", "train.steps=5", "optimizer.lr_multipliers={layers.2: 40.0, layers.1.bias: 2.0}"
    )
    assert code == 0
    same, head = stored("same"), stored("head")
    moved = {name for name in same if not np.array_equal(same[name][1], head[name][1])}
    assert moved == {"layers.2.weight", "layers.2.bias"}


def test_the_norm_of_the_scope_is_recorded(train: Train) -> None:
    overrides = ["optimizer.clip_scope=[layers.0, layers.1]", "optimizer.clip_norm=0.1"]
    assert train("run.dir=a", *overrides) == train("run.dir=b", *overrides, "guard.nonfinite=skip") == 0
    for run in ("a", "b"):
        for line in read_metrics(Path(run) / "metrics.jsonl"):
            if "lr" in line:
                assert 0 < line["clipped_norm"] < line["grad_norm"]
    assert train("run.dir=c", "optimizer.clip_norm=0.1") == 0
    assert not any("clipped_norm" in line for line in read_metrics(Path("c/metrics.jsonl")))


def test_frozen_layers_stay_and_are_in_the_checkpoint(train: Train) -> None:
    overrides = ["optimizer.freeze=[layers]", "optimizer.unfreeze=[layers.*.bias, layers.2]"]
    assert "of them frozen" in train.told("run.dir=a", *overrides, "train.steps=2")
    before = stored("a")
    assert train("run.dir=a", "resume=auto", "train.steps=6") == 0
    after = stored("a")
    still = {name for name in before if "/" not in name and np.array_equal(before[name][1], after[name][1])}
    assert still == {"layers.0.weight", "layers.1.weight"}
    assert not any(name.startswith(tuple(f"{path}/" for path in still)) for name in after)


def test_another_set_of_frozen_layers_on_resume(train: Train) -> None:
    assert train("run.dir=a", "optimizer.freeze=[layers.0]", "train.steps=4") == 0
    first = stored("a")
    told = train.told("run.dir=b", "resume=a", "optimizer.freeze=[layers.1]", "train.steps=6")
    assert "Frozen until now, so their optimizer state starts from zero: layers.0.bias, layers.0.weight." in told
    assert "Frozen from now on, so what the optimizer kept is dropped: layers.1.bias, layers.1.weight." in told
    assert "optimizer.freeze: ['layers.0'] -> ['layers.1']" in told
    last = stored("b")
    assert not np.array_equal(first["layers.0.weight"][1], last["layers.0.weight"][1])
    assert np.array_equal(first["layers.1.weight"][1], last["layers.1.weight"][1])
    assert last["layers.0.weight/first_moment"][1].any() and "layers.1.weight/first_moment" not in last


def test_moments_that_are_missing_for_another_reason_are_refused(train: Train) -> None:
    assert train("run.dir=a", "optimizer=sgd", "train.steps=2") == 0
    told = train.told("run.dir=b", "resume=a", "optimizer=adamw", "train.steps=4", code=2)
    assert "does not fit this model and optimizer: it lacks" in told


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


def test_they_begin_and_end_with_any_attempt(train: Train) -> None:
    assert train("run.dir=plain", "train.steps=3") == 0
    told = train.told("run.dir=on", "resume=plain", EMA, "optimizer.lr=0", "train.steps=4")
    assert "so they start as the weights are" in told
    on = stored("on")
    assert all(np.array_equal(on[name][1], on[f"{name}/average"][1]) for name in on if "/" not in name)
    told = train.told("run.dir=off", "resume=on", "train.ema=null", "train.steps=5")
    assert "Averages of the weights are kept no more" in told
    assert not any(name.endswith("/average") for name in stored("off"))


REFUSED = {
    "optimizer.freeze=[layrs]": "optimizer.freeze.layrs: no parameter's name begins so. Did you mean 'layers'?",
    "optimizer.stochastic_rounding=true": "precision=fp32 keeps fp32 weights, so there is nothing to round",
    "optimizer.freeze=layers": "optimizer.freeze",
    f"{EMA} optimizer=schedule_free": "keeps an average of its own",
    "optimizer=schedule_free optimizer.average_after=5 train.steps=5": "must be below train.steps=5",
    f"{EMA} precision=bf16_true": "train.ema=0.5: an average needs weights in fp32",
    "optimizer=schedule_free precision=bf16_true": "optimizer=schedule_free: an average needs weights",
    "optimizer=adafactor optimizer.state_dtype=bf16": "they change too little in a step for bf16",
}


@pytest.mark.parametrize("given", REFUSED)
def test_bad_parts_are_refused_before_anything_is_made(train: Train, given: str) -> None:
    assert REFUSED[given] in train.told("run.dir=a", *given.split(), code=2) and not Path("a").exists()


def test_a_group_with_a_rate_of_zero_is_no_fault(train: Train) -> None:
    assert train("run.dir=a", "optimizer.lr_multipliers={layers.0: 0.0}", "guard.check_learning=3") == 0


def test_pure_bf16_warns_unless_it_is_rounded_stochastically(train: Train) -> None:
    overrides = ["precision=bf16_true", "optimizer.lr=1e-7", "guard.check_learning=3"]
    assert "bf16 without a master copy" in train.told("run.dir=nearest", *overrides)
    told = train.told("run.dir=stochastic", *overrides, "optimizer.stochastic_rounding=true")
    assert "bf16 without a master copy" not in told
