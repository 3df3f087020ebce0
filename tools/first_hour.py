"""Checks and measures ttrain on a GPU within eight minutes, without a network: `python -m tools.first_hour OUT`.

The tests of CUDA and the lives of three models run side by side, then benchmarks one after the other. Every part has a
time limit. A part that fails does not stop the others, and one whose need is missing is skipped by name.
OUT/results.json is written anew after each part, and has the cases of all benchmarks in the form that
`python -m benchmarks.page` reads. OUT/logs has what each command printed. The exit code is 1 if a part failed.
`--device cpu --tiny` does the same work at tiny sizes on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from ttrain.core.files import read_json, replace_file, to_json
from ttrain.core.units import format_duration
from ttrain.train.checkpoint.retention import find_checkpoint
from ttrain.train.checkpoint.tensor_files import lazy_tensors
from ttrain.train.supervise.child import Child, describe_exit

GRACE = 10.0  # seconds that a command has to save what it has, once its part's time is used up
TESTS = ("tests/device", "tests/engine", "tests/ops")  # those with the mark `cuda`
SMALL = ("model.layers=1", "model.width=32", "model.heads=2", "model.context=32")


class Failed(Exception):
    """A part that did not do what it should."""


@dataclass
class Hour:
    """One part of the work. All parts share a folder and `result`, whose parts and cases become results.json."""

    out: Path
    device: str
    tiny: bool
    result: dict[str, Any] = field(default_factory=lambda: {"parts": [], "cases": []})
    part: str = ""
    stop: float = 0.0  # time.monotonic() at which the part has to end
    facts: dict[str, Any] = field(default_factory=dict)  # of the part

    @property
    def folder(self) -> Path:
        return self.out / self.part

    def start(self, name: str, *words: str) -> Child:
        """Start a command of Python, which prints into a log of that name."""
        log = self.out / "logs" / f"{self.part}_{name}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"$ python {shlex.join(words)}\n")
        return Child([sys.executable, *words], log=log, orphaned=signal.SIGKILL)

    def finish(self, name: str, child: Child) -> None:
        """Wait for a command. Raises Failed where it fails or the part's time is used up."""
        code = child.wait(max(self.stop - time.monotonic(), 0.0))
        if code is None:
            child.send(signal.SIGTERM)
            child.wait(GRACE)
            child.kill()
            child.wait()
            raise Failed(f"{name}: it was stopped as the part's time was used up")
        if code:
            lines = (self.out / "logs" / f"{self.part}_{name}.txt").read_text(errors="replace").splitlines()
            last = next(filter(None, reversed([line.strip() for line in lines])), "")
            raise Failed(f"{name}: {describe_exit(code)}: {last[:300]}")

    def ttrain(self, name: str, *overrides: str) -> None:
        began = time.monotonic()
        self.finish(name, self.start(name, "-m", "ttrain", f"device={self.device}", *overrides))
        self.facts.setdefault("seconds", {})[name] = round(time.monotonic() - began, 1)

    def save(self, complete: bool) -> None:
        """Write the result of all parts that are done."""
        order = [part.name for part in PARTS]
        parts = sorted(self.result["parts"], key=lambda part: order.index(part["part"]))
        notes = [f"{part['part']}: {part['status']}, {part['reason']}." for part in parts if part["reason"]]
        values = {"bench": "first_hour", "complete": complete, **self.result, "notes": notes, "parts": parts}
        replace_file(self.out / "results.json", to_json(values))


def text_of(hour: Hour) -> Path:
    """A file of the sources of the running Python's standard library, which is on every machine."""
    path = hour.folder / "text.txt"
    if not path.exists():
        size = 60_000 if hour.tiny else 2_000_000
        sources = (each.read_text("utf-8", errors="ignore") for each in sorted(Path(os.__file__).parent.glob("*.py")))
        path.write_text("\n".join(sources)[:size], "utf-8")
    return path


def run_tests(hour: Hour) -> None:
    """Run the tests that need a GPU."""
    where = TESTS[:1] if hour.tiny else TESTS
    words = ("-m", "pytest", "-m", "cuda", "-n", "0" if hour.tiny else "4", "-q", "-p", "no:cacheprovider", *where)
    hour.finish("pytest", hour.start("pytest", *words))


def settings(hour: Hour, steps: int) -> list[str]:
    """Return the overrides of every run: so many steps, fewer of a tiny one, and a save at each quarter."""
    steps = 80 if hour.tiny else steps
    quick = ["device.threads=1", "engine=static"] if hour.tiny else []
    every = ["data.tokenizer=byte", f"data.path={text_of(hour)}", "precision=bf16", "logger=jsonl", "train.keep_last=1"]
    return [*every, *quick, f"train.steps={steps}", f"train.save_every={steps // 4}", "train.eval_sequences=8"]


