"""task=plan of many ranks, for which no process starts: memory, bytes and time of one of them, by plain formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.session import plan_of
from tests.ttnn.runs import adamw, mlp
from ttrain.cli import main
from ttrain.device.null import NullDevice
from ttrain.device.timing import Work
from ttrain.graph import Stage
from ttrain.parallel.ranks import Ranks
from ttrain.plan.plan import Plan
from ttrain.train.forecast.step_cost import collectives, exposed_seconds, link_seconds
from ttrain.train.steps.step_graph import StepGraph

WIDTH, LAYERS = 64, 2
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
MLP = ["task=plan", "model=mlp", f"model.width={WIDTH}", f"model.layers={LAYERS}", "train.batch_size=64", "device=cpu"]
MLP += ["optimizer=adamw", "optimizer.decay_rule=all", "plan.time=false", "plan.limits=false"]


def planned(folder: Path, *overrides: str) -> dict[str, Any]:
    assert main([*MLP, *overrides, f"plan.json={folder / 'plan.json'}"]) == 0
    found: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return found


def test_the_plan_is_that_of_the_rank_that_owns_most(tmp_path: Path) -> None:
    """Of three hidden matrices that stay whole one of two ranks has two, each with its momentum, and of the first and
    the last one half, with two moments.
    """
    five = ["optimizer=muon", "model.layers=5", "model.bias=false", "parallel=zero1", "parallel.world=2"]
    found = planned(tmp_path, *five)
    assert found["memory"]["optimizer"] == 2 * 4 * WIDTH * WIDTH + 2 * 2 * 4 * WIDTH * WIDTH // 2


@pytest.mark.parametrize("count", [2, 8])
def test_a_rank_of_zero1_keeps_its_shard_and_sends_the_rest(count: int, tmp_path: Path) -> None:
    one = planned(tmp_path)
    shard = planned(tmp_path, "parallel=zero1", f"parallel.world={count}")
    assert one["memory"]["optimizer"] == 2 * 4 * PARAMETERS
    assert shard["memory"]["optimizer"] == pytest.approx(2 * 4 * PARAMETERS / count, rel=0.15)
    assert shard["memory"]["parameter"] == one["memory"]["parameter"]
    assert shard["checkpoint_bytes"] == one["checkpoint_bytes"]
    sent = shard["communication"]
    for name in ("reduce_scatter", "all_gather"):
        assert sent[name]["nbytes"] == pytest.approx(4 * PARAMETERS * (count - 1) / count, rel=0.15)


def test_ranks_of_ddp_send_every_gradient_twice(tmp_path: Path) -> None:
    found = planned(tmp_path, "parallel=ddp", "parallel.world=4", "parallel.slices=8", "train.gradient_accumulation=2")
    assert found["communication"]["all_reduce"]["nbytes"] == pytest.approx(2 * 4 * PARAMETERS * 3 / 4, rel=0.01)
    assert found["runs_per_step"] == {
        "accumulate_first": 2, "accumulate_next": 1, "keep0": 1, "train": 1,
    }  # fmt: skip
    rows = 64 // 8 // 2
    products = 2 * rows * WIDTH * WIDTH * LAYERS  # of one micro-batch forward; a rank computes four of them
    assert found["flops_per_step"]["forward"] == pytest.approx(4 * products, rel=0.05)


@pytest.mark.parametrize("count", [2, 4])
def test_a_rank_of_zero3_keeps_its_shard_and_gathers_the_rest(count: int, tmp_path: Path) -> None:
    """Of six layers all are gathered for forward. The last two are kept for backward, and of the first layer backward
    reads no weights, so three are gathered again.
    """
    layers, each = 6, PARAMETERS // LAYERS
    found = planned(tmp_path, "parallel=zero3", f"parallel.world={count}", f"model.layers={layers}")
    memory, sent = found["memory"], found["communication"]
    assert memory["parameter"] == memory["gradient"] == memory["optimizer"] / 2
    assert memory["parameter"] == pytest.approx(4 * layers * each / count, rel=0.15)
    for name, times in (("reduce_scatter", layers), ("all_gather", layers + 3)):
        assert sent[name]["nbytes"] == pytest.approx(4 * times * each * (count - 1) / count, rel=0.15)
    assert sent["all_gather"]["calls"] == layers + 3 and sent["all_gather"]["early"] == sent["all_gather"]["nbytes"]


@pytest.mark.parametrize(("mode", "copies", "sent"), [("ddp", 4, 2), ("zero1", 2.5, 2), ("zero3", 1, 3)])
def test_the_plan_tells_what_divided_experts_would_take(
    mode: str, copies: float, sent: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six experts, of which one of four ranks would have two. `copies` of their weights are what a rank holds now, with
    gradients and two moments. Now it sends gradients to sum them, then sums or weights, and zero3 weights twice.
    """
    experts, tokens = 6, 16 * 8 // 4
    words = ["model=llama", "model.preset=null", f"model.layers={LAYERS}", "model.heads=2", f"model.width={WIDTH}"]
    words += ["model.hidden=32", "model.context=8", "model.vocabulary=40", f"model.experts={experts}"]
    words += ["model.experts_per_token=2", f"model.expert_width={WIDTH}", "train.batch_size=16", "optimizer=adamw"]
    words += ["task=plan", "device=cpu", "plan.time=false", "plan.limits=false", f"plan.json={tmp_path / 'plan.json'}"]
    assert main([*words, f"parallel={mode}", "parallel.world=4"]) == 0
    found = json.loads((tmp_path / "plan.json").read_text())["experts_over_ranks"]
    nbytes = 4 * LAYERS * 3 * experts * WIDTH * WIDTH
    assert found["rows"] == 4 * LAYERS * (2 * tokens * WIDTH * 4) * 3 // 4  # forward and backward, there and back
    assert found["weights"] == sent * nbytes * 3 // 4
    assert found["held"] == copies * nbytes
    assert found["divided"] == 4 * nbytes * 2 // experts
    assert "With experts divided, by all-to-all (not built), it would send" in capsys.readouterr().out


