"""Time a GPT's training step of ttrain and of other systems, in turns: `python -m benchmarks.peers --size=char`.

Each peer is a short program in this folder, in a process of its own. `--python jax=<venv>/bin/python` names the Python
that has it, `--option llmc=--source=<folder>` gives its program an option. A peer that can't start is listed with the
reason.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import SIZES
from ttrain.core.files import replace_file, to_json
from ttrain.core.processor import processor_name, vector_extensions
from ttrain.core.tables import Table, plain_table

FOLDER = Path(__file__).parent
OURS, PYTORCH = ("static", "traced"), ("eager", "compile")
PEERS = (*PYTORCH, "jax", "mlx", "tinygrad", "llmc", *OURS)
TURN = 1.0  # seconds of steps in a turn, at least one step
LIMIT = 150.0  # seconds to the first steps, and for a turn


class Peer:
    """One contender in its process."""

    def __init__(self, name: str, python: str, options: list[str], given: argparse.Namespace) -> None:
        own = name in OURS or name in PYTORCH
        program = FOLDER / f"{'ttrain' if own else name}_gpt.py"
        settings = [f"--size={given.size}", f"--precision={given.precision}", f"--threads={given.threads}"]
        more = [f"--contender={name}"] if own else []
        environment = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "NUM_CPU_THREADS"), str(given.threads))}
        if own:
            environment["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parents[1]), environment.get("PYTHONPATH", "")])
        self.name, self.times, self.reason = name, list[float](), ""
        self.log = open(f"{given.out}.{name}.log", "w+b")  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            [python, str(program), *settings, *more, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.log, env=environment, text=True, errors="replace",
        )  # fmt: skip

    def start(self) -> None:
        """Wait for its first steps."""
        told = self._answer("ready")
        if told is not None:
            self.version, self.losses = told["ready"], told["losses"]
            self.steps = 1
            print(f"{self.name}: {self.version}, first steps in {told['first_s']:.1f} s", flush=True)

    def turn(self) -> None:
        """Take a turn, and note its median step time."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which the answer tells
            self.process.stdin.write(f"{self.steps}\n")
            self.process.stdin.flush()
        told = self._answer("times")
        if told is not None:
            found = statistics.median(told["times"])
            self.times.append(found)
            self.steps = max(1, int(TURN / found))

    def _answer(self, key: str) -> dict[str, Any] | None:
        """Return its next message with this key, or None if it ended or takes longer than LIMIT."""
        late = threading.Timer(LIMIT, self.process.kill)
        late.start()
        began = time.monotonic()
        assert self.process.stdout is not None
        found = next(filter(None, (_message(line, key) for line in self.process.stdout)), None)
        late.cancel()
        if found is not None:
            return found
        self.process.wait()
        self.log.seek(0)
        words = self.log.read().decode("utf-8", "replace").strip().splitlines()
        slow = f"no step within {LIMIT:g} s" if time.monotonic() - began >= LIMIT else ""
        self.reason = slow or (words[-1][:200] if words else f"it ended with {self.process.returncode}")
        return None


def _message(line: str, key: str) -> dict[str, Any] | None:
    """Return what the line says; None where it is no message, such as what a library prints."""
    with suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict) and key in found:
            return found
    return None


def lines_of(peers: list[Peer], size: str, precision: str) -> list[list[str]]:
    """Return the rows of the table: median, range and the factor to the fastest of PyTorch."""
    medians = {peer.name: statistics.median(peer.times) for peer in peers if peer.times and not peer.reason}
    best = min((medians[name] for name in PYTORCH if name in medians), default=None)
    rows = []
    for peer in peers:
        if peer.name not in medians:
            rows.append([size, precision, peer.name, "", "", peer.reason])
            continue
        median, spread = medians[peer.name], [min(peer.times), max(peer.times)]
        factor = "" if best is None else f"{best / median:.2f}"
        told = f"{1e3 * spread[0]:.4g} to {1e3 * spread[1]:.4g}"
        rows.append([size, precision, peer.name, f"{1e3 * median:.4g}", factor, told])
    return rows


TITLES = ["size", "precision", "contender", "ms/step", "x", "range or reason"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="char")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", default=",".join(PEERS), help="names with commas between them")
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PYTHON")
    parser.add_argument("--option", action="append", default=[], metavar="PEER=OPTION")
    parser.add_argument("--out", default="peers.json", help="results are added to this file")
    given = parser.parse_args()
    for each in (*given.python, *given.option):
        if each.partition("=")[0] not in PEERS or "=" not in each:
            parser.error(f"{each}: expected PEER=..., with one of {', '.join(PEERS)}")
    pythons, names = dict(each.split("=", 1) for each in given.python), given.peers.split(",")
    if unknown := [name for name in names if name not in PEERS]:
        parser.error(f"--peers={given.peers}: there is no {', '.join(unknown)}, only {', '.join(PEERS)}")
    if min(given.rounds, given.threads) < 1:
        parser.error("--rounds and --threads are 1 or more")
    peers = list[Peer]()
    try:
        for name in names:  # one after another: a start beside another would be slow for both
            options = [each.split("=", 1)[1] for each in given.option if each.startswith(f"{name}=")]
            peers.append(Peer(name, pythons.get(name, sys.executable), options, given))
            peers[-1].start()
        take_turns([peer for peer in peers if not peer.reason], given.rounds)
        rows = lines_of(peers, given.size, given.precision)
        print(plain_table(Table("Milliseconds per step", tuple(TITLES), rows)))
        write(Path(given.out), rows, given)
    except OSError as error:  # a Python that is not there, or a file that can't be written
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, "interrupted: nothing is written\n")
    finally:
        for peer in peers:
            peer.process.kill()


def take_turns(peers: list[Peer], rounds: int) -> None:
    """Let each take a turn in every round, in random order."""
    order = random.Random(0)
    for _ in range(rounds):
        order.shuffle(peers)
        for peer in peers:
            if not peer.reason:
                peer.turn()


def write(file: Path, rows: list[list[str]], given: argparse.Namespace) -> None:
    """Add the rows to a file that benchmarks.page reads; those of the same contender and case are replaced."""
    known: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {"lines": [TITLES]}
    made = [row[:3] for row in rows]
    kept = [row for row in known["lines"][1:] if row[:3] not in made]
    features = ", ".join(sorted(vector_extensions()))
    result = {
        "environment": {"started": date.today().isoformat(), "command": "python -m benchmarks.peers"},
        "cases": [{"device": {"name": "cpu", "hardware": processor_name(), "threads": given.threads}}],
        "notes": [f"{processor_name()} ({features}), {given.threads} threads."],
        "lines": [TITLES, *kept, *rows],
    }
    replace_file(file, to_json(result))


if __name__ == "__main__":
    main()
