"""What saving and supervision cost, on the default model: `python tests/faults/overhead.py`.

Prints one line of JSON. One run saves every 2 * 50 steps, so that windows of 50 steps with a save take turns with
windows without. A window with a save is compared with the two beside it, which the machine's drift moves alike:

`saving_percent` is the median of these differences, with its quartiles; what other processes do is in it as well.
`waited_percent` is the part for which steps stood still: the copy to host memory, and a save that was not done yet.
`saver_cpu_percent` is the time that the saving thread computed, on one core, relative to the fastest 50 steps without a
save. A save can't cost more than this and the waiting together, and neither hangs much on what else the machine does.
`heartbeat_percent` is one heartbeat, relative to a step.

Exit 1 where saving costs 3 % or more, by its measured median or by that bound, whichever is less, or a heartbeat 1 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ttrain.cli import main as ttrain
from ttrain.train.logging.events import read_events
from ttrain.train.loop.loop import Loop
from ttrain.train.loop.saver import Saver
from ttrain.train.supervise.heartbeat import VARIABLE, Heartbeat

WINDOW = 50  # steps
WORDS = [
    "logger=jsonl", "device=cpu", "train.eval_every=null", "train.eval_sequences=4", "sample.tokens=1",
    f"train.save_every={2 * WINDOW}", "train.save_minutes=null", "train.peak_tflops=1",
]  # fmt: skip


def measured(run: Path, pairs: int) -> dict[str, Any]:
    """Trains; when each step ended, and for every save the seconds that it was waited for and that it computed."""
    found: dict[str, Any] = {"ends": {}, "waited": [], "cpu": []}
    after, save, write = Loop._save_and_evaluate, Saver.save, Saver._write

    def timed_after(loop: Loop) -> None:
        found["ends"].setdefault(loop.context.progress.step, time.perf_counter())
        after(loop)

    def timed_save(saver: Saver, *arguments: Any, **options: Any) -> None:
        before = saver.delay_seconds
        save(saver, *arguments, **options)
        found["waited"].append(saver.delay_seconds - before)

    def timed_write(saver: Saver, *arguments: Any) -> None:
        before = time.thread_time()
        write(saver, *arguments)
        found["cpu"].append(time.thread_time() - before)

    replaced = ((Loop, "_save_and_evaluate", timed_after), (Saver, "save", timed_save), (Saver, "_write", timed_write))
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        overrides = [f"train.steps={2 * WINDOW * (pairs + 1)}", f"run.dir={run}"]
        with contextlib.redirect_stdout(sys.stderr):
            assert ttrain([*WORDS, *overrides]) == 0
    finally:
        Loop._save_and_evaluate, Saver.save, Saver._write = after, save, write  # type: ignore[method-assign]
    return found


def differences(ends: dict[int, float]) -> tuple[list[float], list[float]]:
    """How much longer each window with a save took than the two beside it, as a share; and the windows without."""
    shares, plain = [], []
    for start in range(2 * WINDOW, max(ends) - WINDOW, 2 * WINDOW):
        before, own, later = (ends[start + (n + 1) * WINDOW] - ends[start + n * WINDOW] for n in (-1, 0, 1))
        shares.append(2 * own / (before + later) - 1)
        plain += [before, later]
    return shares, plain


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
    parser.add_argument("--pairs", type=int, default=8)
    options = parser.parse_args()
    os.environ.pop(VARIABLE, None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = measured(folder / "run", options.pairs)
        beat = beat_seconds(folder)
        first = next(event for event in read_events(folder / "run") if event["kind"] == "first_step")
    shares, plain = differences(found["ends"])
    window = min(plain)
    waited, cpu = (statistics.median(found[key][:-1]) / window for key in ("waited", "cpu"))  # the last is the end's
    low, middle, high = statistics.quantiles(shares, n=4)
    result = {
        "step_ms": round(1e3 * statistics.median(plain) / WINDOW, 3),
        "fastest_step_ms": round(1e3 * window / WINDOW, 3),
        "saves": len(shares),
        "saving_percent": round(100 * middle, 2),
        "saving_quartiles": [round(100 * low, 2), round(100 * high, 2)],
        "waited_percent": round(100 * waited, 3),
        "saver_cpu_percent": round(100 * cpu, 2),
        "heartbeat_us": round(1e6 * beat, 2),
        "heartbeat_percent": round(100 * beat * WINDOW / window, 4),
        "first_step_seconds": first["seconds"],
    }
    print(json.dumps(result))
    return 0 if min(middle, waited + cpu) < 0.03 and beat * WINDOW / window < 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
