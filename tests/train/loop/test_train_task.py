"""task=train and task=sample through the command line, on a small model and text."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Told
from tests.train.reading import attempts, events, losses, tensors
from ttrain.cli import main
from ttrain.core.spec import DType, TensorSpec
from ttrain.data.library_tokenizer import train_bpe
from ttrain.data.tokenizer import ByteTokenizer, CharTokenizer
from ttrain.tasks.training.run import _held_out, shown_prompt
from ttrain.train.logging.metrics import read_metrics
from ttrain.train.runs.run_directory import read_config, read_run
from ttrain.train.steps.session import Session

LINES = [f"{number} times the river ran over the stone and under the bridge of copper" for number in range(300)]
MODEL = ["model.layers=2", "model.width=32", "model.heads=2", "model.context=16", "model.dropout=0.2"]
TRAIN = ["train.batch_size=4", "train.eval_every=4", "train.eval_sequences=8", "train.save_every=4"]
TRAIN += ["train.log_every=1"]
QUIET = ["logger=jsonl", "device=cpu", "device.threads=1", "sample.tokens=8"]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("\n".join(LINES))
    return ["data=text", f"data.path={path}", *MODEL, *TRAIN, *QUIET]


@pytest.fixture
def train(command: list[str], inside: Path) -> Any:
    """Runs the command line in this process: `train("run.dir=..", ...)` -> exit code."""
    return lambda *overrides: main([*command, *overrides])


@pytest.fixture(scope="module")
def trained(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps; copy it before changing it."""
    run = tmp_path_factory.mktemp("trained") / "run"
    assert main([*command, f"run.dir={run}", "train.steps=4"]) == 0
    return run


def test_a_run_leaves_everything_that_it_promises(train: Any, tmp_path: Path, capsys: Any) -> None:
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
    (first_step,) = events(run, "first_step")
    assert summary["engine"]["allocations"] == first_step["engine"]["allocations"] > 0
    (record,) = attempts(run)
    assert record["device"]["name"] == "cpu" and record["tokenizer_hash"] and record["data"]["tokens"]
    line = next(read_metrics(run / "metrics.jsonl"))
    assert {"step", "train/loss", "lr", "grad_norm", "tokens_per_s", "step_ms", "memory_bytes", "mfu"} <= line.keys()


def test_resume_from_an_older_checkpoint_sets_later_ones_aside(train: Any, told: Told) -> None:
    assert train("run.dir=run", "train.steps=12", "train.keep_last=9") == 0
    before, expected = losses(Path("run")), tensors(Path("run"), 12)
    printed = told("resume=run/checkpoints/step_00000004")
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
        (["run.dir=new", "resume=."], "neither a run nor a checkpoint"),
        (["run.dir=new", "sample.prompt=☃"], "never saw"),
        (["run.dir=new", "sample.prompt=''"], "sample.prompt is empty"),
        (["task=sample", "run.dir=run", "sample.prompt=☃"], "never saw"),
        (["task=sample", "run.dir=run", "device=null"], "computes no values. Give device=cpu"),
        (["task=sample", "run.dir=run", "model.layers=3"], "model.layers: 2 where the weights come from, 3 given"),
        (["task=sample", "run.dir=run", "sample.mode=sat"], "has no SAT head"),
        (["task=sample", "run.dir=run", "sample.mode=pairs"], "sample.mode=pairs"),
        (["task=sample", "run.dir=run", "sample.repetition=0"], "sample.repetition=0"),
    ],
)
def test_bad_input_is_one_message_and_exit_2(
    command: list[str], inside: Path, trained: Path, refused: Told, overrides: list[str], message: str
) -> None:
    shutil.copytree(trained, "run")
    alone = "resume=auto" in overrides or "task=sample" in overrides
    refused(message, *([] if alone else [*command, "train.steps=2"]), *overrides)
    assert losses(Path("run")) == losses(trained)


