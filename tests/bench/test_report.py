"""JSON, the table and the notes of a result; the page of figures; and what a config is refused for."""

from __future__ import annotations

import dataclasses
import json
import statistics
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import compare, page, plot, recipes
from tests.bench.pretend import ONE_THREAD, case
from ttrain import ops
from ttrain.bench import contender, workload
from ttrain.bench.baselines import PyTorchContender
from ttrain.bench.contender import EngineContender
from ttrain.bench.report import notes, print_result, table
from ttrain.bench.results import CaseResult, Result, Row, numbers, ratio
from ttrain.bench.settings import size_problem
from ttrain.cli import main
from ttrain.core.spec import TensorSpec
from ttrain.device.settings import DeviceConfig
from ttrain.engine.base import EngineCounters
from ttrain.engine.settings import EngineConfig
from ttrain.graph import Graph
from ttrain.train.forecast.step_time import Rates


def result(static_ms: float = 0.5, threads: int = 2, precision: str = "fp32") -> dict[str, Any]:
    rows = [
        Row("eager", "PyTorch", status="ok", round_ms=[1.0, 1.1, 1.2], checked_against="eager", warm_s=[1.5, 1.0, 3.0]),
        Row("static", "ttrain", status="ok", round_ms=[static_ms] * 3, checked_against="eager"),
        Row("traced", "ttrain", status="failed", reason="no [bold] compiler | here."),
    ]
    device = {"name": "cpu", "hardware": "a processor", "threads": threads, "torch": "2"}
    case = CaseResult("char", "gpt: small", precision, "tokens", 100, 2e9, 7, device=device, others_cpu=0.5, rows=rows)
    return Result("gpt", {}, {"platform": "here", "versions": {}}, [case], complete=True).to_dict()


def cells(values: dict[str, Any], contender: str) -> dict[str, str]:
    titles, *lines = table(values)
    return next(dict(zip(titles, line, strict=True)) for line in lines if contender in line)


def test_the_table_says_what_the_json_says_and_has_no_empty_column() -> None:
    assert cells(result(), "static") == {
        "size": "char", "precision": "fp32", "contender": "static", "ms/step": "0.5", "quartiles": "", "x": "2.20",
        "95 %": "2.00 – 2.40", "per second": "200.0k tokens", "TFLOP/s": "4", "warm start": "", "same work": "yes",
    }  # fmt: skip
    assert cells(result(), "eager")["warm start"] == "1.5 s (1.0 – 3.0)"
    values = json.loads(json.dumps(result()))
    values["cases"][0]["rows"][1]["facts"] = {"roof_ms": 0.25, "bound_by": "compute"}
    found = cells(values, "static")
    assert (found["of roof"], found["bound by"]) == ("50.0 %", "compute")


def test_a_reader_is_told_what_to_make_of_it(capsys: Any) -> None:
    print_result(result())
    shown = capsys.readouterr().out
    for said in ("a processor", "2 threads", "50 %", "no [bold] compiler | here", "char is gpt: small"):
        assert said in shown
    assert "partial" not in shown
    assert any("partial" in note for note in notes({**result(), "complete": False}))


def test_numbers_of_a_sweep_are_named_by_what_differs() -> None:
    assert result()["numbers"] == pytest.approx({"eager_ms": 1.1, "static_ms": 0.5, "times_as_fast": 2.2})
    both = numbers([*result()["cases"], *result(0.25, precision="bf16")["cases"]])
    assert both["bf16 static_ms"] == 0.25 and both["times_as_fast"] == pytest.approx(2.2)
    assert both["bf16 times_as_fast"] == pytest.approx(4.4)


def test_quartiles_by_another_library() -> None:
    times = list(np.random.default_rng(0).lognormal(size=21))
    row = Row("static", "ttrain", status="ok", round_ms=times)
    found = CaseResult("a", "a", "fp32", "tokens", 1, 1.0, 1, rows=[row]).to_dict()["rows"][0]["step_ms"]
    expected = statistics.quantiles(times, n=4, method="inclusive")
    assert [found[name] for name in ("q1", "median", "q3")] == pytest.approx(expected)


def test_times_as_fast_is_the_other_over_the_own_where_both_took_part() -> None:
    assert ratio([2.0, 2.0, 2.0], [6.0, 6.0, 6.0]) == {"ratio": 3.0, "low": 3.0, "high": 3.0}
    assert ratio([1.0, 1.0], [2.0, 2.0, 99.0])["ratio"] == 2.0


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    """A true ratio of 1.5 under noise that both share: at least 85 of 100 intervals of 95 % contain it."""
    generator, hits = np.random.default_rng(5), 0
    for seed in range(100):
        shared = generator.lognormal(0, 0.3, 20)
        own, other = (shared * scale * generator.lognormal(0, 0.1, 20) for scale in (1.0, 1.5))
        found = ratio(list(own), list(other), seed)
        hits += found["low"] <= 1.5 <= found["high"]
    assert hits >= 85


