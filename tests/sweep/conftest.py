"""Sweeps over a stub for `python -m ttrain` that starts in a moment and does what its overrides say."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ttrain.config.compose import Composer
from ttrain.sweep import run

# What a job does follows from run.seed; the rest of a job is checked where real processes run.
STAND_IN = """
import json, os, pathlib, signal, sys, time
overrides = dict(w.split("=", 1) for w in sys.argv[1:] if "=" in w)
folder = pathlib.Path(overrides.get("run.dir", "elsewhere").strip("'\\""))
folder.mkdir(exist_ok=True)
seed = int(overrides.get("run.seed", 0))
with open("started.jsonl", "a") as file:
    record = {"overrides": sys.argv[1:], "threads": os.environ.get("OMP_NUM_THREADS"), "time": time.time()}
    file.write(json.dumps({**record, "group": os.environ.get("WANDB_RUN_GROUP"), "seed": seed}) + "\\n")
print("job speaks")
fixed = os.path.exists("fixed")
if seed == 101 and not fixed: raise RuntimeError("a bug")
if seed == 102 and not fixed: os._exit(7)
if seed == 103 and not fixed: os.kill(os.getpid(), signal.SIGKILL)
if seed == 104 and not fixed: sys.exit(print("ttrain: Step 3: train/loss is nan.\\n  more", file=sys.stderr) or 1)
if seed == 105 and not fixed: sys.exit(print("ttrain: no such corpus", file=sys.stderr) or 2)
if seed in (106, 108) and not fixed:  # the user interrupts; 108 does not stop for it
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130) if seed == 106 else None)
    (folder / "run.json").write_text("{}")
    os.kill(os.getppid(), signal.SIGINT)
    for _ in range(100): time.sleep(0.1); seed == 108 and _ == 3 and os.kill(os.getppid(), signal.SIGINT)
if seed == 107:  # four jobs that meet, or one that lasts
    meet = os.path.exists("meet")
    until = time.time() + (20 if meet else 0.3)
    while time.time() < until and not (meet and len(list(open("started.jsonl"))) == 4): time.sleep(0.01)
value = float(overrides.get("optimizer.lr", 1)) + seed
if seed in (110, 111):  # ten evaluations; 111 kills the sweep before the first one of its third job
    (folder / "run.json").write_text("{}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    for number in range(1, 11):
        time.sleep(0.0 if os.path.exists("fast") else 0.05)
        if seed == 111 and number == 1 and folder.name.startswith("002") and not fixed:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": number, "val/loss": value + 1 / number}) + "\\n")
if "plan.json" in overrides:
    plan = {"parameters": {"total": 7}, "memory": {"total": 2048}, "expected": {"step_ms": 2.0 * value}}
    sys.exit(pathlib.Path(overrides["plan.json"].strip("'\\"")).write_text(json.dumps(plan)) and 0)
if "bench.out" in overrides:
    out = pathlib.Path(overrides["bench.out"].strip("'\\""))
    if out.exists(): sys.exit(print("ttrain: holds results already", file=sys.stderr) or 2)
    out.mkdir()
    numbers = {"bf16 static_ms" if seed == 3 else "static_ms": value, "eager_ms": 6.0, "times_as_fast": 6.0 / value}
    if seed == 4: del numbers["times_as_fast"]  # no PyTorch beside
    (out / "results.json").write_text(json.dumps({"numbers": numbers}))
    sys.exit(1 if seed == 109 and not fixed else 0)
(folder / "summary.json").write_text(json.dumps({"best_val_loss": value, "step": 4, "tokens_per_s": 1000.0}))
"""

Sweep = Callable[..., int]


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sweep]:
    """Runs a sweep with the stub in a folder of its own: `sweep("run.seed=1,2")` -> exit code."""
    script = tmp_path / "stub.py"
    script.write_text(STAND_IN)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(run, "PROGRAM", (sys.executable, "-S", "-E", "-u", str(script)))
    monkeypatch.setattr(run, "_POLL_SECONDS", 0.005)

    def start(*overrides: str, name: str | None = None) -> int:
        with Composer(name) as composer:
            return run.run_sweep(composer, list(overrides))

    yield start
