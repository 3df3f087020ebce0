"""The second queue takes in the next batch while the first computes: order by events, and the numbers of one queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("ttnn", reason="the package ttnn is not installed")

from tests.models.session import Session
from tests.ttnn.doubles.golden import GoldenMesh, GoldenRuntime, GoldenTensor
from tests.ttnn.runs import adamw, golden, gpt, run, same, step_inputs
from ttrain.device.ttnn.device import TenstorrentDevice
from ttrain.device.ttnn.settings import TenstorrentConfig


class QueueRuntime(GoldenRuntime):
    """Queue 0 computes at once; what queue 1 writes arrives as late as it may: when queue 0 waits for it.

    `log` holds what the host asked for, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, int]] = []
        self._events = 0
        self._late: list[tuple[int, Callable[[], None]]] = []  # by number of events before

    def record_event(self, handle: Any, queue: int) -> tuple[int, int]:
        self._events += 1
        self.log.append(("record", queue))
        return queue, self._events

    def wait_for_event(self, queue: int, event: tuple[int, int]) -> None:
        self.log.append(("wait", queue))
        if event[0] == 1 and queue == 0:
            for _, write in [late for late in self._late if late[0] < event[1]]:
                write()
            self._late = [late for late in self._late if late[0] >= event[1]]

    def copy_host_to_device_tensor(self, host: GoldenTensor, tensor: GoldenTensor, cq_id: int = 0) -> None:
        self.log.append(("write", cq_id))
        if cq_id == 0:
            super().copy_host_to_device_tensor(host, tensor)
        else:
            self._late.append((self._events, lambda: GoldenRuntime.copy_host_to_device_tensor(self, host, tensor)))

    def copy(self, source: GoldenTensor, target: GoldenTensor) -> GoldenTensor:
        self.log.append(("copy", 0))
        return super().copy(source, target)


def opened() -> TenstorrentDevice:
    config = TenstorrentConfig(fused_kernels=False, command_queues=2)
    return TenstorrentDevice(GoldenMesh(QueueRuntime(), config), config)


def small(**sizes: Any) -> Any:
    return gpt(layers=1, heads=1, width=32, vocabulary=33, **sizes)


@pytest.mark.parametrize("engine", ["static", "traced"])
@pytest.mark.parametrize("prefetch", [False, True], ids=["in turn", "prefetch"])
def test_numbers_are_those_of_one_queue(engine: str, prefetch: bool) -> None:
    """Learning rate, step number, tokens and dropout seeds move; each of them comes through the second queue."""
    one = run(small(dropout=0.1), adamw(), golden(fused=False), engine=engine, rows=1)
    two = run(small(dropout=0.1), adamw(), opened(), engine=engine, rows=1, prefetch=prefetch)
    assert one.norms == two.norms and same(one, two)


def test_a_step_writes_nothing_but_the_next_inputs() -> None:
    device = opened()
    log = device.mesh.tt.log
    built, model = built_step(device)
    for step in range(1, 4):
        built(step_inputs(model, built, 2, step))
    log.clear()
    built.prefetch(step_inputs(model, built, 2, 4))
    # After the copies out; then the copies in may go.
    assert (log[0], set(log[1:-1]), log[-1]) == (("wait", 1), {("write", 1)}, ("record", 1))
    log.clear()
    built.start(step_inputs(model, built, 2, 4))
    assert log[:2] == [("wait", 0), ("copy", 0)]
    assert [entry for entry in log if entry[0] != "copy"] == [("wait", 0), ("record", 0)]


def test_inputs_that_turn_out_otherwise_are_written_again() -> None:
    """For example a rollback lowers the learning rate of a step whose inputs were prefetched."""
    results = []
    for guess in (1, 3):
        built, model = built_step(opened())
        built(step_inputs(model, built, 2, 1))
        built.prefetch({**step_inputs(model, built, 2, guess), "lr": 0.5})
        results.append([built(step_inputs(model, built, 2, step)) for step in (2, 3)])
    assert results[0] == results[1]


def built_step(device: TenstorrentDevice) -> tuple[Any, Any]:
    model = small()
    return Session(model, adamw(), 2, device=device).steps["train"], model
