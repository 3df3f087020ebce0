"""What a rank takes of memory, beside its plan.

    python tests/parallel/memory.py --folder outputs/memory --count 2 parallel=zero1 model=gpt2 model.layers=4

Prints one line of JSON. By rank: `planned`, bytes as task=plan tells them; `allocated`, what the device gave to state
and steps; `resident`, by how much the process has grown over three steps, imports aside.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.parallel.forks import LIMIT, Change, Forks, import_all

STEPS = 4
SETTINGS = [
    "data=text", f"train.steps={STEPS}", "train.eval_every=null", "train.save_every=null", "train.peak_tflops=1",
    "logger=jsonl", "device=cpu", "device.threads=1", "sample.tokens=1",
]  # fmt: skip


def told(folder: Path) -> Change:
    """Each rank writes at the start of its last step how much memory it has."""

    def change(rank: int) -> None:
        import psutil

        from ttrain.train.steps.step import TrainStep

        before, run = psutil.Process().memory_info().rss, TrainStep.__call__

        def start(self: TrainStep, batch: Any, rates: Any, step: int, *given: Any) -> Any:
            if step == STEPS:
                device = next(iter(self._steps.values())).engine.device
                grown = psutil.Process().memory_info().rss - before
                found = {"allocated": device.counters.allocated_bytes, "resident": grown}
                (folder / f"rank{rank}.json").write_text(json.dumps(found))
            return run(self, batch, rates, step, *given)

        TrainStep.__call__ = start  # type: ignore[method-assign]

    return change


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--count", type=int, default=2)
    options, overrides = parser.parse_known_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    import_all()
    from ttrain.cli import main as ttrain

    text = folder / "text.txt"
    text.write_text("".join(f"{number} is a number, and so is {number * number}.\n" for number in range(20_000)))
    given = [*SETTINGS, f"data.path={text}", *overrides]
    plan = ["task=plan", "plan.time=false", "plan.limits=false", f"plan.json={folder / 'plan.json'}"]
    with open(os.devnull, "w") as nowhere:
        sys.stdout, out = nowhere, sys.stdout
        code = ttrain([*given, *plan, f"parallel.world={options.count}"])
        sys.stdout = out
    forks = Forks([[*given, f"run.dir={folder / 'run'}"]] * options.count, folder / "log", told(folder))
    forks.wait(5 * LIMIT)
    memory = json.loads((folder / "plan.json").read_text())["memory"]
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    print(json.dumps({"planned": memory["total"] - memory["libraries"], "ranks": ranks}))
    return code or int(forks.codes != [0] * options.count)


if __name__ == "__main__":
    sys.exit(main())
