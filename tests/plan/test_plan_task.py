"""task=plan through the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ttrain.cli import main
from ttrain.train.forecast.limits import fit_text

SMALL = ["model.layers=1", "model.width=32", "model.heads=2", "model.context=16", "model.vocabulary=29"]
Planned = Callable[..., str]


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Planned:
    """`planned("device=cpu")` -> what task=plan prints of a small model, or of that which is given."""

    def run(*overrides: str, code: int = 0) -> str:
        small = [] if any(given.startswith("model=") for given in overrides) else SMALL
        assert main(["task=plan", "plan.time=false", *small, *overrides]) == code
        out, err = capsys.readouterr()
        return out + err * (code != 0)

    return run


def test_the_summary_is_plain_text_where_nobody_looks_at_a_terminal(planned: Planned) -> None:
    text = planned("device=cpu", "engine=static", "train.batch_size=4")
    first = "Plan of nano-gpt on cpu, engine static, fp32; 4 examples per optimizer step; vocabulary 29.\nIt fits: "
    assert text.startswith(first)
    titles = "Parameters", "One optimizer step", "Memory", "Arena of each step", "Largest buffers at the peak of train"
    assert all(f"\n{title}\n" in text for title in titles)
    assert "\x1b" not in text and "A checkpoint takes" in text


def test_gpt2_has_as_many_parameters_as_published(planned: Planned, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    model = ["model=gpt2", "model.vocabulary=50257", "device=null", "train.batch_size=4"]
    assert "124,439,808" in planned(*model, f"plan.json={file}")
    found = json.loads(file.read_text("utf-8"))
    assert found["parameters"]["total"] == 124_439_808
    # Weights in products take 2 operations a token forward and 4 backward (Kaplan et al., 2020); the rest is attention.
    products = sum(count for name, count in found["parameters"]["groups"].items() if name != "positions")
    tokens, context, width, layers = 4 * 1024, 1024, 768, 12
    attention = 12 * layers * width * context * tokens
    assert found["flops_per_step"]["total"] == pytest.approx(6 * products * tokens + attention, rel=0.04)
    assert found["memory"]["parameter"] == 4 * 124_439_808 and found["checkpoint_bytes"] == 12 * 124_439_808
    parts = ("parameter", "gradient", "optimizer", "arena", "libraries")
    assert found["memory"]["total"] == sum(found["memory"][part] for part in parts)


def test_what_does_not_fit_is_told_first_with_keys_that_take_less(planned: Planned, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    overrides = ["device=n300", "train.batch_size=4", "plan.memory_gb=0.0001"]
    told = planned(*overrides, f"plan.json={file}").splitlines()[1]
    assert told.startswith("It does not fit: ") and "of 104.9 KiB, plan.memory_gb. Less take: " in told
    assert "train.gradient_accumulation=2 (a micro-batch of 2)" in told and "precision=bf16" in told
    assert "device.host_resident=[embedding,head]" in told
    found = json.loads(file.read_text("utf-8"))
    assert found["fits"]["fits"] is False and found["memory"]["total"] > found["fits"]["available_bytes"]
    smaller = found["smaller"]
    both = (
        "train.gradient_accumulation=2 model.recompute=block precision=bf16 optimizer.state_dtype=bf16 "
        "device.host_resident=[embedding,head]"
    )
    assert {"precision=bf16", "lora.rank=8", both, f"lora.rank=8 {both}"} <= smaller.keys()
    assert smaller[both] < smaller["precision=bf16"] < found["memory"]["total"]
    assert smaller[f"lora.rank=8 {both}"] < smaller["lora.rank=8"]
    assert "\nIt fits: " in planned("device=n300")
    assert "fit" not in planned("device=null").splitlines()[1]
    assert fit_text(99, 100, "plan.memory_gb", ["engine=static"]).startswith("It may fit: 99 B of 100 B")


@pytest.mark.parametrize(
    ("show", "present", "absent"),
    [
        ("graph", ["input  tokens", "head_cross_entropy("], ["backward", "update("]),
        ("backward", ["attention_grad(", "output loss"], ["@0+"]),
        ("plan", ["arena: ", "@0+", "=embedding.weight/gradient", "in..", "workspace"], ["input  tokens"]),
    ],
)
def test_what_lies_behind_can_be_shown_of_every_step(
    planned: Planned, show: str, present: list[str], absent: list[str]
) -> None:
    text = planned(f"plan.show={show}", "device=cpu", "train.gradient_accumulation=2", "train.batch_size=4")
    assert "in 2 micro-batches" in text
    _, *steps = text.split("\nstep ")
    assert [step.split()[0] for step in steps] == ["accumulate_first", "accumulate_next", "update"]
    assert all(part in steps[0] for part in present) and ("update(" in steps[2]) is (show != "graph")
    assert not [part for part in absent if part in steps[0]]


def test_the_dynamic_engine_is_planned_as_static_and_says_so(planned: Planned) -> None:
    text = planned("engine=dynamic")
    assert "engine dynamic plans nothing: this is what engine static would take" in text
    assert text.splitlines()[2:] == planned("engine=static").splitlines()[2:]


OTHERS = [["device=cuda", "precision=bf16"], ["device=null", "model.recompute=block"], ["device=n150"]]


@pytest.mark.parametrize("overrides", OTHERS, ids=" ".join)
def test_other_devices_plan_without_being_there(planned: Planned, overrides: list[str]) -> None:
    text = planned(*overrides, "engine=traced")
    assert "Arena of each step" in text and f" on {overrides[0].removeprefix('device=')}, engine traced" in text


def test_a_card_holds_whole_tiles(planned: Planned, tmp_path: Path) -> None:
    found = {}
    for device in ("cpu", "n150"):
        planned(f"device={device}", "train.batch_size=1", "model.context=1", f"plan.json={tmp_path}/{device}")
        found[device] = json.loads((tmp_path / device).read_text("utf-8"))["memory"]
    assert found["n150"]["arena"] > 3 * found["cpu"]["arena"] and found["n150"]["arena"] % (32 * 32) == 0


def test_a_mesh_is_planned_as_it_runs(planned: Planned, tmp_path: Path) -> None:
    """A chip's part of the batch, and nothing offered that a run on several chips refuses."""
    mesh, file = ["device=n300", "device.mesh=[1,2]"], tmp_path / "plan.json"
    given = [*mesh, "train.batch_size=2", "plan.limits=true", "plan.memory_gb=0.0007", f"plan.json={file}"]
    assert "linear fp32[1, 16, 128]" in planned(*given)
    found = json.loads(file.read_text("utf-8"))
    assert found["fits"]["fits"] and found["largest"]["micro_batch"]["value"] % 2 == 0
    told = planned(*given, "plan.memory_gb=0.0001")
    assert "train.gradient_accumulation" not in told and "device.host_resident" not in told
    told = planned("model=mlp", "data.resident=device", *mesh, code=2)
    assert "the chips of a mesh share every batch" in told


def test_an_mlp_plans_too_and_a_file_that_can_not_be_written_is_told(planned: Planned, tmp_path: Path) -> None:
    told = planned("model=mlp", f"plan.json={tmp_path}/missing/plan.json", code=2)
    assert "layers.*" in told and "plan.json=" in told
