"""Training steps on the golden runtime and on the CPU, from the same start."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.models.session import ENGINES as ENGINES
from tests.models.session import Session, initial_values, open_cpu
from ttrain.core.spec import DType
from ttrain.device.base import Device
from ttrain.graph import Kind
from ttrain.models.agillm import AGILLM
from ttrain.models.base import loss_weights, preparation
from ttrain.models.gpt import GPT
from ttrain.models.llama import Llama
from ttrain.models.mlp import MLP
from ttrain.models.settings import AGILLMConfig, GPTConfig, LlamaConfig, MLPConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig, SGDConfig
from ttrain.optim.sgd import SGD

cpu = open_cpu


def golden(fused: bool = True, **settings: Any) -> Device:
    """The Tenstorrent device on ttnn's reference functions; a test skips without the package."""
    import pytest

    pytest.importorskip("ttnn", reason="the package ttnn is not installed")
    from tests.ttnn.doubles.golden import open_golden
    from ttrain.device.ttnn.settings import TenstorrentConfig

    return open_golden(TenstorrentConfig(fused_kernels=fused, **settings))


def mlp(compute: DType = DType.FP32, **sizes: Any) -> MLP:
    return MLP(MLPConfig(**{"width": 64, "inputs": 33, "outputs": 40, **sizes}), compute)


def gpt(compute: DType = DType.FP32, **sizes: Any) -> GPT:
    usual = {"layers": 2, "heads": 2, "width": 64, "context": 32, "vocabulary": 65}
    return GPT(GPTConfig(**{**usual, **sizes}), compute)


def llama(compute: DType = DType.FP32, **sizes: Any) -> Llama:
    usual = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 64, "hidden": 96, "context": 32, "vocabulary": 65}
    return Llama(LlamaConfig(**{**usual, **sizes}), compute)


def agillm(compute: DType = DType.FP32, **sizes: Any) -> AGILLM:
    return AGILLM(AGILLMConfig(**sizes), compute)


def adamw(**settings: Any) -> AdamW:
    return AdamW(AdamWConfig(**settings))


def sgd(**settings: Any) -> SGD:
    return SGD(SGDConfig(**settings))


def batch(model: Any, rows: int, index: int) -> dict[str, np.ndarray]:
    """Random tokens with some targets missing, or random numbers."""
    generator = np.random.default_rng(index)
    fields = {}
    for name, spec in model.batch_specs(rows).items():
        if spec.dtype is DType.INT64:
            fields[name] = generator.integers(0, model.vocabulary, spec.shape)
        else:
            fields[name] = generator.standard_normal(spec.shape).astype(np.float32)
    if "positions" in fields:
        fields["positions"][:] = np.arange(fields["positions"].shape[1]) % 12
    if fields["targets"].dtype.kind == "i":
        fields["targets"][0, :3] = -1
    return fields


@dataclass
class Outcome:
    """Results of a run of a few steps."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]  # of the last step
    state: dict[str, np.ndarray]
    device: Device
    engine: Any
    steps: Mapping[str, Any]


Turns = Generator[None, None, Outcome]


def run(model: Any, optimizer: Any, device: Device, **how: Any) -> Outcome:
    """`steps` optimizer steps at a learning rate that falls, with a seed that changes; see `turns`."""
    return side_by_side([turns(model, optimizer, device, **how)])[0]


def turns(
    model: Any,
    optimizer: Any,
    device: Device,
    *,
    engine: str = "static",
    rows: int = 2,
    steps: int = 3,
    weights: int = 7,
    prefetch: bool = False,
) -> Turns:
    """Yields while the device computes. `weights` seeds them; with `prefetch` the next inputs are written meanwhile."""
    made = Session(model, optimizer, rows, engine=engine, device=device, values=initial_values(model, weights))
    state, train = made.state, made.steps["train"]
    losses, norms = [], []
    for step in range(1, steps + 1):
        read = train.start(step_inputs(model, train, rows, step))
        if prefetch and step < steps:
            train.prefetch(step_inputs(model, train, rows, step + 1))
        yield
        result = read()
        losses.append(result["loss"])
        norms.append(result["grad_norm"])
    kept = {name: state.read(name) for name in state.names(Kind.PARAMETER, Kind.OPTIMIZER)}
    return Outcome(losses, norms, made.gradients(), kept, device, made.engine, made.steps)


def step_inputs(model: Any, built: Any, rows: int, step: int) -> dict[str, Any]:
    """All inputs of one step, counted from 1."""
    given, counts = preparation(model)(batch(model, rows, step))
    inputs = {**given, **loss_weights(counts), "seed": 1000 + step, "lr": 0.01 / step, "step": step}
    wide = "lr/width_"  # rates that muP scales
    inputs |= {name: inputs["lr"] * float(name[len(wide) :]) for name in built.inputs if name.startswith(wide)}
    return {**inputs, "rounding_seed": 2**40 + step} if "rounding_seed" in built.inputs else inputs


def side_by_side(runs: Sequence[Turns]) -> list[Outcome]:
    """The outcomes of several runs, whose steps take turns."""
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(runs):
        for index, each in enumerate(runs):
            if index not in outcomes:
                try:
                    next(each)
                except StopIteration as end:
                    outcomes[index] = end.value
    return [outcomes[index] for index in range(len(runs))]


def same(one: Outcome, two: Outcome) -> bool:
    """True if two runs have equal losses, and leave equal state."""
    return one.losses == two.losses and all(np.array_equal(one.state[name], two.state[name]) for name in one.state)


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    """Return the cosine of the angle between two tensors; 1 if both are zero."""
    one, two = left.astype(np.float64).ravel(), right.astype(np.float64).ravel()
    norms = np.linalg.norm(one) * np.linalg.norm(two)
    return 1.0 if not norms and np.array_equal(one, two) else float(one @ two / max(norms, 1e-300))
