"""Files and tables, and comparison with an earlier file."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttrain import ops
from ttrain.bench import folder as folders
from ttrain.bench.engines import EngineContender
from ttrain.bench.expected import roof_facts
from ttrain.bench.plot import draw
from ttrain.bench.report import markdown, notes, print_result
from ttrain.bench.results import CaseResult, Result, Row, read_earlier
from ttrain.bench.tables import roof_table, speed_table
from ttrain.cli import main
from ttrain.core.errors import UserError
from ttrain.core.spec import TensorSpec
from ttrain.graph import Graph
from ttrain.train.forecast.peak import Rates
from ttrain.train.runs.results_folder import claim


def result(static_ms: float = 0.5, threads: int = 2) -> Result:
    rows = {
        "eager": Row("eager", "PyTorch", status="ok", round_ms=[1.0, 1.1, 1.2], fastest_ms=0.9, peak_bytes=2**30, base_bytes=2**29, warm_s=1.5),  # noqa: E501
        "static": Row("static", "ttrain", status="ok", round_ms=[static_ms] * 3, fastest_ms=static_ms),
        "traced": Row("traced", "ttrain", status="failed", reason="no [bold] compiler | here."),
    }  # fmt: skip
    device = {"name": "cpu", "hardware": "a processor", "threads": threads, "torch": "2"}
    case = CaseResult("gpt: small", "fp32", "tokens", 100, {}, rows, device, others_cpu=0.5)
    environment = {"command": "python -m ttrain task=bench", "platform": "here", "versions": {}, "device": device}
    return Result("gpt", "gpt_char", {}, environment, [case], complete=True)


def test_files_say_the_same(tmp_path: Path) -> None:
    folders.save(result(), tmp_path)
    values = json.loads((tmp_path / "results.json").read_text("utf-8"))
    lines = list(csv.DictReader(io.StringIO((tmp_path / "results.csv").read_text("utf-8"))))
    for row, line in zip(values["cases"][0]["rows"], lines, strict=True):
        assert row["contender"] == line["contender"]
        median = None if row["step_ms"] is None else str(row["step_ms"]["median"])
        assert (median or "") == line["median_ms"]
    assert lines[1]["times_as_fast"] == str(2.2)
    text = (tmp_path / "results.md").read_text("utf-8")
    assert "| static | 0.5 | 0.5 – 0.5 | 2.20 | 2.00 – 2.40 |" in text
    assert "| static | 2.20 (2.00 – 2.40) |  |" in text
    assert text.startswith("```sh\npython -m ttrain task=bench\n```\n")


def test_a_reader_is_told_what_to_make_of_it(capsys: Any, tmp_path: Path) -> None:
    print_result(result(), None, tmp_path)
    shown = capsys.readouterr().out
    assert "cpu: a processor, 2 threads, torch 2." in shown
    assert "Other processes used 50 % of the CPU cores" in shown
    assert "traced: failed, no [bold] compiler | here." in shown
    assert "bench.compare=" in shown


def test_what_kernels_take_at_the_roof_stands_beside_the_step() -> None:
    case = result().cases[0]
    assert roof_table(case) == []
    case.rows["static"].facts = {
        "roof": {"flops": 3 * 10**9, "nbytes": 2**30, "flops_ms": 0.2, "nbytes_ms": 0.1, "ms": 0.25}
    }
    assert roof_table(case)[1:] == [["static", "3.0G", "0.2", "1.0 GiB", "0.1", "0.25", "0.5", "50 %"]]


def test_roof_facts_add_up_the_kernels_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttrain.train.forecast.peak.measured_rates", lambda *_: Rates(1e9, 1e6))
    graph = Graph()
    x, weight = graph.input("x", TensorSpec((100, 200))), graph.input("weight", TensorSpec((200, 300)))
    launched = [ops.matmul(x, weight).producer, ops.add(weight, weight).producer]
    contender: Any = EngineContender.__new__(EngineContender)
    contender.built = SimpleNamespace(plan=SimpleNamespace(launched=launched))
    device: Any = SimpleNamespace(name="cpu")
    roof = roof_facts(contender, device, "fp32", 0)["roof"]
    moved = 4 * (100 * 200 + 200 * 300 + 100 * 300), 4 * 2 * 200 * 300
    assert (roof["flops"], roof["nbytes"]) == (2 * 100 * 200 * 300 + 200 * 300, sum(moved))
    # The product takes its bytes, so does the sum; with slower operations the product takes those.
    assert roof["ms"] == pytest.approx(1e3 * sum(moved) / 1e6)
    monkeypatch.setattr("ttrain.train.forecast.peak.measured_rates", lambda *_: Rates(1e7, 1e6))
    roof = roof_facts(contender, device, "fp32", 0)["roof"]
    assert roof["ms"] == pytest.approx(1e3 * (12e6 / 1e7 + moved[1] / 1e6))


def test_a_comparison_shows_both_and_names_what_else_changed(tmp_path: Path) -> None:
    folders.save(result(), tmp_path)
    earlier = read_earlier(str(tmp_path / "results.json"), "gpt")
    now = result(static_ms=0.25, threads=1)
    table = speed_table(now.cases[0], earlier)
    places = {title: number for number, title in enumerate(table[0])}
    assert [line[places["earlier ms"]] for line in table[1:]] == ["1.1", "0.5", ""]
    assert [line[places["x earlier"]] for line in table[1:]] == ["1.00", "2.00", ""]
    assert any("threads differ: 2 earlier, 1 now." in note for note in notes(now, now.cases[0], earlier))
    assert "earlier ms" in markdown(now, earlier)
    then = dataclasses.replace(earlier, environment={"device": {"name": "n150", "mode": "cost model"}})
    now.cases[0].device = {**now.cases[0].device, "name": "cpu"}
    told = list(notes(now, now.cases[0], then))
    assert any("n150, cost model earlier, cpu, measured now" in note for note in told)
    assert not any("None earlier, 1 now" in note for note in told)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda values: {"format": 1}, "has format 1, this ttrain reads format 2."),
        (lambda values: [], "is not a results.json of task=bench."),
        (lambda values: {**values, "cases": 3}, "is not a results.json of task=bench."),
        (lambda values: {**values, "bench": "mlp"}, "holds bench=mlp, this is bench=gpt."),
    ],
)
def test_a_file_that_cannot_be_compared_with(tmp_path: Path, change: Callable[[Any], Any], said: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(change(result().to_dict())), "utf-8")
    with pytest.raises(UserError, match=r"^bench.compare=") as caught:
        read_earlier(str(path), "gpt")
    assert said in str(caught.value)


def test_folders_are_never_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    now = datetime(2030, 1, 2, 3, 4, 5)
    made = [claim("bench.out", None, folders.ROOT, "gpt_char", now) for _ in range(2)]
    assert [str(path) for path in made] == [f"outputs/bench/2030-01-02/03-04-05_gpt_char{end}" for end in ("", "_2")]
    folders.save(result(), claim("bench.out", "mine", folders.ROOT, "x", now))
    with pytest.raises(UserError, match="holds results already"):
        claim("bench.out", "mine", folders.ROOT, "x", now)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"can't be written"):
        claim("bench.out", "file/inside", folders.ROOT, "x", now)


def test_a_plot_of_what_was_timed(tmp_path: Path) -> None:
    assert draw(result(), tmp_path / "plot.png") is None
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    nothing = result()
    nothing.cases[0].rows = {"traced": Row("traced", status="failed")}
    assert draw(nothing, tmp_path / "none.png") == "nothing was timed"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["bench=gtp"], "bench=gtp: no such option. Did you mean 'gpt'?"),
        (["bench.size=chra"], "bench.size=chra: no such choice. Did you mean 'char'?"),
        (["bench=mlp", "bench.size=char"], "bench.size=char: no such choice. Valid: 1024x512, 256, tiny."),
        (["bench.engines=[statik]"], "bench.engines=statik: no such choice. Did you mean 'static'?"),
        (["bench.precision=[fp16]"], "bench.precision=fp16: no such choice."),
        (["bench.precision=[]"], "bench.precision=[]: name at least one"),
        (["bench.engines=[]", "bench.baselines=[]"], "bench.engines=[] and bench.baselines=[]: nobody takes part."),
        (["bench.compare=missing.json"], "bench.compare=missing.json: can't be read (No such file or directory)."),
        (["device=null"], "device=null: computes nothing"),
        (["model.width=64"], "model.width: task=bench does not read it; the keys of bench"),
        (["engine=traced"], "engine=traced: task=bench takes its engines from bench.engines."),
        (["bench.rounds=2"], "bench.rounds=2: must be at least 3."),
    ],
)
def test_a_bad_request_is_one_line_and_exit_code_2(
    overrides: list[str], said: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["task=bench", *overrides]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"ttrain: {said}")
    assert shown.err.count("\n") == 1
    assert not shown.out
    assert not list(tmp_path.iterdir())