def test_samples(train: Any, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert sample("sample.temperature=0") == sample("sample.top_k=1", "sample.seed=9")


def test_regression_has_no_sample(inside: Path, capsys: Any, refused: Told) -> None:
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
    refused("no tokenizer", "task=sample", "run.dir=run")


def test_a_device_that_computes_nothing_is_not_mistaken_for_training(
    command: list[str], inside: Path, told: Told
) -> None:
    said = told(*command, "device=null", "run.dir=run", "train.length_schedule=[8,16]", "train.phase_steps=2")
    assert "Dry run: device null computes no values" in said and not Path("run").exists()


def test_wandb_continues_its_run(train: Any, fake: Any) -> None:
    """The directory stays; a copy is a run of its own. Each job ends its run, even if it fails."""
    assert train("train.steps=2", "logger=wandb", "logger.mode=offline", "run.dir=run") == 0
    assert main(["train.steps=3", "resume=auto", "run.dir=run"]) == 0
    assert main(["train.steps=4", "resume=run", "run.dir=copy"]) == 0
    assert main(["train.steps=5", "resume=run", "run.dir=bad", "optimizer.lr=1e38", "optimizer.clip_norm=null"]) == 1
    assert [init["id"] for init in fake.inits] == [None, "run1", None, None]
    assert all(init["mode"] == "offline" for init in fake.inits) and len({init["name"] for init in fake.inits}) == 3
    assert [run.exit_codes for run in fake.runs] == [[0], [0], [0], [1]]


# how a run ends, as its events and its sample tell it

SMALL = ["device=cpu", "device.threads=1", "model.layers=1", "model.heads=2", "model.width=32", "train.batch_size=2",
         "train.eval_sequences=2", "train.peak_tflops=1", "data.path=book.txt"]  # fmt: skip


@pytest.fixture
def book(inside: Path) -> None:
    Path("book.txt").write_text("\n".join(LINES))


def test_an_interrupt_while_steps_are_built_is_told_as_one(book: None, monkeypatch: Any, capsys: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Session, "build_training", lambda self: (os.kill(os.getpid(), signal.SIGINT), time.sleep(60)))
        assert main([*SMALL, "train.steps=2", "run.dir=run"]) == 130
    assert capsys.readouterr().err.endswith("ttrain: interrupted\n")
    assert events("run")[-1]["kind"] == "interrupted" and "error" not in events("run")[-1]
    info = read_run(Path("run"))
    assert info.state == "interrupted" and info.reason.startswith("Stopped by SIGINT before the steps were built")
    assert main(["task=runs", "runs.root=.", "runs.state=interrupted"]) == 0
    assert "run  interrupted" in capsys.readouterr().out
    assert main([*SMALL, "train.steps=2", "run.dir=run", "sample.tokens=1"]) == 0
    assert read_run(Path("run")).state == "finished" and events("run")[-1]["message"] == "All steps are done."


def test_an_early_stop_is_told_as_one(book: None) -> None:
    stop = ["train.steps=50", "train.eval_every=2", "train.early_stop=2", "train.min_improvement=9"]
    assert main([*SMALL, *stop, "run.dir=run", "sample.tokens=1"]) == 0
    event = events("run")[-1]
    assert event["kind"] == "finished" and event["message"].startswith("Early stop at step 6: val/loss has not fallen")
    assert read_run(Path("run")).state == "finished"


@pytest.mark.parametrize("tokenizer", ["bpe", "char"])
def test_the_sample_follows_held_out_text_that_is_shown(book: None, tokenizer: str, capsys: Any) -> None:
    data = [f"data.tokenizer={tokenizer}", "data.vocabulary_size=300", "model.context=256"]
    assert main([*SMALL, *data, "train.steps=1", "run.dir=run", "sample.tokens=3", "sample.stop=[xyz]"]) == 0
    out = capsys.readouterr().out
    head, _, rest = out.partition("\n> ")
    assert head == "\nA sample of what the model writes after this held-out text:\n"
    prompt, blank, *_ = rest.split("\n")
    held_out = "\n".join(LINES)[-len("\n".join(LINES)) // 10 - 1 :]
    assert 60 <= len(prompt) <= 80 and blank == "" and f"\n{prompt} " in f"\n{held_out}"
    assert out.count(prompt) == 1  # what the model writes is apart
    if tokenizer == "char":  # a prompt that is given is shown too
        given = ["train.steps=1", "run.dir=given", "sample.tokens=3"]
        assert main([*SMALL, *given, "sample.prompt='the river\nran '", "data.tokenizer=byte"]) == 0
        told = "\nA sample of what the model writes after this prompt:\n\n> the river\n> ran\n\n"
        assert told in capsys.readouterr().out


class Rows:
    """One held-out row."""

    fields = {"targets": TensorSpec((8,), DType.INT64)}

    def __init__(self, tokenizer: Any, text: str, learned_from: int = 0) -> None:
        self.tokenizer = tokenizer
        tokens = np.array(tokenizer.encode(text))
        targets = np.where(np.arange(len(tokens)) + 1 >= learned_from, np.append(tokens[1:], -1), -1)
        self._batch = {"tokens": tokens[None], "targets": targets[None]}

    def batch(self, *_: Any) -> dict[str, np.ndarray]:
        return self._batch


@pytest.mark.parametrize(
    ("text", "learned_from", "expected"),
    [
        ("user: hi\nassistant: Hello there.", 1, "user: hi\nassistant:"),
        ("ver ran\nover the stone.", 0, "over the"),
        ("ver ran over the stone", 0, "ran over the"),
        ("word", 0, "word"),
        ("一二三四五六", 0, "一二三四五六"),
    ],
)
def test_where_a_prompt_begins_and_ends(text: str, learned_from: int, expected: str) -> None:
    bpe: Any = train_bpe(["ver ran\nover the stone. user: hi\nassistant: Hello there."], 280)
    tokenizers: list[Any] = [bpe] if learned_from else [bpe, CharTokenizer.of([text]), ByteTokenizer()]
    if learned_from:
        learned_from = len(bpe.encode(expected))
    for tokenizer in tokenizers:
        found = tokenizer.decode(_held_out(Rows(tokenizer, text, learned_from), None))  # type: ignore[arg-type]
        assert found.strip(" ") == expected.strip(" ")


def test_the_longest_document_of_a_row_is_taken() -> None:
    row = Rows(ByteTokenizer(), "one|the longest of them all|three")
    assert bytes(_held_out(row, ord("|"))) == b"longest of them"  # type: ignore[arg-type]
    shown = [shown_prompt(ByteTokenizer(), list(text)) for text in (b"\n \n", b"A\nB")]
    assert shown == ["", "> A\n> B"]


def test_the_scores_of_a_sample_are_over_short_texts(book: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed for every token anew: over the whole context that would take most of a short run."""
    shapes: list[tuple[int, ...]] = []
    build = Session.build_training

    def recorded(self: Session) -> Any:
        steps = build(self)
        shapes.append(steps["logits"].inputs["tokens"].shape)
        return steps

    monkeypatch.setattr(Session, "build_training", recorded)
    for tokens, length in ((20, 64), (100, 128), (1000, 256)):
        sizes = [f"sample.tokens={tokens}", "model.context=256", "train.steps=1"]
        assert main([*SMALL, *sizes, f"run.dir=run{tokens}", "sample.prompt=the"]) == 0
        assert shapes[-1] == (1, length)


def test_the_sample_of_a_run_and_those_of_the_task_stop(book: None, capsys: Any, refused: Told) -> None:
    sample = ["sample.tokens=60", "sample.prompt=the"]

    def printed(*given: str) -> str:
        capsys.readouterr()
        assert main([*given, *sample]) == 0
        return str(capsys.readouterr().out)

    def of_run(*given: str) -> str:
        return printed(*SMALL, "train.steps=2", *given).split("> the\n\n")[1].split("\n\nmodel ")[0]

    whole = of_run("run.dir=a")
    stop = f"sample.stop=['{whole[20]}']"
    expected = whole.partition(whole[20])[0]
    assert of_run("run.dir=b", stop) == expected != whole
    for cache in ("null", "false"):
        texts = printed("task=sample", "run.dir=a", "sample.count=2", f"sample.cache={cache}", stop)
        assert texts.startswith(f"--- sample 1 of 2 ---\nthe{expected}\n--- sample 2 of 2 ---\n")
    refused("an empty text would end every sample at once", "task=sample", "run.dir=a", "sample.stop=['']")
