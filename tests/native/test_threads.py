"""Generated kernels share one pool of threads that nobody has to wait for, and joined launches run in order."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from tests import forked
from tests.native.conftest import NativeDevice, require_compiler
from tests.ops.harness import node_of
from ttrain import ops
from ttrain.core.spec import TensorSpec
from ttrain.device.base import chain
from ttrain.device.torch.native.native import NativeLaunch, Sizing
from ttrain.device.torch.native.rows import NativeKernels
from ttrain.device.torch.native.toolchain import Toolchain
from ttrain.graph import Graph

SCRIPT = """
import os, signal, time
import torch
from ttrain.device.torch.device import TorchDevice
from ttrain.device.torch.native.rows import NativeKernels
from ttrain.device.torch.native.toolchain import Toolchain
from ttrain.device.torch.native.native import NativeLaunch, Sizing, launch
from tests.native.test_numbers import run_all
from tests import forked
from tests.native.conftest import NativeDevice

def threads():
    return len(os.listdir("/proc/self/task"))

def gelu(device):
    (y,), = run_all(device, [("gelu", [x], {"approximate": "tanh"})])
    assert torch.allclose(y, expected, atol=1e-6)

base = TorchDevice("cpu", threads=2)
x = torch.randn(400, 400)
expected = torch.nn.functional.gelu(x, approximate="tanh")
devices = [NativeDevice(NativeKernels(base.kernels, Sizing(2, thread_cost=cost)), 2) for cost in (1, 2)]
before = threads()
for device in devices:
    gelu(device)
print(before, threads())
torch.set_num_threads(1)  # its own pool does not outlive a fork
child = os.fork()
if not child:
    signal.alarm(30)
    gelu(devices[0])
    os._exit(0 if threads() == 1 else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="no /proc to count threads in")
def test_one_pool_serves_all_libraries_and_a_region_waits_for_no_idle_thread(tmp_path: Path) -> None:
    """A forked process has none of the pool's threads: as if the system never let them run."""
    require_compiler()
    result = forked.run("-c", SCRIPT, TTRAIN_CACHE=str(tmp_path), OMP_NUM_THREADS="2")
    assert result.returncode == 0, result.stderr
    before, after, code = map(int, result.stdout.split())
    assert after == before + 1, "two libraries share the threads of one pool"
    assert code == 0, "without its threads the caller does all there is"


def scaled(device: NativeDevice, x: torch.Tensor, factor: float) -> NativeLaunch:
    """x <- factor * x."""
    node = node_of("scale", [x], {"factor": factor})
    device.native.prepare([node])
    made = device.kernels["scale"].bind([x], [x], node.attributes, [])
    assert isinstance(made, NativeLaunch)
    return made


def test_neighbouring_launches_become_one_call_that_keeps_their_arguments_alive(device: NativeDevice) -> None:
    x, log = torch.ones(40), []
    double, triple = scaled(device, x, 2.0), scaled(device, x, 3.0)

    def host() -> None:
        log.append(float(x[0]))

    together = device.native.join([double, triple, host, double, chain(triple, host), double])
    assert [isinstance(item, NativeLaunch) for item in together] == [False, False, False, False, True]
    del double, triple
    gc.collect()
    for item in together:
        item()
    assert log == [6.0, 36.0] and x.eq(72).all()


def test_a_plan_too_small_for_threads_runs_on_a_device_that_has_some(tmp_path: Path) -> None:
    """Its library holds no parallel function, and the host still finds what it fills in."""
    require_compiler()
    kernels = NativeKernels({}, Sizing(threads=2), Toolchain(tmp_path))
    graph = Graph()
    x = graph.input("x", TensorSpec((4, 4)))
    graph.output("y", ops.relu(x))
    kernels.prepare(graph.nodes)
    assert kernels.compilations == 1
