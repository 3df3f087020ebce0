"""SIGKILL a training run again and again, half of the times during a save, and compare it with an undisturbed one.

    python tests/faults/kills.py --kills 100 --folder outputs/kills

Prints one line of JSON: how many kills there were, how many came during a save, and what was compared. Exit 1 where a
parameter, an optimizer tensor or a metric differs. Children are forked from a process that has imported everything, so
that a hundred of them take a minute or two.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

SETTINGS = [
    "model.layers=1", "model.width=16", "model.heads=2", "model.context=8", "model.dropout=0.1", "train.batch_size=4",
    "train.gradient_accumulation=2", "train.eval_every=25", "train.eval_sequences=8", "train.keep_last=1",
    "train.log_every=1", "train.peak_tflops=1", "logger=jsonl", "device=cpu", "device.threads=1", "sample.tokens=4",
]  # fmt: skip
IMPORTED = (
    "torch", "tokenizers", "safetensors.numpy", "ttrain.device.torch.device", "ttrain.engine.static",
    "ttrain.tasks.train", "ttrain.train.loop.loop", "matplotlib.backends.backend_agg", "matplotlib.figure",
)  # fmt: skip
MOMENTS = ("save", "training", "save", "training", "save", "start", "save", "training", "save", "training")
WORDS = ["def", "return", "self", "for", "in", "if", "else", "import", "class", "None"]


def command(folder: Path, run: str, steps: int, save_every: int) -> list[str]:
    own = [f"data.path={folder / 'text.txt'}", f"run.dir={folder / run}", f"train.steps={steps}", "resume=auto"]
    return ["data=text", *SETTINGS, f"train.save_every={save_every}", *own]


def start(
    overrides: list[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    change: Callable[[], None] = lambda: None,
) -> int:
    """Trains in a forked process, after a change of the program there; its id."""
    child = os.fork()
    if child:
        return child
    os.environ |= environment or {}
    try:
        change()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        from ttrain.cli import main

        code = main(overrides)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        os.write(2, "\n".join([repr(error), *getattr(error, "__notes__", [])]).encode() + b"\n")
        code = 99
    os._exit(code)


def ended(child: int) -> int | None:
    """The exit code of a child, None while it runs."""
    found, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def unfinished(checkpoints: Path) -> bool:
    """Whether a save is being written right now."""
    try:
        with os.scandir(checkpoints) as entries:
            return any(entry.name.startswith(".unfinished_step") for entry in entries)
    except FileNotFoundError:
        return False


def first_steps(run: Path) -> int:
    """How many attempts of the run have done a step."""
    try:
        return (run / "events.jsonl").read_text().count('"first_step"')
    except FileNotFoundError:
        return 0


def kill_one(child: int, run: Path, moment: str, generator: random.Random) -> tuple[int | None, bool]:
    """Kills in the start, in training or in a save: (exit code if it ended by itself, whether a save was cut off)."""
    attempts, waiting = first_steps(run), moment != "start"
    while waiting and first_steps(run) == attempts:  # what an earlier kill cut off is cleared away by then
        if (code := ended(child)) is not None:
            return code, False
        time.sleep(0.002)
    until = time.monotonic() + generator.uniform(0, 0.3)
    while time.monotonic() < until:
        if (code := ended(child)) is not None:
            return code, False
        time.sleep(0.002)
    if moment == "save":
        while not unfinished(run / "checkpoints"):
            if (code := ended(child)) is not None:
                return code, False
        time.sleep(generator.uniform(0, 0.003))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None, waiting and unfinished(run / "checkpoints")


def run_with_kills(folder: Path, kills: int, steps: int, save_every: int, seed: int) -> dict[str, Any]:
    generator = random.Random(seed)
    done = cut = 0
    overrides, run = command(folder, "killed", steps, save_every), folder / "killed"
    while True:
        child = start(overrides, folder / "killed.log")
        if done >= kills:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        else:
            code, was_cut = kill_one(child, run, MOMENTS[done % len(MOMENTS)], generator)
            done, cut = done + (code is None), cut + was_cut
        if code is not None:
            return {"kills": done, "during_a_save": cut, "attempts": first_steps(run), "exit_code": code}


def tensors(run: Path) -> dict[str, bytes]:
    from safetensors.numpy import load_file

    from ttrain.train.checkpoint.retention import find_checkpoint

    files = sorted(find_checkpoint(run, "last").path.glob("*.safetensors"))
    return {name: array.tobytes() for file in files for name, array in load_file(file).items()}


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(options.folder / "cache")
    generator = random.Random(0)
    (options.folder / "text.txt").write_text("".join(f"{generator.choice(WORDS)} \n" for _ in range(2000)))

    for module in IMPORTED:  # once, before the forks
        importlib.import_module(module)
    begin = time.monotonic()
    child = start(command(options.folder, "whole", options.steps, options.save_every), options.folder / "whole.log")
    found = run_with_kills(options.folder, options.kills, options.steps, options.save_every, options.seed)
    whole = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    result = {"undisturbed_exit_code": whole, **found}
    if whole == found["exit_code"] == 0:
        result |= compare(options.folder, options.steps)
    result["seconds"] = round(time.monotonic() - begin, 1)
    print(json.dumps(result))
    good = result.get("tensors_equal") and result.get("metrics_equal")
    return 0 if good and not result["duplicated"] and not result["missing"] else 1


if __name__ == "__main__":
    sys.exit(main())