def test_the_roof_adds_up_the_kernels_of_the_plan() -> None:
    graph = Graph()
    x, weight = graph.input("x", TensorSpec((100, 200))), graph.input("weight", TensorSpec((200, 300)))
    launched = [ops.matmul(x, weight).producer, ops.add(weight, weight).producer]
    contender: Any = EngineContender.__new__(EngineContender)
    contender.built = SimpleNamespace(plan=SimpleNamespace(launched=launched, arena_bytes=0))
    contender.engine = SimpleNamespace(counters=EngineCounters())
    moved = 4 * (100 * 200 + 200 * 300 + 100 * 300), 4 * 2 * 200 * 300
    for rate, expected in ((1e9, sum(moved) / 1e6), (1e7, 12e6 / 1e7 + moved[1] / 1e6)):
        assert contender.told(Rates(rate, 1e6))["roof_ms"] == pytest.approx(1e3 * expected)


def test_a_product_that_is_compiled_counts_for_the_rate_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(contender, "timing", lambda opened, compiler, nodes: nullcontext(lambda node: 1e-12))
    graph = Graph()
    x, small = graph.input("x", TensorSpec((100, 200))), graph.input("small", TensorSpec((200, 3)))
    launched = [ops.matmul(x, small).producer, ops.matmul(x, graph.input("large", TensorSpec((200, 300)))).producer]
    made: Any = EngineContender(case("4x8"), ONE_THREAD, EngineConfig())
    made.device = SimpleNamespace(name="cpu", describe=dict)
    made.built = SimpleNamespace(plan=SimpleNamespace(launched=launched, arena_bytes=0))
    made.engine = SimpleNamespace(counters=EngineCounters(), compiler="a compiler")
    assert made.facts(False)["facts"]["peak_flops"] == 2 * 100 * 200 * 300 / 1e-12
    made.engine.compiler = None
    assert made.facts(False)["facts"]["peak_flops"] == 2 * 100 * 200 * 300 / 1e-12  # kept, for everybody


CHIP = [
    ["bench=chip", "device=n300", "bench.size=[64x64x1,nano32]"],
    ["bench=wormhole", "device=n300", "bench.size=256x256"],
    ["bench=gpt", "device=n300", "bench.precision=bf16"],
]


