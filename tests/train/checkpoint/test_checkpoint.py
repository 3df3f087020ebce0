"""Checkpoints survive what disks, kills and strangers do to them."""

from __future__ import annotations

import builtins
import errno
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.session import open_cpu
from tests.train.conftest import ArrayState
from ttrain.core.errors import CheckpointError, TtrainError
from ttrain.core.spec import DType, TensorSpec
from ttrain.engine.state import State, StateTensor
from ttrain.graph import Kind
from ttrain.train.checkpoint import retention
from ttrain.train.checkpoint import save as module
from ttrain.train.checkpoint.checkpoint import match, read_checkpoint
from ttrain.train.checkpoint.retention import find_checkpoint, newest_complete, prune_checkpoints
from ttrain.train.checkpoint.save import CheckpointContent, host_copy, save_checkpoint
from ttrain.train.logging.metrics import Events, read_events
from ttrain.train.loop.checkpoints import Checkpoints, RunContext, yield_processor
from ttrain.train.runs.resume import find_resume_point, hold_run
from ttrain.train.runs.run_directory import RunDirectory
from ttrain.train.settings import TrainConfig


def made(seed: int = 0, width: int = 6) -> ArrayState:
    """Parameters and moments of two tensors."""
    generator, arrays = np.random.default_rng(seed), {}
    for name, shape in {"b.weight": (4, width), "a.bias": (width,)}.items():
        arrays[name] = Kind.PARAMETER, generator.normal(size=shape).astype(np.float32)
        arrays[f"{name}/first_moment"] = Kind.OPTIMIZER, generator.normal(size=shape).astype(np.float32)
    return ArrayState(arrays)


def content(step: int = 100, val_loss: float | None = 1.5) -> CheckpointContent:
    return CheckpointContent(step, {"model": {"name": "gpt"}}, {"step": step}, '{"tokenizer": "ü"}', val_loss)


def test_round_trip(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, made(0), content(val_loss=1.5))
    assert saved.path.name == "step_00000100"
    loaded = read_checkpoint(saved.path)
    assert (loaded.step, loaded.val_loss, loaded.config) == (100, 1.5, {"model": {"name": "gpt"}})
    assert (loaded.progress, loaded.tokenizer) == ({"step": 100}, '{"tokenizer": "ü"}')
    state, weights = made(1), loaded.weights()
    loaded.load(state)
    for name, array in made(0).arrays.items():
        assert state.arrays[name].tobytes() == array.tobytes()
        assert (name in weights) == ("/" not in name)
        assert "/" in name or np.array_equal(weights[name], array)


def test_shards_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 100)
    saved = save_checkpoint(tmp_path, made(0), content())
    assert {f"parameters-0000{number}-of-00002.safetensors" for number in (1, 2)} < saved.files.keys()
    state = made(1)
    saved.load(state)
    assert np.array_equal(state.arrays["a.bias"], made(0).arrays["a.bias"])


def test_other_shapes_and_names_are_refused_before_anything_is_copied(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, made(0), content())
    other = made(1, width=5)
    other.kinds["c.weight"], other.arrays["c.weight"] = Kind.PARAMETER, np.zeros(3, np.float32)
    before = {name: array.copy() for name, array in other.arrays.items()}
    with pytest.raises(CheckpointError, match=r"lacks c\.weight.*a\.bias \(6,\) instead of \(5,\)"):
        saved.load(other)
    assert all(np.array_equal(other.arrays[name], array) for name, array in before.items())


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"format": 2}', '{"format": 9, "files": {}}', "\x00\xff", "[" * 9999]
)
def test_damaged_manifest(tmp_path: Path, text: str) -> None:
    path = save_checkpoint(tmp_path, made(), content()).path
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError):
        read_checkpoint(path)


def test_a_disk_that_writes_something_else_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = module.write_synced

    def lossy(path: Path, data: bytes) -> str:
        digest = original(path, data)
        if path.name.startswith("parameters"):
            path.write_bytes(data[:-1] + b"\0")
        return digest

    save_checkpoint(tmp_path, made(0), content(50))
    monkeypatch.setattr(module, "write_synced", lossy)
    with pytest.raises(TtrainError, match="could not be saved"):
        save_checkpoint(tmp_path, made(0), content(100))
    newest, _ = retention.newest_complete(tmp_path)
    assert newest is not None and newest.step == 50


