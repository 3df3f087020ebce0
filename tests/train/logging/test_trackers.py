"""Several loggers of one run: TensorBoard's files as its own reader reads them, and what W&B keeps beside metrics."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.config.test_bad_input import problems
from tests.conftest import Told
from ttrain.cli import main
from ttrain.config.compose import load
from ttrain.core.errors import UserError
from ttrain.train.checkpoint.retention import list_checkpoints
from ttrain.train.logging.loggers import Console, Loggers
from ttrain.train.logging.metrics import Events, MetricsFile, read_metrics
from ttrain.train.logging.tensorboard_logger import TensorBoardLogger
from ttrain.train.logging.wandb_logger import WandbLogger
from ttrain.train.settings import WandbConfig

RUN = [
    "model.layers=1", "model.width=16", "model.heads=2", "model.context=8", "data.path=book.txt", "device=cpu",
    "device.threads=1", "engine=static", "sample.tokens=2", "train.peak_tflops=1", "train.batch_size=2",
    "train.eval_every=2", "train.log_every=1", "run.dir=run", "logger.mode=offline", "logger.artifacts=[checkpoint]",
    "train.evals=[{path: prompts.txt, kind: samples, every: evaluation}]",
]  # fmt: skip


def in_tensorboard(run: Path) -> tuple[list[tuple[int, str, float]], list[tuple[int, str, str]]]:
    """Scalars and texts with their steps and names, by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"), {"scalars": 0, "tensors": 0}).Reload()
    scalars = [(each.step, tag, each.value) for tag in found.Tags()["scalars"] for each in found.Scalars(tag)]
    texts = [
        (each.step, tag.removesuffix("/text_summary"), each.tensor_proto.string_val[0].decode())
        for tag in found.Tags()["tensors"]
        for each in found.Tensors(tag)
    ]
    return sorted(scalars), sorted(texts)


def recorded(run: Path) -> list[tuple[int, str, Any]]:
    lines = list(read_metrics(run / "metrics.jsonl"))
    pairs = [
        (line["step"], key, line[key]) for line in lines for key in line if key != "step" and line[key] is not None
    ]
    return sorted((step, key, pytest.approx(value, rel=1e-6)) for step, key, value in pairs)


def test_a_run_and_its_resume_tell_both(inside: Path, fake: Any, told: Told) -> None:
    Path("book.txt").write_text("the river ran over the stone. " * 60)
    Path("prompts.txt").write_text("the\n")
    assert main([*RUN, "logger=[tensorboard,jsonl,wandb]", "train.steps=2"]) == 0
    again = told("resume=auto", "run.dir=run", "train.steps=4", "optimizer.lr=0.01")
    assert "step/s" not in again  # jsonl: no bar
    scalars, texts = in_tensorboard(Path("run"))
    assert scalars == recorded(Path("run")) and len({step for step, _, _ in scalars}) == 4
    assert len(list(Path("run/tensorboard").iterdir())) == 1
    assert [text[:2] for text in texts] == [(2, "samples/prompts"), (4, "samples/prompts")]
    assert all(text.startswith("the**") for _, _, text in texts)
    weights = list_checkpoints(Path("run/checkpoints"))[0][-1].weights(False)
    block = [weights[name].ravel() for name in weights if name.startswith("blocks.0.")]
    assert [value for step, tag, value in scalars if step == 4 and tag == "norm/blocks.0"] == [
        pytest.approx(float(np.linalg.norm(np.concatenate(block))), rel=1e-6)
    ]
    told_wandb = [(line["step"], key) for line in fake.runs[1].logged for key in line if key != "step"]
    assert sorted(told_wandb) == sorted([*(each[:2] for each in recorded(Path("run"))), (4, "samples")])  # offline
    tables = [line["samples"] for run in fake.runs for line in run.logged if "samples" in line]
    assert [[row[:3] for row in table["data"]] for table in tables] == [
        [[2, "prompts", "the"]], [[2, "prompts", "the"], [4, "prompts", "the"]],
    ]  # fmt: skip
    newest = [str(list_checkpoints(Path("run/checkpoints"))[0][-1].path)]
    assert [path for path, _, _ in fake.runs[1].artifacts] == newest
    export = ["task=export", "run.dir=run", "export.file=model.safetensors", "device=cpu", "logger=wandb"]
    assert main([*export, "logger.mode=offline"]) == 0
    assert fake.runs[2].artifacts == [("model.safetensors", "export-run1", "export")]
    assert [run.exit_codes for run in fake.runs] == [[0], [0], [0]]
    assert "logger=wandb: keeps an export" in told("task=export", "export.source=a.pt", *export[2:], code=2)


