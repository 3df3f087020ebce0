"""Calls into ttnn that never return: the process says so, notes it in the run, and ends although the call does not."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from ttrain.core.errors import EXIT_DEVICE_BUSY, DeviceHang
from ttrain.device.ttnn.runtime import watch as module
from ttrain.device.ttnn.runtime.watch import Watch
from ttrain.train.runs.run_directory import RunDirectory

pytest.importorskip("ttnn", reason="the package ttnn is not installed")

ROOT = forked.ROOT


class Ended:
    """Stands for os._exit."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.event = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.event.set()


def watched(seconds: float | None, progress: Any = lambda: 0, **changes: Any) -> tuple[Watch, Ended, list[DeviceHang]]:
    ended, told = Ended(), list[DeviceHang]()
    return Watch("n300", seconds, progress, "Reset it.", changes.get("words", [told.append]), ended), ended, told


def test_a_call_that_never_returns_ends_the_process_after_everybody_was_told(capsys: Any) -> None:
    watch, ended, told = watched(0.3)
    start = time.monotonic()
    with watch("step train"), watch("an upload"):
        assert ended.event.wait(100)
    assert time.monotonic() - start >= 0.3
    assert ended.codes == [EXIT_DEVICE_BUSY] == [75]
    (hang,) = told
    for part in (
        "device=n300: step train (an upload) has neither returned",
        "0.3 s",
        "Reset it.",
        "device.step_timeout_s",
    ):
        assert part in str(hang)
    said = capsys.readouterr().err
    assert "step train (an upload) has not returned" in said  # before the end
    assert str(hang) in said


def test_steps_that_take_long_but_go_on_are_no_hang() -> None:
    """Ops that are started are signs of life, and so is every call that returns; time between calls does not count."""
    count = iter(range(10**9))
    moving, ended, _ = watched(0.2, progress=lambda: next(count))
    with moving("step train"):
        assert not ended.event.wait(0.8)
    short, ended_too, _ = watched(0.5)
    for _ in range(20):
        with short("step train"):
            time.sleep(0.03)
    time.sleep(0.4)
    assert ended.codes == ended_too.codes == []


def test_last_words_that_fail_or_take_for_ever_keep_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(hang: DeviceHang) -> None:
        raise OSError("full")

    told: list[DeviceHang] = []
    monkeypatch.setattr(module, "_LAST_WORDS_SECONDS", 0.2)
    watch, ended, _ = watched(0.1, words=[fail, told.append, lambda hang: time.sleep(30)])
    with watch("step train (the capture of train)"):
        assert ended.event.wait(100)
    assert len(told) == 1 and ended.codes == [75]


def test_a_closed_device_leaves_no_thread_that_keeps_its_runtime() -> None:
    watch, _, _ = watched(600)
    with watch("step train"):
        (thread,) = [each for each in threading.enumerate() if each is watch._thread]
    watch.close()
    assert not thread.is_alive()


# A plugin: a device on the reference functions of ttnn, which needs no card, that sleeps for ever at one place; once,
# where TTRAIN_HANG_ONCE names a file.
HANGING = """
import os, time
from pathlib import Path
from ttrain.config import registry
from ttrain.device.ttnn import device as module
from tests.ttnn.doubles import golden
from ttrain.device.ttnn.settings import TenstorrentConfig

place, after = os.environ["TTRAIN_HANG"].split()
once, calls = os.environ.get("TTRAIN_HANG_ONCE"), 0

def hang(where):
    global calls
    calls += where == place
    if where == place and calls > int(after) and not (once and Path(once).exists()):
        if once:
            Path(once).touch()
        while True:
            time.sleep(3600)

class HangingMesh(golden.GoldenMesh):
    def capture(self, launches, name):
        hang("capture")
        return super().capture(launches, name)
    def close(self):
        hang("close")

def slow(where, function):
    def call(*arguments, **options):
        hang(where)
        return function(*arguments, **options)
    return call

def opened(config):
    mesh = HangingMesh()
    places = {"copy_host_to_device_tensor": "upload", "matmul": "launch", "linear": "launch", "to_torch": "read"}
    for name, where in places.items():
        setattr(mesh.tt, name, slow(where, getattr(mesh.tt, name)))
    return module.TenstorrentDevice(mesh, config)

registry.register("device", "hanging", config=TenstorrentConfig, target=opened)
"""


def hanging(folder: Path, place: str, after: int, *words: str, once: bool = False) -> subprocess.CompletedProcess[str]:
    (folder / "hanging_device.py").write_text(HANGING, "utf-8")
    device = ["plugins=[hanging_device]", "device=hanging", f"device.step_timeout_s={60 if place == 'nowhere' else 2}"]
    environment = {
        "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{folder}", "TTRAIN_CACHE": str(folder / "cache"),
        "TTRAIN_HANG": f"{place} {after}", **({"TTRAIN_HANG_ONCE": str(folder / "hung")} if once else {}),
    }  # fmt: skip
    return forked.run("ttrain", *device, *words, cwd=folder, **environment)


MLP = ["model=mlp", "model.width=32", "data=regression", "train.batch_size=32", "train.steps=6", "optimizer=sgd"]


@pytest.mark.parametrize(
    ("place", "after", "words", "what"),
    [
        ("read", 6, ["train.save_every=1"], "what was launched"),
        ("upload", 30, ["train.save_every=1", "train.async_save=false"], "step train (an upload)"),
        ("capture", 0, ["engine=traced"], "step train (the capture of train)"),
        ("launch", 12, ["engine=dynamic"], "step train"),
        ("close", 0, ["train.steps=1"], "closing the device"),
    ],
    ids=["read", "upload", "capture", "dynamic", "close"],
)
def test_a_run_whose_device_hangs_ends(tmp_path: Path, place: str, after: int, words: list[str], what: str) -> None:
    done = hanging(tmp_path, place, after, *MLP, "run.dir=run", *words)
    assert done.returncode == EXIT_DEVICE_BUSY, done.stderr
    assert f"device=hanging: {what}" in done.stderr
    assert "resume=auto run.dir=" in done.stderr
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text("utf-8").splitlines()]
    assert [(event["kind"], event.get("error")) for event in events][-1] == ("failed", "DeviceHang")
    RunDirectory.open(tmp_path / "run").close()  # its lock is free


@pytest.mark.slow
def test_a_supervised_run_whose_device_hung_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    words = ["run.dir=run", "train.save_every=1", "train.async_save=false", "supervise.backoff=0"]
    done = hanging(tmp_path, "launch", 14, *MLP, *words, once=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hung").exists()
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text("utf-8").splitlines()]
    (restart,) = [event for event in events if event["kind"] == "restart"]
    assert restart["exit_code"] == EXIT_DEVICE_BUSY and "has neither returned" in restart["message"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))["step"] == 6


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sample", "verify"])
def test_other_tasks_end_too(tmp_path: Path, task: str) -> None:
    words = ["task=verify", "verify.ops=[matmul]", "verify.model=false"]
    if task == "sample":
        (tmp_path / "text.txt").write_text("abcdefgh " * 400, "utf-8")
        given = ["model.layers=1", "model.heads=1", "model.width=32", "model.context=16", "train.steps=1"]
        given += ["data.path=text.txt", "train.batch_size=2", "train.eval_sequences=4", "run.dir=run"]
        assert hanging(tmp_path, "nowhere", 0, *given).returncode == 0
        words = ["task=sample", "run.dir=run"]
    done = hanging(tmp_path, "launch", 2, *words)
    assert done.returncode == EXIT_DEVICE_BUSY, done.stdout + done.stderr
    assert "has neither returned" in done.stderr
