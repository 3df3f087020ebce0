"""task=profile where no profiler of the device is: each node timed, beside its FLOPs, its bytes and the roof."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ttrain import ops
from ttrain.cli import main
from ttrain.core.spec import TensorSpec
from ttrain.graph import Graph
from ttrain.train.forecast.node_profile import NodeProfile, part_of
from ttrain.train.forecast.step_time import Rates

SMALL = ["model.layers=2", "model.width=32", "model.heads=2", "model.context=32", "train.batch_size=2"]


@pytest.mark.parametrize("engine", ["dynamic", "static", "traced"])
def test_every_node_of_a_step_is_timed(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTRAIN_CACHE", str(tmp_path))
    files = [f"profile.json={tmp_path}/found.json", f"profile.trace={tmp_path}/trace.json", "profile.steps=2"]
    if engine == "dynamic":
        files += ["guard.nonfinite=skip", "train.length_schedule=[16,32]"]
    accumulated = (
        ["train.gradient_accumulation=3", "train.batch_size=6", "parallel.slices=2"] if engine == "static" else []
    )
    assert main(["task=profile", "device=cpu", f"engine={engine}", *SMALL, *files, *accumulated]) == 0
    text, found = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert "By part of the model" in text and "At the roof, " in text
    nodes = found["nodes"]
    assert all(node["seconds"] > 0 and node["roof"] >= 0 for node in nodes) and found["step_ms"] > 0
    for groups in ("parts", "ops"):
        for what in ("launches", "flops", "nbytes", "seconds"):
            total = sum(group[what] for group in found[groups].values())
            assert total == pytest.approx(sum(node[what] for node in nodes))
    parts = found["parts"]
    assert not [name for name in parts if name.startswith(("lr/", "backward"))] and "(update)" in parts
    assert {node["stage"] for node in nodes} == {"forward", "backward", "update"}
    assert max(node["launches"] for node in nodes) == (4 if accumulated else 1)
    events = json.loads((tmp_path / "trace.json").read_text("utf-8"))["traceEvents"]
    leaves = [event for event in events if event["args"]]
    assert len(leaves) == sum(node["launches"] for node in nodes)
    assert {"forward", "backward", "blocks.0", "feed_forward"} <= {
        event["name"] for event in events if not event["args"]
    }
    check_nesting(events)


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Slices of one track lie inside one another or apart, and leaves do not overlap: else a viewer refuses them."""
    open_slices: list[float] = []
    for event in events:  # parents come before what lies in them
        begin, end = event["ts"], event["ts"] + event["dur"]
        while open_slices and open_slices[-1] <= begin + 1e-3:
            open_slices.pop()
        assert not open_slices or end <= open_slices[-1] + 1e-3
        open_slices.append(end)


def test_medians_shares_and_roofs_are_of_the_spans() -> None:
    graph = Graph()
    with graph.scope("blocks.3.attention"):
        product = ops.matmul(graph.input("x", TensorSpec((10, 20))), graph.input("w", TensorSpec((20, 30)))).producer
    total = ops.add(product.outputs[0], product.outputs[0]).producer
    steps = [
        [(product, at, at + took), (total, at + took, at + took + 1), (total, at + took + 1, at + took + 2)]
        for at, took in ((0.0, 2.0), (10.0, 4.0), (20.0, 30.0))
    ]
    profile = NodeProfile.of("cpu", "static", 1, [4.0, 5.0, 40.0], [6.0, 6.0, 6.0], Rates(1e4, 1e3), steps, {})
    assert profile.overhead == pytest.approx(0.2) and profile.whole["seconds"] == 6 and profile.whole["launches"] == 3
    assert profile.nodes[product]["seconds"] == 4 and profile.nodes[product]["roof"] == pytest.approx(4400 / 1e3)
    assert profile.nodes[total]["flops"] == 2 * 300 and profile.nodes[total]["roof"] == pytest.approx(2 * 2400 / 1e3)
    assert list(profile.by(part_of)) == ["blocks.*.attention", "(forward)"]
    assert len(profile.tables()[0].rows) == 1 and profile.tables()[0].rows[0][0] == "blocks.3.attention"
    names = [event["name"] for event in profile.trace()["traceEvents"]]
    assert names == ["forward", "blocks.3", "attention", "matmul", "add", "add"]
    check_nesting(profile.trace()["traceEvents"])
