"""Speed, peak, summary, loss curve, and what the start of a run tells of its data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.conftest import Told
from tests.train.conftest import MakeTraining, Training
from ttrain.cli import main
from ttrain.config.compose import load
from ttrain.core.errors import CheckpointError
from ttrain.data.batches import Sizes
from ttrain.data.documents import open_documents
from ttrain.data.settings import DocumentsConfig, RegressionConfig, TextConfig, TokensConfig
from ttrain.data.synthetic.regression import open_regression
from ttrain.data.text import open_text
from ttrain.data.tokens import open_tokens
from ttrain.parallel.ranks import Ranks
from ttrain.sweep.outcome import _LAST, columns, numbers_of, print_table
from ttrain.tasks.prepare import prepare
from ttrain.tasks.report import page
from ttrain.train.checkpoint.checkpoint import Progress
from ttrain.train.forecast import step_time as peak
from ttrain.train.logging.chart import COLORS, Series, line_chart, smoothed
from ttrain.train.logging.metrics import Events, Meter, read_metrics
from ttrain.train.runs.run_directory import RunInfo, find_runs, read_run
from ttrain.train.runs.summary import draw_loss_curve, extent_line, print_summary, recorded, summarize, summary_lines


def test_meter_times_steps_only() -> None:
    ticks = iter([0.0, 0.5, 10.0, 10.5, 20.0, 22.0])
    meter = Meter(flops_per_step=1e9, peak_flops=1e10, memory=lambda: 77, clock=lambda: next(ticks))
    for _ in range(2):
        meter.start()
        assert meter.stop(100) == 0.5
    expected = {"tokens_per_s": 200.0, "step_ms": 500.0, "mfu": 0.2, "memory_bytes": 77}
    assert meter.read() == expected
    meter.start()
    meter.stop(100)
    assert meter.read() == {"tokens_per_s": 50.0, "step_ms": 2000.0, "mfu": 0.05, "memory_bytes": 77}
    bare = Meter(flops_per_step=1e9)
    bare.start()
    bare.stop(1)
    assert bare.read().keys() == {"tokens_per_s", "step_ms"}


def test_peak_is_the_best_of_the_first_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measured one is plausible: more than an addition per nanosecond, less than any machine of this decade."""
    monkeypatch.setitem(peak._SIZES, "cpu", 256)
    assert 1e9 < peak._measure("cpu", "fp32", 0, 0.1) < 1e15
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = iter([1e11, 3e11, 2e11, 4e11, 1e11, 5e11])
    monkeypatch.setattr(peak, "_measure", lambda *_: next(measured))

    def flops(dtype: str) -> float:
        monkeypatch.setattr(peak, "_rates", {})  # as another process begins
        rates = peak.measured_rates("cpu", dtype)
        assert rates is not None
        return rates.flops

    assert [flops("fp32") for _ in range(7)] == [1e11, 3e11, 3e11, *[4e11] * 4]
    assert flops("bf16") == 5e11 and peak.measured_rates("null", "fp32") is None


def make_summary(progress: Progress, lines: Any = (), **more: Any) -> dict[str, Any]:
    facts = {"model": "nano-gpt", "parameters": 1_234_567, "steps": 100, "unit": "tokens", "peak_memory_bytes": 3 << 30}
    measured = {"mfu": 0.31, "median_step_ms": 1.25, "median_tokens_per_s": 5.2e4}
    return summarize(progress, lines, Ranks(), ("unigram entropy", 3.1), **{**facts, **measured, **more})


def test_summary_tells_the_numbers_and_the_next_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(100, 6400, 0.128, 1.5, 1.75, evaluated_at=100, best_val_loss=1.625, best_step=80)
    summary, run = make_summary(progress), tmp_path / "a run"
    start = "python -m ttrain 'plugins=[my_parts,mine]'"
    print_summary(summary, run, ("train.steps=200", "goes on at 1.00e-04"), start=start)
    printed = capsys.readouterr().out
    for expected in (
        "nano-gpt, 1.2M parameters", "1.5000", "1.7500 (best 1.6250 at step 80)", "3.1000", "3.0 GiB",
        "50.0k tokens/s, mfu 31.0 %\n", f"{start} task=sample 'run.dir={run}'",
        f"{start} resume=auto 'run.dir={run}' train.steps=200\nlearning rate    goes on at 1.00e-04\n",
    ):  # fmt: skip
        assert expected in printed
    assert "average" not in printed
    print_summary(summary, run, ("train.steps=200", None), writes_text=False)
    printed = capsys.readouterr().out
    assert "task=sample" not in printed and "learning rate" not in printed
    averaged = make_summary(progress, val_loss_of_average=True)
    told = "1.7500 (best 1.6250 at step 80), with the average of the weights"
    assert dict(summary_lines(averaged))["val loss"] == told and averaged["val_loss_of_average"] is True
    stored = json.loads(json.dumps(summary, allow_nan=False))
    assert stored["val/loss"] == 1.75 and stored["best_step"] == 80 and stored["peak_memory_bytes"] == 3 << 30
    nothing = dict(summary_lines(make_summary(Progress())))
    assert "not measured" in nothing["val loss"] and "speed" not in nothing


