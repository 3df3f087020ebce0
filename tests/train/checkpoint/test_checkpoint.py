"""Checkpoints survive what disks, kills and strangers do to them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import signal
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ttrain.core.errors import CheckpointError, NonFiniteError, TtrainError
from ttrain.core.files import sha256_file
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph.kinds import Kind
from ttrain.train.checkpoint import save as module
from ttrain.train.checkpoint.checkpoint import read_checkpoint, sealed
from ttrain.train.checkpoint.retention import (
    SMALL_FILES,
    best_checkpoint,
    check_space,
    list_checkpoints,
    newest_complete,
    prune_checkpoints,
    set_aside_after,
)
from ttrain.train.checkpoint.save import CheckpointContent, save_checkpoint


class State:
    """Parameters and moments of two tensors."""

    def __init__(self, seed: int = 0, width: int = 6) -> None:
        generator = np.random.default_rng(seed)
        self.arrays: dict[str, np.ndarray] = {}
        for name, shape in {"b.weight": (4, width), "a.bias": (width,)}.items():
            self.arrays[name] = generator.normal(size=shape).astype(np.float32)
            self.arrays[f"{name}/first_moment"] = generator.normal(size=shape).astype(np.float32)

    def names(self, *kinds: Kind) -> list[str]:
        of = {name: Kind.OPTIMIZER if "/" in name else Kind.PARAMETER for name in self.arrays}
        return [name for name, kind in of.items() if not kinds or kind in kinds]

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(self.arrays[name].shape, DType.FP32)

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def write(self, name: str, array: np.ndarray) -> None:
        self.arrays[name] = array


def content(step: int = 100, val_loss: float | None = None) -> CheckpointContent:
    return CheckpointContent(step, {"model": {"name": "gpt"}}, {"step": step}, '{"tokenizer": "ü"}', val_loss)


def rewrite_manifest(path: Path, **changes: Any) -> None:
    """Makes the manifest agree with whatever the files are now: an attacker can do that."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name in manifest["files"]:
        if (path / name).exists():
            manifest["files"][name] = {"bytes": (path / name).stat().st_size, "sha256": sha256_file(path / name)}
    manifest["files"].update(changes)
    del manifest["sha256"]
    (path / "manifest.json").write_text(sealed(manifest))


def test_round_trip(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, State(0), content(val_loss=1.5))
    assert saved.path.name == "step_00000100"
    loaded = read_checkpoint(saved.path)
    assert (loaded.step, loaded.val_loss, loaded.config) == (100, 1.5, {"model": {"name": "gpt"}})
    assert (loaded.progress, loaded.tokenizer) == ({"step": 100}, '{"tokenizer": "ü"}')
    state, alone = State(1), State(1)
    loaded.load(state)
    loaded.load(alone, optimizer=False)
    for name, array in State(0).arrays.items():
        assert state.arrays[name].tobytes() == array.tobytes()
        assert np.array_equal(alone.arrays[name], (State(1) if "/" in name else State(0)).arrays[name])


def test_shards_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 100)
    saved = save_checkpoint(tmp_path, State(0), content())
    assert sorted(name for name in saved.files if name.startswith("parameters")) == [
        "parameters-00001-of-00002.safetensors",
        "parameters-00002-of-00002.safetensors",
    ]
    state = State(1)
    saved.load(state)
    assert np.array_equal(state.arrays["a.bias"], State(0).arrays["a.bias"])


def test_other_shapes_and_names_are_refused_before_anything_is_copied(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, State(0), content())
    other = State(1, width=5)
    other.arrays["c.weight"] = np.zeros(3, np.float32)
    before = {name: array.copy() for name, array in other.arrays.items()}
    with pytest.raises(CheckpointError, match=r"lacks c\.weight.*a\.bias \(6,\) instead of \(5,\)"):
        saved.load(other)
    assert all(np.array_equal(other.arrays[name], array) for name, array in before.items())


SHARD = "parameters-00001-of-00001.safetensors"


def _flip(file: Path) -> None:
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)


def _link(file: Path) -> None:
    os.rename(file, file.parents[1] / "outside.json")
    file.symlink_to(file.parents[1] / "outside.json")


