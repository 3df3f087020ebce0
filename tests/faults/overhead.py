"""What saving and supervision cost, on the default model: `python tests/faults/overhead.py --steps 200`.

Prints one line of JSON. Saving: the time that steps waited for saves (the copy to host memory, and a save that was
still being written when the next was due), and how much longer the steps themselves took while a save was written
beside them, both as a share of the step time. Supervision: a heartbeat per step as a share of the step time, and the
time to the first step of a first start and of a restart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ttrain.cli import main as ttrain
from ttrain.train.events import read_events
from ttrain.train.heartbeat import VARIABLE, Heartbeat
from ttrain.train.loop import Loop

COMMON = ["logger=jsonl", "device=cpu", "train.eval_every=null", "train.eval_batches=1", "sample.tokens=1"]


def measured(run: Path, steps: int, every: int | None) -> dict[str, float]:
    """Trains; the loop's seconds without its last save, the seconds that steps waited, and the median step."""
    found: dict[str, Any] = {"steps": []}
    step, finish = Loop._train_step, Loop._finish

    def timed_step(loop: Loop) -> None:
        start = time.perf_counter()
        found.setdefault("start", start)
        step(loop)
        found["steps"].append(time.perf_counter() - start)

    def timed_finish(loop: Loop) -> None:
        found["end"] = time.perf_counter()
        found["waited"] = loop.saver.delay_seconds
        finish(loop)

    Loop._train_step, Loop._finish = timed_step, timed_finish  # type: ignore[method-assign]
    try:
        words = [f"train.steps={steps}", f"train.save_every={'null' if every is None else every}"]
        words += ["train.save_minutes=null", f"run.dir={run}", "train.log_every=1"]
        with contextlib.redirect_stdout(sys.stderr):
            assert ttrain([*COMMON, *words]) == 0
    finally:
        Loop._train_step, Loop._finish = step, finish  # type: ignore[method-assign]
    times = sorted(found["steps"][10:])
    return {"loop": found["end"] - found["start"], "waited": found["waited"], "step": times[len(times) // 2]}


def beat_seconds(folder: Path) -> float:
    """Time of one heartbeat."""
    path = folder / "heartbeat.json"
    path.touch()
    heartbeat, count = Heartbeat(path), 20_000
    start = time.perf_counter()
    for _ in range(count):
        heartbeat.beat()
    return (time.perf_counter() - start) / count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ.pop(VARIABLE, None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rounds = []
        for number in range(options.rounds):  # in turns, because the machine's speed drifts
            plain = measured(folder / f"plain{number}", options.steps, None)
            rounds.append((plain, measured(folder / f"saving{number}", options.steps, 50)))
        plain, saving = (min((pair[which] for pair in rounds), key=lambda one: one["loop"]) for which in (0, 1))
        beat = beat_seconds(folder)
        first = next(event for event in read_events(folder / "plain0") if event["kind"] == "first_step")
    result = {
        "step_ms": round(1e3 * plain["step"], 3),
        "saves": options.steps // 50,
        "waited_percent": round(100 * saving["waited"] / saving["loop"], 3),
        "loop_percent": round(100 * (saving["loop"] / plain["loop"] - 1), 2),
        "heartbeat_us": round(1e6 * beat, 2),
        "heartbeat_percent": round(100 * beat / plain["step"], 4),
        "first_step_seconds": first["seconds"],
    }
    print(json.dumps(result))
    return 0 if result["waited_percent"] < 3 and result["heartbeat_percent"] < 1 else 1


if __name__ == "__main__":
    sys.exit(main())
