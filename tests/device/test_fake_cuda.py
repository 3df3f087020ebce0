"""The path of CUDA on a machine without a GPU: every row, and whole steps, on fake tensors. Values are not computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.device.fake_cuda import FakeCuda, fake_cuda
from tests.ops.harness import every_op, most_cases
from ttrain.config import build
from ttrain.config.compose import load
from ttrain.core.spec import DType
from ttrain.device.torch.triton.rows import RULES
from ttrain.engine.base import Step, examples
from ttrain.graph import Case, Op
from ttrain.train.sampling.source import StepsByLength, sampling_traces
from ttrain.train.steps.session import Session
from ttrain.train.task_settings import SampleConfig


@pytest.fixture
def device() -> Iterator[FakeCuda]:
    with fake_cuda() as opened:
        yield opened


@pytest.fixture
def plain(device: FakeCuda) -> FakeCuda:
    """A GPU without Triton."""
    device.context, device.groups = replace(device.context, triton=False), False
    return device


@every_op(most_cases())
def test_every_row_takes_its_cases(device: FakeCuda, op: Op, case: Case, dtype: DType) -> None:
    device.takes(op, case, dtype)


@every_op(most_cases(lambda op: op.name in RULES and op.name != "fused"))
def test_rows_of_aten_take_what_triton_does(plain: FakeCuda, op: Op, case: Case, dtype: DType) -> None:
    plain.takes(op, case, dtype)


SMALL = "model.layers=1 model.context=64"
PARTS = "train.gradient_accumulation=2 guard.nonfinite=skip"
ROWS = "data=documents data.sources=[a]"
RUNS = {
    "mlp": "model=mlp data=regression model.inputs=6 model.outputs=3 optimizer=sgd",
    "gpt, dropout": f"model=nano-gpt {SMALL} model.dropout=0.1",
    "gpt, bf16": "model=nano-gpt precision=bf16",
    "gpt, muon": f"model=nano-gpt {SMALL} precision=bf16 optimizer=muon run.seed=1 {PARTS}",
    "gpt2": "model=gpt2 model.layers=1 precision=bf16",
    "gpt, fp16": f"model=nano-gpt {SMALL} precision=fp16 train.gradient_accumulation=2 optimizer.clip_norm=null",
    "llama, fp16": f"model=llama {SMALL} precision=fp16 lora.rank=4 optimizer=muon",
    "llama": "model=llama precision=bf16",
    "llama, bf16": f"model=llama {SMALL} precision=bf16 optimizer=adafactor",
    "llama, experts": f"model=llama {SMALL} model.experts=4 model.experts_per_token=2 model.expert_width=20",
    "llama, adapters": f"model=llama {SMALL} precision=bf16 lora.rank=4",
    "llama, documents": f"model=llama {SMALL} precision=bf16 data=documents data.sources=[a] data.attention=document",
    "agillm": f"model=agillm {SMALL} precision=bf16",
    "llama, dpo": f"model=llama {SMALL} precision=bf16 lora.rank=4 {ROWS} objective=dpo",
    "gpt, kto": f"model=nano-gpt {SMALL} precision=bf16 {ROWS} objective=kto {PARTS}",
    "agillm, orpo": f"model=agillm {SMALL} precision=fp16 {ROWS} objective=orpo model.objective=ar_only",
}


LAUNCHES = {"gpt, bf16": 140, "gpt2": 61, "llama": 203}  # of a step; of all 12 layers of gpt2 they are 431


@pytest.mark.parametrize("run", RUNS)
def test_whole_steps_stay_on_the_gpu(device: FakeCuda, run: str) -> None:
    """A step runs once as `static` launches it, and is captured at its second call."""
    steps = opened(device, RUNS[run]).build_training()
    each_is_captured(steps, device)
    if run in LAUNCHES:
        assert dict(zip(steps, device.watched, strict=True))["train"].launches == LAUNCHES[run]


def test_tf32_is_torchs_switch_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="a card", total_memory=2**34, major=7, minor=5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    for precision, switch in (("tf32", "high"), ("fp32", "highest")):
        config = load(["device=cuda", f"precision={precision}"])
        with fake_cuda(), closing(build.build_device(config.device, config.precision)) as device:
            assert torch.get_float32_matmul_precision() == switch
            assert device.describe()["tf32"] is (precision == "tf32")


def test_a_step_without_triton_stays_on_the_gpu(plain: FakeCuda) -> None:
    each_is_captured(opened(plain, RUNS["gpt, dropout"]).build_training(further=False), plain)


@pytest.mark.parametrize(("model", "mode"), [("llama", "ar"), ("nano-gpt", "ar"), ("agillm", "speculative")])
def test_steps_that_read_with_caches_stay_on_the_gpu(device: FakeCuda, model: str, mode: str) -> None:
    session = opened(device, f"model={model} {SMALL} precision=bf16")
    config = SampleConfig(mode=mode)
    with_caches = StepsByLength(session, lambda length: None).get(
        mode,
        64,
        lambda graph: {k: v for each in sampling_traces(graph.model, config, 64).values() for k, v in each.items()},
    )
    each_is_captured(with_caches, device)


def opened(device: FakeCuda, overrides: str) -> Session:
    config = load([*overrides.split(), "engine=traced", "device=cuda", "train.batch_size=4"])
    model = build.build_model(config, None if config.model.name == "mlp" else 96)
    return build.build_session(model, device, config)


def each_is_captured(steps: Mapping[str, Step], device: FakeCuda) -> None:
    """Run steps twice. Their captures hold calls of aten, on tensors of the GPU alone."""
    for step in steps.values():
        for _ in range(2):
            step(examples(step.plan.graph))
    assert len(device.watched) == len(steps) and all(each.calls for each in device.watched)
