"""One rank of the tests: it trains small models for some steps in every way, and saves the results."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.models.decoder.plain_decoder import PlainDecoder
from tests.models.session import initial_values
from tests.ttnn.runs import agillm, gpt, llama
from ttrain.config import build
from ttrain.config.schema import Config
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Device
from ttrain.device.torch.device import TorchDevice
from ttrain.engine.settings import EngineConfig
from ttrain.graph import Kind
from ttrain.models.base import preparation
from ttrain.models.gpt import GPT
from ttrain.nn.lora import attach
from ttrain.nn.settings import LoraConfig
from ttrain.objectives.base import Objective
from ttrain.optim.settings import AdamWConfig, MuonConfig
from ttrain.parallel.distributed import DistributedWorld
from ttrain.parallel.ranks import Ranks
from ttrain.parallel.settings import ParallelConfig, Place
from ttrain.parallel.world import World
from ttrain.train.loop.evaluation import Evaluation
from ttrain.train.settings import GuardConfig, TrainConfig
from ttrain.train.steps.session import Session, averaged
from ttrain.train.steps.step import TrainStep

SLICES, ROWS, STEPS = 4, 16, 3
SIZE: dict[str, Any] = {"layers": 1, "heads": 2, "width": 32, "context": 8, "vocabulary": 40}
ADAMW = AdamWConfig(lr=1e-2, clip_norm=0.5)


@dataclass(frozen=True)
class Case:
    """A model and how it is trained; `shards` takes ZeRO-1 where there are several ranks, `divides` ZeRO-3."""

    name: str
    model: Callable[[DType], Any]
    engine: str = "static"
    compute: DType = DType.FP32
    optimizer: Any = None  # ADAMW
    shards: bool = False
    divides: bool = False
    guarded: bool = False
    gradient_accumulation: int = 2
    ema: float | None = None


_gpt, _plain_gpt = partial(gpt, dropout=0.2, **SIZE), partial(gpt, dropout=0.0, bias=False, **SIZE)
_llama, _agillm = partial(llama, kv_heads=1, hidden=64, **SIZE), partial(agillm, rank=8, pad_vocabulary=1, **SIZE)
_moe = partial(
    _llama, experts=3, experts_per_token=2, expert_width=20, router="biased", router_z_weight=0.01, shared_experts=1
)
_deep_gpt, _deep_llama = partial(_gpt, layers=2), partial(_llama, layers=2)  # their weights are gathered twice


def _adapted(made: Callable[[DType], Any], lora: LoraConfig, compute: DType) -> Any:
    model = made(compute)
    attach(model, lora)
    return model


_wide = partial(llama, **{**SIZE, "layers": 2, "width": 64, "hidden": 128, "kv_heads": 1})
_moe_with_adapters = partial(_adapted, _moe, LoraConfig(rank=16))
_int8, _nf4 = (partial(_adapted, _wide, LoraConfig(rank=4, base=base, dropout=0.2)) for base in ("int8", "nf4"))
BF16 = DType.BF16
STOCHASTIC = AdamWConfig(lr=1e-2, clip_norm=0.5, state_dtype="bf16")
SCOPED = AdamWConfig(lr=1e-2, clip_norm=0.1, clip_scope=["blocks"])
CASES = [
    *(Case(f"gpt-{engine}-{'zero1' if shards else 'ddp'}", _gpt, engine, shards=shards)
      for engine in ("static", "traced") for shards in (False, True)),
    Case("gpt-bf16-zero1", _gpt, "traced", BF16, shards=True, guarded=True),
    Case("gpt-rounding-zero1", _gpt, "static", BF16, STOCHASTIC, shards=True, gradient_accumulation=1),
    Case("gpt-scoped-zero1", _gpt, "dynamic", optimizer=SCOPED, shards=True),
    Case("gpt-muon-zero1", _gpt, "static", BF16, MuonConfig(lr=1e-2), shards=True, ema=0.9),
    Case("llama-zero1", _llama, shards=True),
    Case("agillm-ddp", _agillm, gradient_accumulation=1),
    Case("agillm-zero1", _agillm, shards=True, gradient_accumulation=1),
    Case("gpt-plain-ddp", _plain_gpt),
    Case("moe-ddp", _moe),
    Case("moe-zero1", _moe, "traced", shards=True),
    Case("moe-muon-zero1", _moe, "traced", BF16, MuonConfig(lr=1e-2), shards=True, gradient_accumulation=1),
    Case("moe-zero3", partial(_moe, layers=2), divides=True),
    Case("moe-muon-zero3", _moe, "traced", BF16, MuonConfig(lr=1e-2), divides=True, gradient_accumulation=1),
    Case("moe-lora-zero3", _moe_with_adapters, divides=True),
    Case("gpt-static-zero3", _deep_gpt, divides=True, gradient_accumulation=1),
    Case("gpt-traced-zero3", _deep_gpt, "traced", divides=True),
    Case("gpt-muon-zero3", _gpt, "static", BF16, MuonConfig(lr=1e-2), divides=True, ema=0.9, gradient_accumulation=1),
    Case("llama-dynamic-zero3", _deep_llama, "dynamic", optimizer=SCOPED, divides=True, gradient_accumulation=1),
    Case("gpt-bf16-zero3", _deep_gpt, "traced", BF16, divides=True, guarded=True, gradient_accumulation=1),
    Case("nf4-zero1", _nf4, shards=True),
    Case("int8-zero3", _int8, divides=True),
    Case("nf4-zero3", _nf4, "traced", BF16, divides=True, gradient_accumulation=1),
]  # fmt: skip
FOUR = ("gpt-static-zero1", "gpt-traced-zero1", "gpt-static-zero3", "gpt-bf16-zero3")
FOUR += ("moe-zero1", "moe-zero3", "nf4-zero3")


def cases_of(count: int) -> list[Case]:
    """Those that so many ranks run; four run only some, to save time."""
    return [case for case in CASES if count < 4 or case.name in FOUR]


def ranks_of(case: Case, rank: int, count: int) -> Ranks:
    return Ranks(rank, count, SLICES, case.shards or case.divides, divides=case.divides)


class Samples:
    """Held-out sequences of random tokens, and batches by the number of their step.

    As of documents, not every held-out token is a target; in one batch of an evaluation none is.
    """

    fields = {"targets": TensorSpec((SIZE["context"],), DType.INT64)}
    val_samples = 21  # the last batch is not full

    def batch(self, split: str, seed: int, first: int, rows: int) -> dict[str, np.ndarray]:
        drawn = np.random.default_rng(7).integers(0, SIZE["vocabulary"], (4 * ROWS, SIZE["context"] + 1))
        drawn = drawn[first : first + rows]
        tokens, targets = drawn[:, :-1].copy(), drawn[:, 1:].copy()
        if split == "val":
            targets[(targets % 5 == first % 3) | (first == 2 * rows)] = -1
        return {"tokens": tokens, "targets": targets}


def session_of(case: Case, device: Device, ranks: Ranks) -> Session:
    """The case as one rank has it, its values still unset."""
    train = TrainConfig(batch_size=ROWS, gradient_accumulation=case.gradient_accumulation, ema=case.ema)
    guard = GuardConfig(nonfinite="skip" if case.guarded else "stop", activations=case.guarded)
    engine = EngineConfig(name=case.engine)
    config = Config(train=train, optimizer=case.optimizer or ADAMW, guard=guard, engine=engine)
    model, objective = case.model(case.compute), Objective(config.objective)
    objective.slice = case.gradient_accumulation, ROWS // SLICES // case.gradient_accumulation
    objective.balances = getattr(model.config, "balances", False)
    return build.build_session(model, device, config, ranks=ranks, objective=objective)


def trained(case: Case, world: World) -> dict[str, np.ndarray]:
    """Numbers of every step, the evaluation at the end, and the whole state; bf16 as fp32."""
    device = TorchDevice("cpu", 1, group=world.group)
    session = session_of(case, device, world.ranks)
    model = session.graph.model
    with closing(device), closing(session):
        for name, value in initial_values(model, seed=3).items():
            session.state.write(name, value)
        steps, prepare, data = session.build_training(), preparation(model), Samples()
        rows, batch = ROWS // SLICES // case.gradient_accumulation, partial(data.batch, "train", 0)
        coupled = session.graph.objective.coupled
        step = TrainStep(steps, rows, 11, prepare, world=world, coupled=coupled or dict)
        results = [step(batch(ROWS * number, ROWS), {"lr": 1e-2}, number) for number in range(1, STEPS + 1)]
        each = 1 if coupled is None else case.gradient_accumulation
        evaluates: Any = steps["evaluate"], data, rows * each, None, prepare
        told: Any = {"world": world, "around": partial(averaged, steps), "coupled": coupled, "each": rows}
        evaluated = Evaluation(*evaluates, count_bytes=len, probe=lambda inputs: steps["probe"](inputs), **told)()
        assert evaluated is not None and all(result.applied for result in results)
        found = {"losses": [(r.loss, r.grad_norm, r.activation_norm or 0.0, *r.metrics.values()) for r in results]}
        found["evaluation"] = [(evaluated.loss, *evaluated.metrics.values())]
        kinds = (Kind.PARAMETER, Kind.OPTIMIZER, Kind.FROZEN, Kind.COPY)
        held = [session.state.nbytes(kind) for kind in kinds[:3]]
        arrays = {name: session.state.read(name) for name in session.state.names(*kinds)}
    held.append(device.counters.allocated_bytes)
    return {**{key: np.array(value) for key, value in found.items()}, **arrays, "held": np.array(held)}


class Plain(torch.nn.Module):
    """The oracle of a model with its initial values, as a module of torch."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        values = initial_values(model, seed=3)
        self.tensors = torch.nn.ParameterList(torch.tensor(value) for value in values.values())
        self.weights = dict(zip(values, self.tensors, strict=True))
        self.oracle = PlainDecoder(model.config, self.weights)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.oracle.logits(tokens)