def test_newest_complete_says_what_it_skipped(tmp_path: Path) -> None:
    for step in (50, 99_999_999, 150_000_000, 200_000_000):  # in the order of numbers, which is not that of names
        save_checkpoint(tmp_path, made(), content(step))
    (tmp_path / "step_200000000" / "manifest.json").unlink()
    file = tmp_path / "step_150000000" / "config.json"
    file.write_bytes(file.read_bytes() + b" ")
    (tmp_path / ".unfinished_step_00000250").mkdir()
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    newest, skipped = retention.newest_complete(tmp_path)
    assert newest is not None and newest.step == 99_999_999
    reasons = {path.name: reason for path, reason in skipped}
    assert reasons.keys() == {"step_200000000", "step_150000000", ".unfinished_step_00000250"}
    assert "no manifest" in reasons["step_200000000"] and "truncated" in reasons["step_150000000"]
    assert retention.newest_complete(tmp_path / "nowhere") == (None, [])


def test_later_checkpoints_are_set_aside_not_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, made(), content(step))
    assert [path.name for path in retention.set_aside_after(tmp_path, 1)] == ["step_00000002", "step_00000003"]
    save_checkpoint(tmp_path, made(), content(2))
    moved = retention.set_aside_after(tmp_path, 1)
    assert [path.name for path in moved] == ["step_00000002_2"]
    read_checkpoint(moved[0])
    assert [checkpoint.step for checkpoint in retention.list_checkpoints(tmp_path)[0]] == [1]


def test_space_for_two_is_asked_for_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = retention.SMALL_FILES + sum(array.nbytes for array in made().arrays.values())
    assert retention.checkpoint_bytes(made()) == size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size))
    retention.check_space(tmp_path, size)
    with pytest.raises(CheckpointError, match="free"):
        retention.check_space(tmp_path, size + 1)


# checkpoints of bf16 state, and of parameters that are frozen on one side only

SHAPES = {"up.weight": (7, 3), "up.bias": (7,)}
KINDS = {"": Kind.PARAMETER, "/gradient": Kind.GRADIENT, "/moment": Kind.OPTIMIZER}


def state(weights: DType, moments: DType, frozen: tuple[str, ...] = ()) -> State:
    dtypes = {"": weights, "/gradient": weights, "/moment": moments}
    named = [(path, slot) for slot in KINDS for path in SHAPES if not (slot and path in frozen)]
    specs = {f"{path}{slot}": (TensorSpec(SHAPES[path], dtypes[slot]), KINDS[slot]) for path, slot in named}
    return State(open_cpu(), [StateTensor(name, *spec) for name, spec in specs.items()])


def filled(made: State, seed: int = 0) -> State:
    generator = np.random.default_rng(seed)
    for name in made.names():
        made.write(name, generator.standard_normal(made.spec(name).shape).astype(np.float32))
    return made


def bf16(array: np.ndarray) -> np.ndarray:
    return torch.from_numpy(array).bfloat16().float().numpy()


def values(made: State) -> dict[str, np.ndarray]:
    return {name: made.read(name) for name in made.names(Kind.PARAMETER, Kind.OPTIMIZER)}


@pytest.mark.parametrize("copied", [False, True], ids=["at once", "from a host copy"])
@pytest.mark.parametrize("weights", [DType.FP32, DType.BF16])
def test_a_checkpoint_holds_the_dtypes_of_the_state(tmp_path: Path, weights: DType, copied: bool) -> None:
    from safetensors import safe_open

    source = filled(state(weights, DType.BF16))
    saved = save_checkpoint(tmp_path, host_copy(source) if copied else source, CheckpointContent(3, {}))
    stored, size = {}, 0
    for file in saved.path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as shard:
            stored |= {name: shard.get_slice(name).get_dtype() for name in shard.keys()}  # noqa: SIM118
        size += file.stat().st_size
    expected = {"": "F32" if weights is DType.FP32 else "BF16", "/moment": "BF16"}
    assert stored == {f"{path}{slot}": dtype for slot, dtype in expected.items() for path in SHAPES}
    tensors = sum(source.spec(name).nbytes for name in values(source))
    assert tensors < size < tensors + 2000
    again = state(weights, DType.BF16)
    assert read_checkpoint(saved.path).load(again) == ()
    assert all(np.array_equal(array, values(again)[name]) for name, array in values(source).items())
    assert all(np.array_equal(array, source.read(name)) for name, array in saved.weights().items())


