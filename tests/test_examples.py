"""Programs of examples/ as a reader would start them, and the names that `import ttrain` offers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ttrain
from tests import forked
from tests.conftest import cache_home
from ttrain import api
from ttrain.nn.settings import PrecisionConfig

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL_MLP = (
    "model=mlp", "model.layers=2", "model.width=5", "model.bias=false", "optimizer=sgd", "optimizer.momentum=0",
    "optimizer.weight_decay=0", "optimizer.clip_norm=null", "device=cpu", "device.threads=1", "train.batch_size=4",
)  # fmt: skip


def started(name: str, folder: Path, overrides: Sequence[str] = ()) -> str:
    """Return the output of an example that is started in an empty folder."""
    variables = {"PYTHONPATH": str(EXAMPLES), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": cache_home(folder)}
    done = forked.run(name, *overrides, cwd=folder, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_example_has_a_test_and_is_short() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"by_hand.py", "own_model.py", "own_op.py"}
    lengths = {path.name: sum(map(bool, path.read_text("utf-8").splitlines())) for path in EXAMPLES.glob("*.py")}
    assert max(lengths.values()) < 60, lengths


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    """Every letter follows from the one before it, so a model that learns at all beats the unigram entropy."""
    letters = random.Random(0).sample("abcdefgh", 8)
    (tmp_path / "cycle.txt").write_text("".join(letters) * 1500, "utf-8")
    overrides = ["data.path=cycle.txt", "run.dir=run", "train.steps=60", "optimizer.lr=0.01", "schedule.warmup=0"]
    overrides += ["device=cpu", "device.threads=1", "train.batch_size=8", "train.peak_tflops=1", "sample.tokens=4"]
    printed = started("own_model", tmp_path, overrides)
    best = float(printed.rpartition(":")[2])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert best == pytest.approx(min(line["val/loss"] for line in lines if "val/loss" in line), abs=1e-4)
    assert best < 0.1 < np.log(8)


def test_an_op_of_ones_own(tmp_path: Path) -> None:
    assert "comparisons passed" in started("own_op", tmp_path)


def test_a_step_by_hand(tmp_path: Path) -> None:
    """The regression has no noise, so the weights are those that made its targets."""
    printed = started("by_hand", tmp_path)
    found = np.array(printed.partition("[[")[2].replace("]", "").replace("[", "").split(), float)
    np.testing.assert_allclose(found, [1, -2, 0.5, 0, 0, 3, 1, -1], atol=0.002)


def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ten cells hold no output; here its run is small and reads another text."""
    cells = json.loads((EXAMPLES / "first_steps.ipynb").read_text("utf-8"))["cells"]
    assert len(cells) == 10 and not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("def first(step):\n    return step\n\n" * 400, "utf-8")
    smaller = {
        "STEPS = 300": "STEPS = 4",
        "width=128": "width=8",
        '"schedule': '"engine=dynamic", "data.path=book.txt", "schedule',
    }
    names: dict[str, Any] = {}
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        text = "".join(cell["source"])
        for old, new in smaller.items():
            text = text.replace(old, new)
        exec(compile(text, cell["id"], "exec"), names)
    said = capsys.readouterr().out
    for part in ("Did you mean 'width'?", "optimizer.lr='fast'", "best loss on held-out text: ", "def "):
        assert part in said
    assert names["plan"]["parameters"]["total"] > 1000 and names["weight"] == pytest.approx(2, abs=1e-3)
    assert (names["RUN"], names["best"] > 0) == ("outputs/first-steps", True)


