"""Fixtures of the tests of Tenstorrent devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttrain.device.ttnn.runtime import environment


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A kernel cache for this session; stub kernels must not outlive it."""
    return str(tmp_path_factory.mktemp("ttnn"))


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with a wheel and without a card, whose environment names no mode."""
    monkeypatch.setattr(environment, "installed_ttnn", lambda: tmp_path)
    monkeypatch.setattr(environment, "DEVICE_NODES", tmp_path / "nothing")
    monkeypatch.setattr(environment, "runtime_root", lambda folder, wheel: folder)
    monkeypatch.setenv("TTRAIN_CACHE", str(tmp_path / "cache"))
    for key in (*environment._OTHER_MODES, environment.MODE_VARIABLE, "TT_METAL_CACHE"):
        monkeypatch.setenv(key, "")  # so that it is undone
        monkeypatch.delenv(key)
