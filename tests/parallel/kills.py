"""SIGKILL random ranks of a run again and again, go on with other numbers of them, and compare with an undisturbed run.

    python tests/parallel/kills.py --kills 50 --folder outputs/kills

Prints one line of JSON: how many kills there were, how the other ranks ended, and what was compared. Exit 1 where a
parameter, an optimizer tensor or a metric differs, or a rank did not end by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from itertools import cycle
from pathlib import Path
from typing import Any

from tests.parallel.forks import LIMIT, Forks

SETTINGS = [
    "data=text", "model.layers=1", "model.width=16", "model.heads=2", "model.context=8", "model.dropout=0.1",
    "train.batch_size=8", "train.gradient_accumulation=2", "train.eval_every=20", "train.eval_sequences=8",
    "train.keep_last=2", "train.log_every=1", "train.save_every=5", "train.peak_tflops=1", "logger=jsonl",
    "device=cpu", "device.threads=1", "sample.tokens=4", "parallel.slices=4", "resume=auto",
]  # fmt: skip
LONG = 900.0  # seconds for an attempt that nobody disturbs
WORDS = ["def", "return", "self", "for", "in", "if", "else", "import", "class", "None"]
MODES = (  # the fifth is that in which a test of four kills ends
    ("none", 1), ("ddp", 2), ("zero3", 4), ("ddp", 1), ("zero1", 2), ("zero3", 2), ("zero1", 4), ("ddp", 4),
)  # fmt: skip


def unfinished(checkpoints: Path) -> bool:
    """True if a save is being written right now."""
    try:
        with os.scandir(checkpoints) as entries:
            return any(entry.name.startswith(".unfinished_step") for entry in entries)
    except FileNotFoundError:
        return False


def first_steps(run: Path) -> int:
    """Return the number of attempts that have done a step."""
    try:
        return (run / "events.jsonl").read_text().count('"first_step"')
    except FileNotFoundError:
        return 0


def tensors(run: Path) -> dict[str, bytes]:
    """Every tensor of the newest checkpoint, whoever wrote it."""
    from ttrain.train.checkpoint.retention import find_checkpoint
    from ttrain.train.checkpoint.tensor_files import lazy_tensors

    found = lazy_tensors(sorted(find_checkpoint(run, "last").path.glob("*.safetensors")))
    return {name: found[name].tobytes() for name in found}


def recorded(run: Path) -> list[tuple[int, str, float]]:
    """Every recorded loss, with its step and kind, in the order of the file."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], key, line[key]) for line in lines for key in ("train/loss", "val/loss") if key in line]


def compare(folder: Path, steps: int) -> dict[str, Any]:
    whole, killed = folder / "whole", folder / "killed"
    first, second = recorded(whole), recorded(killed)
    steps_seen = [step for step, key, _ in second if key == "train/loss"]
    return {
        "tensors": len(tensors(whole)),
        "tensors_equal": tensors(whole) == tensors(killed),
        "metrics": len(second),
        "metrics_equal": first == second,
        "duplicated": len(steps_seen) - len(set(steps_seen)),
        "missing": len(set(range(1, steps + 1)) - set(steps_seen)),
    }


def started(folder: Path, run: str, steps: int, mode: str, count: int) -> Forks:
    own = [f"data.path={folder / 'text.txt'}", f"run.dir={folder / run}", f"train.steps={steps}", f"parallel={mode}"]
    return Forks([[*SETTINGS, *own]] * count, folder / f"{run}.log")


def kill_one(forks: Forks, run: Path, generator: random.Random) -> bool:
    """Kills a random rank in a save or while it trains; whether it came to that."""
    attempts, saves = first_steps(run), generator.random() < 0.5
    while first_steps(run) == attempts:
        if forks.poll():
            return False
        time.sleep(0.005)
    until = time.monotonic() + generator.uniform(0, 0.5)
    while time.monotonic() < until or (saves and not unfinished(run / "checkpoints")):
        if forks.poll():
            return False
        time.sleep(0.002)
    generator.choice(forks.processes).kill()
    return True


def disturbed(folder: Path, kills: int, steps: int, seed: int) -> dict[str, Any]:
    generator, done = random.Random(seed), 0
    found: dict[str, Any] = {"alone": 0, "hung": 0, "codes": {}, "slowest_end": 0.0}
    for mode, count in cycle(MODES):
        forks = started(folder, "killed", steps, mode, count)
        killed = done < kills and kill_one(forks, folder / "killed", generator)
        begin = time.monotonic()
        found["hung"] += not forks.wait(LIMIT if killed else LONG)
        done += killed
        if not killed:
            return {"kills": done, **found, "exit_codes": forks.codes, "attempts": first_steps(folder / "killed")}
        found["alone"] += count == 1
        found["slowest_end"] = max(found["slowest_end"], round(time.monotonic() - begin, 1))
        for code in forks.codes:
            found["codes"][str(code)] = found["codes"].get(str(code), 0) + 1
    raise AssertionError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    generator = random.Random(0)
    (folder / "text.txt").write_text("".join(f"{generator.choice(WORDS)} \n" for _ in range(2000)))
    begin = time.monotonic()
    whole = started(folder, "whole", options.steps, "none", 1)
    found = disturbed(folder, options.kills, options.steps, options.seed)
    whole.wait(LONG)
    result = {"undisturbed": whole.codes, **found}
    if {*whole.codes, *result["exit_codes"]} == {0}:
        result |= compare(folder, options.steps)
    print(json.dumps({**result, "seconds": round(time.monotonic() - begin, 1)}))
    equal = result.get("tensors_equal") and result.get("metrics_equal")
    return 0 if equal and not (result["hung"] or result["duplicated"] or result["missing"]) else 1


if __name__ == "__main__":
    sys.exit(main())
