"""Ranks over torch.distributed: gloo between CPUs and for host numbers, NCCL between GPUs. Nothing else imports it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from socket import socket
from threading import Thread
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ttrain.core import errors
from ttrain.core.errors import RankFailed, TtrainError, UserError
from ttrain.core.options import differences
from ttrain.device.base import Launch
from ttrain.parallel.failure_store import FailureStore
from ttrain.parallel.settings import ParallelConfig, Place, gpu_index
from ttrain.parallel.world import Numbers, T, World

_EARLY_SECONDS = 30.0  # for ranks that end early to start
_CLOSE_SECONDS = 1.0  # for what is under way as the ranks part


class DistributedWorld(World):
    """One of several processes."""

    group: DistributedGroup

    def __init__(self, place: Place, config: ParallelConfig, on_gpu: bool) -> None:
        """Return once all ranks are there. Raises TtrainError where some don't come in time."""
        super().__init__(config.ranks(place.rank, place.count))
        wait = timedelta(seconds=config.timeout)
        self._turns = 0  # of `broadcast`
        name, store, self._failures = _failure_store(place, wait)
        self._lasting = dist.PrefixStore("ttrain", store)  # also over restarts by torchrun
        self._failures.rendezvous()
        gpu = torch.device("cuda", gpu_index(place, torch.cuda.device_count())) if on_gpu else None
        with self._failures.waiting():
            group = dist.PrefixStore(f"{name}/group", _store(place, wait))
            dist.init_process_group(
                "nccl" if on_gpu else "gloo", store=group, rank=place.rank, world_size=place.count, timeout=wait,
                device_id=gpu,
            )  # fmt: skip
            # None is the group of all. To hold it would keep its threads beyond the end, and they abort the process.
            self._host: Any = dist.new_group(backend="gloo", timeout=wait) if on_gpu else None
        self.group = DistributedGroup(place.rank, place.count, self._host, self._failures, gpu)

    @contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
            self.close()
        except BaseException as error:
            ending = self._failures.ended(error)
            if self._host is None:  # NCCL would wait for the others
                self.close()
            if ending is error:
                raise
            raise ending from None

    def close(self) -> None:
        self._failures.leave()
        self.group.close()
        self._host = self.group.host = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def agree(self, what: str, facts: Mapping[str, Any]) -> None:
        given = json.loads(json.dumps(facts))
        for key, leaders, own in differences(self.broadcast(given), given):
            told = f"another {what} than on rank 0: {key} is {json.dumps(own)} here and {json.dumps(leaders)} there"
            raise UserError(f"{told}. Start all ranks with the same.")
        self.barrier()

    def remember(self, key: str, text: str) -> None:
        self._lasting.set(key, text)

    def remembered(self, key: str) -> str | None:
        return self._lasting.get(key).decode() if self._lasting.check([key]) else None

    def send(self, key: str, text: str) -> None:
        self._failures.post(f"{key}/{self.ranks.rank}", text)

    def receive(self, key: str, rank: int) -> str:
        return self._failures.wait(f"{key}/{rank}", rank)

    def joining(self, thread: Thread) -> AbstractContextManager[None]:
        return self._failures.joining(thread)

    def gather(self, records: Sequence[Numbers]) -> list[dict[str, float]]:
        names = list(records[0])
        own = torch.tensor([[record[name] for name in names] for record in records], dtype=torch.float64)
        every = [torch.empty_like(own) for _ in range(self.ranks.count)]
        with self._failures.waiting():
            dist.all_gather(every, own, group=self._host)
        return [dict(zip(names, row, strict=True)) for rows in every for row in rows.tolist()]

    def broadcast(self, value: T, rank: int = 0) -> T:
        self._turns += 1
        key = f"turn/{self._turns}"
        if self.ranks.rank == rank:
            self.send(key, json.dumps(value))
            return value
        found: T = json.loads(self.receive(key, rank))
        return found

    def once(self, work: Callable[[], str]) -> str:
        told: Any = ["", ""]  # the name of an error, and its message or the result
        try:
            told[1] = work() if self.leads else ""
        except TtrainError as error:
            self.broadcast([type(error).__name__, str(error)])
            raise
        while isinstance(told := self.broadcast(told), str):
            self.follow(told)
        name, text = told
        if name:
            raise getattr(errors, name, TtrainError)(text)
        return text

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        if not self.leads:
            self.broadcast("")
        yield
        if self.leads:
            self.broadcast("")


def _store(place: Place, wait: timedelta, hosts: bool = False) -> dist.TCPStore:
    """Connect to the store of the ranks: in the process that started them, or in rank 0, which `hosts` it."""
    try:
        return dist.TCPStore(place.address, place.port, is_master=hosts, wait_for_workers=False, timeout=wait)
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise RankFailed(
            f"rank {place.rank}: {place.address}:{place.port}, where the ranks meet: {why}", reported=False
        ) from None


def _failure_store(place: Place, wait: timedelta) -> tuple[str, dist.TCPStore, FailureStore]:
    """Return the prefix of the keys of this start, the store, and the failures there. Raises RankFailed without one."""
    led = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = _store(place, wait, led and place.rank == 0)
    started = "/".join(os.environ.get(f"TORCHELASTIC_{key}", "") for key in ("RUN_ID", "RESTART_COUNT"))
    name = f"ttrain/{started}/{place.count}"
    prefixed = dist.PrefixStore(name, store)
    return name, store, FailureStore(prefixed, place.rank, place.count, wait.total_seconds(), led)


