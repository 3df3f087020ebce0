"""Saves on disks that fail, and checkpoints that were damaged: the newest good one loads, nothing else does."""

from __future__ import annotations

import builtins
import errno
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ttrain.core.errors import CheckpointError
from ttrain.core.spec import TensorSpec
from ttrain.graph import Kind
from ttrain.train.checkpoint import retention
from ttrain.train.checkpoint.checkpoint import read_checkpoint
from ttrain.train.checkpoint.retention import find_checkpoint, newest_complete, prune_checkpoints
from ttrain.train.checkpoint.save import CheckpointContent, save_checkpoint
from ttrain.train.logging.metrics import read_events
from ttrain.train.loop.checkpoints import Checkpoints, RunContext, yield_processor
from ttrain.train.runs.resume import find_resume_point, hold_run
from ttrain.train.runs.run_directory import RunDirectory
from ttrain.train.settings import TrainConfig


class State:
    """Three small tensors, all of one value."""

    def __init__(self, value: float = 0.0) -> None:
        names = {"a": Kind.PARAMETER, "b": Kind.PARAMETER, "a/moment": Kind.OPTIMIZER}
        self.kinds, self.arrays = names, {name: np.full((3, 4), value, np.float32) for name in names}

    def names(self, *kinds: Kind) -> list[str]:
        return [name for name, kind in self.kinds.items() if not kinds or kind in kinds]

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec((3, 4))

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name].copy()

    def write(self, name: str, array: np.ndarray) -> None:
        self.arrays[name] = array


def content(step: int) -> CheckpointContent:
    return CheckpointContent(step, {"model": {"name": "gpt"}}, {"step": step}, '{"characters": "ab"}', 1.5)


