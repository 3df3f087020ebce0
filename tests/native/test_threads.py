"""Generated kernels run on the threads that torch has, and joined launches run in order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.native.conftest import NativeDevice, require_compiler
from tests.native.test_numbers import node_of
from ttrain import ops
from ttrain.core.spec import TensorSpec
from ttrain.device.torch.kernels.common import Chain
from ttrain.device.torch.native import NativeKernels, Toolchain
from ttrain.device.torch.native.launch import NativeLaunch, launch
from ttrain.device.torch.native.native import Sizing
from ttrain.graph import Graph

SCRIPT = """
import os
import torch
from ttrain.device.torch.device import TorchDevice
from ttrain.device.torch.native import NativeKernels, Toolchain, openmp
from ttrain.device.torch.native.native import Sizing
from tests.native.test_numbers import run_all
from tests.native.conftest import NativeDevice

def threads():
    return len(os.listdir("/proc/self/task"))

base = TorchDevice("cpu", threads=2)
x = torch.randn(400, 400)
torch.mm(x, x)
torch.nn.functional.gelu(x)
before = threads()
device = NativeDevice(NativeKernels(base.kernels, Sizing(2, thread_cost=1)), 2)
(y,), = run_all(device, [("gelu", [x], {"approximate": "tanh"})])
torch.mm(x, x)
assert torch.allclose(y, torch.nn.functional.gelu(x, approximate="tanh"), atol=1e-6)
print(len(openmp.entry_points()), before, threads(), len(set(openmp._loaded())))
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="no /proc to count threads in")
def test_no_second_pool_of_threads(tmp_path: Path) -> None:
    require_compiler()
    environment = {**os.environ, "TTRAIN_CACHE": str(tmp_path), "OMP_NUM_THREADS": "2"}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    entry_points, before, after, runtimes = map(int, result.stdout.split())
    assert entry_points == 3, "the runtime's entry points are found"
    assert after == before, "the kernels ran on the threads that were there"
    assert runtimes == 1, "one OpenMP runtime is loaded"


def scaled(device: NativeDevice, x: torch.Tensor, factor: float) -> NativeLaunch:
    """x <- factor * x."""
    node = node_of("scale", [x], {"factor": factor})
    device.native.prepare([node])
    made = device.kernels["scale"].bind([x], [x], node.attributes, [])
    assert isinstance(made, NativeLaunch)
    return made


def test_neighbouring_launches_become_one_call(device: NativeDevice) -> None:
    x, log = torch.ones(40), []
    double, triple = scaled(device, x, 2.0), scaled(device, x, 3.0)

    def host() -> None:
        log.append(float(x[0]))

    together = device.native.join([double, triple, host, double, Chain([triple, host]), double])
    assert [isinstance(item, NativeLaunch) for item in together] == [False, False, False, False, True]
    for item in together:
        item()
    assert log == [6.0, 36.0] and x.eq(72).all()


def test_joined_launches_keep_their_arguments_alive(device: NativeDevice) -> None:
    x = torch.ones(40)
    (call,) = device.native.join([scaled(device, x, 2.0), scaled(device, x, 0.25)])
    import gc

    gc.collect()
    call()
    assert x.eq(0.5).all()


def test_a_launch_takes_numbers_and_null_pointers() -> None:
    made = launch(0, [])
    assert made.function == 0 and made.block != 0


def test_a_plan_too_small_for_threads_runs_on_a_device_that_has_some(tmp_path: Path) -> None:
    """Its library holds no parallel function, and the host still finds what it fills in."""
    require_compiler()
    kernels = NativeKernels({}, Sizing(threads=2), Toolchain(tmp_path))
    graph = Graph()
    x = graph.input("x", TensorSpec((4, 4)))
    graph.output("y", ops.relu(x))
    kernels.prepare(graph.nodes)
    assert kernels.compilations == 1