def test_speed_is_that_of_the_whole_loop() -> None:
    """A busy machine: most steps are quick, the time went elsewhere."""
    quick = {"mfu": 0.05, "median_step_ms": 3.6, "median_tokens_per_s": 17_800.0}
    summary = make_summary(Progress(1800, tokens=115_200, seconds=46.0), **quick)
    assert dict(summary_lines(summary))["speed"] == "2.5k tokens/s, mfu 5.0 %; 17.8k in the median step, 3.6 ms"
    assert summary["tokens_per_s"] == round(115_200 / 46, 1) and summary["median_tokens_per_s"] == 17_800


def test_pace_over_all_lines() -> None:
    """Medians over the lines; mfu over their time: one step of 10 ms at 0.5, nine of 100 ms at 0.05."""
    lines = [
        {"step": 1, "tokens_per_s": 1000.0, "step_ms": 10.0, "mfu": 0.5},
        {"step": 5, "val/loss": 1.0},
        {"step": 7, "tokens_per_s": 100.0, "step_ms": 100.0, "mfu": 0.05},
        {"step": 10, "tokens_per_s": 100.0, "step_ms": 100.0, "mfu": 0.05},
    ]
    keys = ("mfu", "median_step_ms", "median_tokens_per_s")
    found = recorded(lines)
    assert [found[key] for key in keys] == [round((10 * 0.5 + 900 * 0.05) / 910, 4), 100.0, 100.0]
    even = recorded(lines[:2] + lines[3:])
    assert [even[key] for key in keys[1:]] == [10.0, 1000.0]  # of two lines both are of the faster one
    assert [recorded(())[key] for key in keys] == [None] * 3


def test_speed_of_a_run_with_all_its_attempts(make_training: MakeTraining, tmp_path: Path) -> None:
    """By a clock of ours: a step takes 1 s, the fourth 21 s, its line of metrics 0.5 s, an evaluation 100 s."""
    now = [0.0]

    def slowed(training: Training) -> Training:
        loop, batch = training.loop, training.dataset.batch
        evaluation, log = loop.evaluation, loop.context.loggers.log
        loop.meter = Meter(clock=lambda: now[0])

        def take(seconds: float, value: Any) -> Any:
            now[0] += seconds
            return value

        seconds = iter([1, 1, 1, 21, 1, 1, 1, 1])
        training.dataset.batch = lambda split, *rest: take(
            next(seconds) if split == "train" else 0, batch(split, *rest)
        )
        loop.evaluation = lambda stopped: take(100, evaluation(stopped))
        loop.context.loggers.log = lambda metrics: take(0.5 if "train/loss" in metrics else 0, log(metrics))
        return training

    first = slowed(make_training(steps=8))
    first.loop.run()
    done = first.loop.context.progress
    assert done.seconds == 7 * 1.5 + 21.5
    first.close()
    second = slowed(make_training(resume=True, steps=10))
    second.loop.run()
    progress, run = second.loop.context.progress, second.run_directory
    assert progress.step == 10 and progress.seconds == 32 + 2 * 1.5
    assert make_summary(progress)["tokens_per_s"] == round(progress.tokens / 35, 1)
    # But for the first line of an attempt, and the slow step.
    assert recorded(list(read_metrics(run.metrics)))["median_step_ms"] == 1500
    run.record({"train": {"steps": 10}}, {})
    so_far = round(progress.tokens / 34.5, 1)  # the last line says what was known before it was written
    assert read_run(run.path).tokens_per_s == so_far == numbers_of("train", run.path, None)["tokens_per_s"]
    run.write(run.summary, make_summary(progress))
    done = round(progress.tokens / 35, 1)
    assert read_run(run.path).tokens_per_s == done == numbers_of("train", run.path, None)["tokens_per_s"]


