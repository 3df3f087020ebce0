"""The CPU device's contract: memory, copies, threads, description, and what it refuses. CUDA where there is a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests import forked
from tests.conftest import Told
from ttrain.core import cores
from ttrain.core.errors import CaptureError, DeviceUnavailable, TtrainError
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.settings import DeviceConfig
from ttrain.device.torch import device as module
from ttrain.device.torch.device import TorchDevice
from ttrain.device.torch.kernels.costs import multiplies_faster_in_fp32

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU on this machine")
KINDS = ["cpu", *([pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else [])]


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> TorchDevice:
    return TorchDevice(request.param, threads=1)


HOST = {
    DType.FP64: np.array([[1.1, -2.2, 3.3]]),
    DType.FP32: np.array([[1.1, -2.2, 3.3]], np.float32),
    DType.INT64: np.array([[1, -2, 2**40]]),
    DType.INT32: np.array([[1, -2, 2**30]], np.int32),
    DType.BOOL: np.array([[True, False, True]]),
}


@pytest.mark.parametrize("dtype", HOST, ids=str)
def test_values_come_back_as_they_went(device: TorchDevice, dtype: DType) -> None:
    buffer = device.allocate(TensorSpec((1, 3), dtype))
    before = device.download(buffer)
    device.upload(buffer, HOST[dtype])
    back = device.download(buffer)
    assert not before.any(), "a download is a copy"
    assert back.dtype == HOST[dtype].dtype
    assert np.array_equal(back, HOST[dtype])


def test_upload_takes_read_only_strided_scalar_and_large_arrays(device: TorchDevice) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    array.flags.writeable = False
    for given in (array, array.T, np.asarray(3.5, np.float32), np.ones((200, 300), np.float32)):
        buffer = device.allocate(TensorSpec(given.shape))
        device.upload(buffer, given)
        assert np.array_equal(device.download(buffer), given)


def test_buffers_are_views_of_their_arena(device: TorchDevice) -> None:
    arena = device.allocate_arena(1024, "a test")
    first = device.place(arena, 0, TensorSpec((4, 8)))
    second = device.place(arena, 128, TensorSpec((2, 4), DType.INT64))
    empty = device.place(arena, 192, TensorSpec((0, 3)))
    assert device.counters.allocations == 1
    assert second.data_ptr() - first.data_ptr() == 128
    assert empty.shape == (0, 3)
    first.fill_(1)
    assert not device.download(second).any()


def test_bf16_is_rounded_to_nearest_even_and_comes_back_as_fp32(device: TorchDevice) -> None:
    source, copied, given = (device.allocate(TensorSpec((3,), dtype)) for dtype in (DType.FP32, *[DType.BF16] * 2))
    numbers = np.array([1 + 2**-8, 1 + 3 * 2**-8, 2], np.float32)
    device.upload(source, numbers)
    device.copy(source, copied)
    device.upload(given, numbers)
    device.synchronize()
    for buffer in (copied, given):
        back = device.download(buffer)
        assert back.dtype == np.float32 and back.tolist() == [1.0, 1 + 2**-6, 2.0]


def test_a_frozen_device_names_who_froze_it_and_a_closed_one_gives_no_memory(device: TorchDevice) -> None:
    device.freeze("step train")
    with pytest.raises(CaptureError, match="after step train was captured"):
        device.allocate_arena(64, "a moment")
    device.freeze(None)
    device.allocate_arena(64, "a moment")
    device.close()
    device.close()
    with pytest.raises(TtrainError, match="was closed"):
        device.allocate_arena(64, "a moment")


MEMORY_GROWS = """
import sys
from ttrain.device.torch.device import TorchDevice

