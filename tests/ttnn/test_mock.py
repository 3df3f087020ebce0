"""Training steps on mocked boards: ttnn's own validators, allocators and program factories take every op of ours."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ttnn", reason="the package ttnn is not installed")

from tests import forked

Order = dict[str, Any]
BF16, TRACED = {"precision": "bf16"}, {"engine": "traced"}
MLP, ODD = {"model": "mlp"}, {"model": "odd", "dropout": 0.1, **BF16}
STEPS: dict[str, Order] = {
    "mlp": MLP,
    "mlp dynamic": {**MLP, "engine": "dynamic"},
    "nano-gpt": {"model": "nano-gpt", **BF16},
    "nano-gpt pure": {"model": "nano-gpt", "precision": "bf16_true"},
    "odd": ODD,
    "many ids": {"model": "many ids", **BF16},
    "llama": {"model": "llama", **BF16},
    "experts": {"model": "experts", **BF16},
    "centred": {"model": "centred"},
    # Last: captured steps keep the device from fused updates.
    "mlp traced": {**MLP, **TRACED},
    "centred traced": {"model": "centred", **TRACED},
    "experts traced": {"model": "experts", **TRACED},
}


def agillm(preset: str, **config: Any) -> Order:
    return {"model": "agillm", "config": {"preset": preset, "vocabulary": 97, "context": 70, **config}}


READS: dict[str, Order] = {
    "nano-gpt": {"model": "nano-gpt", "reads": "causal", **BF16},
    "fp32 traced": {"model": "odd", "reads": "causal", **TRACED},
    "llama": {"model": "llama", "reads": "causal", **BF16},
    "agillm": {**agillm("nano_1x"), "reads": "causal", **BF16},
    "agillm pairs": {**agillm("nano_3x"), "reads": "pairs", **TRACED, **BF16},
    "standard bias": {**agillm("nano_3x", alibi="standard"), "reads": "pairs"},
}
# Device ops of one step, forward to update, and of a token that is read.
LIMITS = {"mlp": 22, "nano-gpt": 150, "nano-gpt pure": 137, "many ids": 114, "llama": 215}
READ_LIMITS = {"nano-gpt": 119, "llama": 130, "agillm": 127, "agillm pairs": 130}
TINY = {"pad_vocabulary": 32, "vocabulary": 300, "context": 64}
# What each must take: cores, settings of the device, and cases.
BOARDS: dict[str, tuple[list[int], Order, tuple[Order, ...]]] = {
    "n300, one chip": ([7, 8], {"board": "n300"}, (
        MLP, *({**agillm(name, **TINY, **more), **BF16}
               for name, more in (("femto_12x", {}), ("nano_3x", {"recompute": "block"}))),
    )),
    "n300": ([7, 8], {"board": "n300", "mesh": [1, 2]}, (MLP, {**STEPS["nano-gpt"], "rows": 8}, STEPS["many ids"])),
    "t3000": ([7, 8], {"board": "t3000", "mesh": [2, 4]}, (MLP, STEPS["llama"], ODD)),
    "p150": ([10, 13], {"board": "p150"}, (MLP, ODD)),
    "dispatch from Ethernet cores": ([8, 8], {"board": "n300", "dispatch": "eth"}, ()),
    # The next inputs are prefetched, for which the copies into place are the only further launches.
    "two queues": ([8, 8], {"board": "n150", "command_queues": 2}, (ODD, MLP, {**MLP, **TRACED})),
    "part of the cores": ([8, 8], {"board": "n150", "core_grid": [4, 3], "product": 512}, (MLP,)),
    "sub-devices": ([8, 8], {"board": "n150", "subdevices": 2, "command_queues": 2}, tuple(
        {**model, "part": part, "columns": True} for part in (0, 1) for model in (MLP, ODD)
    )),
}  # fmt: skip
Costs = dict[str, dict[str, Any]]


@cache
def child(cache_folder: str, order: str) -> list[dict[str, Any]]:
    """Lines of JSON that a process on a mocked board prints."""
    done = forked.run("tests.ttnn.mock_child", order, TTRAIN_CACHE=cache_folder, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="session")
def n150(kernels: str) -> Costs:
    cases = STEPS | {f"reading {name}": case for name, case in READS.items()}
    facts, product, *costs = child(kernels, json.dumps({"board": "n150", "cases": [*cases.values()], "product": 512}))
    assert facts == {"cores": [8, 8], "computes": False}
    return {"product": product, **dict(zip(cases, costs, strict=True))}


def check_settled(cost: dict[str, Any], traced: bool) -> None:
    """Programs are built by the second step; the child forbids new ones after that."""
    assert cost["zero"], "a mocked board computes nothing"
    assert (cost["later_allocations"], cost["later_dram"], cost["captures"]) == (0, 0, traced)


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_accepted_and_settle(n150: Costs, name: str) -> None:
    if "dynamic" in name:
        assert n150[name]["zero"]
    else:
        check_settled(n150[name], "traced" in name)


def test_device_ops_of_a_step_and_of_a_token(n150: Costs) -> None:
    limits = LIMITS | {f"reading {name}": limit for name, limit in READ_LIMITS.items()}
    assert {name: n150[name]["ops"] for name, limit in limits.items() if n150[name]["ops"] > limit} == {}
    captures = {name: n150[f"reading {name}"]["captures"] for name in READS}  # of a chunk's step, and of a token's
    assert captures == {name: 2 * (case.get("engine") == "traced") for name, case in READS.items()}


@pytest.mark.parametrize("name", BOARDS)
def test_boards_and_ways_to_use_them(kernels: str, n150: Costs, name: str) -> None:
    cores, settings, cases = BOARDS[name]
    facts, *costs = child(kernels, json.dumps({**settings, "cases": cases}))
    assert facts["cores"] == cores
    if "product" in settings:
        assert (n150["product"]["columns"], costs.pop(0)["columns"]) == ([[0, 7]], [[0, 2]])
    for cost, case in zip(costs, cases, strict=True):
        check_settled(cost, "engine" in case)
    if cases and "subdevices" not in settings:  # gradients are summed over the chips
        assert (costs[cases.index(MLP)]["ops"] > n150["mlp"]["ops"]) is ("mesh" in settings or name == "two queues")
    if "subdevices" in settings:  # not loaded, so products start at the first core; all others are on their columns
        assert all(max(last for _, last in cost["columns"]) == 3 for cost in costs[:2])
        assert all({first for first, _ in cost["columns"]} == {0, 4} for cost in costs[2:])


def test_large_agillm_on_one_chip_of_an_n300(kernels: str) -> None:
    """Two layers of `large` with embedding and heads in host memory, fp32 masters on the card."""
    config = {"preset": "large", "layers": 2, "vocabulary": 128_815, "context": 128, "pad_vocabulary": 32}
    hosted = {"model": "agillm", "config": {**config, "recompute": "block"}, "rows": 1, "steps": 3, **BF16}
    order = {"board": "n300", "host_resident": ["embedding", "head"], "cases": [hosted]}
    _, large = child(kernels, json.dumps(order))
    check_settled(large, False)
    # Parameters on the card take 4 + 4 + 4 bytes for fp32 masters and moments, 2 + 2 for copies and gradients.
    core = large["parameters"] - 3 * 128_815 * 1024 - 2 * 128_815 - 2 * 1024 - 2
    assert 16 * core < large["dram"] < 1.2 * 16 * core
    assert large["host"] > 16 * 3 * 128_815 * 1024


def test_a_run_on_a_mocked_board_can_not_be_mistaken_for_training(kernels: str, tmp_path: Path) -> None:
    overrides = ["device=n150", "device.mode=mock", "model=mlp", f"run.dir={tmp_path / 'run'}"]
    done = forked.run("ttrain", *overrides, TTRAIN_CACHE=kernels, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert said.count("values are not computed") == 2  # at the start and at the end
    assert "device ops " in said
    run = tmp_path / "run"
    assert "not computed" in json.loads((run / "run.json").read_text("utf-8"))["attempts"][0]["dry_run"]
    assert json.loads((run / "summary.json").read_text("utf-8"))["computes"] is False
    assert not list((run / "checkpoints").glob("*"))
    assert not (run / "metrics.jsonl").exists()