def test_loss_curve(tmp_path: Path) -> None:
    image, summary = tmp_path / "loss.png", make_summary(Progress())
    lines: list[dict[str, Any]] = [{"step": 1, "train/loss": 3}]
    draw_loss_curve(lines, image, summary)
    assert not image.exists()
    lines += [{"step": 2, "train/loss": None}, {"step": 2, "val/loss": 2}, {"step": 3, "train/loss": 1}]
    draw_loss_curve(lines, image, summary)
    assert image.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_further_metrics_of_the_newest_evaluation_are_told() -> None:
    lines = [
        {"step": 2, "val/loss": 9.0, "val/ar/ce": 4.0, "val/sat/ce": 5.0},
        {"step": 4, "val/loss": 7.0, "val/ar/ce": 3.0, "val/sat/ce": 3.5},
        {"step": 5, "train/loss": 7.5, "ar/ce": 3.1},
    ]
    summary = make_summary(Progress(), lines)
    assert summary["val_metrics"] == {"ar/ce": 3.0, "sat/ce": 3.5}
    told = dict(summary_lines(summary))
    assert told["val metrics"] == "ar/ce 3.0000, sat/ce 3.5000"
    assert told["unigram entropy"] == "3.1000 (what ignoring the input can reach; compare ar/ce)"


@pytest.fixture
def book(inside: Path) -> Path:
    Path("book").mkdir()
    for name in "abcd":
        Path(f"book/{name}.txt").write_text(f"{name}23456789\n" * 25)
    return Path("book")


def test_the_start_tells_files_bytes_tokens_and_passes(book: Path) -> None:
    text = open_text(TextConfig(path="book", separator=""), Sizes(context=9))
    assert extent_line(text, 10, [4]) == (
        "Data: book, 4 files, 1000 B: 900 tokens to train on, 100 held out. "
        "An epoch is 99 sequences of 9 tokens; 10 steps of 4 make 0.40 epochs."
    )
    assert "10 steps of 2 to 4 make 0.89 epochs" in extent_line(text, 10, [2, 4], tokens=801)
    limited = "An epoch is 8 sequences of 9 tokens (data.limit); 10 steps of 4 make 5.00 epochs."
    assert limited in extent_line(text, 10, [4], limit=8)
    assert "1 step of 1 make less than 0.01 epochs" in extent_line(text, 1, [1], tokens=8)
    prepare(TextConfig(path="book", separator="", tokenizer="byte"), "tokens", progress=False)
    tokens = open_tokens(TokensConfig(path="tokens"), Sizes(context=9))
    assert extent_line(tokens, 10, [4]).startswith("Data: tokens, 2 files, 2.0 KiB: 900 tokens to train on, 100 held")


def test_the_start_tells_of_documents_and_examples(book: Path) -> None:
    whole = DocumentsConfig(sources=["book"], tokenizer="byte", long_documents="cut")
    told = extent_line(open_documents(whole, Sizes(context=10)), 5, [3])  # of three documents the start of each
    assert told.endswith("An epoch is 3 sequences of 10 tokens; 5 steps of 3 make 5.00 epochs.")
    told = extent_line(open_regression(RegressionConfig(examples=1000), Sizes(inputs=2, outputs=1)), 450, [4])
    assert told.endswith(
        "900 examples to train on, 100 held out. An epoch is 900 examples; 450 steps of 4 make 2.00 epochs."
    )