def test_steps_are_those_of_plain_pytorch() -> None:
    generator = np.random.default_rng(0)
    batches = [
        {name: generator.standard_normal((4, 5)).astype(np.float32) for name in ("inputs", "targets")} for _ in range(3)
    ]
    values = {f"layers.{index}.weight": generator.standard_normal((5, 5)).astype(np.float32) for index in (0, 1)}
    weights = {path: torch.nn.Parameter(torch.tensor(value)) for path, value in values.items()}
    optimizer = torch.optim.SGD(weights.values(), lr=1.0)
    with ttrain.Training(ttrain.load_config(*SMALL_MLP, "train.gradient_accumulation=2")) as training:
        training.set_parameters(values)
        for lr, batch in zip((0.1, 0.05, 0.02), batches, strict=True):
            hidden = torch.relu(torch.tensor(batch["inputs"]) @ weights["layers.0.weight"].T)
            loss = torch.nn.functional.mse_loss(hidden @ weights["layers.1.weight"].T, torch.tensor(batch["targets"]))
            optimizer.zero_grad()
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            result = training.step(batch, lr)
            norm = torch.stack([weight.grad.norm() for weight in weights.values()]).norm()  # type: ignore[union-attr]
            assert result.loss == pytest.approx(loss.item(), rel=1e-5)
            assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        after = training.parameters()
        assert training.steps == 3 and after.keys() == weights.keys()
        for path, weight in weights.items():
            np.testing.assert_allclose(after[path], weight.detach().numpy(), rtol=1e-5, atol=1e-6)
        half = {name: array[:2] for name, array in batches[0].items()}
        hidden = torch.relu(torch.tensor(half["inputs"]) @ weights["layers.0.weight"].T)
        loss = torch.nn.functional.mse_loss(hidden @ weights["layers.1.weight"].T, torch.tensor(half["targets"]))
        assert training.evaluate(half) == pytest.approx(loss.item(), rel=1e-5)


def test_without_a_rate_the_schedule_decides() -> None:
    overrides = (*SMALL_MLP, "optimizer.lr=0.1", "schedule=linear", "schedule.warmup=4", "train.steps=10")
    batch = {name: np.full((4, 5), 0.5, np.float32) for name in ("inputs", "targets")}
    results = []
    for lr in (None, 0.1 / 5):  # a warmup of four steps begins with a fifth
        with ttrain.Training(ttrain.load_config(*overrides)) as training:
            training.step(batch, lr)
            results.append(training.parameters()["layers.0.weight"])
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [(("model=nano-gpt", "device=cpu"), "model.vocabulary=null"), (("model=mlp", "device=null"), "device=null")],
)
def test_what_can_not_be_trained_is_told(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ttrain.UserError, match=said):
        ttrain.Training(ttrain.load_config(*overrides))


def test_a_config_made_by_hand_is_settled_and_checked() -> None:
    small = ttrain.load_config(*SMALL_MLP)
    by_hand = ttrain.Config(model=small.model, data=small.data, device=small.device, train=small.train)
    with ttrain.Training(replace(by_hand, precision=PrecisionConfig("auto"))) as training:
        assert "auto" not in (training.config.engine.name, training.config.precision.name)
    with pytest.raises(ttrain.UserError, match="precision.name=fp99: not registered"):
        ttrain.Training(replace(by_hand, precision=PrecisionConfig("fp99")))


def test_names_are_loaded_when_they_are_used() -> None:
    code = (
        "import sys, ttrain; heavy = {'torch', 'hydra', 'numpy', 'ttrain.api'}\n"
        "assert set(ttrain.__all__) <= set(dir(ttrain)) and not heavy & sys.modules.keys()\n"
        "ttrain.load_config('model=mlp'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=170)


def test_the_public_names_are_those_of_the_api() -> None:
    assert ttrain.__all__ == api.__all__ and all(getattr(ttrain, name) is getattr(api, name) for name in api.__all__)
    assert all(getattr(api, name).__doc__ for name in api.__all__)
    with pytest.raises(AttributeError, match="Training"):
        _ = ttrain.train_everything  # type: ignore[attr-defined]


def test_the_program_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (EXAMPLES.parent / "README.md").read_text("utf-8")
    program = page.split("```python\n")[1].split("```")[0]
    exec(compile(program, "README.md", "exec"), {})
    assert float(capsys.readouterr().out) > 0