def test_numbers_stay_in_a_wider_dtype_and_are_rounded_to_nearest_in_a_narrower_one(tmp_path: Path) -> None:
    narrow, wide = filled(state(DType.BF16, DType.BF16), 1), filled(state(DType.FP32, DType.FP32), 2)
    files = [
        save_checkpoint(tmp_path / str(i), made, CheckpointContent(1, {})) for i, made in enumerate((narrow, wide))
    ]
    into_wide, into_narrow = state(DType.FP32, DType.FP32), state(DType.BF16, DType.BF16)
    files[0].load(into_wide)
    files[1].load(into_narrow)
    for name, array in values(narrow).items():
        assert np.array_equal(into_wide.read(name), array)
        assert np.array_equal(into_narrow.read(name), bf16(wide.read(name)))


def config(**optimizer: Any) -> dict[str, Any]:
    return {"optimizer": optimizer}


def test_state_of_parameters_that_were_frozen_starts_at_zero_also_over_old_values(tmp_path: Path) -> None:
    source = filled(state(DType.FP32, DType.FP32, frozen=("up.bias",)))
    saved = save_checkpoint(tmp_path, source, CheckpointContent(1, config(freeze=["up.bias"])))
    target = filled(state(DType.FP32, DType.FP32), 5)
    (note,) = saved.load(target)
    assert note.startswith("Frozen until now, so their optimizer state starts from zero: up.bias.")
    assert not target.read("up.bias/moment").any()
    assert np.array_equal(target.read("up.weight/moment"), source.read("up.weight/moment"))


@pytest.mark.parametrize(
    "stored",
    [{}, config(), config(freeze=["up.weight"]), config(freeze="up"), {"optimizer": ["x"]}, config(freeze=[3])],
)
def test_what_is_missing_for_no_known_reason_is_refused(tmp_path: Path, stored: dict[str, Any]) -> None:
    """Whatever a stranger's config holds."""
    source = filled(state(DType.FP32, DType.FP32, frozen=("up.bias",)))
    saved = save_checkpoint(tmp_path, source, CheckpointContent(1, stored))
    target = filled(state(DType.FP32, DType.FP32), 5)
    before = values(target)
    with pytest.raises(CheckpointError, match="it lacks up.bias/moment"):
        saved.load(target)
    assert all(np.array_equal(array, before[name]) for name, array in values(target).items())


def test_tensors_of_another_optimizer_are_refused() -> None:
    """Not frozen, only unknown: state of parameters that are trained."""
    made = state(DType.FP32, DType.FP32)
    wanted = {name: made.spec(name).shape for name in values(made)}
    for name, frozen in (("up.bias/second", []), ("down.bias", ["down"])):
        with pytest.raises(CheckpointError, match=f"^it also holds {name}.$"):
            match({**wanted, name: (7,)}, wanted, made, config(freeze=frozen))


# disks that fail, and checkpoints that were damaged: the newest good one loads, nothing else does


def constant(value: float = 0.0) -> ArrayState:
    """Three small tensors, all of one value."""
    kinds = {"a": Kind.PARAMETER, "b": Kind.PARAMETER, "a/moment": Kind.OPTIMIZER}
    return ArrayState({name: (kind, np.full((3, 4), value, np.float32)) for name, kind in kinds.items()})


