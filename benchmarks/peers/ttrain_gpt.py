"""A GPT's training step by ttrain, or by PyTorch as `task=bench` runs it: `pip install -e .` in a clone of ttrain."""

from __future__ import annotations

import torch
from protocol import arguments, serve

import ttrain
from ttrain.bench.child import make_contender
from ttrain.bench.settings import BASELINES
from ttrain.bench.workload import Case
from ttrain.device.settings import TorchConfig
from ttrain.engine.settings import EngineConfig

given = arguments("--contender")
case, device = Case(given.size, given.precision, 0), TorchConfig(name="cpu", threads=given.threads)
contender = make_contender(given.contender, case, device, EngineConfig())
contender.build()
done = 0


def step() -> float:
    global done
    done += 1
    return contender.loss(contender.step(done))


version = f"torch {torch.__version__}" if given.contender in BASELINES else f"ttrain {ttrain.__version__}"
serve(step, version, contender.rest)  # what others do in their turns is no matter of ours
