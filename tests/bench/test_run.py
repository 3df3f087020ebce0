"""The order of things, what a row says in each case, and that nothing found is lost."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.bench.pretend import (
    GPT_CONFIG,
    ONE_THREAD,
    Processes,
    Script,
    alone_event,
    built_events,
    environment_event,
    quick,
    round_event,
)  # fmt: skip
from ttrain.bench import studies
from ttrain.bench.process import WorkerFailed
from ttrain.bench.results import Result
from ttrain.bench.run import Bench
from ttrain.bench.settings import BenchConfig, GPTBenchConfig
from ttrain.cli import main
from ttrain.core.errors import UserError
from ttrain.core.files import to_json
from ttrain.engine.settings import EngineConfig
from ttrain.tasks import bench as task


class Silent:
    """Progress that shows nothing."""

    def stage(self, label: str) -> Any:
        return nullcontext(SimpleNamespace(tell=lambda *_: None, done=lambda _: None))


def bench(config: GPTBenchConfig, script: Script) -> tuple[Bench, Processes, list[int]]:
    processes, saved = Processes(script), []
    result = Result("gpt", "gpt_char", {}, {"command": "a command"})
    made = Bench(studies.gpt(config, 1), config, ONE_THREAD, EngineConfig(), [], result, Silent(), start=processes)  # type: ignore[arg-type]
    made.save = lambda: saved.append(len(to_json(result.to_dict())))
    return made, processes, saved


def only(**changes: Any) -> GPTBenchConfig:
    return replace(GPT_CONFIG, precision=["fp32"], engines=["static"], baselines=["eager", "compile"], **changes)


def test_starts_first_then_turns_with_all_compiled_code() -> None:
    made, processes, saved = bench(only(startup=True), quick)
    made.run()
    steps = [(do, names) for do, names, _ in processes.orders]
    assert steps == [
        ("alone", ["eager"]),
        ("alone", ["compile"]), ("alone", ["compile"]),  # cold, warm
        ("alone", ["static"]),
        ("together", ["eager", "compile", "static"]),
    ]  # fmt: skip
    caches = [environment["TORCHINDUCTOR_CACHE_DIR"] for _, _, environment in processes.orders if environment]
    assert caches[1] == caches[2] != caches[0]
    assert len(set(caches)) == 4
    (case,) = made.result.cases
    assert [(row.cold_s, row.warm_s) for row in case.rows.values()] == [(None, 1.0), (1.0, 1.0), (None, 1.0)]
    assert made.result.complete
    assert len(saved) == 5
    assert processes.closed == 5


def test_numbers_of_a_row() -> None:
    made, _, _ = bench(only(), quick)
    made.run()
    values = made.result.to_dict()["cases"][0]
    rows = {row["contender"]: row for row in values["rows"]}
    assert values["best_baseline"] == "eager"
    static = rows["static"]
    assert static["step_ms"]["median"] == pytest.approx(0.5)  # the median of 0.5, 0.5 and 1.5
    assert static["items_per_s"] == pytest.approx(12 * 64 / 0.5e-3)
    assert static["mfu"] == pytest.approx(2e6 / 0.5e-3 / 1e11)
    assert static["times_as_fast_as"]["eager"]["ratio"] == pytest.approx(2.0)
    line = list(csv.DictReader(io.StringIO(made.result.to_csv())))[2]
    assert (line["contender"], line["side"], line["status"], line["rounds"]) == ("static", "ttrain", "ok", "20")


def test_turns_beside_a_neighbour_have_a_row_that_is_compared_with_all() -> None:
    def script(order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        assert order["beside"] == "busy"
        yield environment_event()
        yield from built_events("eager", "PyTorch")
        yield from built_events("static", "ttrain")
        for name in ("eager", "static"):
            yield {"event": "seated", "contender": name, "like": name}
            yield {"event": "seated", "contender": f"{name} beside", "like": name}
        for number in range(3):
            seconds = {"eager": 2e-3, "static": 1e-3, "eager beside": 8e-3, "static beside": 2e-3}
            yield round_event(number, **seconds)

    made, _, _ = bench(only(beside="busy"), script)
    made.run()
    rows = {row["contender"]: row for row in made.result.to_dict()["cases"][0]["rows"]}
    assert rows["static beside"]["side"] == "ttrain"
    assert rows["static"]["times_as_fast_as"]["static beside"]["ratio"] == pytest.approx(2.0)
    assert rows["static beside"]["times_as_fast_as"]["eager beside"]["ratio"] == pytest.approx(4.0)


def test_every_precision_is_a_case_and_a_name_given_twice_counts_once() -> None:
    config = replace(only(), precision=["bf16", "fp32", "bf16"], engines=["static", "static"], baselines=[])
    study = studies.gpt(config, 1)
    assert [case.precision for case in study.cases] == ["bf16", "fp32"]
    assert (study.contenders, study.reference) == (("static",), "static")


def test_other_work_makes_a_row_invalid_and_it_is_never_compared() -> None:
    def script(order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for event in quick(order):
            if event["event"] == "checked" and event["contender"] == "compile":
                event = built_events("compile", "PyTorch", "losses differ")[1]
            if event["event"] == "round":
                event = round_event(0, eager=1e-3, compile=1e-9, static=1e-3)
            yield event

    made, _, _ = bench(only(), script)
    made.run()
    (case,) = made.result.cases
    assert (case.rows["compile"].status, case.rows["compile"].reason) == ("invalid", "losses differ")
    assert case.best_baseline is case.rows["eager"]
    assert case.ratio(case.rows["static"], case.rows["compile"]) is None


def test_a_contender_that_cannot_start_takes_no_further_part_and_says_why() -> None:
    def script(order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if order["contenders"] == ["compile"]:
            yield {"event": "failed", "contender": "compile", "reason": "no working C++ compiler"}
        else:
            yield from quick(order)

    made, processes, _ = bench(only(startup=True), script)
    made.run()
    row = made.result.cases[0].rows["compile"]
    assert (row.status, row.reason) == ("failed", "no working C++ compiler")
    assert [names for _, names, _ in processes.orders] == [["eager"], ["compile"], ["static"], ["eager", "static"]]
    assert made.result.complete


def test_a_process_that_dies_fails_its_rows_only() -> None:
    def script(order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if order["contenders"] == ["compile"]:
            raise WorkerFailed("killed by SIGSEGV")
        yield from quick(order)

    made, _, _ = bench(only(startup=True), script)
    made.run()
    assert [row.status for row in made.result.cases[0].rows.values()] == ["ok", "failed", "ok"]


def test_a_device_without_values_is_the_users_mistake() -> None:
    made, _, _ = bench(only(), lambda order: iter([{"event": "refused", "reason": "computes no values"}]))
    with pytest.raises(UserError, match="computes no values"):
        made.run()


def test_what_does_not_fit_into_memory_together_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4 * 2**30))

    def script(order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if order["do"] == "alone":
            yield alone_event(order["contenders"][0], "ttrain", 1.0, gigabytes=1.5)
        else:
            yield from quick(order)

    config = replace(only(startup=True), engines=["dynamic", "static"])
    made, processes, _ = bench(config, script)
    made.run()
    rows = made.result.cases[0].rows
    assert (rows["dynamic"].status, rows["compile"].status) == ("left out", "left out")
    assert "all together need 6.0 GiB, 3.4 GiB can be used" in str(rows["dynamic"].reason)
    assert processes.orders[-1][1] == ["eager", "static"]


def interrupted(order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield environment_event()
    for name, side in (("eager", "PyTorch"), ("static", "ttrain")):
        yield from built_events(name, side)
    yield round_event(0, eager=1e-3, static=5e-4)
    yield round_event(1, eager=1e-3, static=5e-4)
    raise KeyboardInterrupt


def test_ctrl_c_keeps_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    processes = Processes(interrupted)
    monkeypatch.setattr(task, "Bench", partial(Bench, start=processes))
    overrides = [
        "bench.startup=false",
        "bench.engines=[static]",
        "bench.baselines=[eager]",
        f"bench.out={tmp_path / 'x'}",
    ]
    assert main(["task=bench", "bench=gpt", *overrides]) == 130
    values = json.loads((tmp_path / "x" / "results.json").read_text("utf-8"))
    assert not values["complete"]
    assert [len(row["round_ms"]) for row in values["cases"][0]["rows"]] == [2, 2]
    for name in ("results.csv", "results.md", "plot.png"):
        assert (tmp_path / "x" / name).stat().st_size > 0
    shown = capsys.readouterr()
    assert "Interrupted: the results are partial." in shown.out
    assert "partial results are in" in shown.err
    assert processes.closed == 1


def test_settings_of_both_benchmarks_share_their_keys() -> None:
    assert set(BenchConfig.__dataclass_fields__) < set(GPTBenchConfig.__dataclass_fields__)
