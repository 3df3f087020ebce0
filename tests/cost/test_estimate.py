"""Expected times of a step: what they add up from, what is recommended, and why."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.wormhole.reproduce import stream
from tests.conftest import cache_home
from tests.models.session import Session
from tests.ttnn.runs import adamw, gpt
from ttrain import ops
from ttrain.cli import main
from ttrain.config.build import planned_device
from ttrain.core.errors import UserError
from ttrain.core.spec import TensorSpec
from ttrain.core.units import format_duration
from ttrain.device.settings import DeviceConfig
from ttrain.device.timing import TIE, Estimate, Work
from ttrain.device.torch.device import open_device
from ttrain.device.ttnn.cost.step_time import CardStep, estimate, split_time
from ttrain.device.ttnn.settings import TenstorrentConfig
from ttrain.graph import Graph, Kind, Node
from ttrain.train.forecast import step_cost, step_time
from ttrain.train.forecast.show import memory_over_time
from ttrain.train.forecast.step_time import KernelTimes, Rates, host_estimate, host_time, timing

SMALL = ["model.layers=1", "model.width=32", "model.heads=2", "model.context=32", "model.vocabulary=29"]


@pytest.fixture(scope="module")
def steps() -> Any:
    return Session(
        gpt(layers=1), adamw(), 2, device=planned_device(DeviceConfig(name="cpu", threads=1)), values={}
    ).steps


@pytest.fixture
def work(steps: Any) -> Work:
    return Work.of(steps, {"train": 1})


def test_a_host_estimate_adds_the_kernels_up(work: Work) -> None:
    seconds = {node: 1e-3 for _, nodes in work.nodes for node in nodes}
    static, traced = (host_time(work, seconds, name) for name in ("static", "traced"))
    assert static.compute + static.bandwidth == pytest.approx(1e-3 * work.launches)
    assert static.total == pytest.approx(static.compute + static.bandwidth + static.dispatch + static.host_input)
    assert traced.total == pytest.approx(static.total - static.dispatch) and static.dispatch > 0 == traced.dispatch
    found = host_estimate(work, {"static": static, "traced": traced}, "static", 1e9)
    assert found.time is static and static.bottleneck in ("compute", "bandwidth")
    assert found.to_dict()["recommended"] == "engine=static"  # both take about the same, and it is simpler
    both = host_estimate(work, {"static": static, "traced": replace(traced, total=static.total / 2)}, "dynamic", 1e9)
    assert both.to_dict()["recommended"] == "engine=traced" and both.time.total > static.total
    assert [way.engine for way in both.ways] == ["static", "traced", "dynamic"]
    alone = host_estimate(work, {"traced": traced}, "traced", 1e9)
    assert alone.time is traced and len(alone.ways) == 1


def test_kernels_are_timed_once_and_remembered_those_of_a_traced_step_as_they_are_compiled(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened() -> Any:
        return open_device(DeviceConfig(name="cpu", threads=1))

    def timed(machine: str, compiler: Any, work: Work) -> tuple[KernelTimes, dict[Node, float]]:
        timer = partial(timing, lambda: closing(opened()), compiler)
        times = KernelTimes(timer, machine, RATES, compiler=compiler, path=tmp_path / "kernels.json")
        return times, times.of(work)

    first, seconds = timed("a machine", None, work)
    assert len(seconds) == work.launches and all(each > 0 for each in seconds.values())
    again, later = timed("a machine", None, work)
    assert all(later[node] <= seconds[node] for node in seconds)
    assert 0 < again.measured <= step_time.AGAIN < first.measured <= work.launches
    compiler, graph = opened().compiler(), Graph()
    small = work_of([ops.gelu(graph.input("x", TensorSpec((4096,)))).producer])
    for given in (None, compiler):  # neither stands for the other
        times, seconds = timed("another machine", given, small)
        assert times.measured == 1 and not times.note and all(each > 0 for each in seconds.values())

    def refuse(_self: Any, _nodes: Any) -> None:
        raise UserError("no compiler here")

    monkeypatch.setattr("ttrain.device.torch.native.rows.NativeKernels.prepare", refuse)
    refusing, seconds = timed("a third", compiler, small)
    assert [*seconds.values()] == pytest.approx([RATES.seconds(node) for node in seconds])
    assert "no compiler here" in refusing.note


def test_a_step_of_small_programs_wants_a_capture_and_two_queues_hide_the_input(work: Work) -> None:
    one, two = (TenstorrentConfig(name="n300", command_queues=number) for number in (1, 2))
    assert CardStep(work, one).time(one, "static").bottleneck == "dispatch"
    small = estimate(one, work, "static")
    assert isinstance(small, Estimate) and "device.subdevices=2 for two runs" in small.reason
    assert "engine=traced" in small.to_dict()["recommended"] and "traced takes" in small.reason
    assert len(small.ways) == 12 and small.peak == pytest.approx(57.344e12)
    heavy = CardStep(Work(work.nodes, 10, 10**8), one)
    alone, hidden = heavy.time(one, "traced"), heavy.time(two, "traced")
    assert hidden.total == pytest.approx(max(alone.host_input, alone.total - alone.host_input))
    assert hidden.total < alone.total and alone.bottleneck == "host_input"


def test_halves_of_a_chip_are_for_runs_that_are_too_small_to_fill_it(work: Work) -> None:
    card = TenstorrentConfig(name="n300")
    step = CardStep(work, card)
    halves, whole = split_time(step, card, "traced")
    assert halves * (1 + TIE) < whole
    # Issued by the host one by one, two runs share what the host can issue.
    assert split_time(step, card, "static")[0] >= 2 * step.time(card, "static").dispatch * 0.9
    step.programs, step.host_input = [(1, [stream((8192, 8192), (8192, 8192))] * 3)], 0.0
    halves, whole = split_time(step, card, "traced")
    assert halves * (1 + TIE) >= whole


RATES = Rates(1e6, 1e6)


class Machine:
    """Takes twice as long for a kernel as RATES say, by a clock of its own."""

    now, slower, compiling = 0.0, 1.0, 0.0

    def __init__(self) -> None:
        self.compiled: set[tuple[Node, ...]] = set()
        self.families: set[str] = set()  # that were measured

    def times(self, path: Path, seconds: float = 1e9) -> KernelTimes:
        return KernelTimes(self.timer, "m", RATES, seconds, path=path, clock=lambda: self.now)

    @contextmanager
    def timer(self, nodes: Sequence[Node]) -> Iterator[Callable[[Node], float]]:
        self.compiled.add(tuple(nodes))
        self.now += self.compiling
        yield self.measure

    def measure(self, node: Node) -> float:
        self.families.add(node.op.family)
        seconds = self.slower * 2 * RATES.seconds(node)
        self.now += 2 * seconds  # once to warm up, once timed
        return seconds


def work_of(nodes: list[Node]) -> Work:
    return Work(((1, tuple(nodes)),), 0, 0)


def test_timing_ends_when_its_seconds_are_over_and_the_rest_is_estimated(work: Work, tmp_path: Path) -> None:
    machine, path = Machine(), tmp_path / "kernels.json"
    whole = machine.times(tmp_path / "whole.json")
    true, long = sum(whole.of(work).values()), machine.now
    assert not whole.note
    machine = Machine()
    part = machine.times(path, long / 2)
    seconds = part.of(work)
    assert 0.4 * long < machine.now <= 0.6 * long and 0 < part.measured < whole.measured
    assert part.measured + part.estimated == whole.measured and f"{part.estimated} kernels" in part.note
    # Kernels of a family that was measured are estimated exactly here, others are taken to reach what rates say.
    for node, time in seconds.items():
        assert time == pytest.approx((2 if node.op.family in machine.families else 1) * RATES.seconds(node))
    assert sum(seconds.values()) == pytest.approx(true, rel=0.2)  # the longest were measured first
    again = machine.times(path, 0)
    assert again.of(work) == pytest.approx(seconds) and again.measured == 0
    machine = Machine()
    machine.compiling = 2 * long
    slow = machine.times(tmp_path / "slow.json", long / 2)
    assert slow.of(work) == pytest.approx(seconds) and slow.measured == part.measured  # compiling does not count


def test_what_a_busy_machine_took_is_forgotten_and_it_spoils_nothing(work: Work, tmp_path: Path) -> None:
    machine, path = Machine(), tmp_path / "kernels.json"
    true = sum(machine.times(tmp_path / "quiet.json").of(work).values())
    totals: list[float] = []
    random.seed(0)
    for number in range(60):
        machine.slower = 1.0 if number % 2 else 100.0
        times = machine.times(path)
        totals.append(sum(times.of(work).values()))
        assert times.measured <= (step_time.AGAIN if number else work.launches)
    assert totals[0] == pytest.approx(100 * true) and sorted(totals, reverse=True) == totals
    assert totals[-1] == pytest.approx(true, rel=0.02)
    assert len(machine.compiled) == 1  # later plans find the library of the first


def test_memory_over_time_peaks_where_the_plan_says(steps: Any) -> None:
    plan = steps["train"].plan
    series = memory_over_time(plan)
    total = sum(series.values())
    aliased, (most, _) = sum(block.nbytes for block in plan.aliased.values()), step_cost.peak(plan.blocks)
    assert np.max(total) <= most <= plan.arena_bytes + aliased and np.max(total) > 0.9 * most
    assert step_cost.state_bytes(plan)[Kind.PARAMETER.value] > 0


def planned(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    assert main(["task=plan", *SMALL, *overrides]) == 0
    return "".join(capsys.readouterr())


def test_the_task_tells_the_time_and_draws(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home(tmp_path))
    files = [f"plan.json={tmp_path}/plan.json", f"plan.picture={tmp_path}/plan.png", "plan.seconds=2"]
    text = planned(capsys, "device=cpu", "train.steps=7000", *files)
    assert "Expected time of one optimizer step" in text and "engine=traced" in text
    found = json.loads((tmp_path / "plan.json").read_text("utf-8"))["expected"]
    assert found["run_s"] == pytest.approx(7 * found["step_ms"]) and f"{format_duration(found['run_s'])}\n" in text
    assert found["step_ms"] > 0 and found["tokens_per_s"] > 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_the_largest_that_fits_is_searched(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    limits = ["device=null", "plan.time=false", "plan.limits=true"]
    assert "give plan.memory_gb" in planned(capsys, *limits)
    text = planned(capsys, *limits, "plan.memory_gb=0.01", f"plan.json={tmp_path}/plan.json")
    found = json.loads((tmp_path / "plan.json").read_text("utf-8"))["largest"]
    assert found["available_bytes"] == int(0.01 * 2**30) and "Largest that fits" in text
    for what in ("micro_batch", "context"):
        assert 0.8 * found["available_bytes"] < found[what]["nbytes"] <= found["available_bytes"]


def test_a_card_s_time_is_from_the_model_and_says_so_without_ttnn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ttnn", None)
    for device in ("n150", "t3000"):
        text = planned(capsys, f"device={device}", "precision=bf16", f"plan.json={tmp_path}/plan.json")
        assert "the cost model of a Wormhole chip" in text and "not from a card" in text and "Padding to tiles" in text
        found = json.loads((tmp_path / "plan.json").read_text("utf-8"))
        assert found["tile_padding"]["state_padded_bytes"] >= found["tile_padding"]["state_bytes"] > 0
        assert "device.dispatch=" in found["expected"]["recommended"]
    assert "no cost model of a Blackhole" in planned(capsys, "device=p150")
    assert "computes nothing" in planned(capsys, "device=null")
