"""Checkpoints survive what disks, kills and strangers do to them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import ArrayState
from ttrain.core.errors import CheckpointError, NonFiniteError, TtrainError
from ttrain.graph import Kind
from ttrain.train.checkpoint import retention
from ttrain.train.checkpoint import save as module
from ttrain.train.checkpoint.checkpoint import read_checkpoint, sealed
from ttrain.train.checkpoint.save import CheckpointContent, save_checkpoint


def made(seed: int = 0, width: int = 6) -> ArrayState:
    """Parameters and moments of two tensors."""
    generator, arrays = np.random.default_rng(seed), {}
    for name, shape in {"b.weight": (4, width), "a.bias": (width,)}.items():
        arrays[name] = Kind.PARAMETER, generator.normal(size=shape).astype(np.float32)
        arrays[f"{name}/first_moment"] = Kind.OPTIMIZER, generator.normal(size=shape).astype(np.float32)
    return ArrayState(arrays)


def content(step: int = 100, val_loss: float | None = None) -> CheckpointContent:
    return CheckpointContent(step, {"model": {"name": "gpt"}}, {"step": step}, '{"tokenizer": "ü"}', val_loss)


def test_round_trip(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, made(0), content(val_loss=1.5))
    assert saved.path.name == "step_00000100"
    loaded = read_checkpoint(saved.path)
    assert (loaded.step, loaded.val_loss, loaded.config) == (100, 1.5, {"model": {"name": "gpt"}})
    assert (loaded.progress, loaded.tokenizer) == ({"step": 100}, '{"tokenizer": "ü"}')
    state, alone = made(1), made(1)
    loaded.load(state)
    loaded.load(alone, optimizer=False)
    for name, array in made(0).arrays.items():
        assert state.arrays[name].tobytes() == array.tobytes()
        assert np.array_equal(alone.arrays[name], (made(1) if "/" in name else made(0)).arrays[name])


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


SHARD = "parameters-00001-of-00001.safetensors"


def _flip(file: Path) -> None:
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)


DAMAGES: list[tuple[str, Any, str]] = [
    (SHARD, lambda file: os.truncate(file, 60), "truncated"),
    *((name, _flip, "SHA-256") for name in (SHARD, "manifest.json")),
    ("optimizer-00001-of-00001.safetensors", os.unlink, "missing"),
    ("manifest.json", os.unlink, "not a complete checkpoint"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES)
def test_what_was_cut_changed_removed_or_linked(tmp_path: Path, name: str, damage: Any, message: str) -> None:
    path = save_checkpoint(tmp_path, made(), content()).path
    damage(path / name)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"format": 2}', '{"format": 9, "files": {}}', "\x00\xff", "[" * 9999]
)
def test_damaged_manifest(tmp_path: Path, text: str) -> None:
    path = save_checkpoint(tmp_path, made(), content()).path
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "name", ["../../outside.json", "/etc/passwd", "a/b.json", "..", "weights.pkl", "manifest.json", ".json"]
)
def test_names_that_leave_the_folder_or_the_formats_are_refused(tmp_path: Path, name: str) -> None:
    path = save_checkpoint(tmp_path, made(), content()).path
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["files"][name] = {"bytes": 1, "sha256": "0"}
    (path / "manifest.json").write_text(sealed(manifest))
    with pytest.raises(CheckpointError, match="own folder only"):
        read_checkpoint(path)


def test_nan_is_not_saved(tmp_path: Path) -> None:
    state = made()
    state.arrays["b.weight"][0, 0] = np.inf
    with pytest.raises(NonFiniteError, match=r"b\.weight"):
        save_checkpoint(tmp_path, state, content())
    assert list(tmp_path.iterdir()) == []


CALLS = [*(("fsync", at) for at in range(1, 8)), *(("replace", at) for at in range(1, 4))]


@pytest.mark.parametrize(("name", "at"), CALLS)
def test_a_kill_at_any_point_of_a_save_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: int
) -> None:
    """SIGKILL runs no handler and no cleanup, so this patches the cleanup away."""
    save_checkpoint(tmp_path, made(0), content(50))
    original, calls = getattr(os, name), itertools.count(1)

    def call(*arguments: Any) -> Any:
        if next(calls) == at:
            raise KeyboardInterrupt
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, call)
        patch.setattr(module.shutil, "rmtree", lambda *_, **__: None)
        with contextlib.suppress(KeyboardInterrupt):
            save_checkpoint(tmp_path, made(1), content(100))
            retention.prune_checkpoints(tmp_path, keep_last=1, keep_best=False)
    newest, skipped = retention.newest_complete(tmp_path)
    assert newest is not None and newest.step in (50, 100)
    assert all("cut off" in reason for _, reason in skipped)
    state, expected = made(2), made(0 if newest.step == 50 else 1)
    newest.load(state)
    assert all(np.array_equal(state.arrays[key], array) for key, array in expected.arrays.items())
    again = save_checkpoint(tmp_path, made(3), content(100))
    assert retention.newest_complete(tmp_path)[0] == again


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
    import shutil
    from types import SimpleNamespace

    size = retention.SMALL_FILES + sum(array.nbytes for array in made().arrays.values())
    assert retention.checkpoint_bytes(made()) == size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size))
    retention.check_space(tmp_path, size)
    with pytest.raises(CheckpointError, match="free"):
        retention.check_space(tmp_path, size + 1)