def live(hour: Hour, given: Sequence[str], steps: int, *form: str) -> None:
    """Train a model, and again with a SIGKILL and a resume; sample, evaluate and export it; compare both runs.

    `form` are the overrides of the export.
    """
    whole, killed = hour.folder / "whole", hour.folder / "killed"
    overrides = [*given, *settings(hour, steps)]
    hour.ttrain("train", *overrides, f"run.dir={whole}")
    child = hour.start("kill", "-m", "ttrain", f"device={hour.device}", *overrides, f"run.dir={killed}")
    while not any((killed / "checkpoints").glob("step_*")):
        if child.poll() is not None or time.monotonic() > hour.stop:
            child.kill()
            raise Failed("kill: the run ended, or its time was used up, before its first checkpoint")
        time.sleep(0.002)
    child.kill()
    if child.wait() != -signal.SIGKILL:
        raise Failed("kill: the run ended before it could be killed; give it more steps")
    hour.ttrain("resume", f"run.dir={killed}", "resume=auto")
    hour.ttrain("sample", "task=sample", f"run.dir={killed}", "sample.tokens=32")
    (hour.folder / "held_out.txt").write_text(text_of(hour).read_text("utf-8")[-5000:])
    words = f"eval.text=[{hour.folder / 'held_out.txt'}]", f"eval.out={hour.folder / 'eval.json'}"
    hour.ttrain("eval", "task=eval", f"run.dir={killed}", *words)
    hour.ttrain("export", "task=export", f"run.dir={killed}", *form, f"export.dir={hour.folder / 'exported'}")
    judge(hour, whole, killed, overrides)


def judge(hour: Hour, first: Path, second: Path, overrides: Sequence[str]) -> None:
    """Compare two runs that should have the same bits. `overrides` are those of the first.

    Where they have not, the first is repeated: kernels whose sums have no order differ from run to run. Raises Failed
    where the repeated run has the bits of the first, or its losses differ ten times less.
    """
    found = hour.facts["bits"] = compare(first, second)
    if found["unlike"]:
        hour.ttrain("again", *overrides, f"run.dir={first.with_name('again')}")
        usual = hour.facts["bits_again"] = compare(first, first.with_name("again"))
        if not usual["unlike"] or found["losses_apart"] > 10 * usual["losses_apart"]:
            raise Failed(f"{found['unlike']} of {found['tensors']} tensors differ; losses by {found['losses_apart']}")
    hour.facts["last_loss"] = losses_of(first)[-1][1]
    if not np.isfinite(hour.facts["last_loss"]):
        raise Failed(f"the last loss is {hour.facts['last_loss']}")


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Return how many tensors of the newest checkpoints of two runs are unlike, and by how much losses differ."""
    ours, theirs = (
        lazy_tensors(sorted(find_checkpoint(run, "last").path.glob("*.safetensors"))) for run in (first, second)
    )
    unlike = [name for name in ours if name not in theirs or ours[name].tobytes() != theirs[name].tobytes()]
    losses, others = (dict(losses_of(run)) for run in (first, second))
    if losses.keys() != others.keys() or len(ours) != len(theirs):
        raise Failed(f"{first.name} and {second.name} recorded other steps, or saved other tensors")
    apart = max(abs(losses[step] - others[step]) for step in losses)
    return {"tensors": len(ours), "unlike": len(unlike), "losses_apart": apart}


def losses_of(run: Path) -> list[tuple[int, float]]:
    """Return the steps of a run with their losses, as far as they are recorded."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]


def nano(hour: Hour) -> None:
    """Let a small GPT live through it all."""
    live(hour, ["model=nano-gpt", *(SMALL if hour.tiny else ())], 2000)


def llama(hour: Hour) -> None:
    """Train a small llama, export it, and fine-tune adapters beside the exported model."""
    base, small = hour.folder / "base", SMALL if hour.tiny else ()
    hour.ttrain("base", "model=llama", *small, *settings(hour, 200), f"run.dir={base}")
    model = hour.folder / "model"
    hour.ttrain("folder", "task=export", f"run.dir={base}", "export.form=huggingface", f"export.dir={model}")
    live(hour, [f"model.from={model}", "lora.rank=8"], 2000, "export.form=peft")


def gpt2(hour: Hour) -> None:
    """Let a GPT-2 of bytes live through it all, which has 86M parameters."""
    sizes = SMALL if hour.tiny else ("train.batch_size=8",)
    live(hour, ["model=gpt2", *sizes], 80, "export.form=huggingface")


def ranks(hour: Hour) -> None:
    """Train on two ranks, and the same sums on one."""
    given = ["model=nano-gpt", *(SMALL if hour.tiny else ()), *settings(hour, 400)]
    one, two = hour.folder / "one", hour.folder / "two"
    alone = [*given, "parallel.slices=2"]
    hour.ttrain("one", *alone, f"run.dir={one}")
    hour.ttrain("two", *given, "parallel=ddp", "parallel.processes=2", f"run.dir={two}")
    judge(hour, one, two, alone)