DAMAGES: list[tuple[str, Any, str]] = [
    *((SHARD, lambda file, keep=keep: os.truncate(file, keep), "truncated") for keep in (0, 60)),
    *((name, _flip, "SHA-256") for name in (SHARD, "config.json", "manifest.json", "tokenizer.json")),
    ("optimizer-00001-of-00001.safetensors", os.unlink, "missing"),
    ("manifest.json", os.unlink, "not a complete checkpoint"),
    ("config.json", _link, "missing"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES)
def test_what_was_cut_changed_removed_or_linked(tmp_path: Path, name: str, damage: Any, message: str) -> None:
    path = save_checkpoint(tmp_path, State(), content()).path
    damage(path / name)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"format": 2}', '{"format": 9, "files": {}}', "\x00\xff", "[" * 9999]
)
def test_damaged_manifest(tmp_path: Path, text: str) -> None:
    path = save_checkpoint(tmp_path, State(), content()).path
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError):
        read_checkpoint(path)


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "state.pkl", "optimizer.pt", ".hidden", "extra.safetensors"])
def test_a_file_that_the_manifest_does_not_list_is_refused(tmp_path: Path, name: str) -> None:
    path = save_checkpoint(tmp_path, State(), content()).path
    (path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(CheckpointError, match="manifest does not list"):
        read_checkpoint(path)
    assert not (tmp_path / "exploded").exists()


def test_a_pickle_in_place_of_a_shard_is_refused_and_never_run(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, State(), content()).path
    (path / "parameters-00001-of-00001.safetensors").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    rewrite_manifest(path)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_checkpoint(path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "name", ["../../outside.json", "/etc/passwd", "a/b.json", "..", "weights.pkl", "manifest.json", ".json"]
)
def test_names_that_leave_the_folder_or_the_formats_are_refused(tmp_path: Path, name: str) -> None:
    path = save_checkpoint(tmp_path, State(), content()).path
    rewrite_manifest(path, **{name: {"bytes": 1, "sha256": "0"}})
    with pytest.raises(CheckpointError, match="own folder only"):
        read_checkpoint(path)


@pytest.mark.parametrize("length", [0, 1, 2**20, 200_000_000, 2**63, 2**64 - 1])
def test_a_header_that_does_not_fit_is_refused(tmp_path: Path, length: int) -> None:
    path = save_checkpoint(tmp_path, State(), content()).path
    file = path / "parameters-00001-of-00001.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    rewrite_manifest(path)
    with pytest.raises(CheckpointError, match="header"):
        read_checkpoint(path)


def test_nan_is_not_saved(tmp_path: Path) -> None:
    state = State()
    state.arrays["b.weight"][0, 0] = np.inf
    with pytest.raises(NonFiniteError, match=r"b\.weight"):
        save_checkpoint(tmp_path, state, content())
    assert list(tmp_path.iterdir()) == []


CALLS = [*(("fsync", at) for at in range(1, 8)), *(("replace", at) for at in range(1, 4))]


class Failure:
    """Lets the n-th call of a function of `os` fail; counts calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, at: int, error: BaseException) -> None:
        self.calls, original = 0, getattr(os, name)

        def call(*arguments: Any) -> Any:
            self.calls += 1
            if self.calls == at:
                raise error
            return original(*arguments)

        monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize(("name", "at"), CALLS)
def test_a_save_that_fails_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: int
) -> None:
    """Also where the step's own directory existed before: the old one comes back."""
    save_checkpoint(tmp_path, State(0), content(50))
    save_checkpoint(tmp_path, State(0), content(100))
    with monkeypatch.context() as patch:
        failure = Failure(patch, name, at, OSError(28, "No space left on device"))
        try:
            save_checkpoint(tmp_path, State(1), content(100))
        except TtrainError as error:
            assert "No space left" in str(error) and error.exit_code == 1
    assert failure.calls >= 1
    newest, skipped = newest_complete(tmp_path)
    assert newest is not None and newest.step == 100 and skipped == []


@pytest.mark.parametrize(("name", "at"), CALLS)
def test_a_kill_at_any_point_of_a_save_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: int
) -> None:
    """SIGKILL runs no handler and no cleanup, so this patches the cleanup away and compares bytes afterwards."""
    save_checkpoint(tmp_path, State(0), content(50))
    with monkeypatch.context() as patch:
        Failure(patch, name, at, KeyboardInterrupt())
        patch.setattr(module.shutil, "rmtree", lambda *_, **__: None)
        with contextlib.suppress(KeyboardInterrupt):
            save_checkpoint(tmp_path, State(1), content(100))
    newest, skipped = newest_complete(tmp_path)
    assert newest is not None and newest.step in (50, 100)
    assert all("cut off" in reason for _, reason in skipped)
    state = State(2)
    newest.load(state)
    expected = State(0 if newest.step == 50 else 1)
    assert all(np.array_equal(state.arrays[key], array) for key, array in expected.arrays.items())
    again = save_checkpoint(tmp_path, State(3), content(100))
    assert newest_complete(tmp_path) == (again, [])