def test_a_run_begins_with_its_data_and_what_is_left_out(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (book / "linked").symlink_to(".")
    small = ["model.layers=1", "model.heads=2", "model.width=8", "model.context=9", "device=cpu", "train.steps=2"]
    assert main([*small, "train.batch_size=2", "data.path=book", "data.separator=", "run.dir=run"]) == 0
    printed = capsys.readouterr().err
    assert "Data: book, 4 files, 1000 B: 900 tokens to train on, 100 held out." in printed
    assert "2 steps of 2 make 0.04 epochs." in printed
    assert printed.count("1 linked folder(s) or broken link(s) are not read: book/linked") == 1
    assert json.loads(Path("run/run.json").read_text())["attempts"][0]["data"]["notices"]


# lists of runs with their state, the HTML report, and the charts in it


def elements(text: str) -> list[tuple[str, dict[str, str]]]:
    """Tags and attributes of a page or a chart, all of which are closed."""
    text = text.removeprefix("<!doctype html>\n").replace("<details open>", "<details>")
    text = re.sub("(<meta [^>]*)>", r"\1/>", text)
    return [(each.tag.rpartition("}")[2], each.attrib) for each in ElementTree.fromstring(text).iter()]


@pytest.fixture
def runs(make_training: Any, tmp_path: Path) -> dict[str, Path]:
    """One run in each state, named by it."""
    finished = make_training("finished").run()
    summary = {"step": 12, "steps": 12, "model": "bigram", "parameters": 121}
    finished.run_directory.write(finished.run_directory.summary, summary)
    resumable = make_training("resumable", steps=4).run()
    for training, config in ((finished, {"train": {"steps": 12}, "model": {"name": "bigram"}}), (resumable, {})):
        text = {"text": "<script>alert(1)</script>"}
        training.run_directory.record({**config, **text}, {"tokenizer_hash": str(config), "data": {}})
        training.close()
    failed = make_training("failed", poison_step=6)
    with pytest.raises(Exception, match="Step 6"):
        failed.loop.run()
    Events(failed.run_directory.path).add("failed", "Step 6: train/loss is nan.\nmore", step=6)
    failed.close()
    make_training("new").close()
    make_training("running")
    return {name: tmp_path / name for name in ("finished", "resumable", "failed", "new", "running")}


def test_states(runs: dict[str, Path], tmp_path: Path) -> None:
    assert list(find_runs(tmp_path)) == sorted(runs.values())
    found = {name: read_run(path) for name, path in runs.items()}
    assert {name: info.state for name, info in found.items()} == {name: name for name in runs}
    assert (found["finished"].step, found["finished"].checkpoint, found["finished"].steps) == (12, 12, 12)
    assert found["failed"].checkpoint == 4 and found["failed"].reason.startswith("Step 6")
    with pytest.raises(CheckpointError, match="not a run"):
        read_run(tmp_path)
    with open(runs["finished"] / "metrics.jsonl", "a") as file:  # of an attempt that went on and was stopped
        file.write(json.dumps({"step": 13, "train/loss": 1.0}) + "\n")
    assert read_run(runs["finished"]).state == "resumable"
    events = [{"kind": "interrupted", "message": "Stopped by SIGTERM"}, {"kind": "pruned", "message": "Was pruned"}]
    assert RunInfo(Path("run"), "resumable", 4, 8, 4, events=events).reason == "Was pruned"
    elements(page([found["new"]]))
    for name in ("resumable", "finished"):  # also where the summary is of an earlier version
        record = json.loads((runs[name] / "run.json").read_text())
        record["attempts"][-1]["model"] = "nano-gpt"
        (runs[name] / "run.json").write_text(json.dumps(record))
        assert read_run(runs[name]).model == "nano-gpt"
    assert found["new"].model == ""


def test_a_dry_run_never_looks_like_training(runs: dict[str, Path], told: Told) -> None:
    folder = runs["new"]
    assert "no complete checkpoint yet" in told("task=sample", f"run.dir={folder}", code=2)
    (folder / "summary.json").write_text(json.dumps({"accepted": True, "computes": False, "note": "nothing trained"}))
    info = read_run(folder)
    assert (info.state, info.reason) == ("dry_run", "nothing trained")
    for overrides in (
        ["task=sample", f"run.dir={folder}"],
        ["task=sample", f"run.dir={folder}", "sample.checkpoint=best"],
        ["task=export", f"run.dir={folder}", "export.file=x.pt"],
        [f"resume={folder}"],
    ):
        said = told(*overrides, code=2)
        assert "was a dry run on a device" in said and "nothing was trained" in said and said.count("\n") == 1


def test_task_runs(runs: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    assert main(["task=runs", f"runs.root={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and lines[0].split()[:3] == ["run", "state", "model"]
    assert next(line for line in lines if "/failed" in line).rstrip().endswith("Step 6: train/loss is nan.")
    assert main(["task=runs", f"runs.root={tmp_path}", "runs.state=new"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["task=runs", f"runs.root={tmp_path}/no"]) == 2


def test_bits_per_byte_are_in_reports_and_sweeps(runs: dict[str, Path], capsys: Any) -> None:
    with open(runs["finished"] / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 12, "val/loss": 1.0, "val/bits_per_byte": 1.2345}) + "\n")
    shown = page([read_run(runs["finished"])])
    assert "<td>val/bits_per_byte</td><td>1.234" in shown
    record = {**dict.fromkeys(_LAST), "job": 0, "state": "finished"}
    print_table([{**record, **columns("train", {"step": 12, "val/bits_per_byte": 1.2345})}], [], "best_val_loss")
    head, line = capsys.readouterr().out.splitlines()
    assert "val/bits_per_byte" in head and "1.2345" in line


def test_a_report_is_one_page_that_loads_nothing(runs: dict[str, Path], capsys: Any) -> None:
    assert main(["task=report", f"run={runs['finished']}"]) == 0
    target = runs["finished"] / "report.html"
    assert capsys.readouterr().out == f"{target}\n"
    text = target.read_text("utf-8")
    seen = elements(text)
    assert sum(tag == "svg" for tag, _ in seen) >= 5
    assert not {tag for tag, _ in seen} & {"script", "link", "img", "iframe", "object"}
    assert not any(key in ("src", "href") or key.startswith("on") for _, attrs in seen for key in attrs)
    assert "&lt;script&gt;" in text and "held-out loss" in text and "bigram" in text


def test_several_runs_compare(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "new folder" / "both.html"
    both = f"{runs['finished']},{runs['resumable']}"
    assert main(["task=report", f"run={both}", f"report.out='{out}'"]) == 0
    text = out.read_text("utf-8")
    elements(text)
    assert "The runs differ in their tokenizer" in text and "<td>train.steps</td>" in text
    assert min(text.count(f"stroke: {color}") for color in COLORS[:2]) >= 4


def test_short_words(tmp_path: Path) -> None:
    assert load(["task=report", "run=a b,c"]).report.run == ["a b", "c"]
    assert load(["task=report", "run=[x,y]"]).report.run == ["x", "y"]
    assert load(["supervise=true"]).supervise.enabled is True and load([]).supervise.enabled is None
    assert main(["task=report"]) == 2
    assert main(["task=report", f"run={tmp_path}"]) == 2


def test_charts() -> None:
    assert line_chart([], "t", "x", "y") == "" == line_chart([Series("a", [(1.0, float("nan"))])], "t", "x", "y")
    for points in ([(1.0, 2.0)], [(1.0, 2.0), (2.0, 2.0)], [(1e-6, -1.0), (1e9, 5e12)]):
        for log in (False, True):
            chart = line_chart([Series("<a> $x", points), Series("_b", points)], "t & u", "x_1", "$y$", log_x=log)
            elements(chart)
            shown = [re.sub("<[^>]*>", "", text) for text in re.findall("<text.*?</text>", chart)]
            assert {"t &amp; u", "&lt;a&gt; $x", "\u200b_b", "x_1", "$y$"} <= set(shown)  # as they are, no formulas
    assert line_chart([Series("a", [(-1.0, 2.0), (0.0, 2.0)])], "t", "x", "y", log_x=True) == ""
    named = line_chart([Series("a", [("sgd", 1.0), ("lion", 2.0)], line=False)], "t", "x", "y")
    assert ">sgd</text>" in named and ">lion</text>" in named
    points = [(float(i), float(i % 2)) for i in range(200)]
    charts = [line_chart([Series("loss", points[:count], noisy=True)], "t", "x", "y") for count in (200, 20)]
    assert ["loss, smoothed" in chart for chart in charts] == [True, False]


def test_a_chart_is_small_readable_anywhere_and_the_same_each_time() -> None:
    many = [(float(i), 5.0 if i == 4321 else 0.0) for i in range(10_000)]
    chart = line_chart([Series("a", many)], "t", "x", "y")
    assert len(chart) < 30_000 and chart == line_chart([Series("a", many)], "t", "x", "y")
    paths = re.findall(r'<path d="([^"]*)"[^>]*stroke: #4477aa', chart, re.DOTALL)
    path = next(found for found in paths if "L" in found)
    heights = [float(height) for height in re.findall(r"[ML] [-\d.]+ ([-\d.]+)", path)]
    assert max(heights) - min(heights) > 100  # the single spike is still there
    assert "currentColor" in chart and "#010203" not in chart and "#000000" not in chart
    head = chart[: chart.index(">")]
    assert "viewBox" in head and " width=" not in head and " height=" not in head


@pytest.mark.parametrize(("count", "size"), [(1, 3), (5, 3), (40, 7), (9, 40)])
def test_a_trend_is_the_mean_of_what_is_near(count: int, size: int) -> None:
    values = np.random.default_rng(count).random(count)
    wide = min(size, (count + 1) // 2)
    weights = np.maximum(wide - np.abs(np.subtract.outer(np.arange(count), np.arange(count))), 0)
    expected = (weights * values).sum(1) / weights.sum(1)
    assert np.allclose(smoothed(values.tolist(), size), expected, rtol=1e-12)
    assert np.allclose(smoothed([2.0] * count, size), 2.0)