def bench(size: str, seconds: float, baselines: str = "eager,compile,reduce_overhead") -> Callable[[Hour], None]:
    """Return the part that times engine=traced at a size beside forms of PyTorch."""

    def measure(hour: Hour) -> None:
        out, given = hour.folder / "bench", [f"bench.size={size}", f"bench.baselines=[{baselines}]"]
        given += [f"bench.seconds={seconds}", "bench.engines=traced"]
        if hour.tiny:
            given = ["bench.size=tiny", "bench.baselines=eager", "bench.seconds=0.5", "bench.engines=static"]
        try:
            hour.ttrain("bench", "task=bench", "bench=gpt", "bench.precision=bf16", *given, f"bench.out={out}")
        finally:
            found = read_json(out / "results.json")  # of what was measured, also if the part's time was used up
            hour.result["format"] = found.get("format")
            hour.result["cases"] += [case for case in found.get("cases", ()) if case["device"]]
            hour.facts["numbers"] = found.get("numbers")
        rows = [row for case in found["cases"] for row in case["rows"] if row["status"] != "ok"]
        if rows:
            raise Failed("; ".join(f"{row['contender']}: {row['reason']}" for row in rows))

    return measure


@dataclass
class Part:
    """A part, its time limit in seconds, and the libraries, or `two GPUs`, that it needs."""

    name: str
    limit: float
    do: Callable[[Hour], None]
    needs: tuple[str, ...] = ()
    alone: bool = False


PARTS = (
    Part("tests", 120, run_tests, ("pytest",)),
    Part("nano", 120, nano),
    Part("llama", 120, llama),
    Part("gpt2", 120, gpt2),
    Part("ranks", 120, ranks, ("two GPUs",)),
    Part("bench_nano", 90, bench("nano", 8), alone=True),
    Part("bench_gpt2", 120, bench("gpt2-16x1024", 10), alone=True),
    Part("bench_smollm2", 140, bench("smollm2", 8), ("transformers",), alone=True),
    Part("bench_lora", 90, bench("smollm2-lora", 6, "compile"), ("transformers", "peft"), alone=True),
)
SAVING = Lock()


def missing(need: str, device: str) -> bool:
    """Return whether a need of a part is not met here."""
    if need != "two GPUs":
        return find_spec(need) is None
    import torch

    return device != "cpu" and torch.cuda.device_count() < 2


def do(hour: Hour, end: float, part: Part) -> None:
    """Do a part by time.monotonic() = `end` at the latest, and save what is found."""
    began = time.monotonic()
    hour = replace(hour, part=part.name, facts={}, stop=min(began + part.limit, end))
    lacking = [need for need in part.needs if missing(need, hour.device)]
    status, reason = "ok", ""
    if lacking or end - began < GRACE:
        status = "skipped"
        reason = f"{', '.join(lacking)} missing" if lacking else "the time is used up"
    else:
        try:
            hour.folder.mkdir(parents=True, exist_ok=True)
            part.do(hour)
        except Exception as error:  # the other parts go on
            status, reason = "failed", str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
    took = round(time.monotonic() - began, 1)
    with SAVING:
        hour.result["parts"].append({"part": part.name, "status": status, "reason": reason, "took": took, **hour.facts})
        hour.save(complete=False)
        print(f"{part.name}: {status} ({format_duration(took)}) {reason}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the parts, and return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a new folder for the results")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, and few parts of PyTorch")
    parser.add_argument("--seconds", type=float, default=480.0, help="of all parts together")
    parser.add_argument("--parts", default=",".join(part.name for part in PARTS), help="names with commas between them")
    given = parser.parse_args(arguments)
    if unknown := set(given.parts.split(",")) - {part.name for part in PARTS}:
        parser.error(f"--parts: there is no {', '.join(sorted(unknown))}")
    given.out.mkdir(parents=True)
    hour = Hour(given.out.resolve(), given.device, given.tiny)
    command = f"python -m tools.first_hour {shlex.join(sys.argv[1:] if arguments is None else arguments)}"
    hour.result["environment"] = {"started": datetime.now().isoformat(timespec="seconds"), "command": command}
    work = partial(do, hour, time.monotonic() + given.seconds)
    chosen = [part for part in PARTS if part.name in given.parts.split(",")]
    with ThreadPoolExecutor(len(PARTS)) as pool:
        list(pool.map(work, [part for part in chosen if not part.alone]))
    for part in chosen:
        if part.alone:
            work(part)
    hour.save(complete=True)
    return int(any(part["status"] == "failed" for part in hour.result["parts"]))


if __name__ == "__main__":
    sys.exit(main())