def trained_by_pytorch(world: World) -> dict[str, np.ndarray]:
    """The case gpt-plain-ddp by torch's DistributedDataParallel."""
    model = _plain_gpt(DType.FP32)
    plain = Plain(model)
    parallel = torch.nn.parallel.DistributedDataParallel(plain)
    matrices, vectors = ([p for p in plain.parameters() if (p.dim() >= 2) is wanted] for wanted in (True, False))
    decay = ADAMW.weight_decay
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=tuple(ADAMW.betas), eps=ADAMW.eps)
    losses, share = [], ROWS // world.ranks.count
    for number in range(1, STEPS + 1):
        batch = Samples().batch("train", 0, ROWS * number + share * world.ranks.rank, share)
        logits = parallel(torch.from_numpy(batch["tokens"]))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch["targets"]).flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        mean = sum(record["loss"] for record in world.gather([{"loss": loss.item()}])) / world.ranks.count
        losses.append((mean, norm.item()))
    return {"losses": np.array(losses), **{name: value.detach().numpy() for name, value in plain.weights.items()}}


@contextmanager
def opened(rank: int, count: int, port: int) -> Iterator[World]:
    place, config = Place(rank, count, 0, 1, "127.0.0.1", port), ParallelConfig(timeout=60)
    world: World = World() if count == 1 else DistributedWorld(place, config, on_gpu=False)
    with world.together():
        yield world


def work(rank: int, count: int, port: int, folder: Path) -> None:
    """Writes what every case gives as `<case>.<count>.<rank>.npz`."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with opened(rank, count, port) as world:
        for case in cases_of(count):
            world.ranks = ranks_of(case, rank, count)
            np.savez(folder / f"{case.name}.{count}.{rank}.npz", **trained(case, world))
        if count == 2:
            np.savez(folder / f"pytorch.{count}.{rank}.npz", **trained_by_pytorch(world))
    assert "exchange" not in {thread.name for thread in threading.enumerate()}
