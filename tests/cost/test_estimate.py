"""Expected times of a step: what they add up from, what is recommended, and why."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.wormhole.reproduce import stream
from tests.conftest import cache_home
from ttrain import ops
from ttrain.cli import main
from ttrain.core.errors import UserError
from ttrain.core.spec import DType, TensorSpec
from ttrain.core.units import format_duration
from ttrain.device.settings import DeviceConfig
from ttrain.device.timing import Work
from ttrain.device.torch.device import cpu
from ttrain.device.ttnn.cost.step_time import CardStep, split_time, wormhole_estimate
from ttrain.device.ttnn.settings import TenstorrentConfig
from ttrain.engine.state import State
from ttrain.engine.static import StaticEngine
from ttrain.graph import Graph, Kind, Node
from ttrain.models.gpt import GPT
from ttrain.models.settings import GPTConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig
from ttrain.train.forecast import kernel_times, step_cost
from ttrain.train.forecast.estimate import host_estimate, host_time
from ttrain.train.forecast.kernel_times import KernelTimes
from ttrain.train.forecast.memory_picture import memory_over_time
from ttrain.train.forecast.peak import Rates
from ttrain.train.steps.step_graph import StepGraph

SMALL = ["model.layers=1", "model.width=32", "model.heads=2", "model.context=32", "model.vocabulary=29"]


@pytest.fixture(scope="module")
def steps() -> Any:
    from ttrain.config.build import planned_device

    model = GPT(GPTConfig(layers=1, heads=2, width=64, context=32, vocabulary=65), DType.FP32)
    graph = StepGraph(model, AdamW(AdamWConfig()), 2)
    device = planned_device(DeviceConfig(name="cpu", threads=1))
    engine = StaticEngine(device, State(device, graph.state_tensors()))
    return {"train": engine.build("train", graph.trace_train)}


@pytest.fixture
def work(steps: Any) -> Work:
    return Work.of(steps, {"train": 1})


class Fixed:
    """One millisecond for every kernel."""

    def of(self, nodes: Any, fewer: Any) -> list[float]:
        return [1e-3] * len(nodes)


def test_a_host_estimate_adds_the_kernels_up(work: Work) -> None:
    static, traced = (host_time(work, Fixed(), None, name, name) for name in ("static", "traced"))
    assert static.compute + static.bandwidth == pytest.approx(1e-3 * work.launches)
    assert static.total == pytest.approx(static.compute + static.bandwidth + static.dispatch + static.host_input)
    assert traced.total == pytest.approx(static.total - static.dispatch) and static.dispatch > 0 == traced.dispatch
    found = host_estimate({"static": static, "traced": traced}, "static", 64, "tokens", 10**6, 1e9)
    assert found.time is static and static.bottleneck in ("compute", "bandwidth")
    assert found.recommended.engine == "static"  # both take about the same, and it is simpler
    quick = replace(traced, total=static.total / 2)
    both = host_estimate({"static": static, "traced": quick}, "dynamic", 64, "tokens", 10**6, 1e9)
    assert both.recommended.engine == "traced" and both.time.total > static.total
    assert [way.engine for way in both.ways] == ["static", "traced", "dynamic"]
    alone = host_estimate({"traced": traced}, "traced", 64, "tokens", 10**6, 1e9)
    assert alone.time is traced and len(alone.ways) == 1
    assert {"step_ms", "tokens_per_s", "bottleneck", "parts_ms", "recommended", "reason"} <= found.to_dict().keys()


def test_a_long_kernel_is_timed_on_fewer_rows_and_its_time_scaled(tmp_path: Path) -> None:
    def product(rows: int) -> list[Node]:
        graph = Graph()
        x, weight = graph.input("x", TensorSpec((rows, 64))), graph.input("weight", TensorSpec((64, 64)))
        return [ops.matmul(x, weight).producer, ops.gelu(graph.input("small", TensorSpec((8,)))).producer]

    times = machine(tmp_path / "kernels.json", 1e9)
    whole, part = product(4096), product(1024)
    assert times.rates is not None and times.rates.seconds(whole[0]) > kernel_times.LONG
    first, second = times.of(whole, part)
    assert times.now == pytest.approx(2 * 2 * (times.rates.seconds(part[0]) + times.rates.seconds(whole[1])))
    assert (first, second) == pytest.approx([2 * times.rates.seconds(node) for node in whole])
    assert times.measured == 2 and not times.note
    # Once it was timed itself, that counts; and a slice that is another op stands for nothing.
    known = json.loads((tmp_path / "kernels.json").read_text("utf-8")) | {times._key(whole[0]): 7.0}
    (tmp_path / "kernels.json").write_text(json.dumps(known), "utf-8")
    assert machine(tmp_path / "kernels.json", 0).of(whole, part)[0] == 7.0
    assert machine(tmp_path / "other.json", 1e9).of(whole, part[::-1]) == pytest.approx([first, second])


def test_a_traced_step_is_timed_by_the_kernels_that_it_compiles(tmp_path: Path) -> None:
    def program() -> list[Node]:
        graph = Graph()
        return [ops.gelu(graph.input("x", TensorSpec((4096,)))).producer]

    device = cpu(DeviceConfig(name="cpu", threads=1))
    static, traced = (
        KernelTimes(lambda: cpu(DeviceConfig(name="cpu", threads=1)), "m", tmp_path / "kernels.json", compiler=compiler)
        for compiler in (None, device.compiler())
    )
    for times in (static, traced):
        assert times.of(program())[0] > 0 and times.measured == 1 and not times.refused
        times.close()
    assert traced._table["gelu"] is not static._table["gelu"]
    refusing = KernelTimes(
        lambda: cpu(DeviceConfig(name="cpu", threads=1)), "n", tmp_path / "kernels.json", rates=Rates(1e9, 1e9),
        compiler=device.compiler(),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ttrain.device.torch.native.rows.NativeKernels.prepare", _no_compiler)
        assert refusing.of(program()) == pytest.approx([Rates(1e9, 1e9).seconds(program()[0])])
    assert refusing.note
    refusing.close()


def _no_compiler(_self: Any, _nodes: Any) -> None:
    raise UserError("no compiler here")


def test_a_step_of_small_programs_wants_a_capture(work: Work) -> None:
    card = TenstorrentConfig(name="n300")
    assert CardStep(work, card).time(card, "static").bottleneck == "dispatch"
    small = wormhole_estimate(work, card, "static", 64, "tokens", 10**6)
    assert small.recommended.engine == "traced" and "traced takes" in small.reason
    assert len(small.ways) == 12 and small.peak == pytest.approx(57.344e12)


def test_two_queues_hide_the_input(work: Work) -> None:
    heavy = Work(work.nodes, 10, 10**8)
    cards = (TenstorrentConfig(name="n300", command_queues=n) for n in (1, 2))
    one, two = (CardStep(heavy, card).time(card, "traced") for card in cards)
    assert two.total == pytest.approx(max(one.host_input, one.total - one.host_input)) and two.total < one.total
    assert one.bottleneck == "host_input"


def test_halves_of_a_chip_are_for_runs_that_are_too_small_to_fill_it(work: Work) -> None:
    card = TenstorrentConfig(name="n300")
    step = CardStep(work, card)
    small = split_time(step, card, "traced")
    assert small.gains and small.side_by_side < small.in_turn and "device.subdevices=2" in small.text("traced")
    # Issued by the host one by one, two runs share what the host can issue.
    issued = split_time(step, card, "static")
    assert issued.side_by_side >= 2 * step.time(card, "static").dispatch * 0.9
    step.programs, step.host_input = [(1, [stream((8192, 8192), (8192, 8192))] * 3)], 0.0
    large = split_time(step, card, "traced")
    assert not large.gains and "halves gain nothing" in large.text("traced")


def test_every_kernel_of_a_plan_is_timed_once_and_remembered(steps: Any, tmp_path: Path) -> None:
    nodes = steps["train"].plan.launched
    opened = []

    def device() -> Any:
        opened.append(cpu(DeviceConfig(name="cpu", threads=1)))
        return opened[-1]

    first = KernelTimes(device, "a machine", tmp_path / "kernels.json")
    times = first.of(nodes)
    first.close()
    assert len(times) == len(nodes) and all(time > 0 for time in times) and 0 < first.measured <= len(nodes)
    again = KernelTimes(device, "a machine", tmp_path / "kernels.json")
    known = zip(again.of(nodes), times, strict=True)
    again.close()
    assert all(new <= old for new, old in known) and 0 < again.measured <= kernel_times.AGAIN < first.measured
    other = KernelTimes(device, "another", tmp_path / "kernels.json")
    other.of(nodes[:1])
    other.close()
    assert other.measured == 1


class Machine(KernelTimes):
    """Takes twice as long for a kernel as the rates say, by a clock of its own."""

    now, slower = 0.0, 1.0
    families: frozenset[str] = frozenset()  # that were measured

    def _prepared(self, nodes: Any) -> bool:
        return bool(nodes)

    def _measure(self, node: Any) -> float:
        assert self.rates is not None
        self.families |= {node.op.family}
        seconds = self.slower * 2 * self.rates.seconds(node)
        self.now += 2 * seconds  # once to warm up, once timed
        return seconds


def machine(path: Path, seconds: float) -> Machine:
    times = Machine(lambda: pytest.fail("nothing is opened"), "m", path, seconds=seconds, rates=Rates(1e6, 1e6))
    times.clock = lambda: times.now
    return times


def test_timing_ends_when_its_seconds_are_over_and_the_rest_is_estimated(steps: Any, tmp_path: Path) -> None:
    nodes, path = steps["train"].plan.launched, tmp_path / "kernels.json"
    whole = machine(tmp_path / "whole.json", 1e9)
    true = whole.of(nodes)
    assert not whole.note
    part = machine(path, whole.now / 2)
    times = part.of(nodes)
    # A kernel of a family that was not measured before may take longer than was expected.
    assert 0.4 * whole.now < part.now <= 0.52 * whole.now and 0 < part.measured < whole.measured
    assert part.measured + len(part.estimated) == whole.measured and f"{len(part.estimated)} kernels" in part.note
    # Kernels of a family that was measured are estimated exactly here, others are taken to reach what rates say.
    for node, time in zip(nodes, times, strict=True):
        assert time == pytest.approx((2 if node.op.family in part.families else 1) * Rates(1e6, 1e6).seconds(node))
    assert sum(times) == pytest.approx(sum(true), rel=0.2)  # the longest were measured first
    again = machine(path, 0)
    assert again.of(nodes) == pytest.approx(times) and again.now == 0 and again.measured == 0


def test_what_a_busy_machine_took_is_forgotten_and_it_spoils_nothing(steps: Any, tmp_path: Path) -> None:
    nodes, path = steps["train"].plan.launched, tmp_path / "kernels.json"
    true = machine(tmp_path / "quiet.json", 1e9).of(nodes)
    totals: list[float] = []
    random.seed(0)
    for number in range(60):
        times = machine(path, 1e9)
        times.slower = 1.0 if number % 2 else 100.0
        totals.append(sum(times.of(nodes)))
        assert times.measured <= (kernel_times.AGAIN if number else len(nodes))
    assert totals[0] == pytest.approx(100 * sum(true)) and sorted(totals, reverse=True) == totals
    assert totals[-1] == pytest.approx(sum(true), rel=0.02)


def test_memory_over_time_peaks_where_the_plan_says(steps: Any) -> None:
    plan = steps["train"].plan
    series = memory_over_time(plan)
    total = sum(series.values())
    aliased, (most, _) = sum(block.nbytes for block in plan.aliased.values()), step_cost.peak(plan.blocks)
    assert np.max(total) <= most <= plan.arena_bytes + aliased and np.max(total) > 0.9 * most
    assert step_cost.state_bytes(plan)[Kind.PARAMETER.value] > 0


def planned(capsys: pytest.CaptureFixture[str], *overrides: str, code: int = 0) -> str:
    assert main(["task=plan", *SMALL, *overrides]) == code
    out, err = capsys.readouterr()
    return out + err


def test_the_task_tells_time_limits_and_padding_and_draws(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home(tmp_path))
    files = [f"plan.json={tmp_path}/plan.json", f"plan.picture={tmp_path}/plan.png"]
    text = planned(capsys, "device=cpu", "train.steps=7000", "plan.limits=true", "plan.memory_gb=0.01", *files)
    assert "Expected time of one optimizer step" in text and "Largest that fits" in text and "engine=traced" in text
    found = json.loads((tmp_path / "plan.json").read_text("utf-8"))
    run = found["expected"]["run_s"]
    assert run == pytest.approx(7 * found["expected"]["step_ms"]) and f"{format_duration(run)}\n" in text
    assert found["expected"]["step_ms"] > 0 and found["expected"]["tokens_per_s"] > 0
    available = found["largest"]["available_bytes"]
    assert available == int(0.01 * 2**30)
    for what in ("micro_batch", "context"):
        assert 0.8 * available < found["largest"][what]["nbytes"] <= available
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("device", ["n150", "n300", "t3000"])
def test_a_card_s_time_is_from_the_model_and_says_so_without_ttnn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setitem(sys.modules, "ttnn", None)
    text = planned(capsys, f"device={device}", "precision=bf16", f"plan.json={tmp_path}/plan.json")
    assert "the cost model of a Wormhole chip" in text and "not from a card" in text and "Padding to tiles" in text
    found = json.loads((tmp_path / "plan.json").read_text("utf-8"))
    assert found["tile_padding"]["state_padded_bytes"] >= found["tile_padding"]["state_bytes"] > 0
    assert "device.dispatch=" in found["expected"]["recommended"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [(["device=p150"], "no cost model of a Blackhole"), (["device=null"], "computes nothing"),
     (["device=null", "plan.limits=true"], "give plan.memory_gb")],
    ids=str,
)  # fmt: skip
def test_what_can_t_be_told_is_said(capsys: pytest.CaptureFixture[str], overrides: list[str], message: str) -> None:
    assert message in planned(capsys, *overrides)
