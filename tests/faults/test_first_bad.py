"""Which tensor went wrong first: a run that stops names the one that an independent computation finds."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.conftest import Train
from ttrain.cli import main
from ttrain.device.torch import device as torch_device
from ttrain.train.checkpoint.retention import list_checkpoints
from ttrain.train.logging.metrics import read_events
from ttrain.train.steps import step_graph

LIMIT = 50.0  # above it the faulty kernels overflow


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`faulty("relu")` makes results of that kernel above LIMIT infinite."""
    import torch

    original = torch_device.kernel_table

    def choose(name: str) -> None:
        def table(context: Any) -> Any:
            rows = dict(original(context))

            def bind(at: str, ins: Any, outs: Any, attributes: Any, work: Any) -> Any:
                launch = rows_before[at].bind(ins, outs, attributes, work)
                if at == "linear" and attributes.get("activation") != name:
                    return launch

                def call() -> None:
                    launch()
                    outs[0][outs[0].abs() > LIMIT] = torch.inf

                return call

            rows_before = dict(rows)
            for at in (name, "linear"):  # an engine that fuses has the activation in there
                rows[at] = dataclasses.replace(rows[at], bind=partial(bind, at))
            return rows

        monkeypatch.setattr(torch_device, "kernel_table", table)

    return choose


def weights(run: str, step: int) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(Path(run, f"checkpoints/step_{step:08d}/parameters-00001-of-00001.safetensors"))


def hidden(values: dict[str, np.ndarray], inputs: np.ndarray) -> list[np.ndarray]:
    """Activations after every relu, and the output."""
    found, layers = [inputs], len(values) // 2
    for layer in range(layers):
        out = found[-1] @ values[f"layers.{layer}.weight"].T + values[f"layers.{layer}.bias"]
        found.append(np.maximum(out, 0) if layer < layers - 1 else out)
    return found[1:]


WORDS = ["schedule=constant", "guard.max_skips=1", "train.save_every=2", "model.layers=3"]


@pytest.mark.parametrize(("engine", "gradient_accumulation"), [("static", 2), ("dynamic", 1)])
def test_the_first_activation(
    train: Train, faulty: Any, spoiled: Any, capsys: Any, engine: str, gradient_accumulation: int
) -> None:
    batches = spoiled({5: {"inputs": 100.0}})
    overrides = [*WORDS, f"engine={engine}", f"train.gradient_accumulation={gradient_accumulation}"]
    assert train("run.dir=good", *overrides, "train.steps=4", "train.save_every=1") == 0
    faulty("relu")
    assert train("run.dir=run", *overrides, "guard.nonfinite=skip") == 1
    expected = ""
    for part in np.split(batches[5]["inputs"], gradient_accumulation):
        for layer, values in enumerate(hidden(weights("good", 4), part)[:-1]):
            count = int((values > LIMIT).sum())
            expected = expected or (count and f" makes in layers.{layer} ({count} of {values.size} elements)") or ""
    assert "layers.0" in expected
    errors = capsys.readouterr().err
    assert "The first tensor with NaN or Inf is the activation that " in errors and expected in errors
    assert "(step 4)" in errors and [c.step for c in list_checkpoints(Path("run/checkpoints"))[0]] == [2, 4]


NO_CLIP = "optimizer.clip_norm=null"
NORM = r"is the result that global_norm makes in clip \(1 of 1 elements\)\."
GRADIENT = r"The first tensor with NaN or Inf is the gradient that relu_grad makes in layers\.1 \("
# What is multiplied in step 5, which kernel overflows, further overrides, and what is told.
TOLD: dict[str, tuple[dict[str, float], str, list[str], str]] = {
    "gradient": ({"targets": 1e4}, "relu_grad", [NO_CLIP], f"Step 5: grad_norm is (inf|nan).*{GRADIENT}"),
    "input": ({"targets": np.inf}, "", [], r"NaN or Inf is input targets \((\d+) of \1 elements\)\."),
    "input of an applied step": ({"targets": np.inf}, "", ["guard.nonfinite=stop"], r"input targets \((\d+) of \1 "),
    "norm of finite gradients": ({"inputs": 1e3, "targets": 1e18}, "", ["model.layers=1"], f" is inf.*{NORM}"),
}


@pytest.mark.parametrize("what", TOLD)
def test_what_went_wrong_first_is_told(train: Train, faulty: Any, spoiled: Any, capsys: Any, what: str) -> None:
    factors, kernel, overrides, told = TOLD[what]
    spoiled({5: factors})
    if kernel:
        faulty(kernel)
    assert train("run.dir=run", *WORDS, "guard.nonfinite=skip", *overrides) == 1
    assert re.search(told, capsys.readouterr().err, re.DOTALL)


def test_parameters_that_were_bad_before(train: Train, spoiled: Any) -> None:
    """An update that overflows shows in the next step, which is told apart from a bad forward pass."""
    spoiled({1: {"targets": 1e3}})
    overrides = ["optimizer=sgd", "optimizer.lr=3e38", NO_CLIP, "guard.nonfinite=skip"]
    told = train.told("run.dir=run", *WORDS, *overrides, code=1)
    assert "Step 2: train/loss is nan. The first tensor with NaN or Inf is parameter layers." in told


@pytest.mark.parametrize("freed", [False, True])
def test_an_applied_step_names_the_gradient_and_a_resumed_run_the_tensor(
    train: Train, faulty: Any, spoiled: Any, capsys: Any, freed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled({5: {"targets": 1e4}})
    monkeypatch.setattr(step_graph, "FREED", 64 if freed else 1 << 40)
    faulty("relu_grad")
    errors = train.told("run.dir=run", *WORDS, NO_CLIP, code=1)
    assert "From the loss backwards, the first bad gradient is gradient layers.1." in errors
    assert "guard.nonfinite=skip guard.max_skips=1 names the first bad tensor of the step" in errors
    assert main(["run.dir=run", "resume=auto", "guard.nonfinite=skip", "guard.max_skips=1"]) == 1
    assert re.search(f"Step 5:.*{GRADIENT}", capsys.readouterr().err, re.DOTALL)


def test_a_skipped_step_names_the_gradient_nearest_to_the_loss(train: Train, faulty: Any, spoiled: Any) -> None:
    spoiled({5: {"targets": 1e4}})
    faulty("relu_grad")
    assert train("run.dir=run", *WORDS, "guard.nonfinite=skip", "guard.max_skips=2", NO_CLIP) == 0
    (event,) = [event for event in read_events(Path("run")) if event["kind"] == "skipped"]
    assert event["tensor"].startswith("gradient layers.1.")


def test_a_search_that_fails_hides_nothing(train: Train, spoiled: Any, capsys: Any, monkeypatch: Any) -> None:
    from ttrain.train.steps.step import TrainStep

    spoiled({5: {"targets": np.nan}})
    monkeypatch.setattr(TrainStep, "inspect", lambda *_: (_ for _ in ()).throw(RuntimeError("no more memory")))
    monkeypatch.setattr("ttrain.train.loop.guards._bad_elements", lambda _: None)
    assert train("run.dir=run", *WORDS, "guard.nonfinite=skip") == 1
    told = "Step 5: train/loss is nan. The search for the first bad tensor failed: no more memory."
    assert told in capsys.readouterr().err
