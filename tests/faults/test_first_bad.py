"""Which tensor went wrong first: a run that stops names the one that an independent computation finds."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ttrain.cli import main
from ttrain.data.regression import RegressionDataset
from ttrain.device.torch import device as torch_device
from ttrain.train.checkpoint.retention import list_checkpoints
from ttrain.train.logging.events import read_events
from ttrain.train.steps import step_graph

Train = Any
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


@pytest.fixture
def fifth(monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """Step 5 has large inputs or targets, once `scale` says so; its batch is noted."""
    original, noted = RegressionDataset.batch, {"scale": {}, "index": 4}

    def batch(self: Any, split: Any, seed: int, first: int, rows: int) -> Any:
        fields = original(self, split, seed, first, rows)
        if split == "train" and first // rows == noted["index"]:
            for name, factor in noted["scale"].items():
                fields[name] = fields[name] * np.float32(factor)
            noted["batch"] = {name: array.copy() for name, array in fields.items()}
        return fields

    monkeypatch.setattr(RegressionDataset, "batch", batch)
    return noted  # type: ignore[return-value]


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
    train: Train, faulty: Any, fifth: Any, capsys: Any, engine: str, gradient_accumulation: int
) -> None:
    fifth["scale"] = {"inputs": 100.0}
    overrides = [*WORDS, f"engine={engine}", f"train.gradient_accumulation={gradient_accumulation}"]
    assert train("run.dir=good", *overrides, "train.steps=4", "train.save_every=1") == 0
    faulty("relu")
    assert train("run.dir=run", *overrides, "guard.nonfinite=skip") == 1
    expected = ""
    for part in np.split(fifth["batch"]["inputs"], gradient_accumulation):
        for layer, values in enumerate(hidden(weights("good", 4), part)[:-1]):
            count = int((values > LIMIT).sum())
            expected = expected or (count and f" makes in layers.{layer} ({count} of {values.size} elements)") or ""
    assert "layers.0" in expected
    errors = capsys.readouterr().err
    assert "The first tensor with NaN or Inf is the activation that " in errors and expected in errors
    assert "(step 4)" in errors and [c.step for c in list_checkpoints(Path("run/checkpoints"))[0]] == [2, 4]


def test_the_first_gradient(train: Train, faulty: Any, fifth: Any, capsys: Any) -> None:
    """The loss is finite; backward goes wrong in the layer below the last one."""
    fifth["scale"] = {"targets": 1e4}
    faulty("relu_grad")
    assert train("run.dir=run", *WORDS, "optimizer.clip_norm=null", "guard.nonfinite=skip") == 1
    errors = capsys.readouterr().err
    assert "Step 5: grad_norm is inf" in errors or "Step 5: grad_norm is nan" in errors
    assert "The first tensor with NaN or Inf is the gradient that relu_grad makes in layers.1 (" in errors


@pytest.mark.parametrize("guard", ["stop", "skip"])
def test_what_enters_a_step(train: Train, fifth: Any, capsys: Any, guard: str) -> None:
    fifth["scale"] = {"targets": np.inf}
    assert train("run.dir=run", *WORDS, f"guard.nonfinite={guard}") == 1
    targets = fifth["batch"]["targets"].size
    assert f"NaN or Inf is input targets ({targets} of {targets} elements)." in capsys.readouterr().err


def test_a_norm_that_overflows_though_every_gradient_is_finite(train: Train, fifth: Any, capsys: Any) -> None:
    fifth["scale"] = {"inputs": 1e3, "targets": 1e18}  # only the squares of the gradients are beyond fp32
    assert train("run.dir=run", *WORDS, "model.layers=1", "guard.nonfinite=skip") == 1
    errors = capsys.readouterr().err
    assert "grad_norm is inf" in errors or "train/loss is inf" in errors
    assert "The first tensor with NaN or Inf is the result that global_norm makes in clip (1 of 1 elements)." in errors


def test_parameters_that_were_bad_before(train: Train, fifth: Any, capsys: Any) -> None:
    """An update that overflows shows in the next step, which is told apart from a bad forward pass."""
    fifth["scale"], fifth["index"] = {"targets": 1e3}, 0
    overrides = [*WORDS, "optimizer=sgd", "optimizer.lr=3e38", "optimizer.clip_norm=null", "guard.nonfinite=skip"]
    assert train("run.dir=run", *overrides) == 1
    errors = capsys.readouterr().err
    assert "Step 2: train/loss is nan. The first tensor with NaN or Inf is parameter layers." in errors


@pytest.mark.parametrize("freed", [False, True])
def test_an_applied_step_names_the_gradient_and_a_resumed_run_the_tensor(
    train: Train, faulty: Any, fifth: Any, capsys: Any, freed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifth["scale"] = {"targets": 1e4}
    monkeypatch.setattr(step_graph, "FREED", 64 if freed else 1 << 40)
    faulty("relu_grad")
    assert train("run.dir=run", *WORDS, "optimizer.clip_norm=null") == 1
    errors = capsys.readouterr().err
    assert "From the loss backwards, the first bad gradient is gradient layers.1." in errors
    assert "guard.nonfinite=skip guard.max_skips=1 names the first bad tensor of the step" in errors
    assert main(["run.dir=run", "resume=auto", "guard.nonfinite=skip", "guard.max_skips=1"]) == 1
    assert "Step 5:" in (errors := capsys.readouterr().err)
    assert "The first tensor with NaN or Inf is the gradient that relu_grad makes in layers.1 (" in errors


def test_a_skipped_step_names_the_gradient_nearest_to_the_loss(train: Train, faulty: Any, fifth: Any) -> None:
    fifth["scale"] = {"targets": 1e4}
    faulty("relu_grad")
    overrides = [*WORDS, "guard.nonfinite=skip", "guard.max_skips=2", "optimizer.clip_norm=null"]
    assert train("run.dir=run", *overrides) == 0
    (event,) = [event for event in read_events(Path("run")) if event["kind"] == "skipped"]
    assert event["tensor"].startswith("gradient layers.1.")


def test_a_search_that_fails_hides_nothing(train: Train, fifth: Any, capsys: Any, monkeypatch: Any) -> None:
    from ttrain.train.steps.step import TrainStep

    fifth["scale"] = {"targets": np.nan}
    monkeypatch.setattr(TrainStep, "inspect", lambda *_: (_ for _ in ()).throw(RuntimeError("no more memory")))
    monkeypatch.setattr("ttrain.train.loop.nonfinite._bad_elements", lambda _: None)
    assert train("run.dir=run", *WORDS, "guard.nonfinite=skip") == 1
    assert (
        "Step 5: train/loss is nan. The search for the first bad tensor failed: no more memory."
        in capsys.readouterr().err
    )