def ended_early(error: TtrainError, place: Place) -> TtrainError:
    """Return the error of a rank that fails before it met the others. They are told; an error of all is told once.

    Nobody may be there to be told.
    """
    try:
        return _failure_store(place, timedelta(seconds=_EARLY_SECONDS))[2].ended(error)
    except RankFailed:
        return error


def serve(listener: socket, count: int, timeout: float) -> FailureStore:
    """Return the failure store of ranks that this process starts, at a port that listens."""
    wait, (address, port) = timedelta(seconds=timeout), listener.getsockname()
    store = dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=wait, master_listen_fd=listener.detach()
    )
    return FailureStore(dist.PrefixStore(f"ttrain///{count}", store), -1, count, timeout)


class CommunicationThread:
    """A thread of the host for exchanges beside computing. Launches run in order, and none after one that raised."""

    def __init__(self) -> None:
        self._orders: SimpleQueue[Sequence[Launch]] = SimpleQueue()
        self._outcomes: SimpleQueue[BaseException | None] = SimpleQueue()
        self._pending: list[str] = []  # the keys of what was started, in order
        self._thread: Thread | None = None

    def start(self, launches: Sequence[Launch], key: str = "") -> None:
        """Return at once."""
        if self._thread is None:
            self._thread = Thread(target=self._serve, name="exchange", daemon=True)
            self._thread.start()
        self._pending.append(key)
        self._orders.put(launches)

    def finish(self, key: str | None = None) -> None:
        """Wait for what was started under a key and before it, without one for all. Raises what a launch raised."""
        while self._pending and (key is None or key in self._pending):
            outcome = self._outcomes.get()
            self._pending.pop(0)
            if outcome is not None:
                raise outcome

    def close(self) -> bool:
        """End the thread once it has done what was started. Return False where that takes too long."""
        if self._thread is None:
            return True
        self._orders.put(())
        self._thread.join(_CLOSE_SECONDS)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        outcome: BaseException | None = None
        while outcome is None and (launches := self._orders.get()):
            try:
                for launch in launches:
                    launch()
            except BaseException as error:
                outcome = error
            self._outcomes.put(outcome)


class CommunicationStream:
    """A stream of the GPU for exchanges. What is captured from a start to the finish goes into the graph in order."""

    def __init__(self, gpu: torch.device) -> None:
        self._gpu, self._stream = gpu, torch.cuda.Stream(gpu)
        self._pending: dict[str, Any] = {}  # the end of what was started, by key; all that have none share one

    def start(self, launches: Sequence[Launch], key: str = "") -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._gpu))
        with torch.cuda.stream(self._stream):
            for launch in launches:
                launch()
        self._pending[key] = self._stream.record_event()

    def finish(self, key: str | None = None) -> None:
        for each in [*self._pending] if key is None else [key]:
            # Where there is nothing, a capture may not wait for what it does not hold.
            if (end := self._pending.pop(each, None)) is not None:
                torch.cuda.current_stream(self._gpu).wait_event(end)

    def close(self) -> bool:
        return True


class DistributedGroup:
    """Messages between devices. See device.base.Group.

    What is started runs on a GPU on a stream of its own, on the CPU on a thread of its own.
    """

    def __init__(self, rank: int, count: int, host: Any, failures: FailureStore, gpu: torch.device | None) -> None:
        self.rank, self.count, self.host, self._failures = rank, count, host, failures
        self.index = 0 if gpu is None else gpu.index
        self._communication = CommunicationThread() if gpu is None else CommunicationStream(gpu)

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> Launch:
        pairs: list[tuple[Any, Any, int]] = [(dist.irecv, buffer, rank) for rank, buffer in receives if buffer.numel()]
        pairs += [(dist.isend, buffer, rank) for rank, buffer in sends if buffer.numel()]
        if not pairs:
            return lambda: None
        if pairs[0][1].is_cuda:  # NCCL wants them together; over gloo each operation would hold the group
            operations = [dist.P2POp(*pair) for pair in pairs]
            return lambda: _wait(dist.batch_isend_irecv(operations))
        return lambda: _wait([start(buffer, rank) for start, buffer, rank in pairs])

    def start(self, launches: Sequence[Launch], key: str = "") -> Launch:
        return self._failures.waiting()(partial(self._communication.start, launches, key)) if launches else lambda: None

    def finish(self, key: str | None = None) -> None:
        with self._failures.waiting():
            self._communication.finish(key)

    def sum(self, buffer: Any) -> Launch:
        return self._failures.waiting()(lambda: _wait([dist.all_reduce(buffer, async_op=True)]))

    def join(self, array: np.ndarray) -> None:
        with self._failures.waiting():
            dist.all_reduce(torch.from_numpy(array.view(np.int32)), group=self.host)  # bits, so that no sign is lost

    def close(self) -> None:
        """End what was started, be it done or not."""
        if not self._communication.close():
            # A receive that nobody answers: once it is late, gloo closes all connections, which wakes who waits there.
            with suppress(RuntimeError):
                late = dist.irecv(torch.empty(1), (self.rank + 1) % self.count, tag=1)
                assert late is not None
                late.wait(timedelta(milliseconds=1))
            self._communication.close()


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
