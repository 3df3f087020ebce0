"""Attention of a GPU on a machine without one: which kernel takes what, its numbers by stand-ins, and its choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.device.attention_on_cpu import ON_CPU
from tests.device.fake_cuda import fake_cuda
from tests.device.test_fake_cuda import each_is_captured, opened
from tests.ops.harness import Interpreter, assert_equals_reference
from tests.ops.test_attention import HEADS, SHAPE, STARTS, TIME, WIDTH, in_torch
from tests.ops.test_functional import assert_equals_torch
from ttrain import ops
from ttrain.cli import main
from ttrain.config import build
from ttrain.config.compose import load
from ttrain.core.attention_mask import AttentionMask
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.torch.device import TorchDevice
from ttrain.device.torch.kernels import blockwise
from ttrain.device.torch.kernels.blockwise import BLOCKS, most_sequences, sequences
from ttrain.device.torch.kernels.common import Call
from ttrain.device.torch.kernels.costs import KEPT
from ttrain.device.torch.planned import planned
from ttrain.graph import Value, op
from ttrain.plan.plan import Plan
from ttrain.testing.cases import cases_of

LLAMA = "model=llama model.layers=1"
DOCUMENTS = "data=documents data.sources=[a] data.attention=document"


@pytest.mark.parametrize(
    ("run", "capability", "pinned", "way"),
    [
        (f"{LLAMA} precision=bf16", (9, 0), None, "_flash_attention_{}"),
        (f"{LLAMA} precision=bf16 model.window=64", (9, 0), None, "_flash_attention_{}"),
        (f"{LLAMA} precision=bf16 {DOCUMENTS}", (9, 0), None, "_flash_attention_{}"),
        (f"{LLAMA} precision=bf16", (9, 0), "cudnn", "_scaled_dot_product_cudnn_attention"),
        (f"{LLAMA} precision=bf16", (9, 0), "efficient", "_scaled_dot_product_efficient_attention"),
        (LLAMA, (9, 0), None, "_scaled_dot_product_efficient_attention"),
        (f"{LLAMA} precision=fp16", (9, 0), None, "_flash_attention_{}"),
        (f"{LLAMA} precision=fp16", (7, 5), None, "_scaled_dot_product_efficient_attention"),
        (f"{LLAMA} precision=bf16", (7, 5), None, None),  # no kernel knows bf16 there
        (f"{LLAMA} model.window=64", (9, 0), None, None),
    ],
)
def test_steps_take_the_kernels_that_know_their_attention(
    run: str, capability: tuple[int, int], pinned: str | None, way: str | None
) -> None:
    """A llama's heads share keys. A captured step reads nothing on the host, of documents neither."""
    with fake_cuda(capability) as device:
        device.context = replace(device.context, attention=pinned or "planned")
        each_is_captured(opened(device, f"{run} model.context=256").build_training(further=False), device)
        found = [name.removeprefix("aten.") for name in device.watched[0].calls if "_attention" in name]
    names = [way.format(part) for part in ("forward", "backward")] if way and "{}" in way else [way, f"{way}_backward"]
    assert found == (names if way else [])


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> TorchDevice:
    """The rows of a GPU on the CPU."""
    monkeypatch.setattr(blockwise, "aten", ON_CPU)
    monkeypatch.setattr(blockwise, "SHORT", 5)
    device = TorchDevice("cpu", threads=1)
    device.context = replace(device.context, kind="cuda", explicit_up_to=0, query_rows=4)
    return device


@pytest.mark.parametrize("capability", [(9, 0), (7, 5)])
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.FP16])
def test_rows_around_attention_of_a_gpu_are_held_to_the_reference(
    stand_ins: TorchDevice, capability: tuple[int, int], dtype: DType
) -> None:
    stand_ins.context = replace(stand_ins.context, capability=capability)
    for name in ("attention", "attention_grad"):
        for case in cases_of(op(name)):
            assert_equals_reference(stand_ins, op(name), case, dtype)


