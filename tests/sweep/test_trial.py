"""Trials: the level and the power of the test, verdicts over a stub for runs, and one trial of real runs."""

from __future__ import annotations

import csv
import json
import math
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import forked
from ttrain.cli import main
from ttrain.sweep import run
from ttrain.sweep.paired import interval, nominal_level, p_values, quantile

# The published quantiles of Student's t for a probability of 0.05 and 0.01 on both sides together.
TABLE = {1: (12.706, 63.657), 2: (4.303, 9.925), 3: (3.182, 5.841), 4: (2.776, 4.604), 9: (2.262, 3.250)}


@pytest.mark.parametrize("freedom", TABLE)
def test_quantiles_are_those_of_the_tables(freedom: int) -> None:
    assert [quantile(tail, freedom) for tail in (0.05, 0.01)] == pytest.approx(TABLE[freedom], abs=6e-4)


@pytest.mark.parametrize(("level", "most"), [(0.05, 2), (0.05, 3), (0.05, 5), (0.05, 8), (0.05, 10), (0.01, 8)])
def test_looking_after_every_seed_keeps_to_the_level(level: float, most: int) -> None:
    """Wrong verdicts of 200,000 comparisons in which nothing differs, one look after the other."""
    drawn = np.random.default_rng(7).standard_normal((200_000, most))
    wrong = float((p_values(0.01 * drawn) <= nominal_level(level, most)).any(1).mean())
    assert 0.85 * level < wrong <= level
    if most == 8 and level == 0.05:
        heavy = np.random.default_rng(8).standard_t(3, drawn.shape)
        assert float((p_values(heavy) <= nominal_level(level, most)).any(1).mean()) < level
        each = nominal_level(level, most)
        assert 1.5 * level / (most - 1) < each < level  # more than Bonferroni grants
        for effect, found, seeds in ((1.0, 0.45, 7.0), (2.0, 0.96, 5.1), (5.0, 1.0, 3.4)):  # in standard deviations
            hits = p_values(effect + drawn[:50_000]) <= each
            assert float(hits.any(1).mean()) > found - 0.01
            used = np.where(hits.any(1), hits.argmax(1) + 2, most)
            assert float(used.mean()) < seeds + 0.1


def test_an_interval_leaves_0_out_where_the_p_value_is_small() -> None:
    drawn = 1.5 + np.random.default_rng(3).standard_normal((40, 5))
    for row, p in zip(drawn, p_values(drawn)[:, -1], strict=True):
        low, high = interval(row.tolist(), 0.05, 5)
        assert (low > 0 or high < 0) == (p <= nominal_level(0.05, 5))
        assert (low + high) / 2 == pytest.approx(row.mean())


# The loss of a run follows from its variant and its seed. `kill` ends the trial in the middle of its fourth run.
STUB = """
import json, math, os, pathlib, signal, sys
overrides = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
folder = pathlib.Path(overrides["run.dir"].strip("'\\""))
seed, kind = int(overrides["run.seed"]), overrides.get("optimizer.lr", "0")
with open("started", "a") as file: file.write(folder.name + "\\n")
if os.path.exists("kill") and len(list(open("started"))) == 4:
    os.remove("kill")
    os.kill(os.getppid(), signal.SIGKILL)
noise = math.sin(7 * seed)
if kind == "0.4" and seed == 6:
    event = {"time": "", "kind": "failed", "message": "Step 3: train/loss is nan.", "error": "NonFiniteError"}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\\n")
    sys.exit(print("ttrain: Step 3: train/loss is nan. Try less.", file=sys.stderr) or 1)
if kind == "0.5": sys.exit(print("ttrain: no such card", file=sys.stderr) or 1)
effect = {"0.1": -0.3, "0.2": 0.3, "0.3": 0.0}.get(kind, 0.0) + (0.2 if kind == "0.6" else 0.01) * math.cos(5 * seed)
loss = 2 + 0.1 * noise + (effect if kind != "0" else 0)
summary = {"step": 1, "val/loss": loss, "seconds": 2.0, "peak_memory_bytes": 1 << 20}
(folder / "summary.json").write_text(json.dumps(summary))
"""
MLP = ["task=trial", "model=mlp", "data=regression", "data.examples=64", "device=cpu", "device.threads=1", "run.seed=5"]
ALL = (
    "trial.variants={better:[optimizer.lr=0.1],worse:[optimizer.lr=0.2],bounded:[optimizer.lr=0.3],"
    "nan:[optimizer.lr=0.4],broken:[optimizer.lr=0.5],noisy:[optimizer.lr=0.6]}"
)


