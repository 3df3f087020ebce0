"""Listing runs with their state, the HTML report, and the charts in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from ttrain.cli import main
from ttrain.config.compose import load
from ttrain.core.errors import CheckpointError
from ttrain.sweep.outcome import _LAST, columns, print_table
from ttrain.tasks.report import page
from ttrain.train.logging.chart import COLORS, Series, line_chart, smoothed
from ttrain.train.logging.metrics import Events
from ttrain.train.runs.run_directory import RunInfo, find_runs, read_run


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


def test_a_dry_run_never_looks_like_training(runs: dict[str, Path], capsys: Any) -> None:
    folder = runs["new"]
    assert main(["task=sample", f"run.dir={folder}"]) == 2
    assert "no complete checkpoint yet" in capsys.readouterr().err
    (folder / "summary.json").write_text(json.dumps({"accepted": True, "computes": False, "note": "nothing trained"}))
    info = read_run(folder)
    assert (info.state, info.reason) == ("dry_run", "nothing trained")
    for overrides in (
        ["task=sample", f"run.dir={folder}"],
        ["task=sample", f"run.dir={folder}", "sample.checkpoint=best"],
        ["task=export", f"run.dir={folder}", "export.file=x.pt"],
        [f"resume={folder}"],
    ):
        assert main(overrides) == 2
        said = capsys.readouterr().err.strip()
        assert "was a dry run on a device" in said and "nothing was trained" in said and "\n" not in said


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