class Disk:
    """Counts every operation of a save that changes the disk, and lets one of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.fail_at, self.error = 0, -1, BaseException()
        for name in ("mkdir", "replace", "fsync", "rmdir"):
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name)))
        original = builtins.open

        def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if not set(mode) & set("wax+"):
                return original(path, mode, *arguments, **options)
            self._tick()
            file: Any = original(path, mode, *arguments, **options)
            file.write = partial(self.write, file, file.write)
            return file

        monkeypatch.setattr(builtins, "open", opened)

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self._tick()
            return function(*arguments, **options)

        return call

    def _tick(self) -> None:
        self.count += 1
        if self.count == self.fail_at:
            raise self.error

    def write(self, file: Any, write: Callable[[Any], int], data: Any) -> int:
        """A write that fails has put half of its data down."""
        try:
            self._tick()
        except BaseException:
            write(data[: len(data) // 2])
            file.flush()
            raise
        return write(data)


def saver(folder: Path, said: list[str]) -> tuple[RunDirectory, Callable[[int], Checkpoints], ArrayState]:
    run = RunDirectory.claim(str(folder), "test")
    (folder / "metrics.jsonl").touch()
    loggers: Any = SimpleNamespace(console=SimpleNamespace(say=said.append), tell=lambda event: None)
    saved = constant(1.0)
    events = Events(run.events, said.append)
    context = RunContext(TrainConfig(async_save=False, keep_last=1), saved, run, loggers, events)
    writer = Checkpoints(context, lambda progress, loss: content(progress.step))

    def save(step: int) -> Checkpoints:
        context.progress.step = step
        writer.save()
        return writer

    return run, save, saved


@pytest.mark.parametrize("killed", [False, True], ids=["error", "kill"])
def test_every_operation_of_a_save_fails_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool) -> None:
    """The previous checkpoint loads; no space, read-only and I/O errors are told and logged.

    SIGKILL runs no handler and no cleanup, so the cleanup is patched away.
    """
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
        run, save, saved = saver(folder, said)
        writer, saved.arrays = save(1), constant(2.0).arrays
        code = (errno.ENOSPC, errno.EROFS, errno.EIO)[number % 3]
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            disk = Disk(patch)
            disk.fail_at, disk.error = number, KeyboardInterrupt() if killed else OSError(code, os.strerror(code))
            if killed:
                patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            save(2)
        newest, skipped = newest_complete(folder / "checkpoints")
        assert newest is not None and all("cut off" in reason for _, reason in skipped)
        loaded = constant()
        newest.load(loaded)
        assert all((array == float(newest.step)).all() for array in loaded.arrays.values())
        assert newest.step == 2 or killed or (writer.failed and said)
        if said:
            told += 1
            assert os.strerror(code) in said[0] and said[0].startswith("WARNING")
            assert [event["kind"] for event in read_events(folder)] == ["save_failed"]
        save(3)  # the disk is well again
        assert newest_complete(folder / "checkpoints")[0].step == 3 and not writer.failed  # type: ignore[union-attr]
        run.close()
    assert told == 0 if killed else told >= operations - 6  # those that come after the new checkpoint has its place


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


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2; the second is about to be damaged."""
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        save_checkpoint(folder, constant(float(step)), content(step))
    return folder


def damaged(original: bytes) -> Iterator[tuple[int, bytes | None]]:
    """A file with bytes flipped, cut off at, or grown; None for one that is gone. With the place of the damage.

    The places are the first bytes, the last one, and one of every 24th part.
    """
    size = len(original)
    for position in sorted({*range(min(16, size)), *range(0, size, max(size // 24, 1)), size - 1}):
        for bit in (0x01, 0xFF):
            yield position, original[:position] + bytes([original[position] ^ bit]) + original[position + 1 :]
        yield position, original[:position]
    yield 1, original + b"\0"
    yield 1, None


def test_every_damage_to_a_file_is_detected(two: Path) -> None:
    newest, checked = two / "step_00000002", 0
    for file in sorted(newest.iterdir()):
        original = file.read_bytes()
        for position, changed in damaged(original):
            file.unlink() if changed is None else file.write_bytes(changed)
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
    """Between two renames neither has the name. The old one gets it back; after a first save the run begins again."""
    run = two / "run"
    shutil.copytree(two / "step_00000002", run / "checkpoints" / f".unfinished_{left}")
    (run / "run.json").write_text('{"attempts": []}')
    held = hold_run("auto", str(run)) if step else None
    point = find_resume_point("auto", str(run))
    assert (point and point.checkpoint.step) == step and (held is not None) == (step is not None)


def test_a_checkpoint_that_is_read_is_not_removed(two: Path) -> None:
    """For example task=sample reads it while the run goes on; it is removed after a later save."""
    read, also = (find_checkpoint(two.parent, "1") for _ in range(2))
    assert prune_checkpoints(two, 1, False) == []
    loaded = constant()
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
            save_checkpoint(two, constant(3.0), content(3))
            shutil.rmtree(path.parent)
        calls.append(path)
        return original(path)

    monkeypatch.setattr(retention, "hold_for_reading", hold)
    assert find_checkpoint(two.parent, "last").step == 3 and len(calls) == 2


def test_retention_by_steps_and_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 11):
        monkeypatch.setattr("time.time", lambda step=step: 1000.0 + 600 * step)  # one every ten minutes
        save_checkpoint(tmp_path, constant(), CheckpointContent(step, {}, {}, None, abs(step - 7.0)))
    prune_checkpoints(tmp_path, 1, True, keep_every=4, keep_hours=0.5)
    kept = [int(path.name[5:]) for path in sorted(tmp_path.iterdir())]
    assert kept == [1, 4, 7, 8, 10]  # by time 1, 4, 7, 10; by steps 4, 8; the best 7; the last 10
