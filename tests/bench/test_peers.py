"""Peers (other systems beside ours) take turns in processes. One that can't start is listed with the reason."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
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


# It prints what is no message, and ends after its first turn.
DIES = """
print("{garbage", "{}", "[1]", sep="\\n")
print('{"ready": "peer 1", "losses": [1], "first_s": 1}', flush=True)
input()
print('{"other": 1}\\n{"times": [0.5, 0.5]}', flush=True)
"""


def test_a_peer_that_dies_between_turns_is_left_out_and_garbage_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jax_gpt.py").write_text(DIES)
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    given = Namespace(size="char", precision="fp32", threads=1, out=tmp_path / "peers.json")
    peer = peers.Peer("jax", sys.executable, [], given)
    peer.start()
    peer.turn()
    assert peer.times == [0.5] and not peer.reason
    peer.process.wait()
    peer.turn()
    assert peer.reason == "it ended with 0"
    assert peers.lines_of([peer], "char", "fp32") == [["char", "fp32", "jax", "", "", "it ended with 0"]]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--python=jax"], "jax: expected PEER=..."),
        (["--option=llm=--source=x"], "llm=--source=x: expected PEER=..., with one of eager"),
        (["--peers=jax,torch"], "there is no torch, only eager"),
        (["--threads=0"], "1 or more"),
        (["--peers=jax", "--python=jax=/nowhere/python"], "No such file or directory: '/nowhere/python'"),
    ],
)
def test_wrong_arguments_of_peers_are_told(
    given: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peers", f"--out={tmp_path}/peers.json", *given])
    with pytest.raises(SystemExit) as ended:
        peers.main()
    assert ended.value.code == 2 and told in capsys.readouterr().err
