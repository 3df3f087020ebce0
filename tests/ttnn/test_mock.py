"""Training steps on mocked boards: ttnn's own validators, allocators and program factories take every op of ours."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ttnn", reason="the package ttnn is not installed")

from tests import forked

pytestmark = pytest.mark.timeout(600)  # one child builds every model on a mocked board
BF16 = {"precision": "bf16"}
N150: dict[str, dict[str, Any]] = {
    "mlp": {"model": "mlp"},
    "mlp dynamic": {"model": "mlp", "engine": "dynamic"},
    "nano-gpt": {"model": "nano-gpt", **BF16},
    "nano-gpt dynamic": {"model": "nano-gpt", "engine": "dynamic", **BF16},
    "nano-gpt pure": {"model": "nano-gpt", "precision": "bf16_true"},
    "odd": {"model": "odd", "dropout": 0.1, **BF16},
    "gpt2": {"model": "gpt2", "rows": 1, **BF16},
    "llama": {"model": "llama", **BF16},
    "centred": {"model": "centred"},
    # Last: captured steps keep the device from fused updates.
    "mlp traced": {"model": "mlp", "engine": "traced"},
    "centred traced": {"model": "centred", "engine": "traced"},
}
AGILLM = {"model": "agillm", "reads": "pairs"}
READS: dict[str, dict[str, Any]] = {
    "nano-gpt": {"model": "nano-gpt", "reads": "causal", **BF16},
    "fp32 traced": {"model": "short", "reads": "causal", "engine": "traced"},
    "llama": {"model": "llama", "reads": "causal", **BF16},
    "agillm": {**AGILLM, "config": {"preset": "nano_1x"}, "reads": "causal", **BF16},
    "agillm pairs": {**AGILLM, "config": {"preset": "nano_3x"}, "engine": "traced", **BF16},
    "standard bias": {**AGILLM, "config": {"preset": "nano_3x", "alibi": "standard"}},
}
for _case in READS.values():
    if "config" in _case:
        _case["config"] |= {"vocabulary": 97, "context": 70}
# Device ops of one step, forward to update. Written op by op, those of nano-gpt take 978 and 362; without rows of its
# own for RMS norm, rotation and gates, llama takes 686.
LIMITS = {"mlp": 22, "nano-gpt": 342, "nano-gpt pure": 329, "gpt2": 162, "llama": 361}
READ_LIMITS = {"nano-gpt": 340, "llama": 214, "agillm": 140, "agillm pairs": 145}  # of a token


@cache
def child(cache_folder: str, order: str) -> list[dict[str, Any]]:
    """Lines of JSON that a process on a mocked board prints."""
    done = forked.run("tests.ttnn.mock_child", order, TTRAIN_CACHE=cache_folder, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def on_board(
    kernels: str, board: str, *cases: dict[str, Any], **settings: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    facts, *costs = child(kernels, json.dumps({"board": board, "cases": cases, **settings}))
    return facts, costs


@pytest.fixture(scope="session")
def n150(kernels: str) -> dict[str, dict[str, Any]]:
    cases = N150 | {f"reading {name}": case for name, case in READS.items()}
    facts, product, *costs = child(kernels, json.dumps({"board": "n150", "cases": [*cases.values()], "product": 512}))
    assert facts == {"cores": [8, 8], "computes": False}
    return {"product": product, **dict(zip(cases, costs, strict=True))}


@pytest.mark.parametrize("name", N150)
def test_steps_are_accepted_and_settle(n150: dict[str, dict[str, Any]], name: str) -> None:
    """Programs are built by the second step; the child forbids new ones after that."""
    cost = n150[name]
    assert cost["zero"], "a mocked board computes nothing"
    if "dynamic" not in name:
        assert (cost["later_allocations"], cost["later_dram"]) == (0, 0)
    assert cost["captures"] == ("traced" in name)


def test_device_ops_of_a_step_and_of_a_token(n150: dict[str, dict[str, Any]]) -> None:
    limits = LIMITS | {f"reading {name}": limit for name, limit in READ_LIMITS.items()}
    assert {name: n150[name]["ops"] for name, limit in limits.items() if n150[name]["ops"] > limit} == {}


def test_steps_that_read_are_captured(n150: dict[str, dict[str, Any]]) -> None:
    """The step of a chunk, and that of a token."""
    captures = {name: n150[f"reading {name}"]["captures"] for name in READS}
    assert captures == {name: 2 * (case.get("engine") == "traced") for name, case in READS.items()}


# What the boards of several chips must take, with rows per chip; a gpt2 sequence has 1024 tokens.
ACCEPTED: tuple[dict[str, Any], ...] = (
    {"model": "mlp"},
    {"model": "nano-gpt", "rows": 32, **BF16},
    {"model": "gpt2", "rows": 1, **BF16},
    {"model": "llama", **BF16},
    {"model": "odd", "dropout": 0.1, **BF16},
)
TINY_AGILLM: tuple[dict[str, Any], ...] = tuple(
    {"model": "agillm", "config": {"pad_vocabulary": 32, **config}, **BF16}
    for config in (
        {"preset": "femto_12x", "vocabulary": 300, "context": 64},
        {"preset": "nano_3x", "vocabulary": 300, "context": 64},
        {"preset": "micro_3x", "vocabulary": 1000, "context": 128, "recompute": "block"},
    )
)


@pytest.mark.parametrize(
    ("board", "mesh", "cores", "cases"),
    [
        ("n300", [1, 1], [7, 8], (ACCEPTED[0], *TINY_AGILLM)),
        ("n300", [1, 2], [7, 8], ACCEPTED),
        ("t3000", [2, 4], [7, 8], (ACCEPTED[0], ACCEPTED[3], ACCEPTED[4])),
        ("p150", [1, 1], [10, 13], (ACCEPTED[0], ACCEPTED[-1])),
    ],
    ids=["n300, one chip", "n300", "t3000", "p150"],
)
def test_other_boards(kernels: str, n150: Any, board: str, mesh: Any, cores: Any, cases: tuple[Any, ...]) -> None:
    facts, costs = on_board(kernels, board, *cases, mesh=mesh)
    assert facts["cores"] == cores
    assert len(costs) == len(cases)
    assert all((cost["later_allocations"], cost["later_dram"]) == (0, 0) for cost in costs)
    several = mesh != [1, 1]
    assert (costs[0]["ops"] > n150["mlp"]["ops"]) is several  # gradients are summed over the chips


def test_large_agillm_on_one_chip_of_an_n300(kernels: str) -> None:
    """`large` with embedding and heads in host memory, fp32 masters on the card: it fits with room to spare."""
    config = {"preset": "large", "vocabulary": 128_815, "context": 128, "recompute": "block", "pad_vocabulary": 32}
    hosted = {"model": "agillm", "config": config, "rows": 1, "steps": 3, **BF16}
    _, (large,) = on_board(kernels, "n300", hosted, host_resident=["embedding", "head"])
    assert (large["later_allocations"], large["later_dram"]) == (0, 0)
    # 302.5M parameters on the card at 4 + 4 + 4 bytes for fp32 masters and moments, 2 + 2 for copies and gradients.
    core = 698_389_088 - 3 * 128_815 * 1024 - 2 * 128_815 - 2 * 1024 - 2
    assert 16 * core < large["dram"] < 1.1 * 16 * core < 12 * 2**30 / 2
    assert large["host"] > 16 * 3 * 128_815 * 1024


def test_dispatch_from_ethernet_cores_leaves_the_whole_grid(kernels: str) -> None:
    assert on_board(kernels, "n300", dispatch="eth")[0]["cores"] == [8, 8]


def test_two_queues(kernels: str) -> None:
    """The next inputs are prefetched, for which the copies into place are the only further launches."""
    cases = [{"model": "odd", "dropout": 0.1, **BF16}, {"model": "mlp"}, {"model": "mlp", "engine": "traced"}]
    _, costs = on_board(kernels, "n150", *cases, command_queues=2)
    assert [cost["captures"] for cost in costs] == [0, 0, 1]
    assert all((cost["later_allocations"], cost["later_dram"]) == (0, 0) for cost in costs)


def test_a_core_grid_limits_products(kernels: str, n150: dict[str, dict[str, Any]]) -> None:
    assert n150["product"]["columns"] == [[0, 7]]
    _, (found, cost) = on_board(kernels, "n150", {"model": "mlp"}, core_grid=[4, 3], product=512)
    assert found["columns"] == [[0, 2]]
    assert (cost["later_allocations"], cost["later_dram"]) == (0, 0)


def test_a_dry_run_of_sub_devices(kernels: str) -> None:
    """Not loaded, so products start at the first core; all other launches are on the replica's columns."""
    models: list[dict[str, Any]] = [{"model": "mlp"}, {"model": "odd", "dropout": 0.1, **BF16}]
    cases = [{**model, "part": part, "columns": True} for part in (0, 1) for model in models]
    _, costs = on_board(kernels, "n150", *cases, subdevices=2, command_queues=2)
    assert all((cost["later_allocations"], cost["later_dram"]) == (0, 0) for cost in costs)
    for cost in costs[:2]:
        assert max(last for _, last in cost["columns"]) == 3
    for cost in costs[2:]:
        assert {first for first, _ in cost["columns"]} == {0, 4}


def test_a_run_on_a_mocked_board_can_not_be_mistaken_for_training(kernels: str, tmp_path: Path) -> None:
    overrides = ["device=n150", "device.mode=mock", "model=mlp", f"run.dir={tmp_path / 'run'}"]
    done = forked.run("ttrain", *overrides, TTRAIN_CACHE=kernels, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert said.count("values are not computed") == 2  # at the start and at the end
    assert "device ops per step" in said
    run = tmp_path / "run"
    assert "not computed" in json.loads((run / "run.json").read_text("utf-8"))["attempts"][0]["dry_run"]
    assert json.loads((run / "summary.json").read_text("utf-8"))["computes"] is False
    assert not list((run / "checkpoints").glob("*"))
    assert not (run / "metrics.jsonl").exists()