def stub(folder: Path) -> None:
    """Let runs of trials be those of the stub, in a current folder of their own."""
    script = folder / "stub.py"
    script.write_text(STUB)
    run.PROGRAM = (sys.executable, "-S", "-E", "-u", str(script))
    run._POLL_SECONDS = 0.005
    run.forkable = lambda job: False


@pytest.fixture
def stubbed(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROGRAM", "_POLL_SECONDS", "forkable"):
        monkeypatch.setattr(run, name, getattr(run, name))
    stub(inside)


def last_line(capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capfd.readouterr().out.splitlines()[-1])
    return found


def started() -> list[str]:
    return Path("started").read_text().split()


def test_every_verdict(stubbed: None, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*MLP, ALL, "trial.seeds=5", "trial.bound=0.1", "sweep.parallel=2"]) == 1
    found = last_line(capfd)
    variants = found["variants"]
    verdicts = {name: facts["verdict"] for name, facts in variants.items()}
    assert verdicts == {
        "better": "better", "worse": "worse", "bounded": "bounded", "nan": "worse", "broken": "failed", "noisy": "open",
    }  # fmt: skip
    assert variants["nan"]["reason"] == "Step 3: train/loss is nan" and variants["broken"]["reason"] == "no such card"
    assert variants["nan"]["seeds"] == 2 and variants["broken"]["seeds"] == 1 and variants["noisy"]["seeds"] == 5
    assert found["finished"] and found["baseline"]["seeds"] == 5 and found["baseline"]["verdict"] is None
    # The numbers, from the losses of the stub.
    losses = [2 + 0.1 * math.sin(7 * seed) for seed in range(5, 10)]
    assert found["baseline"]["deviation"] == pytest.approx(np.std(losses, ddof=1))
    noisy = variants["noisy"]
    differences = [0.2 * math.cos(5 * seed) for seed in range(5, 10)]
    own = np.add(losses, differences)
    assert noisy["differences"] == pytest.approx(differences)
    assert noisy["variance_ratio"] == pytest.approx(
        np.var(differences, ddof=1) / (np.var(losses, ddof=1) + np.var(own, ddof=1))
    )
    assert (noisy["low"], noisy["high"]) == pytest.approx(interval(differences, 0.05, 5))
    # No run is started that no verdict needs, and none twice.
    counts = Counter(name.rpartition("-")[0] for name in started())
    assert counts == {"baseline": 5} | {name: facts["seeds"] for name, facts in variants.items()}
    with open("outputs/results.tsv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert [row["name"] for row in rows] == ["baseline", *variants]
    assert rows[1]["status"] == "better" and float(rows[1]["peak_memory_bytes"]) == 1 << 20
    assert "optimizer.lr=0.1" in rows[1]["command"] and "task" not in rows[1]["command"]


def test_a_killed_trial_goes_on(inside: Path, stubbed: None, capfd: pytest.CaptureFixture[str]) -> None:
    """SIGKILL in the fourth run; the same command again runs that one and those that are left."""
    Path("kill").touch()
    words = [*MLP, "trial.variants={better:[optimizer.lr=0.1],noisy:[optimizer.lr=0.6]}", "trial.seeds=3"]
    code = f"from pathlib import Path; from tests.sweep.test_trial import *; stub(Path('.').absolute()); main({words})"
    assert forked.run("-c", code, cwd=inside, PYTHONPATH=str(forked.ROOT)).returncode == -signal.SIGKILL
    assert len(started()) == 4
    assert main(words) == 0
    again = Counter(started())
    assert again.pop(started()[3]) == 2 and set(again.values()) == {1}
    found = last_line(capfd)
    assert found["finished"] and found["variants"]["noisy"]["seeds"] == 3
    assert len(list(Path("outputs/trials").glob("*/*"))) == 1
    assert len(Path("outputs/results.tsv").read_text().splitlines()) == 4
    Path("stub.py").write_text("raise SystemExit(print('ttrain: no such card') or 1)")  # a baseline that fails
    assert main([*words, "sweep.dir=mine"]) == 1
    assert last_line(capfd)["problem"] == "The baseline has no val/loss: no such card"


def test_what_is_wrong_with_variants_is_told_before_anything_runs(inside: Path, capfd: Any) -> None:
    before = sorted(Path().iterdir())

    def said(*words: str) -> str:
        assert main([*MLP, *words]) == 2
        assert sorted(Path().iterdir()) == before
        return str(capfd.readouterr().err)

    told = said("trial.variants={a:[model.widht=3],b:[optimizer=none],c:[run.seed=2],d:[train.init_from=nowhere]}")
    assert "4 problems" in told and "trial.variants.a: model.widht: unknown key" in told
    assert "trial.variants.b: optimizer=none: no such option" in told and "trial.variants.c: run.seed: is the" in told
    assert "trial.variants.d: train.init_from=nowhere" in told
    wrong = said("trial.variants={a:[],b:[]}", "train.stepss=3")
    assert wrong.count("train.stepss") == 1
    assert "there is nothing to compare" in said() and "must be a word of at most 59" in said("trial.variants={a/b:[]}")
    assert "must be a mapping of names to lists of texts" in said("trial.variants={a: b=1}")
    assert "must be a word of at most 59" in said(f"trial.variants={{{60 * 'x'}:[]}}")
    assert "is 2147483648, above 2147483647" in said("trial.variants={a:[]}", "run.seed=2147483641", "trial.seeds=8")
    assert "sweep.search: says how a search" in said("trial.variants={a:[]}", "sweep.search=tpe")
    Path("outputs").touch()
    before = sorted(Path().iterdir())
    assert "can't write outputs/results.tsv: " in said("trial.variants={a:[]}", "sweep.dir=elsewhere")


def test_a_trial_of_real_runs(inside: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A variant that changes nothing is equal to the bit, and two that were made worse on purpose are found."""
    monkeypatch.setenv("PYTHONPATH", str(forked.ROOT))
    monkeypatch.setattr(run, "forkable", lambda job: False)
    monkeypatch.setattr(run, "Child", forked.ForkedChild)
    Path("mine/trial").mkdir(parents=True)
    Path("mine/trial/three.yaml").write_text(
        "seeds: 2\nvariants:\n  same: [train.save_every=3]\n  still: [optimizer.lr=1e-9]\n"
        "  boom: [optimizer.lr=1e38, optimizer.clip_norm=null]\n"
    )
    small = ["engine=static", "schedule=constant", "optimizer.lr=1e-2", "train.steps=40", "train.peak_tflops=1"]
    assert main(["--config-dir", "mine", "trial=three", *MLP, *small, "sweep.parallel=2"]) == 0
    found = last_line(capfd)
    variants = found["variants"]
    assert {name: (facts["verdict"], facts["seeds"]) for name, facts in variants.items()} == {
        "same": ("equal", 1), "still": ("worse", 2), "boom": ("worse", 1),
    }  # fmt: skip
    assert "nan" in variants["boom"]["reason"] or "inf" in variants["boom"]["reason"]
    assert variants["same"]["differences"] == [0.0] and variants["still"]["low"] > 0
