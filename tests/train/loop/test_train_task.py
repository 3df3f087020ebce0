"""task=train and task=sample through the command line, on a small model and text."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.reading import attempts, losses, tensors
from ttrain.cli import main
from ttrain.train.logging.metrics import read_metrics
from ttrain.train.runs.run_directory import read_config

WORDS = ["def", "return", "self", "for", "in", "if", "else", "import", "class", "None", "while", "yield"]
MODEL = ["model.layers=2", "model.width=32", "model.heads=2", "model.context=16", "model.dropout=0.2"]
TRAIN = ["train.batch_size=4", "train.eval_every=4", "train.eval_sequences=8", "train.save_every=4"]
TRAIN += ["train.log_every=1"]
QUIET = ["logger=jsonl", "device=cpu", "device.threads=1", "sample.tokens=8"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("".join(f"{generator.choice(WORDS)} \n"[: generator.integers(4, 9)] for _ in range(3000)))
    return path


@pytest.fixture
def train(corpus: Path, inside: Path) -> Any:
    """Runs the command line in this process: `train("run.dir=..", ...)` -> exit code."""
    return lambda *overrides: main(["data=text", f"data.path={corpus}", *MODEL, *TRAIN, *QUIET, *overrides])


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps; copy it before changing it."""
    run = tmp_path_factory.mktemp("trained") / "run"
    assert main(["data=text", f"data.path={corpus}", *MODEL, *TRAIN, *QUIET, f"run.dir={run}", "train.steps=4"]) == 0
    return run


