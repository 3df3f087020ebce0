"""Measure what zero3 takes beside other modes, by default of SmolLM2-135M's shape: memory of a rank, time of a step.

    python -m tests.parallel.divided none:1 zero3:4 --tokens 64
    python -m tests.parallel.divided zero1:2 zero3:2 --rows 4 --tokens 512 --steps 3

Prints one line of JSON for each mode. Bytes are the most of any rank: `allocated` by the device, `planned` for it,
and by how much the process `grew` from before the model until the end. Seconds are of the fastest step.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import torch

from tests.forked import forks
from tests.parallel.forks import free_port
from tests.parallel.ranks_worker import opened
from ttrain.config import build
from ttrain.config.compose import load
from ttrain.device.torch.device import TorchDevice
from ttrain.models.base import preparation
from ttrain.parallel.settings import ParallelConfig
from ttrain.train.forecast.plan_report import plan_report
from ttrain.train.steps.step import TrainStep

SHAPE = "model=llama model.width=576 model.heads=9 model.kv_heads=3 model.hidden=1536 model.vocabulary=49152"


def grown(before: int) -> int:
    """Return by how many bytes the most that this process has held exceeds what it held before."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024 - before


def measure(rank: int, count: int, port: int, mode: str, options: Any, folder: str) -> None:
    torch.set_num_threads(options.threads)
    Path("/proc/self/clear_refs").write_text("5")  # the most held begins anew
    before = psutil.Process().memory_info().rss
    rows = options.rows * count
    sizes = [f"model.layers={options.layers}", f"model.context={options.tokens}", f"train.batch_size={rows}"]
    config = load([*SHAPE.split(), *sizes, f"engine={options.engine}", f"precision={options.precision}", "device=cpu"])
    with opened(rank, count, port) as world:
        world.ranks = ParallelConfig(name=mode).ranks(rank, count)
        device = TorchDevice("cpu", options.threads, group=world.group)
        session = build.build_session(build.build_model(config, None), device, config, ranks=world.ranks)
        session.initialize(0)
        steps = session.build_training(further=False)
        step, times = TrainStep(steps, options.rows, 0, preparation(session.graph.model), world=world), []
        for number in range(1, options.steps + 1):
            drawn = np.random.default_rng(number).integers(0, 49152, (rows, options.tokens + 1))
            world.barrier()
            begin = time.perf_counter()
            result = step({"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}, {"lr": 1e-4}, number)
            times.append(time.perf_counter() - begin)
        report = plan_report(session.graph, session.state, steps)
    found = {"allocated": device.counters.allocated_bytes, "planned": report.memory, "grew": grown(before)}
    Path(folder, f"{rank}.json").write_text(json.dumps({**found, "seconds": min(times), "loss": result.loss}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="+", help="mode:ranks")
    for name, value in (("layers", 30), ("rows", 1), ("tokens", 64), ("steps", 2), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--engine", default="traced")
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    for each in options.modes:
        mode, _, count = each.partition(":")
        with TemporaryDirectory() as folder:
            given = int(count), free_port(), mode, options, folder
            ranks = [forks().Process(target=measure, args=(rank, *given)) for rank in range(int(count))]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            every = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
        assert [process.exitcode for process in ranks] == [0] * len(ranks)
        print(json.dumps({"mode": each, **{key: max(one[key] for one in every) for key in every[0]}}), flush=True)


if __name__ == "__main__":
    main()