def test_tensorboard_has_the_lines_that_were_not_cut(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    logger = TensorBoardLogger(tmp_path)
    for step in (1, 2, 3):
        line = {"step": step, "train/loss": 1.0 / step, "mfu": None, "grad_norm": float("inf")}
        file.append(line)
        logger.log(line)
    logger.close(1)
    file.cut(2, True)
    again = TensorBoardLogger(tmp_path)
    for step in (3, 4):
        file.append({"step": step, "train/loss": 2.0 * step})
        again.log({"step": step, "train/loss": 2.0 * step})
    again.close(0)
    file.close()
    assert in_tensorboard(tmp_path)[0] == recorded(tmp_path)
    assert [step for step, _, _ in recorded(tmp_path)] == [1, 2, 3, 4]


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="pip install tensorboard"):
        TensorBoardLogger(tmp_path)


def test_guards_alert_and_a_tracker_that_fails_is_dropped_once(
    fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view = WandbLogger(WandbConfig(mode="offline"), tmp_path, {}, None, print)
    loggers = Loggers(MetricsFile(tmp_path / "metrics.jsonl"), Console(bar=False), [view])
    events = Events(tmp_path, loggers.console.say)
    events.on_event = loggers.tell
    events.add("started", "An attempt starts.")
    events.warn("spike", "Step 3: a spike.", 3)
    assert fake.runs[0].alerts == [(f"{tmp_path.name}: spike", "Step 3: a spike.")]
    fake.runs[0].alerts = None  # the next one raises
    events.warn("rollback", "Step 4: back.", 4)
    events.warn("rollback", "Step 5: back.", 5)
    loggers.log({"step": 5, "train/loss": 1.0})
    loggers.close(0)
    assert capsys.readouterr().err.count("WandbLogger failed and gets no more") == 1
    assert fake.runs[0].logged == [] and fake.runs[0].exit_codes == [1]
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [5]


def test_wandb_itself_takes_tables_alerts_and_artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    wandb.teardown()
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "config.yaml").write_text("a: 1\n")
    config = WandbConfig(mode="offline", artifacts=["config", "checkpoint"])
    logger = WandbLogger(config, tmp_path, {}, None, print)
    logger.tell({"kind": "failed", "message": "no more memory"})
    logger.tell({"kind": "sample", "step": 2, "name": "poems", "prompt": "a", "text": "b"})
    logger.close(0)
    wandb.teardown()
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (table,) = (run / "files" / "media" / "table").iterdir()
    assert json.loads(table.read_text())["data"] == [[2, "poems", "a", "b", None]]
    (stored,) = run.glob("*.wandb")
    content = stored.read_bytes()
    assert b"no more memory" in content
    assert f"config-{logger.run_id}".encode() in content


def test_which_loggers_a_list_chooses(tmp_path: Path) -> None:
    chosen: Any = load(["logger=[tensorboard,wandb,jsonl]", "logger.project=mine"]).logger
    assert (chosen.name, chosen.beside, chosen.project) == ("wandb", ["tensorboard", "jsonl"], "mine")
    (tmp_path / "mine.yaml").write_text("defaults: [config, {override logger: [jsonl, tensorboard]}, _self_]\n")
    in_file: Any = load([], "mine", tmp_path).logger
    assert (in_file.name, in_file.beside) == ("jsonl", ["tensorboard"])
    assert load(["logger=[jsonl]"]).logger.name == "jsonl"
    (both,) = problems("optimizer=[sgd,adamw]")
    assert both == "optimizer=[sgd,adamw]: takes one option. Give one of them."
    (unknown,) = problems("logger=[wandb,nope]")
    assert "there is no config logger/nope.yaml" in unknown and "tensorboard" in unknown
    (other,) = problems("logger=[tensorboard,jsonl]", "logger.project=mine")
    assert other.startswith("logger.project: unknown key. It belongs to logger wandb")