def test_no_more_micro_batches_than_rows_of_a_slice_are_proposed(tmp_path: Path) -> None:
    found = planned(tmp_path, "parallel=ddp", "parallel.world=8", "train.batch_size=8", "plan.memory_gb=0.00001")
    assert not found["fits"]["fits"] and not [keys for keys in found["smaller"] if "accumulation" in keys]


def test_auto_takes_the_fastest_mode_that_fits(tmp_path: Path) -> None:
    given = ["parallel=auto", "parallel.world=4", "model.layers=6"]
    found = planned(tmp_path, *given)
    modes = {each["mode"]: each for each in found["modes"]}
    sizes = [modes[mode]["memory"] for mode in ("ddp", "zero1", "zero3")]
    assert sizes == sorted(sizes, reverse=True) and all(each["fits"] for each in found["modes"])
    assert found["memory"]["total"] == modes["ddp"]["memory"] and modes["ddp"]["seconds"] < modes["zero3"]["seconds"]
    small = planned(tmp_path, *given, f"plan.memory_gb={sum(sizes[1:]) / 2**31}")
    assert [each["fits"] for each in small["modes"]] == [False, False, True]
    assert small["memory"]["total"] == modes["zero3"]["memory"]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_weights_are_gathered_ahead_and_freed_after_their_last_reader(prefetch: int) -> None:
    plan = last_step(Ranks(1, 4, 4, True, divides=True, prefetch=prefetch), layers=8)
    gathers = [node for node in plan.launched if node.op.name == "all_gather"]
    done = [(place, node) for place, node in enumerate(plan.launched) if node.op.name == "exchange_done"]
    places = {node.attributes["key"]: place for place, node in done}
    waits = [places[gather.attributes["key"]] for gather in gathers]
    assert waits == sorted(waits) and len(gathers) == 8 + 5
    for number, gather in enumerate(gathers):
        start = plan.launched.index(gather)
        assert sum(start < wait < waits[number] for wait in waits[:number]) == max(prefetch - 1, 0) or number < prefetch
        assert start < waits[number - 1] or number < 1 or prefetch < 2
    blocks = [plan.owned[gather.outputs[0]] for gather in gathers]
    held = [sum(block.start <= time <= block.end for block in blocks) for time in range(len(plan.graph.nodes))]
    assert max(held) <= prefetch + 2  # the last two layers are kept for backward


def last_step(ranks: Ranks, layers: int = LAYERS) -> Plan:
    model = mlp(layers=layers, width=WIDTH, inputs=None, outputs=None)
    steps = StepGraph(model, adamw(decay_rule="all"), rows=2, ranks=ranks)
    return plan_of(NullDevice(), steps.trace_train)


@pytest.mark.parametrize("shards", [False, True])
def test_all_ranks_start_buckets_in_one_order_as_soon_as_they_are_complete(shards: bool) -> None:
    orders = []
    for rank in range(4):
        plan = last_step(Ranks(rank, 4, 8, shards, bucket_mb=0.02))
        nodes = plan.launched
        starts = [node for node in nodes if node.op.name.endswith("_start")]
        (done,) = (node for node in nodes if node.op.name == "collectives_done")
        end = max(place for place, node in enumerate(nodes) if node.stage is Stage.BACKWARD)
        assert len(starts) == 2  # of 4160 numbers each, those of a layer
        assert nodes.index(starts[0]) < end < nodes.index(starts[-1]) < nodes.index(done)
        for start in starts:
            assert nodes[nodes.index(start) - 1].op.name in ("accumulate", start.op.name)
            buffer = plan.owned[start.outputs[-1]]
            assert [plan.graph.nodes[time] for time in (buffer.start, buffer.end)] == [start, done]
            held = set(start.outputs)
            assert {node for node in nodes if held & {*node.values}} <= {*starts, done}
        orders.append([(node.op.name, node.attributes["bounds"]) for node in nodes if "bounds" in node.attributes])
    assert all(order == orders[0] for order in orders)


def test_backward_hides_what_it_has_time_for() -> None:
    for ranks, hides in ((Ranks(0, 2, 2, bucket_mb=0.02), True), (Ranks(0, 2, 2), False)):
        work = Work(((1, tuple(last_step(ranks).launched)),), 0, 0)
        found = collectives(work, ranks)
        whole, early = (link_seconds(sum(each[of] for each in found.values()), 1.0) for of in ("nbytes", "early"))
        assert (early > 0) == hides

        def exposed(computing: float, work: Work = work, ranks: Ranks = ranks) -> float:
            return exposed_seconds(work, ranks, 1.0, computing, lambda node: float(node.stage is Stage.BACKWARD))

        assert exposed(0.0) == pytest.approx(whole)
        assert exposed(60.0) == pytest.approx(whole - early)
        assert whole - early < exposed(early / 2) < whole or not hides


def test_communication_is_part_of_the_expected_time(tmp_path: Path) -> None:
    given = ["parallel=ddp", "parallel.world=2", "plan.time=true", "plan.seconds=0"]
    found = planned(tmp_path, *given, "parallel.link_gbps=0.001")
    expected = 8 * found["communication"]["all_reduce"]["nbytes"] / 1e6
    assert found["expected"]["parts_ms"]["communication"] == pytest.approx(1e3 * expected)
    assert found["expected"]["bottleneck"] == "communication"
    assert found["expected"]["step_ms"] > 1e3 * expected