def test_a_run_leaves_everything_that_it_promises(
    train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("train.steps=8", "sample.prompt=de") == 0
    (run,) = (tmp_path / "outputs").glob("*/*")
    assert run.name.endswith("_nano-gpt_cpu_static")
    printed = capsys.readouterr()
    assert "A sample of what the model writes after this prompt:\n\n> de\n\n" in printed.out
    assert f"task=sample run.dir={run.relative_to(tmp_path)}" in printed.out
    files = {path.name for path in run.iterdir()}
    assert files >= {"config.yaml", "run.json", "metrics.jsonl", "plan.txt", "summary.json"}
    assert read_config(run)["model"]["vocabulary"] > 10
    summary = json.loads((run / "summary.json").read_text())
    assert summary["step"] == 8 and summary["baseline"]["name"] == "unigram entropy"
    assert summary["engine"]["allocations_after_first"] == summary["engine"]["nodes_after_first"] == 0
    (record,) = attempts(run)
    assert record["device"]["name"] == "cpu" and record["tokenizer_hash"] and record["data"]["tokens"]
    line = next(read_metrics(run / "metrics.jsonl"))
    assert {"step", "train/loss", "lr", "grad_norm", "tokens_per_s", "step_ms", "memory_bytes", "mfu"} <= line.keys()


def test_three_attempts_equal_one_run_bit_for_bit(train: Any) -> None:
    """With dropout, gradient_accumulation, warm-up, a moving learning rate and shuffled epochs."""
    overrides = ["train.gradient_accumulation=2", "data.order=epoch", "schedule.warmup=3", "schedule.steps=20"]
    assert train(*overrides, "run.dir=whole", "train.steps=13") == 0
    assert train(*overrides, "run.dir=attempts", "train.steps=5") == 0
    assert main(["run.dir=attempts", "resume=auto", "train.steps=9"]) == 0
    os.rename("attempts", "moved")
    assert main(["resume=moved", "train.steps=13"]) == 0
    assert tensors(Path("moved"), 13) == tensors(Path("whole"), 13)
    grid = [entry for entry in losses(Path("moved")) if entry[1] == "train/loss" or entry[0] % 4 == 0 or entry[0] == 13]
    assert grid == losses(Path("whole"))
    resumed = [attempt.get("resumed_from") for attempt in attempts("moved")]
    assert resumed == [None, "step_00000005", "step_00000009"]


def test_resume_from_an_older_checkpoint_sets_later_ones_aside(train: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run.dir=run", "train.steps=12", "train.keep_last=9") == 0
    before, expected = losses(Path("run")), tensors(Path("run"), 12)
    assert main(["resume=run/checkpoints/step_00000004"]) == 0
    printed = capsys.readouterr().err
    assert "Training nano-gpt with" in printed
    assert json.loads(Path("run/summary.json").read_text())["model"] == "nano-gpt"
    assert "Set aside" in printed and "abandoned_after_00000004/step_00000012" in printed
    assert "Removed 10 lines after step 4" in printed
    assert losses(Path("run")) == before and tensors(Path("run"), 12) == expected


def test_resume_into_another_directory_leaves_the_first_alone(train: Any) -> None:
    assert train("run.dir=first", "train.steps=8") == 0
    before = {path: path.read_bytes() for path in Path("first").rglob("*") if path.is_file() and path.name != ".lock"}
    assert main(["resume=first", "run.dir=second", "train.steps=10"]) == 0
    assert all(path.read_bytes() == data for path, data in before.items())
    assert [step for step, key, _ in losses(Path("second")) if key == "train/loss"] == list(range(1, 11))
    shutil.copytree("first/checkpoints/step_00000008", "alone")
    assert main(["resume=alone", "run.dir=third", "train.steps=9"]) == 0
    assert [step for step, key, _ in losses(Path("third")) if key == "train/loss"] == [9]


def test_overrides_win_and_are_printed(train: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run.dir=run", "train.steps=4", "optimizer.lr=0.01", "schedule=constant") == 0
    assert main(["run.dir=run", "resume=auto", "train.steps=6", "optimizer.lr=0.002"]) == 0
    printed = capsys.readouterr().err
    assert "optimizer.lr: 0.01 -> 0.002" in printed and "train.steps: 4 -> 6" in printed
    assert "model" not in printed.split("Changed")[-1].split("\n")[0]
    rates = [line["lr"] for line in read_metrics(Path("run/metrics.jsonl")) if "lr" in line]
    assert rates == pytest.approx([0.01] * 4 + [0.002] * 2)
    assert read_config(Path("run"))["optimizer"]["lr"] == 0.002
    assert read_config(Path("run"))["train"]["save_every"] == 4


def test_another_device_or_engine_continues_the_same_run(train: Any) -> None:
    assert train("run.dir=run", "train.steps=4", "engine=dynamic") == 0
    assert train("run.dir=whole", "train.steps=8", "engine=static", "schedule.steps=4") == 0
    assert main(["run.dir=run", "resume=auto", "train.steps=8", "schedule.steps=4", "engine=static"]) == 0
    assert tensors(Path("run"), 8) == tensors(Path("whole"), 8)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.dir=run"], "already holds a run"),
        (["run.dir=run", "resume=auto", "model.layers=3"], "model.layers: 2 where the weights come from, 3 given"),
        (["run.dir=run", "resume=auto", "model=gpt2"], "another architecture"),
        (["run.dir=run", "resume=auto", "data.tokenizer=byte", "model.vocabulary=null"], "another"),
        (["run.dir=run", "resume=auto", "optimizer=sgd"], "does not fit this model and optimizer"),
        (["run.dir=new", "resume=run", "optimizer=sgd"], "Give the optimizer that it was trained with"),
        (["run.dir=new", "resume=nowhere"], "no such folder"),
        (["run.dir=new", "resume=."], "neither a run nor a checkpoint"),
        (["run.dir=file/run"], "can't be written"),
        (["run.dir=new", "sample.prompt=☃"], "never saw"),
        (["run.dir=new", "sample.prompt=''"], "sample.prompt is empty"),
        (["task=sample", "run.dir=run", "sample.prompt=☃"], "never saw"),
        (["task=sample", "run.dir=run", "sample.checkpoint=77"], "no checkpoint of step 77"),
        (["task=sample", "run.dir=."], "not a run"),
        (["task=sample", "run.dir=run", "device=null"], "computes no values. Give device=cpu"),
        (["task=sample", "run.dir=run", "sample.mode=sat"], "has no SAT head"),
        (["task=sample", "run.dir=run", "sample.mode=pairs"], "sample.mode=pairs"),
        (["task=sample", "run.dir=run", "sample.repetition=0"], "sample.repetition=0"),
    ],
)
def test_bad_input_is_one_message_and_exit_2(
    train: Any, trained: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    Path("file").write_text("in the way")
    shutil.copytree(trained, "run")
    before = losses(Path("run"))
    capsys.readouterr()
    if "resume=auto" in overrides or "task=sample" in overrides:
        assert main(overrides) == 2
    else:
        assert train("train.steps=2", *overrides) == 2
    errors = capsys.readouterr().err
    assert message in errors and "Traceback" not in errors
    assert losses(Path("run")) == before
    assert not Path("new").exists()


def test_samples(train: Any, capsys: pytest.CaptureFixture[str], corpus: Path) -> None:
    assert train("run.dir=run", "train.steps=8", "train.keep_last=9") == 0
    capsys.readouterr()
    os.rename("run", "moved")

    def sample(*overrides: str) -> str:
        assert main(["task=sample", "run.dir=moved", "sample.prompt=de", "sample.tokens=30", *overrides]) == 0
        return capsys.readouterr().out

    first = sample("sample.seed=1")
    assert first.startswith("de") and len(first) == 33
    assert sample("sample.seed=1") == first == sample("sample.seed=1", "engine=dynamic")
    assert sample("sample.seed=2") != first
    assert sample("sample.seed=1", "sample.checkpoint=4") != first
    greedy = sample("sample.temperature=0")
    assert greedy == sample("sample.top_k=1", "sample.seed=9") == sample("sample.top_p=1e-9", "sample.seed=8")
    assert "sample 2 of 2" in sample("sample.count=2")


def test_regression_has_no_sample(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["model=mlp", "data=regression", "data.examples=256", "model.width=16", "train.steps=40", "run.dir=run"]
    assert main([*overrides, *QUIET, "train.log_every=1", "optimizer.lr=0.01"]) == 0
    printed = capsys.readouterr()
    assert "train on" in printed.out and "sample" not in printed.out.lower()
    told = printed.out + printed.err  # 16 rows of 16 targets, in 40 steps
    assert (
        ", 10.2k target values" in told and "target values/s" in told and "tok/s" not in told and " tokens" not in told
    )
    found = [loss for _, key, loss in losses(Path("run")) if key == "train/loss"]
    assert found[-1] < found[0]
    assert main(["task=sample", "run.dir=run"]) == 2
    assert "no tokenizer" in capsys.readouterr().err


def test_a_device_that_computes_nothing_is_not_mistaken_for_training(
    train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("device=null", "run.dir=run", "train.length_schedule=[8,16]", "train.phase_steps=2") == 0
    assert "Dry run: device null computes no values" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_wandb_continues_its_run(train: Any, fake: Any) -> None:
    """In the same directory; a copy is a run of its own. Each job ends its run, also where it fails."""
    assert train("train.steps=2", "logger=wandb", "logger.mode=offline", "run.dir=run") == 0
    assert main(["train.steps=3", "resume=auto", "run.dir=run"]) == 0
    assert main(["train.steps=4", "resume=run", "run.dir=copy"]) == 0
    assert main(["train.steps=5", "resume=run", "run.dir=bad", "optimizer.lr=1e38", "optimizer.clip_norm=null"]) == 1
    assert [init["id"] for init in fake.inits] == [None, "run1", None, None]
    assert all(init["mode"] == "offline" for init in fake.inits) and len({init["name"] for init in fake.inits}) == 3
    assert [run.exit_codes for run in fake.runs] == [[0], [0], [0], [1]]
