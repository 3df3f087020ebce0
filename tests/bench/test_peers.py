"""Peers (other systems beside ours) take turns in processes. One that can't start is listed with the reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers


def test_peers_take_turns_and_those_that_can_not_start_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "peers.json"
    (tmp_path / "jax.py").write_text("raise ModuleNotFoundError(\"No module named 'jax'\")")
    given = ["--size=char", "--threads=1", "--rounds=1", "--peers=static,jax,llmc", f"--out={out}"]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(peers, "TURN", 0.01)
    monkeypatch.setattr(sys, "argv", ["peers", *given])
    peers.main()
    titles, *rows = json.loads(out.read_text())["lines"]
    found = {row[2].split()[0]: dict(zip(titles, row, strict=True)) for row in rows}
    assert float(found["static"]["ms/step"]) > 0 and found["static"]["x"] == ""  # without PyTorch there is no factor
    assert found["jax"]["range or reason"] == "ModuleNotFoundError: No module named 'jax'"
    assert found["llmc"]["range or reason"] == "Give --source=<folder of llm.c>."
    assert "static" in capsys.readouterr().out
