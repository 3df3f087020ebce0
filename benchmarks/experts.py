"""Times a mixture of experts beside a dense model and Transformers: `python -m benchmarks.experts`.

The contenders are `moe` and `dense` of ttrain, and Transformers with `eager` and `grouped_mm` experts. A dense model
has the feed-forward that a token of the mixture meets. Each contender is a process of its own; they take turns, so that
all meet the same machine. In bf16 Transformers runs under autocast, as task=bench has it.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from ttrain.core.tables import Table, plain_table

VOCABULARY, OURS, THEIRS = 6400, ("moe", "dense"), ("eager", "grouped_mm")
PARTS = "gradients", "step"  # forward and backward alone, and with clipping and AdamW
Calls = dict[str, Callable[[], Any]]


def config_of(asked: argparse.Namespace, who: str) -> Any:
    """Return the config of a contender's model and training."""
    from ttrain.api import load_config

    given = ["model=llama", f"model.preset={asked.preset}", f"model.hidden={asked.hidden}"]
    given += [f"model.experts={asked.experts}", f"model.experts_per_token={asked.per_token}"]
    given += [f"model.expert_width={asked.hidden // asked.per_token}", f"model.context={asked.tokens}"]
    given += [f"model.vocabulary={VOCABULARY}", f"train.batch_size={asked.rows}", f"precision={asked.precision}"]
    config = load_config(*given, "device=cpu", f"device.threads={asked.threads}", "engine=traced")
    if who != "dense":
        return config
    without = {"experts": 0, "experts_per_token": None, "expert_width": None, "router_normalised": True}
    return replace(config, model=replace(config.model, preset=None, **without))


def batch(asked: argparse.Namespace) -> dict[str, Any]:
    """Return random sequences with their targets, int64 [rows, tokens]."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (asked.rows, asked.tokens + 1))
    return {"tokens": ids[:, :-1].copy(), "targets": ids[:, 1:].copy()}


def ours(asked: argparse.Namespace, who: str) -> Calls:
    """Return the parts of a step of ttrain."""
    from ttrain.api import Training
    from ttrain.models.base import loss_weights

    training, given = Training(config_of(asked, who)), batch(asked)
    session = training._session
    built = session.engine.build("gradients", partial(session.graph.trace_accumulate, first=True))
    fields, counts = session.prepare(given)
    inputs = {**fields, **loss_weights(counts), "seed": 1}
    return {"gradients": lambda: built(inputs), "step": lambda: training.step(given)}


def theirs(asked: argparse.Namespace, who: str) -> Calls:
    """Return the parts of a step of Transformers."""
    import torch
    import transformers

    from ttrain.config.build import build_model
    from ttrain.models.llama_weights import config_to_transformers

    torch.set_num_threads(asked.threads)
    said = config_to_transformers(build_model(config_of(asked, "moe")).config)
    config = transformers.Qwen3MoeConfig(**{**said, "use_cache": False})
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=who).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    tokens, targets = (torch.from_numpy(each) for each in batch(asked).values())
    autocast = torch.autocast("cpu", torch.bfloat16) if asked.precision == "bf16" else nullcontext()

    def gradients() -> None:
        optimizer.zero_grad()
        with autocast:
            logits = model(input_ids=tokens).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()

    def step() -> None:
        gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"gradients": gradients, "step": step}


def serve(asked: argparse.Namespace, who: str) -> None:
    """Answer each line of stdin, the name of a part, by its seconds and the peak of resident memory in bytes."""
    calls = ours(asked, who) if who in OURS else theirs(asked, who)
    for name in chain(PARTS, map(str.strip, sys.stdin)):
        began = time.perf_counter()
        calls[name]()
        seconds = time.perf_counter() - began
        print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]), flush=True)


def measured(asked: argparse.Namespace, given: Sequence[str]) -> dict[str, Any]:
    """Return for each contender its seconds by part, and its peak in bytes."""
    found: dict[str, Any] = {who: {name: [] for name in PARTS} for who in asked.contenders}
    with ExitStack() as stack:
        children = {}
        for who in asked.contenders:
            command = [sys.executable, "-m", "benchmarks.experts", *given, "--serve", who]
            children[who] = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            answers = [children[who].stdout.readline() for _ in PARTS]
            if not answers[-1]:
                raise SystemExit(f"{who}: ended, see its message above.")
        for _ in range(asked.rounds):
            for who, name in ((who, name) for who in asked.contenders for name in PARTS):
                print(name, file=children[who].stdin, flush=True)
                seconds, found[who]["peak"] = json.loads(children[who].stdout.readline())
                found[who][name].append(seconds)
        for child in children.values():
            child.stdin.close()
    return found


def table(asked: argparse.Namespace, found: dict[str, Any]) -> Table:
    """Return medians in milliseconds, their ratios to those of `moe`, and the peaks."""
    medians = {who: {name: statistics.median(each[name]) for name in PARTS} for who, each in found.items()}
    one = medians.get("moe", next(iter(medians.values())))
    rows = [
        (
            who,
            *(f"{1000 * each[name]:.0f} ({each[name] / one[name]:.2f})" for name in PARTS),
            f"{found[who]['peak'] / 2**30:.2f}",
        )
        for who, each in medians.items()
    ]
    title = f"{asked.preset}, {asked.experts} experts, {asked.per_token} a token"
    title += f", {asked.rows} x {asked.tokens} tokens, {asked.precision}"
    return Table(title, ("contender", "forward and backward, ms (x moe)", "whole step, ms (x moe)", "peak GiB"), rows)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contenders", nargs="*", default=[*OURS, *THEIRS])
    parser.add_argument("--preset", default="minimind-moe-198m")
    parser.add_argument("--hidden", type=int, default=2432, help="width of the feed-forward that a token meets")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--per-token", type=int, default=1)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked, asked.serve)
    else:
        print(plain_table(table(asked, measured(asked, sys.argv[1:]))))


if __name__ == "__main__":
    main()