@pytest.mark.parametrize(
    ("way", "how"),
    [
        ("flash", {}),
        ("flash", {"mask": "full", "kv_heads": 3}),
        ("flash", {"window": 4, "kv_heads": 1}),
        ("flash", {"mask": "full", "window": 3}),
        ("cudnn", {"kv_heads": 2, "scale": 0.9}),
        ("cudnn", {"mask": "full"}),
        ("efficient", {"kv_heads": 2, "scale": 0.9}),
        ("efficient", {"mask": "full"}),
        ("varlen", {"documents": True}),
        ("varlen", {"documents": True, "kv_heads": 2, "window": 3}),
        ("varlen", {"documents": True, "mask": "full", "kv_heads": 1}),
        ("varlen", {"documents": True, "mask": "full", "window": 7}),
    ],
)
def test_every_way_and_its_gradients_equal_torchs(
    stand_ins: TorchDevice, monkeypatch: pytest.MonkeyPatch, way: str, how: Mapping[str, Any]
) -> None:
    """In fp64, which no kernel takes. Of the documents in two rows two are short."""
    monkeypatch.setattr(blockwise, "_able", lambda *given: (way,))
    settings = {key: value for key, value in how.items() if key != "documents"}

    def ours(q: Value, k: Value, v: Value) -> Value:
        if "documents" in how:
            settings["positions"] = q.graph.input("positions", TensorSpec(SHAPE[:2], DType.INT64))
        return ops.attention(q, k, v, heads=HEADS, **settings)

    shapes = [SHAPE, *[(*SHAPE[:2], how.get("kv_heads", HEADS) * WIDTH)] * 2]
    given = [np.random.default_rng(5).standard_normal(shape) for shape in shapes]
    feeds = {"positions": (torch.arange(TIME) - STARTS).numpy()}
    assert_equals_torch(ours, partial(in_torch, how), given, feeds, Interpreter(stand_ins))


