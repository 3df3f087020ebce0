"""The order in which four ranks on GPUs exchange tensors: the path of CUDA, on fake tensors, rank after rank.

Sends and receives that are issued in another order on one rank than on another would wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.device.fake_cuda import fake_cuda
from tests.parallel.test_ranks import Posted
from ttrain.config import build
from ttrain.config.compose import load
from ttrain.engine.base import examples
from ttrain.parallel.distributed import DistributedGroup
from ttrain.parallel.failure_store import FailureStore
from ttrain.parallel.ranks import Ranks

RANKS = 4
RUN = (
    "model=nano-gpt model.layers=1 model.context=16 model.width=64 model.heads=4 precision=bf16 "
    "train.batch_size=4 engine=traced device=cpu"
)
Message = tuple[str, int, int, torch.dtype]  # isend or irecv, the other rank, elements, and their dtype


@dataclass(frozen=True)
class Issued:
    """What a rank hands to NCCL at a time, `beside` the steps on a stream of its own, or on theirs."""

    beside: bool
    messages: tuple[Message, ...] = ()
    summed: int = 0  # elements of a sum over all ranks


DONE = Issued(False)  # stands where the steps wait for what was issued beside


class Noted(list[Issued]):
    """What one rank issues, in order."""

    beside = False

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self.beside = True
        yield
        self.beside = False

    def batch(self, operations: Sequence[dist.P2POp]) -> list[Any]:
        each = ((one.op.__name__, one.peer, one.tensor.numel(), one.tensor.dtype) for one in operations)
        self.append(Issued(self.beside, tuple(each)))
        return []

    def sum(self, buffer: torch.Tensor, async_op: bool) -> SimpleNamespace:
        self.append(Issued(self.beside, (), buffer.numel()))
        return SimpleNamespace(wait=lambda: None)


def issued(rank: int, mode: str) -> list[Issued]:
    """One step of a rank as its graph holds it."""
    noted, failures = Noted(), FailureStore(Posted(), rank, RANKS, 60.0)  # type: ignore[arg-type]
    dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
    try:
        with fake_cuda() as device, pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "stream", noted.on)
            patch.setattr(dist, "batch_isend_irecv", noted.batch)
            patch.setattr(dist, "all_reduce", noted.sum)
            group = DistributedGroup(rank, RANKS, None, failures, device.device)
            finish = group.finish
            patch.setattr(group, "finish", lambda key=None: (finish(key), noted.append(DONE)))
            device.group, device.context = group, replace(device.context, group=group)
            shards, divides = mode != "ddp", mode == "zero3"
            config, ranks = load(RUN.split()), Ranks(rank, RANKS, RANKS, shards, bucket_mb=0.05, divides=divides)
            session = build.build_session(build.build_model(config, 96), device, config, ranks=ranks)
            step = session.build_training(further=False)["train"]
            for _ in range(2):  # the second is captured
                noted.clear()
                step(examples(step.plan.graph))
    finally:
        dist.destroy_process_group()
    return noted


def between(each: Issued, word: str, other: int) -> list[Any]:
    return [(count, dtype) for how, rank, count, dtype in each.messages if (how, rank) == (word, other)]


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero3"])
def test_four_ranks_issue_their_exchanges_in_one_order(mode: str) -> None:
    """What each sends at a time is what the other receives then; weights and gradients go beside the step."""
    every = [issued(rank, mode) for rank in range(RANKS)]
    for alike in zip(*every, strict=True):
        assert len({(each.beside, bool(each.messages), each.summed) for each in alike}) == 1
        for one, other in permutations(range(RANKS), 2):
            assert between(alike[one], "isend", other) == between(alike[other], "irecv", one)
    started = every[0] if mode == "zero3" else every[0][: every[0].index(DONE)]
    beside = [each for each in started if each.beside]
    assert len(beside) > 3 and all(each.messages for each in beside)
    assert any(each.summed for each in every[0]) == (mode != "ddp")
    assert mode == "zero3" or (started == beside and every[0][-1] == DONE)