class Numbered(State):
    """Tensors that all hold the number of the save."""

    def __init__(self, step: int) -> None:
        super().__init__(width=20_000)
        self.arrays = {name: np.full_like(array, step) for name, array in self.arrays.items()}


def test_kills_at_any_moment_of_a_save_loop_leave_a_checkpoint_that_loads(tmp_path: Path) -> None:
    """keep_last=1, so that a deletion before its time would show; every attempt starts from what the last one left."""
    generator, steps = np.random.default_rng(0), [0]
    for _ in range(12):
        child = os.fork()
        if child == 0:
            try:
                for step in itertools.count(steps[-1] + 1):
                    save_checkpoint(tmp_path, Numbered(step), content(step))
                    prune_checkpoints(tmp_path, keep_last=1, keep_best=False)
            finally:
                os._exit(1)
        while max((int(path.name[5:13]) for path in tmp_path.glob("step_*")), default=0) <= steps[-1]:
            time.sleep(0.002)  # until it has saved, however slow the machine is
        time.sleep(generator.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        newest, skipped = newest_complete(tmp_path)
        if newest is not None:
            steps.append(newest.step)
            assert all((array == newest.step).all() for array in newest.weights().values())
        assert all("cut off" in reason for _, reason in skipped)
    assert steps == sorted(set(steps)) and steps[-1] >= 12


def test_a_disk_that_writes_something_else_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = module.write_synced

    def lossy(path: Path, data: bytes) -> str:
        digest = original(path, data)
        if path.name.startswith("parameters"):
            path.write_bytes(data[:-1] + b"\0")
        return digest

    save_checkpoint(tmp_path, State(0), content(50))
    monkeypatch.setattr(module, "write_synced", lossy)
    with pytest.raises(TtrainError, match="could not be saved"):
        save_checkpoint(tmp_path, State(0), content(100))
    newest, _ = newest_complete(tmp_path)
    assert newest is not None and newest.step == 50


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(TtrainError, match="could not be saved"):
        save_checkpoint(tmp_path / "checkpoints", State(), content())


def test_newest_complete_says_what_it_skipped(tmp_path: Path) -> None:
    for step in (50, 99_999_999, 150_000_000, 200_000_000):  # in the order of numbers, which is not that of names
        save_checkpoint(tmp_path, State(), content(step))
    (tmp_path / "step_200000000" / "manifest.json").unlink()
    file = tmp_path / "step_150000000" / "config.json"
    file.write_bytes(file.read_bytes() + b" ")
    (tmp_path / ".unfinished_step_00000250").mkdir()
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    newest, skipped = newest_complete(tmp_path)
    assert newest is not None and newest.step == 99_999_999
    reasons = {path.name: reason for path, reason in skipped}
    assert reasons.keys() == {"step_200000000", "step_150000000", ".unfinished_step_00000250"}
    assert "no manifest" in reasons["step_200000000"] and "truncated" in reasons["step_150000000"]
    assert newest_complete(tmp_path / "nowhere") == (None, [])


def test_retention_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 2.5)):
        save_checkpoint(tmp_path, State(), content(step, loss))
    best = best_checkpoint(tmp_path)
    assert best is not None and best.step == 2
    removed = prune_checkpoints(tmp_path, keep_last=2, keep_best=True)
    assert [path.name for path in removed] == ["step_00000001", "step_00000003"]
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)[0]] == [2, 4, 5]
    prune_checkpoints(tmp_path, keep_last=1, keep_best=False)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)[0]] == [5]


def test_later_checkpoints_are_set_aside_not_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, State(), content(step))
    assert [path.name for path in set_aside_after(tmp_path, 1)] == ["step_00000002", "step_00000003"]
    save_checkpoint(tmp_path, State(), content(2))
    moved = set_aside_after(tmp_path, 1)
    assert [path.name for path in moved] == ["step_00000002_2"]
    read_checkpoint(moved[0])
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)[0]] == [1]


def test_space_for_two_is_asked_for_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil
    from types import SimpleNamespace

    state = State()
    size = SMALL_FILES + sum(array.nbytes for array in state.arrays.values())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * size))
    check_space(tmp_path, state)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * size - 1))
    with pytest.raises(CheckpointError, match="free"):
        check_space(tmp_path, state)
