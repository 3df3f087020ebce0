"""The studies beyond one size: sweeps, products, starts, memory, and ways to use a chip."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.bench.pretend import ONE_THREAD, Processes, Script, alone_event, quick
from ttrain.bench import settings, studies
from ttrain.bench.modelled import modelled
from ttrain.bench.process import events
from ttrain.bench.results import Result
from ttrain.bench.run import Bench
from ttrain.bench.settings import BenchConfig
from ttrain.bench.workload import Case, MLPWork, ProductWork
from ttrain.cli import main
from ttrain.device.family import Variant, family_of
from ttrain.device.settings import DeviceConfig
from ttrain.device.ttnn.settings import TenstorrentConfig
from ttrain.engine.settings import EngineConfig

SMALL_PRODUCT = ProductWork(40)


class Silent:
    """Progress that shows nothing."""

    def stage(self, label: str) -> Any:
        return nullcontext(SimpleNamespace(tell=lambda *_: None, done=lambda _: None))


def bench(
    config: BenchConfig, study: studies.Study, script: Script, device: DeviceConfig = ONE_THREAD
) -> tuple[Bench, Processes]:
    processes = Processes(script)
    result = Result(config.name, study.label, {}, {"command": "a command"})
    return Bench(study, config, device, EngineConfig(), [], result, Silent(), start=processes), processes  # type: ignore[arg-type]


def order(do: str, case: Case, contender: str, **changes: Any) -> dict[str, Any]:
    return {
        "do": do, "case": case.to_dict(), "contenders": [contender], "plugins": [], "device": vars(ONE_THREAD),
        "engine": {"name": "static", "rematerialize": True}, "reference": contender, "seconds": 0.05, "rounds": 3,
        **changes,
    }  # fmt: skip


def test_every_study_has_an_option_and_a_function() -> None:
    for name, config in settings.STUDIES.items():
        study = getattr(studies, name)(config(), 1)
        assert study.name == name == config().name and study.cases
        assert study.kind != "chip" or len(study.variants) == len(study.cases)


def test_a_sweep_has_every_pair_once() -> None:
    config = settings.ShapesBenchConfig(batch=[8, 8, 32], dim=[64, 16])
    study = studies.shapes(config, 1)
    assert [(case.work.rows, case.work.width) for case in study.cases if isinstance(case.work, MLPWork)] == [
        (8, 64), (8, 16), (32, 64), (32, 16),
    ]  # fmt: skip
    depth = studies.depth(settings.DepthBenchConfig(layers=[1, 3], dim=[16], batch=5), 1)
    assert [case.work for case in depth.cases] == [MLPWork(1, 16, 5), MLPWork(3, 16, 5)]


def test_a_sweep_is_one_table_with_ours_against_the_best_of_pytorch(tmp_path: Path, capsys: Any) -> None:
    from ttrain.bench.report import markdown, print_result

    config = settings.ShapesBenchConfig(batch=[8, 16], dim=[16], engines=["static"], baselines=["eager"])
    made, _ = bench(config, studies.shapes(config, 1), quick)
    made.run()
    print_result(made.result, None, tmp_path)
    shown = capsys.readouterr().out
    assert shown.count("mlp: 2 layers, 16 wide, batch") == 2 and "x static" in shown
    line = next(line for line in markdown(made.result, None).splitlines() if "batch 16" in line)
    assert [cell.strip() for cell in line.strip("|").split("|")][1:] == ["1", "0.5", "2.00"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["eager", "static", "dynamic"])
def test_a_product_is_that_of_numpy(name: str, precision: str) -> None:
    from ttrain.bench.worker import make_contender

    contender = make_contender(name, Case(SMALL_PRODUCT, precision, 1), ONE_THREAD, EngineConfig())
    contender.build()
    contender.step(1)
    a, b = SMALL_PRODUCT.factors(1)
    expected, found = a.astype(np.float64) @ b, contender.weight("product")
    bound = 1e-5 if precision == "fp32" else 2e-2
    assert np.abs(found - expected).max() < bound * np.abs(expected).max()
    assert contender.loss(None) == pytest.approx(np.abs(expected).sum(), rel=bound)
    contender.close()


def test_products_are_timed_with_their_operations(tmp_path: Path) -> None:
    case = Case(SMALL_PRODUCT, "fp32", 1)
    found = list(events({**order("together", case, "static"), "contenders": ["eager", "static"]}, tmp_path / "p"))
    facts = next(event for event in found if event["event"] == "environment")
    assert facts["flops_per_step"] == 2 * 40**3 and facts["peak_flops"] > 1e6
    assert [event["problem"] for event in found if event["event"] == "checked"] == [None, None]


def test_memory_of_a_process_of_its_own_beside_what_was_planned(tmp_path: Path) -> None:
    (found,) = events(order("memory", Case(MLPWork(2, 256, 512), "fp32", 1), "static"), tmp_path / "p")
    assert found["event"] == "memory"
    # Two weights and two biases with their gradients, and at least the batch and one layer's activations.
    assert found["planned_bytes"] > 4 * (4 * 256 * 256 + 3 * 512 * 256)
    assert 0 < found["steady_bytes"] - found["base_bytes"] < 4 * found["planned_bytes"]
    (other,) = events(order("memory", Case(MLPWork(2, 64, 32), "fp32", 1), "eager"), tmp_path / "q")
    assert other["planned_bytes"] is None


def memory_script(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    name = given["contenders"][0]
    if given["do"] == "memory":
        planned = 90 * 2**20 if name == "static" else None
        yield {
            "event": "memory", "side": "ttrain" if planned else "PyTorch", "description": "", "base_bytes": 2**20,
            "peak_bytes": 131 * 2**20, "steady_bytes": 101 * 2**20, "planned_bytes": planned,
        }  # fmt: skip
        return
    yield from quick(given)
    if given["planned"]:
        yield {"event": "planned", "contender": "static", "step_ms": 0.6}


def test_planned_stands_beside_measured(tmp_path: Path) -> None:
    from ttrain.bench.plot import draw
    from ttrain.bench.report import markdown

    config = settings.MemoryBenchConfig(work=["mlp"], engines=["static"])
    made, processes = bench(config, studies.memory(config, 1), memory_script)
    made.run()
    assert [do for do, _, _ in processes.orders] == ["memory", "memory", "together"]
    line = next(line for line in markdown(made.result, None).splitlines() if line.startswith("| static | 90.0 MiB"))
    assert "| 100.0 MiB | -10 % | 130.0 MiB | 131.0 MiB | 0.6 | 0.5 | +20 % |" in line
    assert draw(made.result, tmp_path / "plot.png") is None


def test_starts_are_repeated_in_turns_with_empty_caches(tmp_path: Path) -> None:
    from ttrain.bench.plot import draw
    from ttrain.bench.tables import startup_table

    seconds = iter([5.0, 1.0, 9.0, 3.0, 7.0, 2.0])

    def script(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        yield alone_event(given["contenders"][0], "PyTorch", next(seconds))

    config = settings.StartupBenchConfig(engines=[], baselines=["compile"], repeats=3)
    made, processes = bench(config, studies.startup(config, 1), script)
    made.run()
    caches = [environment["TORCHINDUCTOR_CACHE_DIR"] for _, _, environment in processes.orders if environment]
    assert len(caches) == 6 and len(set(caches)) == 3
    row = made.result.cases[0].rows["compile"]
    assert (row.cold_s, row.warm_s, row.cold_samples_s) == (7.0, 2.0, [5.0, 9.0, 7.0])
    assert startup_table(made.result.cases[0])[1][1:5] == ["7.0 s", "5.0 – 9.0", "2.0 s", "1.0 – 3.0"]
    assert draw(made.result, tmp_path / "plot.png") is None


def test_variants_on_a_card_open_it_otherwise_in_processes_of_their_own() -> None:
    seen = []

    def script(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        seen.append((given["contenders"][0], given["device"]["dispatch"], given["device"]["core_grid"]))
        yield from quick(given)

    config = settings.CoreGridBenchConfig(engines=["static"])
    made, processes = bench(config, studies.core_grid(config, 1), script, TenstorrentConfig(name="n300"))
    made.run()
    assert sorted(seen, key=str) == sorted([("static", "auto", None), ("static", "auto", [7, 4])] * 3, key=str)
    assert processes.closed == 6
    assert [len(row.round_ms) for row in made.result.cases[0].rows.values()] == [60, 60]


def test_what_a_variant_changes() -> None:
    card = TenstorrentConfig(name="n300")
    family = family_of(card)
    assert family.variant(card, Variant("x", "static", "eth")) == replace(card, dispatch="eth")
    half = family.variant(card, Variant("x", "static", "eth", "half"))
    assert isinstance(half, TenstorrentConfig) and half.core_grid == [8, 4]
    assert family.variant(card, Variant("x", "static", None, "both")) is None


CHIP = [
    ["bench=dispatch", "bench.size=[1024]"],
    ["bench=core_grid"],
    ["bench=subdevices", "device=n150"],
    ["bench=mlp", "device=n300"],
    ["bench=shapes", "device=n300", "bench.batch=[256]", "bench.dim=[256]"],
    ["bench=matmul", "device=n300", "bench.size=[512]"],
    ["bench=gpt", "device=n300", "bench.precision=[bf16]"],
]


@pytest.mark.parametrize("overrides", CHIP, ids=" ".join)
def test_without_a_card_every_output_says_that_a_model_told_the_times(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("ttrain.device.ttnn.runtime.environment.has_card", lambda: False)
    monkeypatch.setattr("ttrain.device.ttnn.family.find_spec", lambda name: None)
    page, out = tmp_path / "page.md", tmp_path / "out"
    assert main(["task=bench", *overrides, f"bench.out={out}", f"bench.markdown={page}"]) == 0
    shown = capsys.readouterr()
    assert "from the cost model" in shown.out and "not from a card" in shown.out and "cost model" in shown.err
    values = json.loads((out / "results.json").read_text("utf-8"))
    assert values["complete"] and {case["basis"] for case in values["cases"]} == {"cost model"}
    lines = list(csv.DictReader((out / "results.csv").read_text("utf-8").splitlines()))
    assert {line["basis"] for line in lines} == {"cost model"} and all(float(line["median_ms"]) > 0 for line in lines)
    assert "not from a card" in (out / "results.md").read_text("utf-8") and "not from a card" in page.read_text("utf-8")
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_batch_on_the_card_leaves_scalars_of_the_hosts_part() -> None:
    config = settings.ShapesBenchConfig(batch=[4096], dim=[2048], precision=["bf16_pure"])
    bounds = {}
    for resident in (False, True):
        study = studies.shapes(replace(config, resident_batch=resident), 1)
        found = modelled(study.cases[0], study.variants[0], TenstorrentConfig(name="n300"))
        bounds[resident] = found.rows["traced"].round_ms[0], found.rows["traced"].facts["bound_by"]
    assert bounds[True][0] < bounds[False][0] and bounds[True][1] == "bandwidth"


def test_studies_of_a_chip_take_precisions_and_hold_batches_but_not_factors() -> None:
    config = settings.DispatchBenchConfig(precision=["bf16_pure", "bf8"], resident_batch=True, size=[64])
    cases = studies.dispatch(config, 1).cases
    assert [(case.work.kind, case.precision, case.resident) for case in cases] == [
        (kind, precision, kind != "product") for kind in ("mlp", "gpt", "product") for precision in ("bf16_pure", "bf8")
    ]


def test_block_floats_reach_the_device_and_the_cost_of_a_product() -> None:
    config = settings.SubdevicesBenchConfig(size=[4096], precision=["bf16", "bf8"])
    study = studies.subdevices(config, 1)
    wide, narrow = (modelled(case, ways, TenstorrentConfig(name="n300")).rows["full, 1 queue"].round_ms[0] for
                    case, ways in zip(study.cases, study.variants, strict=True))  # fmt: skip
    assert narrow <= wide


def test_a_mocked_board_tells_host_time_only_and_says_so(tmp_path: Path) -> None:
    pytest.importorskip("ttnn", reason="the package ttnn is not installed")
    case = Case(MLPWork(2, 64, 32), "bf16_pure", 1, resident=True)
    device = vars(TenstorrentConfig(name="n300", mode="mock"))
    (found,) = events(order("host", case, "static", device=device), tmp_path / "p")
    assert found["event"] == "host", found
    assert len(found["ms"]) == 5 and all(0 < ms < 1000 for ms in found["ms"])
    assert found["device"]["mode"] == "mock" and "values are not computed" in found["device"]["note"]


def test_mocked_rows_are_labelled() -> None:
    def script(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        assert given["device"]["mode"] == "mock" and given["do"] == "host"
        yield {"event": "host", "contender": given["contenders"][0], "ms": [2.0, 1.0], "device": {"name": "n300"}}

    config = settings.DispatchBenchConfig(size=[64], engines=["static"])
    made, _ = bench(config, studies.dispatch(config, 1), script, TenstorrentConfig(name="n300"))
    made.modelled = made.mocked = True
    made.run()
    mocked = [case for case in made.result.cases if case.basis == "mocked board"]
    assert len(mocked) == 2 and all("computes nothing" in case.heading for case in mocked)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["bench=shape"], "bench=shape: no such option. Did you mean 'shapes'?"),
        (["bench=shapes", "bench.batch=[0]"], "bench.batch=0: must be at least 1."),
        (["bench=shapes", "bench.dim=[]"], "bench.dim=[]: name at least one, such as [256]."),
        (["bench=depth", "bench.layers=[-1]"], "bench.layers=-1: must be at least 1."),
        (["bench=matmul", "bench.size=[65536]"], "bench.size=65536: must be at most 32768."),
        (["bench=matmul", "bench.baselines=[compile]"], "bench.baselines=compile: no such choice."),
        (["bench=mlp", "bench.precision=[bf8]", "device=cpu"], "bench.precision=bf8: only on Tenstorrent devices."),
        (["bench=memory", "bench.work=[gpt3]"], "bench.work=gpt3: no such choice."),
        (["bench=dispatch", "bench.engines=[]"], "bench.engines=[]: nobody takes part."),
        (["bench=dispatch", "device=cpu"], "device=cpu: bench=dispatch is about a Tenstorrent chip."),
        (["bench=subdevices", "device=p150"], "device=p150: there is no cost model of a Blackhole chip"),
        (["bench=memory", "device=n150"], "bench=memory: measures on the device, and there is no Tenstorrent card"),
        (["bench=shapes", "bench.compare=none.json"], "bench.compare=none.json: can't be read"),
        (["bench=shapes", "bench.markdown=missing/page.md"], "bench.markdown=missing/page.md: is no file in a folder"),
    ],
)
def test_a_bad_request_is_one_line_and_exit_code_2(
    overrides: list[str], said: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ttrain.device.ttnn.runtime.environment.has_card", lambda: False)
    assert main(["task=bench", *overrides]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"ttrain: {said}"), shown.err
    assert shown.err.count("\n") == 1 and not shown.out and not list(tmp_path.iterdir())


def test_a_result_of_another_study_is_not_compared_with(tmp_path: Path, capsys: Any) -> None:
    config = settings.ShapesBenchConfig(batch=[8], dim=[16], engines=["static"], baselines=["eager"])
    made, _ = bench(config, studies.shapes(config, 1), quick)
    made.run()
    file = tmp_path / "results.json"
    file.write_text(json.dumps(made.result.to_dict()), "utf-8")
    assert main(["task=bench", "bench=depth", f"bench.compare={file}", f"bench.out={tmp_path}/x"]) == 2
    assert "holds bench=shapes, this is bench=depth" in capsys.readouterr().err
