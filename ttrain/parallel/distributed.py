"""Ranks over torch.distributed: gloo between CPUs and for host numbers, NCCL between GPUs. Nothing else imports it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ttrain.core import errors
from ttrain.core.errors import TtrainError
from ttrain.device.base import Launch
from ttrain.parallel.place import Place
from ttrain.parallel.ranks import Ranks
from ttrain.parallel.world import Numbers, T, World


class DistributedWorld(World):
    """One of several processes."""

    group: DistributedGroup

    def __init__(self, place: Place, slices: int, shards: bool, timeout: float, on_gpu: bool) -> None:
        super().__init__(Ranks(place.rank, place.count, slices, shards))
        wait = timedelta(seconds=timeout)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", init_method=f"tcp://{place.address}:{place.port}", rank=place.rank,
            world_size=place.count, timeout=wait,
            device_id=torch.device("cuda", place.local_rank) if on_gpu else None,
        )  # fmt: skip
        # None is the group of all. To hold it would keep its threads beyond close(), and they abort an ending process.
        self._host = dist.new_group(backend="gloo", timeout=wait) if on_gpu else None
        self.group = DistributedGroup(place.rank, place.count, self._host)

    def gather(self, records: Sequence[Numbers]) -> list[dict[str, float]]:
        names = list(records[0])
        own = torch.tensor([[record[name] for name in names] for record in records], dtype=torch.float64)
        every = [torch.empty_like(own) for _ in range(self.ranks.count)]
        dist.all_gather(every, own, group=self._host)
        return [dict(zip(names, row, strict=True)) for rows in every for row in rows.tolist()]

    def of_leader(self, value: T) -> T:
        found: T = json.loads(self._told(json.dumps(value)))
        return found

    def _told(self, text: str) -> str:
        """The leading rank's text."""
        size = torch.tensor([len(text.encode())], dtype=torch.int64)
        dist.broadcast(size, 0, group=self._host)
        content = torch.zeros(int(size), dtype=torch.uint8)
        if self.leads:
            content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else content
        if len(content):
            dist.broadcast(content, 0, group=self._host)
        return bytes(content.tolist()).decode()

    def once(self, work: Callable[[], str]) -> str:
        failure: TtrainError | None = None
        told = {"value": "", "error": "", "message": ""}
        if self.leads:
            try:
                told["value"] = work()
            except TtrainError as error:
                failure, told = error, {**told, "error": type(error).__name__, "message": str(error)}
        told = json.loads(self._told(json.dumps(told)))
        if failure is not None:
            raise failure
        if told["error"]:
            raise getattr(errors, told["error"], TtrainError)(told["message"])
        return told["value"]

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        if not self.leads:
            self.barrier()
        try:
            yield
        finally:
            if self.leads:
                self.barrier()

    def barrier(self) -> None:
        dist.barrier(group=self._host)

    def close(self) -> None:
        self._host = None
        self.group.host = None
        if dist.is_initialized():
            dist.destroy_process_group()


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


class DistributedGroup:
    """Messages between devices. See device.base.Group."""

    def __init__(self, rank: int, count: int, host: Any) -> None:
        self.rank, self.count, self.host = rank, count, host

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> Launch:
        pairs: list[tuple[Any, Any, int]] = [(dist.irecv, buffer, rank) for rank, buffer in receives if buffer.numel()]
        pairs += [(dist.isend, buffer, rank) for rank, buffer in sends if buffer.numel()]
        if not pairs:
            return lambda: None
        if pairs[0][1].is_cuda:  # NCCL wants them together; over gloo each operation would hold the group
            operations = [dist.P2POp(*pair) for pair in pairs]
            return lambda: _wait(dist.batch_isend_irecv(operations))
        return lambda: _wait([start(buffer, rank) for start, buffer, rank in pairs])

    def sum(self, buffer: Any) -> Launch:
        return lambda: dist.all_reduce(buffer)

    def join(self, array: np.ndarray) -> None:
        dist.all_reduce(torch.from_numpy(array.view(np.int32)), group=self.host)  # bits, so that no sign is lost
