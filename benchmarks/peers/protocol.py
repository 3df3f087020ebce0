"""Sizes and turns that all peers share. This module imports nothing but the standard library.

A peer's program runs in its own environment, which need not have ttrain. It builds a step, says `ready`, then reads
the number of steps of each turn from standard input and answers with their times.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

STEPS = 5  # before the first turn: they compile and warm up


@dataclass(frozen=True)
class Size:
    """A GPT with a tied head, and its batch. `bias` tells if linear layers and norms have biases."""

    layers: int
    heads: int
    width: int
    vocabulary: int
    rows: int
    context: int
    bias: bool


SIZES = {
    "char": Size(4, 4, 128, 65, 12, 64, False),
    "nano": Size(6, 6, 384, 65, 8, 256, False),
    "gpt2": Size(12, 12, 768, 50257, 2, 256, True),
}
ADAMW = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}


def arguments(*more: str) -> argparse.Namespace:
    """Read --size, --precision, --threads, and options of a peer by their names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="char")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    for name in more:
        parser.add_argument(name)
    return parser.parse_args()


def serve(step: Callable[[], float], version: str, rest: Callable[[], None] = lambda: None) -> None:
    """Take turns until standard input ends, and `rest` between them.

    `step` does one optimizer step and returns its loss once all is done.
    """
    start = time.perf_counter()
    losses = [step() for _ in range(STEPS)]
    rest()
    tell({"ready": version, "losses": losses, "first_s": time.perf_counter() - start})
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            before = time.perf_counter()
            step()
            times.append(time.perf_counter() - before)
        rest()
        tell({"times": times})


def tell(message: dict[str, object]) -> None:
    """Write one line of JSON to the program that started this one."""
    print(json.dumps(message), flush=True)
