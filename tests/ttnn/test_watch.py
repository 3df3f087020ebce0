"""Calls into ttnn that never return: the process says so, notes it in the run, and ends although the call does not."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from tests import forked
from ttrain.core.errors import EXIT_DEVICE_BUSY, DeviceHang
from ttrain.device.ttnn.runtime import watch as module
from ttrain.device.ttnn.runtime.watch import Watch
from ttrain.train.runs.run_directory import RunDirectory

pytest.importorskip("ttnn", reason="the package ttnn is not installed")

from tests.ttnn.runs import golden, mlp, sgd, turns


def watched(seconds: float | None, progress: Any = lambda: 0, words: Any = None) -> tuple[Watch, Queue[int], list[Any]]:
    """Return a watch, the exit codes with which it ended the process, and what it told."""
    ended, told = Queue[int](), list[DeviceHang]()
    return Watch("n300", seconds, progress, "Reset it.", [told.append, *(words or [])], ended.put), ended, told


def test_a_call_that_never_returns_ends_the_process_after_everybody_was_told(capsys: Any) -> None:
    watch, ended, told = watched(0.3)
    start = time.monotonic()
    with watch("step train"), watch("an upload"):
        assert ended.get(timeout=100) == EXIT_DEVICE_BUSY == 75
    assert time.monotonic() - start >= 0.3 and ended.empty()
    (hang,) = told
    assert str(hang).startswith("device=n300: step train (an upload) has neither returned")
    assert "0.3 s" in str(hang) and "Reset it." in str(hang) and "device.step_timeout_s" in str(hang)
    said = capsys.readouterr().err
    assert "step train (an upload) has not returned" in said  # before the end
    assert str(hang) in said


def test_steps_that_take_long_but_go_on_are_no_hang() -> None:
    """Ops that are started are signs of life, and so is every call that returns; time between calls does not count."""
    count = iter(range(10**9))
    moving, ended, _ = watched(0.2, progress=lambda: next(count))
    with moving("step train"):
        time.sleep(0.8)
    short, ended_too, _ = watched(0.5)
    for _ in range(20):
        with short("step train"):
            time.sleep(0.03)
    time.sleep(0.4)
    assert ended.empty() and ended_too.empty()


def test_last_words_that_fail_or_take_for_ever_keep_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(hang: DeviceHang) -> None:
        raise OSError("full")

    later: list[DeviceHang] = []
    monkeypatch.setattr(module, "_LAST_WORDS_SECONDS", 0.2)
    watch, ended, _ = watched(0.1, words=[fail, later.append, lambda hang: time.sleep(30)])
    with watch("step train (the capture of train)"):
        assert ended.get(timeout=100) == 75
    assert len(later) == 1


def test_a_closed_device_leaves_no_thread_that_keeps_its_runtime() -> None:
    watch, _, _ = watched(600)
    with watch("step train"):
        (thread,) = [each for each in threading.enumerate() if each is watch._thread]
    watch.close()
    assert not thread.is_alive()


class HungError(Exception):
    """Stands for a call that never returns."""


@pytest.mark.parametrize(
    ("call", "engine", "what"),
    [
        ("to_torch", "static", "what was launched"),
        ("copy_host_to_device_tensor", "static", "step train (an upload)"),
        ("capture", "traced", "step train (the capture of train)"),
        ("linear", "dynamic", "step train"),
        ("close", "static", "closing the device"),
    ],
)
def test_calls_that_may_hang_are_watched_under_a_name(call: str, engine: str, what: str) -> None:
    device: Any = golden(step_timeout_s=None)
    seen: list[str] = []

    def hang(*_: Any, **__: Any) -> None:
        seen.append(device.watch.what)
        raise HungError

    steps = turns(mlp(), sgd(), device, engine=engine)
    if call != "capture":
        next(steps)
    setattr(device.mesh if call in ("capture", "close") else device.mesh.tt, call, hang)
    with pytest.raises(HungError):
        device.close() if call == "close" else list(steps)
    assert seen == [what]


# A plugin: a device on the reference functions of ttnn, which needs no card, of which a product sleeps for ever.
HANGING = """
import time
from ttrain.config import registry
from tests.ttnn.doubles.golden import open_golden
from ttrain.device.ttnn.settings import TenstorrentConfig

calls = 0

def opened(config):
    device = open_golden(config)
    linear = device.mesh.tt.linear
    def product(*arguments, **options):
        global calls
        calls += 1
        while calls > 14:
            time.sleep(3600)
        return linear(*arguments, **options)
    device.mesh.tt.linear = product
    return device

registry.register("device", "hanging", config=TenstorrentConfig, target=opened)
"""
RUN = [
    "plugins=[hanging_device]", "device=hanging", "device.step_timeout_s=2", "model=mlp", "model.width=32",
    "data=regression", "train.batch_size=32", "train.steps=6", "optimizer=sgd", "run.dir=run", "train.save_every=1",
    "train.async_save=false",
]  # fmt: skip


def test_a_run_whose_device_hangs_ends(tmp_path: Path) -> None:
    (tmp_path / "hanging_device.py").write_text(HANGING, "utf-8")
    paths = {"PYTHONPATH": f"{forked.ROOT}:{tmp_path}", "TTRAIN_CACHE": str(tmp_path / "cache")}
    done = forked.run("ttrain", *RUN, cwd=tmp_path, OMP_NUM_THREADS="1", **paths)
    assert done.returncode == EXIT_DEVICE_BUSY, done.stderr
    assert "device=hanging: step train" in done.stderr and "resume=auto run.dir=" in done.stderr
    (*_, last) = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text("utf-8").splitlines())
    assert (last["kind"], last["error"]) == ("failed", "DeviceHang")
    RunDirectory.open(tmp_path / "run").close()  # its lock is free