@pytest.mark.parametrize("overrides", CHIP, ids=" ".join)
def test_without_a_card_the_output_says_that_a_model_told_the_times(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("ttrain.device.ttnn.runtime.environment.has_card", lambda: False)
    assert main(["task=bench", *overrides, f"bench.out={tmp_path}"]) == 0
    shown = capsys.readouterr()
    assert "cost model" in shown.out and "not from a card" in shown.out and "cost model" in shown.err
    values = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert values["complete"] and {case["basis"] for case in values["cases"]} == {"cost model"}
    rows = [row for case in values["cases"] for row in case["rows"]]
    assert all(row["side"] == "ttrain" and row["step_ms"]["median"] > 0 and row["facts"]["bound_by"] for row in rows)


def test_what_a_card_is_told_changes_what_the_model_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the cores take longer for large products; a narrower dtype does not."""
    monkeypatch.setattr("ttrain.device.ttnn.runtime.environment.has_card", lambda: False)
    found = {}
    for precision, cores in (("bf16", "[7,8]"), ("bf16", "[7,4]"), ("bf8", "[7,8]")):
        folder = tmp_path / f"{precision} {cores}"
        overrides = f"device=n300 bench.size=8192x2048x1 bench.precision={precision} device.core_grid={cores}".split()
        assert main(["task=bench", "bench=chip", "bench.engines=static", *overrides, f"bench.out={folder}"]) == 0
        found[precision, cores] = json.loads((folder / "results.json").read_text("utf-8"))["numbers"]["static_ms"]
    whole = found["bf16", "[7,8]"]
    assert 1.2 < found["bf16", "[7,4]"] / whole < 2.5 and found["bf8", "[7,8]"] <= whole


REFUSED = [
    ("bench=gtp", "bench=gtp"), ("bench.size=chra", "bench.size=chra"), ("bench.size=256", "bench.size=256"),
    ("bench.size=[2000000x5]", "bench.size=2000000x5"), ("bench.size=mm65536", "bench.size=mm65536"),
    ("bench.size=0x5", "bench.size=0x5"), ("bench.size=gpt2-0x5", "bench.size=gpt2-0x5"),
    ("bench.engines=[statik]", "bench.engines=statik"),
    ("bench.precision=[fp16]", "bench.precision=fp16"), ("bench.precision=[]", "bench.precision=[]"),
    ("bench.engines=[] bench.baselines=[]", "bench.engines=[] and bench.baselines=[]"),
    ("device=null", "device=null"), ("model.width=64", "model.width"), ("engine=traced", "engine=traced"),
    ("bench.rounds=2", "bench.rounds=2"),
    ("bench.ranks=3", "bench.ranks=3"),
    ("bench.ranks=2 bench.measure=[memory]", "bench.ranks=2"), ("device=p150", "device=p150"),
    ("bench=memory device=n150", "bench.measure"), ("bench.precision=[bf8] device=cpu", "bench.precision=bf8"),
    ("device=cpu device.dispatch=eth", "device.dispatch"), ("bench.measure=[stop]", "bench.measure=stop"),
    ("device=n300 bench.engines=[]", "bench.engines=[]"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "key"), REFUSED, ids=[overrides for overrides, _ in REFUSED])
def test_a_bad_request_is_one_line_and_exit_code_2(
    overrides: str, key: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ttrain.device.ttnn.runtime.environment.has_card", lambda: False)
    assert main(["task=bench", *overrides.split()]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"ttrain: {key}") and shown.err.count("\n") == 1
    assert not shown.out and not list(tmp_path.iterdir())


def test_a_transformer_may_be_given_its_rows_and_context() -> None:
    work, given = workload.work_of("gpt2-16x1024"), workload.NAMED["gpt2"]
    assert size_problem("gpt2-16x1024") is None and (work.rows, work.units_per_step) == (16, 16384)
    assert work.model == dataclasses.replace(given.model, context=1024) and work.optimizer == given.optimizer


@pytest.mark.parametrize(("name", "mode"), [("compile", None), ("reduce_overhead", "reduce-overhead")])
def test_compiled_baselines_have_their_mode(name: str, mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    monkeypatch.setattr(torch, "compile", lambda model, mode=None: modes.append(mode) or model)
    contender = PyTorchContender(name, workload.Case("2x3", "fp32", 0), DeviceConfig("cpu", threads=1))
    contender.build()
    assert modes == [mode] and contender.step(1).isfinite()


# the page of figures in benchmarks/


def test_the_page_is_what_the_command_writes_and_shows_every_result() -> None:
    text = page.PAGE.read_text("utf-8")
    assert page.written(text) == text
    shown = {name for found in page.MARK.finditer(text) for name in found[2].split()}
    assert shown == {path.stem for path in page.RESULTS.glob("*.json")}
    assert len(text.split()) <= 2_500


def test_a_table_has_a_line_per_contender_or_a_column() -> None:
    text = page.written("<!-- table mlp_tiny: contender, x -->\nold\n<!-- /table -->\n")
    assert "| traced | 7.63 |" in text and "old" not in text and text.count("2026-11-29") == 1
    text = page.written("<!-- table mlp_tiny: ms/step, x -->\n<!-- /table -->\n")
    assert "| tiny | fp32 | 0.177 (1.00) |" in text


def test_the_readme_has_the_table_of_recipes() -> None:
    """Each result is of a recipe, has a row, and a log that ends with the loss in it."""
    text = recipes.README.read_text("utf-8")
    assert recipes.written(text) == text
    for file in recipes.RESULTS.glob("*.json"):
        assert (recipes.ROOT.parent / "recipes" / f"{file.stem}.yaml").is_file()
        lines = [json.loads(line) for line in file.with_suffix(".jsonl").read_text("utf-8").splitlines()]
        assert lines[-1]["val/loss"] == json.loads(file.read_text("utf-8"))["val/loss"]


def test_a_log_keeps_evaluations_and_some_of_training() -> None:
    lines = [json.dumps({"step": step, "train/loss": 1.0}) for step in range(1, 131)]
    lines.insert(7, json.dumps({"step": 7, "val/loss": 2.0}))
    kept = [json.loads(line) for line in recipes.thinned(lines)]
    assert [line["step"] for line in kept if "val/loss" in line] == [7]
    assert [line["step"] for line in kept if "train/loss" in line] == list(range(1, 131, 3))


def test_a_plot_of_what_was_timed(tmp_path: Path) -> None:
    plot.draw(page.result_of("gpt_char"), tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text("utf-8").count("</svg>") == 1


def test_two_results_are_compared_and_what_else_changed_is_named(tmp_path: Path) -> None:
    files = [tmp_path / "earlier.json", tmp_path / "later.json"]
    for file, values in zip(files, (result(), result(static_ms=0.25, threads=1)), strict=True):
        file.write_text(json.dumps(values), "utf-8")
    found = compare.compared(*(compare.read(str(file)) for file in files))
    assert found.rows[1] == ("char fp32 static", "0.5", "0.25", "2.00")
    assert any("2 earlier" in note and "1 later" in note and "threads" in note for note in found.notes)
    for content in ('{"format": 1}', "[]", '{"bench": "gpt"}'):
        files[0].write_text(content, "utf-8")
        with pytest.raises(SystemExit):
            compare.read(str(files[0]))