@pytest.mark.parametrize("short", [1, 4, 5, 50])
def test_long_documents_are_sequences_and_all_have_a_bound(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a loop over the documents of rows, among them rows of one document and of a document each token."""
    monkeypatch.setattr(blockwise, "SHORT", short)
    draw, time = np.random.default_rng(1), 43
    lengths = [[time], [1] * time, [short] * time, *([*draw.integers(1, 2 * short + 2, time)] for _ in range(20))]
    rows = [np.concatenate([np.arange(each) for each in row])[:time] for row in lengths]
    expected, begins, number = [], [], 0
    for row in rows:
        starts = [*np.flatnonzero(row == 0), time]
        before = True  # was long: a sequence begins
        for start, stop in pairwise(starts):
            long = stop - start >= short
            expected += [long] * (stop - start)
            begins += [number + start] * bool(long or before or start == 0)
            before = long
        number += time
    long, found = sequences(torch.from_numpy(np.stack(rows)))
    bound = most_sequences(len(rows), time)
    assert len(begins) <= bound and long.flatten().tolist() == expected and found.dtype is torch.int32
    assert found.tolist() == [*begins, *[number] * (bound + 1 - len(begins))]
    alternating = torch.tensor([[*range(short), *range(max(short - 1, 0))] * 50])[:, :time]
    assert sequences(alternating)[1][-1] == time, "as many sequences as there can be"


@pytest.fixture
def on_a_gpu(stand_ins: TorchDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TorchDevice]:
    """A device that measures its ways. flash is not there, and cudnn hides no key."""

    def missing(*given: Any, **settings: Any) -> None:
        raise RuntimeError("no kernel image")

    def wrong(q: Any, k: Any, v: Any, bias: Any, sums: bool, p: float, causal: bool, *, scale: float) -> Any:
        return ON_CPU._scaled_dot_product_cudnn_attention.default(q, k, v, bias, sums, p, False, scale=scale)

    replaced = {"_flash_attention_forward": missing, "_scaled_dot_product_cudnn_attention": wrong}
    named = {name: SimpleNamespace(default=function) for name, function in replaced.items()}
    monkeypatch.setattr(blockwise, "aten", SimpleNamespace(**{**vars(ON_CPU), **named}))
    monkeypatch.setenv("TTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    stand_ins.context = replace(stand_ins.context, attention="measured", capability=(9, 0))
    blockwise._measured.cache_clear()
    yield stand_ins
    blockwise._measured.cache_clear()


def _chosen(device: TorchDevice, **more: Any) -> str:
    q = torch.empty(3, 2, 64, 16, dtype=torch.bfloat16)
    attributes = {"heads": 2, "kv_heads": 1, "scale": 0.25, "mask": AttentionMask(), "stream": 7, **more}
    return blockwise.chosen(Call(device.context, [], [], attributes), q, documents=False)


def test_the_fastest_way_that_agrees_is_measured_once_and_kept(on_a_gpu: TorchDevice) -> None:
    way = _chosen(on_a_gpu)
    (key,) = [key for key in KEPT.known() if "attention a GPU torch.bfloat16 64x16 flash" in key]
    costs = KEPT.known()[key]
    assert {name for name, cost in costs.items() if np.isinf(cost)} == {"flash", "cudnn"}
    assert way == min(costs, key=lambda name: costs[name]) and set(costs) == {"flash", "cudnn", "efficient", BLOCKS}
    KEPT.keep({key: {name: float(name != "cudnn") for name in costs}})
    assert _chosen(on_a_gpu, stream=8) == way, "once per process"
    blockwise._measured.cache_clear()
    assert _chosen(on_a_gpu) == way, "what is kept counts"


def planned_step(run: str, context: int) -> Plan:
    config = load([*run.split(), "device=cuda", "engine=traced", f"model.context={context}", "train.batch_size=2"])
    session = build.build_session(build.build_model(config, 96), planned(config.device), config)  # type: ignore
    return session.build_training(further=False)["train"].plan


@pytest.mark.parametrize(
    "run",
    [
        "precision=bf16",
        "precision=fp32",
        "precision=bf16 model.window=1024",
        "precision=fp32 model.window=1024",
        f"precision=bf16 {DOCUMENTS}",
        f"precision=fp32 {DOCUMENTS}",
        "precision=bf16 dropout",
    ],
)
def test_twice_the_context_takes_twice_the_memory(run: str) -> None:
    """Every buffer of a plan for a GPU, and what libraries take."""
    gpt = "model=nano-gpt model.layers=2 model.dropout=0.1"
    model = (
        f"{gpt} precision=bf16" if "dropout" in run else f"model=llama model.preset=SmolLM2-360M model.layers=2 {run}"
    )
    single, double = (planned_step(model, context) for context in (8192, 16384))
    sizes = [sorted(block.nbytes for block in plan.blocks) for plan in (single, double)]
    assert len(sizes[0]) == len(sizes[1])
    assert max(after / max(before, 512) for before, after in zip(*sizes, strict=True)) <= 2.01
    # Where gradients will lie is lent to the arena, and does not grow.
    taken, twice = ((plan.arena_bytes, plan.outside_bytes) for plan in (single, double))
    assert max(after / max(before, 1) for before, after in zip(taken, twice, strict=True)) <= 2.1


def test_a_plan_tells_the_way_of_attention(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["model=llama", "model.layers=1", "model.context=512", "device=cuda", "engine=traced", "plan.time=false"]
    told = {
        "precision=bf16": "Attention by the fastest on the GPU of flash, cudnn, efficient.",
        "precision=fp32": "Attention by efficient.",
        "model.window=64": "Attention by blocks of rows.",
    }
    for more, line in told.items():
        assert main(["task=plan", *given, more]) == 0
        assert line in capsys.readouterr().out
