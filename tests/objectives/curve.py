"""Run recipe=grpo-arithmetic twice, the second time killed again and again, and compare; then on several ranks.

    python -m tests.objectives.curve --pretrained outputs/sums --folder outputs/curve --kills 20 --ranks 2 4

Prints one line of JSON: the share of right answers of 200 held-out sums before and after, the seconds of the first run,
how many kills there were, and which of the others are equal to it in every recorded number and every tensor. Exit 1
where one is not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.parallel.forks import environments
from tests.parallel.kills import tensors

TIMED = ("seconds", "tokens_per_s", "step_ms", "mfu", "memory_bytes")
LOGGED = ["logger=jsonl", "train.log_every=1", "train.save_every=10", "parallel.slices=4", "device=cpu"]


def started(folder: Path, name: str, given: list[str], ranks: int = 1) -> list[subprocess.Popen[bytes]]:
    """Start or continue a run in a folder."""
    mode = "none" if ranks == 1 else "ddp"
    command = [sys.executable, "-m", "ttrain", "recipe=grpo-arithmetic", f"run.dir={folder / name}", "resume=auto"]
    with open(folder / f"{name}.log", "ab") as log:
        command += [*LOGGED, *given, f"parallel={mode}"]
        every = [{**os.environ, **own} for own in environments(ranks)]
        return [subprocess.Popen(command, env=own, stderr=log, stdout=log) for own in every]


def recorded(run: Path) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in TIMED} for line in lines]


def newest(run: Path) -> int:
    """Return the last step that a run has recorded, 0 where there is none."""
    file = run / "metrics.jsonl"
    return max((line["step"] for line in recorded(run)), default=0) if file.exists() else 0


def killed(folder: Path, given: list[str], kills: int, steps: int, seed: int) -> int:
    """Kill a run at random times, spread over its steps, and let it end. Return how often it was killed."""
    generator = random.Random(seed)
    for number in range(kills):
        (process,) = started(folder, "killed", given)
        until, wanted = time.monotonic() + 600, steps * (number + 1) // (kills + 1)
        while newest(folder / "killed") < wanted and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(generator.uniform(0, 0.3))  # in a rollout, a step, a save or an evaluation
        process.kill()
        if process.wait() == 0:
            return number
    assert [process.wait() for process in started(folder, "killed", given)] == [0]
    return kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pretrained", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=0)
    options, given = parser.parse_known_args()
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    given += [f"train.init_from={options.pretrained}"]
    first = [*given, "train.steps=1", "schedule.warmup=0", "train.eval_every=null", "optimizer.lr=1e-12"]
    first.append("guard.check_learning=null")
    assert [process.wait() for process in started(folder, "before", first)] == [0]
    begin = time.monotonic()
    assert [process.wait() for process in started(folder, "whole", given)] == [0]
    whole, held = recorded(folder / "whole"), "val/rewards/exact/mean"
    result = {"before": recorded(folder / "before")[-1][held], "after": whole[-1][held]}
    result |= {"seconds": round(time.monotonic() - begin, 1), "steps": whole[-1]["step"]}
    others = ["killed"] if options.kills else []
    if options.kills:
        result["kills"] = killed(folder, given, options.kills, whole[-1]["step"], options.seed)
    for ranks in options.ranks:
        assert [process.wait() for process in started(folder, f"ranks{ranks}", given, ranks)] == [0] * ranks
        others.append(f"ranks{ranks}")
    same = {
        name: recorded(folder / name) == whole and tensors(folder / name) == tensors(folder / "whole")
        for name in others
    }
    print(
        json.dumps(
            {
                **result,
                "equal": same,
                "differences": max(x.get("sampling/sampling_logp_difference/mean", 0) for x in whole),
            }
        )
    )
    return 0 if all(same.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