device = TorchDevice(sys.argv[1], threads=1)
before = device.memory()
arena = device.allocate_arena(64 << 20, "a large arena")
arena.fill_(1)
after = device.memory()
assert after["in_use"] - before["in_use"] > 32 << 20
assert after["peak"] >= after["in_use"] > 0
assert after["total"] > after["in_use"]
"""


@pytest.mark.parametrize("kind", KINDS)
def test_memory_grows_with_what_is_allocated(kind: str) -> None:
    # In a process of its own: the heap of a long one may still hold pages, so that nothing grows.
    done = forked.run("-c", MEMORY_GROWS, kind)
    assert done.returncode == 0, done.stderr


def test_description_has_what_a_run_record_needs(device: TorchDevice) -> None:
    facts = device.describe()
    assert facts["threads"] == 1
    assert facts["torch"] == torch.__version__
    assert facts["hardware"]
    assert isinstance(facts["cpu_features"], list)


def test_cpu_cannot_capture() -> None:
    device = TorchDevice("cpu", threads=1)
    assert not device.supports_capture
    with pytest.raises(CaptureError, match="engine=static"):
        device.capture([], "step train")


def test_threads_are_those_of_the_config_or_else_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.open_device(DeviceConfig("cpu", threads=1)).threads == torch.get_num_threads() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert module.open_device(DeviceConfig("cpu")).threads == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(cores, "core_limits", lambda: {"physical": 3, "affinity": 3, "quota": 2})
    assert module.open_device(DeviceConfig("cpu")).threads == 2


def test_without_a_gpu_cuda_is_refused_with_a_way_out_and_auto_takes_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceUnavailable, match=r"device=cuda: .*Use device=cpu, or device=auto"):
        module.open_device(DeviceConfig(name="cuda"))
    assert module.open_device(DeviceConfig(threads=1)).kind == "cpu"


def test_a_gpu_that_is_not_there_is_refused_before_data_is_read(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "device=cuda: " in told("device=cuda", "data=text", "data.path=nowhere", code=2)


def test_a_gpu_that_is_not_there_is_refused_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceUnavailable, match=r"device.index=3: this machine has 1 GPU, numbered from 0"):
        module.open_device(DeviceConfig(name="cuda", index=3))


def test_a_cpu_run_never_touches_cuda() -> None:
    """A process is started in which asking torch about CUDA is an error."""
    program = """
import numpy as np, torch
def touched(*a, **k): raise SystemExit("CUDA was touched")
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device", "synchronize"):
    setattr(torch.cuda, name, touched)
from ttrain.core.spec import TensorSpec
from ttrain.device.settings import DeviceConfig
from ttrain.device.torch.device import open_device
device = open_device(DeviceConfig("cpu", threads=1))
x = device.allocate(TensorSpec((4, 4)))
device.upload(x, np.ones((4, 4), np.float32))
device.kernels["relu"].bind([x], [x], {}, [])()
device.memory(), device.describe(), device.synchronize(), device.download(x)
device.close()
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr


def test_bf16_products_use_the_matrix_units(capfd: pytest.CaptureFixture[str]) -> None:
    """oneDNN says which implementation it chose; a machine without bf16 instructions has nothing to show."""
    if held := {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"} & os.environ.keys():
        pytest.skip(f"no bf16 instructions that oneDNN may use: {', '.join(held)} is set")
    device = TorchDevice("cpu", threads=1)
    features = set(device.describe()["cpu_features"])
    units = [
        unit for feature, unit in (("amx_bf16", "amx"), ("avx512_bf16", "avx512_core_bf16")) if feature in features
    ]
    if not units:
        pytest.skip("no bf16 instructions on this CPU: neither amx_bf16 nor avx512_bf16")
    if multiplies_faster_in_fp32():
        pytest.skip("no fast bf16 instructions on this CPU: it multiplies fp32 faster, so bf16 is widened")
    spec = TensorSpec((64, 64), DType.BF16)
    a, b, c = (device.allocate(spec) for _ in range(3))
    launches = [
        device.kernels["linear"].bind([a, b, None], [c], {}, []),
        device.kernels["matmul"].bind([a, b], [c], {"transpose_a": True, "transpose_b": False}, []),
    ]
    for launch in launches:
        capfd.readouterr()
        with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
            launch()
        sys.stdout.flush()
        lines = [line for line in capfd.readouterr().out.splitlines() if "exec" in line and "matmul" in line]
        assert any(unit in line for unit in units for line in lines), lines


@pytest.mark.cuda
@needs_gpu
def test_a_host_read_inside_a_capture_is_refused_by_name() -> None:
    """tests/engine/test_footguns.py replays whole steps."""
    device = TorchDevice("cuda", threads=1)
    x = device.allocate(TensorSpec(()))
    with pytest.raises(CaptureError, match="step bad"):
        device.capture([lambda: x.item()], "step bad")