class Disk:
    """Counts every operation of a save that changes the disk, and lets one of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.fail_at, self.error = 0, -1, errno.ENOSPC
        for name in ("mkdir", "replace", "fsync", "rmdir"):
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name)))
        original = builtins.open

        def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if not set(mode) & set("wax+"):
                return original(path, mode, *arguments, **options)
            self._tick()
            return _File(original(path, mode, *arguments, **options), self)

        monkeypatch.setattr(builtins, "open", opened)

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self._tick()
            return function(*arguments, **options)

        return call

    def _tick(self) -> None:
        self.count += 1
        if self.count == self.fail_at:
            raise OSError(self.error, os.strerror(self.error))

    def write(self, file: Any, data: Any) -> int:
        """A write that fails has put half of its data down."""
        try:
            self._tick()
        except OSError:
            file.write(data[: len(data) // 2])
            file.flush()
            raise
        return int(file.write(data))


class _File:
    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> int:
        return self._disk.write(self._file, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.close()


def saver(folder: Path, said: list[str]) -> tuple[RunDirectory, Callable[[int], Checkpoints], State]:
    run = RunDirectory.claim(str(folder), "test")
    (folder / "metrics.jsonl").touch()
    loggers: Any = SimpleNamespace(console=SimpleNamespace(say=said.append))
    state: Any = State(1.0)
    context = RunContext(TrainConfig(async_save=False, keep_last=1), state, run, loggers)
    writer = Checkpoints(context, lambda progress, loss: content(progress.step))

    def save(step: int) -> Checkpoints:
        context.progress.step = step
        writer.save()
        return writer

    return run, save, state


def test_every_operation_of_a_save_fails_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No space, read-only and I/O errors: the previous checkpoint loads, the failure is told and logged."""
    with monkeypatch.context() as patch:
        run, save, _ = saver(tmp_path / "count", [])
        disk = Disk(patch)
        save(1)
        operations = disk.count
        run.close()
    assert operations > 20
    told = 0
    for number in range(1, operations + 1):
        folder, said = tmp_path / str(number), []
        run, save, state = saver(folder, said)
        save(1)
        state.arrays = State(2.0).arrays
        with monkeypatch.context() as patch:
            disk = Disk(patch)
            disk.fail_at, disk.error = number, (errno.ENOSPC, errno.EROFS, errno.EIO)[number % 3]
            writer = save(2)
        newest, skipped = newest_complete(folder / "checkpoints")
        assert newest is not None and all("cut off" in reason for _, reason in skipped)
        loaded = State()
        newest.load(loaded)
        assert all((array == float(newest.step)).all() for array in loaded.arrays.values())
        assert newest.step == 2 or (writer.failed and said)
        if said:
            told += 1
            assert os.strerror(disk.error) in said[0] and said[0].startswith("WARNING")
            assert [event["kind"] for event in read_events(folder)] == ["save_failed"]
        save(3)  # the disk is well again
        assert newest_complete(folder / "checkpoints")[0].step == 3 and not writer.failed  # type: ignore[union-attr]
        run.close()
    assert told >= operations - 6  # those that come after the new checkpoint has its place


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of single threads")
def test_the_thread_that_saves_gives_way_and_the_others_do_not(tmp_path: Path) -> None:
    found: dict[str, int] = {}

    def look() -> None:
        yield_processor()
        found["saving"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found["saving"] == max(before, 10)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def regions(size: int, pieces: int) -> Iterator[int]:
    """Positions over a whole file: its first and last bytes and one of every piece."""
    yield from sorted({*range(min(16, size)), *range(0, size, max(size // pieces, 1)), size - 1})


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2; the second is about to be damaged."""
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        save_checkpoint(folder, State(float(step)), content(step))
    return folder


def damaged(original: bytes) -> Iterator[tuple[int, bytes | None]]:
    """A file with bytes flipped, cut off at, or grown; None for one that is gone. With the place of the damage."""
    for position in regions(len(original), 24):
        for bit in (0x01, 0xFF):
            yield position, original[:position] + bytes([original[position] ^ bit]) + original[position + 1 :]
        yield position, original[:position]
    yield 1, original + b"\0"
    yield 1, None


def test_every_damage_to_a_file_is_detected(two: Path) -> None:
    newest, checked = two / "step_00000002", 0
    for file in sorted(newest.iterdir()):
        original = file.read_bytes()
        for position, content in damaged(original):
            file.unlink() if content is None else file.write_bytes(content)
            with pytest.raises(CheckpointError):
                read_checkpoint(newest)
            checked += 1
            if position % 16 == 0:
                found, skipped = newest_complete(two)
                assert found is not None and found.step == 1
                assert [path for path, _ in skipped] == [newest] and file.name.split(".")[0] in skipped[0][1]
        file.write_bytes(original)
    assert newest_complete(two)[0].step == 2 and checked > 300  # type: ignore[union-attr]


@pytest.mark.parametrize(("left", "step"), [("replaced_step_00000002", 2), ("step_00000002", None)])
def test_a_kill_while_a_checkpoint_takes_its_place(two: Path, left: str, step: int | None) -> None:
    """Between two renames neither has the name, and the old one gets it back; a first save lets the run begin again."""
    run = two / "run"
    shutil.copytree(two / "step_00000002", run / "checkpoints" / f".unfinished_{left}")
    (run / "run.json").write_text('{"attempts": []}')
    held = hold_run("auto", str(run)) if step else None
    point = find_resume_point("auto", str(run))
    assert (point and point.checkpoint.step) == step and (held is not None) == (step is not None)


def test_a_checkpoint_that_is_read_is_not_removed(two: Path) -> None:
    """As by task=sample of a run that goes on: it goes after a later save."""
    read, also = (find_checkpoint(two.parent, "1") for _ in range(2))
    assert prune_checkpoints(two, 1, False) == []
    loaded = State()
    read.load(loaded)
    assert (loaded.arrays["a"] == 1.0).all()
    del read
    assert prune_checkpoints(two, 1, False) == []
    del also
    assert [path.name for path in prune_checkpoints(two, 1, False)] == ["step_00000001"]


def test_a_checkpoint_that_goes_away_while_it_is_read(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = retention.hold_for_reading, []

    def hold(path: Path) -> Any:
        if not calls:
            save_checkpoint(two, State(3.0), content(3))
            shutil.rmtree(path.parent)
        calls.append(path)
        return original(path)

    monkeypatch.setattr(retention, "hold_for_reading", hold)
    assert find_checkpoint(two.parent, "last").step == 3 and len(calls) == 2


def test_retention_by_steps_and_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 11):
        monkeypatch.setattr("time.time", lambda step=step: 1000.0 + 600 * step)  # one every ten minutes
        save_checkpoint(tmp_path, State(), CheckpointContent(step, {}, {}, None, abs(step - 7.0)))
    prune_checkpoints(tmp_path, 1, True, keep_every=4, keep_hours=0.5)
    kept = [int(path.name[5:]) for path in sorted(tmp_path.iterdir())]
    assert kept == [1, 4, 7, 8, 10]  # by time 1, 4, 7, 10; by steps 4, 8; the best 7; the last 10
