"""GPUs of Apple and Intel on a machine without one: rows and steps on fake tensors, and what is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.conftest import Told
from tests.device.fake_cuda import INDEX, FakeCuda, fake_cuda
from tests.ops.harness import assert_equals_reference, most_cases
from ttrain.config import build
from ttrain.config.compose import load
from ttrain.core.errors import CaptureError, DeviceUnavailable
from ttrain.core.spec import DType
from ttrain.device.base import filled
from ttrain.device.settings import TorchConfig
from ttrain.device.torch.device import TorchDevice, open_device
from ttrain.device.torch.info import Torch
from ttrain.device.torch.kernels.common import constant
from ttrain.engine.state import State
from ttrain.engine.traced import TracedEngine
from ttrain.graph import op
from ttrain.testing.cases import cases_of

KINDS = ("mps", "xpu")


class Watched(TorchDispatchMode):
    """Notes the calls of aten on the GPU, and refuses its tensors in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:  # every other call, by other calls
            return result
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
        if any(each.device.type == "cuda" for each in tensors):
            assert not any(each.device.type == "cuda" and each.dtype is torch.float64 for each in tensors), func
            self.calls.add(str(func).removeprefix("aten.").removesuffix(".default"))
        return result


class FakeGpu(FakeCuda):
    """Rows of another GPU. Its fake tensors lie on `cuda`, as the torch of most machines has no other backend."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind, threads=1)
        self.device = torch.device("cuda", INDEX)
        self.context = replace(self.context, device=self.device)


@contextmanager
def fake_gpu(kind: str) -> Iterator[tuple[FakeGpu, Watched]]:
    with pytest.MonkeyPatch.context() as patch, fake_cuda(), Watched() as watched:
        for name in ("set_device", "synchronize", "empty_cache"):
            patch.setattr(getattr(torch, kind), name, lambda *given: None, raising=False)
        device = FakeGpu(kind)
        try:
            yield device, watched
            device.close()
        finally:
            constant.cache_clear()  # it has constants of the host, which are fakes here


@cache
def kernels_of_aten() -> dict[str, dict[str, Any]]:
    """The functions of aten as torch lists them, with the devices that have a kernel of each."""
    spec = find_spec("torchgen")
    assert spec is not None and spec.submodule_search_locations is not None
    path = Path(next(iter(spec.submodule_search_locations))) / "packaged/ATen/native/native_functions.yaml"
    listed = yaml.load(path.read_text("utf-8"), yaml.CSafeLoader)
    return {each["func"].partition("(")[0]: each for each in listed}


def without_kernel(calls: set[str], backend: str) -> set[str]:
    """The calls that a backend has no kernel for: neither its own nor one of others that aten composes it of."""
    table = kernels_of_aten()

    def has(name: str) -> bool:
        delegate = table.get(table[name].get("structured_delegate"), {})
        dispatch = {**table[name].get("dispatch", {}), **delegate.get("dispatch", {})}
        keys = ", ".join(dispatch or {"CompositeImplicitAutograd": ""}).split(", ")
        return any(key == backend or key.startswith("Composite") for key in keys)

    return {name for name in calls if not name.startswith("prim.") and not has(name)}


def test_every_row_launches_what_the_backend_has() -> None:
    """Both kinds have the same rows. The table does not list the kernels that Intel keeps apart."""
    with fake_gpu("mps") as (device, watched):
        for parameters in most_cases():
            device.takes(*parameters.values)
    assert len(watched.calls) > 80 and not without_kernel(watched.calls, "MPS")
    assert without_kernel({"_scaled_dot_product_flash_attention"}, "MPS"), "the table tells something"


RUNS = {
    "gpt, bf16": "model=nano-gpt model.dropout=0.1 precision=bf16 train.gradient_accumulation=2",
    "gpt, lion": "model=nano-gpt optimizer=lion",
    "llama, documents": "model=llama data=documents data.sources=[a] data.attention=document optimizer=adafactor",
    "llama, muon": "model=llama precision=bf16 optimizer=muon",
}


@pytest.mark.parametrize(
    ("run", "kind", "engine"),
    [*((run, "mps", "static") for run in RUNS), ("gpt, bf16", "xpu", "static"), ("llama, muon", "mps", "dynamic")],
)
def test_whole_steps_run(run: str, kind: str, engine: str) -> None:
    given = [*RUNS[run].split(), "model.layers=1", "model.context=64", "device=cpu", "train.batch_size=4"]
    config = load([*given, f"engine={engine}"])
    with fake_gpu(kind) as (device, watched):
        model = build.build_model(config, 96)
        for step in build.build_session(model, device, config).build_training().values():
            step({name: filled(spec, 1) for name, spec in step.inputs.items()})
    assert "mm.out" in watched.calls


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_can_not_be_captured(kind: str) -> None:
    refusal = f"device {kind} can't capture .*engine=static"
    with fake_gpu(kind) as (device, _), pytest.raises(CaptureError, match=refusal):
        TracedEngine(device, State(device, []))


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_rules_whose_scalars_are_worked_out_on_the_host_are_held_to_the_reference(dtype: DType) -> None:
    device = TorchDevice("cpu", threads=1)
    device.context = replace(device.context, kind="mps", fp64=False)
    for case in cases_of(op("update")):
        assert_equals_reference(device, op("update"), case, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_there_is_told_by_name(
    kind: str, refused: Any, told: Told, inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told("task=plan", f"device={kind}", "model.layers=1", "data.path=null")
    with pytest.raises(
        DeviceUnavailable, match=f"device={kind}: this torch is built without {kind.upper()} .*device=cpu"
    ):
        open_device(TorchConfig(kind))
    refused(f"device={kind}: this torch is built without", f"device={kind}", "data=text", "data.path=nowhere")
    refused(f"runs on device=cpu or cuda, not on device={kind}", f"device={kind}", "parallel=ddp")
    refused(f"the memory of device={kind}", f"device={kind}", "task=bench", "bench.measure=[memory]")
    assert Torch().best_engine(TorchConfig(kind))[0] == "static"
    monkeypatch.setattr(getattr(torch, kind), "is_available", lambda: True)
    monkeypatch.setattr(getattr(torch, kind), "device_count", lambda: 1)
    with pytest.raises(DeviceUnavailable, match="this machine has 1 GPU"):
        open_device(TorchConfig(kind, index=1))
