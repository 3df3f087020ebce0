"""Beside other programs OpenMP's workers move to the cores that are left, and back; no bit changes."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from ttrain.core.cores import OtherWork
from ttrain.device.settings import DeviceConfig
from ttrain.device.torch import contention
from ttrain.device.torch.contention import Contention
from ttrain.device.torch.device import open_device
from ttrain.device.torch.native.threads import entry_points

CORES = os.sched_getaffinity(0)
pytestmark = [
    pytest.mark.skipif(len(CORES) < 2, reason="no second core to bind threads to"),
    pytest.mark.skipif(not entry_points(), reason="no OpenMP runtime in this torch whose threads could be moved"),
]


def places(threads: int) -> dict[int, set[int]]:
    """Return the cores on which each thread of the team may run."""
    found: dict[int, set[int]] = {}
    contention._on_threads(threads, lambda number: found.update({number: os.sched_getaffinity(0)}))
    return found


def test_workers_yield_cores_while_cores_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, used = len(CORES), [0.0]
    monkeypatch.setattr(OtherWork, "cores", lambda self: used[0])
    clock = SimpleNamespace(monotonic=count(1, 60).__next__, thread_time=lambda: 0.0)  # steps may take minutes
    monkeypatch.setattr(contention, "time", clock)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    near, alone = Contention(threads), threading.active_count()
    near._move(CORES)  # a device of an earlier test may have made room beside other tests
    try:
        moved, x = [], torch.randn(700, 257)
        before_moving = x.sum(), x @ x.t()
        for share in (0.0, 0.3, 0.7, 0.3, 0.1):
            used[0] = share
            near.look()
            found = places(threads)
            assert found.pop(0) == CORES, "who launches kernels is left alone, and with it the threads that it starts"
            moved.append({len(place) for place in found.values()} == {len(CORES) - 1})
            assert moved[-1] or set(map(len, found.values())) == {len(CORES)}
            assert all(map(torch.equal, before_moving, (x.sum(), x @ x.t())))
        assert moved == [False, False, True, True, False]
        used[0] = 1.0
        near.look()
        near.forget()
        assert places(threads)[1] == CORES and threading.active_count() == alone
        moved = []
        for _ in range(2):  # what others did before is no matter of the next steps
            near.look()
            moved.append(places(threads)[1] != CORES)
        assert moved == [False, True]
    finally:
        near.forget()
        torch.set_num_threads(before)


def test_one_thread_never_looks_nor_does_who_is_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[OtherWork] = []
    monkeypatch.setattr(OtherWork, "__init__", lambda self: looks.append(self))
    monkeypatch.setattr(OtherWork, "cores", lambda self: 0.0)
    before = torch.get_num_threads()
    try:
        for room, expected in ((False, 0), (True, 1)):
            with (
                closing(open_device(DeviceConfig("cpu", threads=2, yield_cores=room))) as device,
                device.launching("a step"),
            ):
                Contention(1).look()
            assert len(looks) == expected
    finally:
        torch.set_num_threads(before)
