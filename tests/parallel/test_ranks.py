"""The division of batches and state among ranks, and the order of their sums."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch

from ttrain.core.errors import ConfigError
from ttrain.core.spec import flat_offsets
from ttrain.parallel.distributed import CommunicationStream, CommunicationThread
from ttrain.parallel.failure_store import FailureStore
from ttrain.parallel.ranks import BLOCK, Ranks, sharding_of, tree_sum
from ttrain.parallel.settings import first_host, place


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("limit", [4 * BLOCK, 1 << 23])
@pytest.mark.parametrize("whole", [False, True])
def test_every_element_of_a_run_has_one_owner(count: int, limit: int, whole: bool) -> None:
    sizes = [1, 64, 3 * BLOCK + 7, 65, 40 * BLOCK, BLOCK]
    sharding = sharding_of(sizes, count, [whole] * len(sizes), limit)
    for size, ranks in zip(sizes, sharding.parts, strict=True):
        owned = sorted(part for parts in ranks for part in parts)
        assert [element for start, stop in owned for element in range(start, stop)] == list(range(size))
        assert all(start % BLOCK == 0 for start, _ in owned)
        assert not whole or owned == [(0, size)]
    starts = [bucket[0] for bucket in sharding.bounds]
    assert starts == [0, *(bucket[-1] for bucket in sharding.bounds[:-1])]
    assert sharding.bounds[-1][-1] == flat_offsets(sizes)[1]
    if not whole and limit > sum(sizes):
        shards = [stop - start for start, stop in zip(sharding.bounds[0], sharding.bounds[0][1:], strict=False)]
        assert max(shards) - min(shards) <= 2 * BLOCK


def test_a_sum_in_a_tree_is_that_of_its_subtrees() -> None:
    def joined(x: str, y: str) -> str:
        return f"({x}+{y})"

    slices = list("abcdefgh")
    assert tree_sum(slices, joined) == "(((a+b)+(c+d))+((e+f)+(g+h)))"
    for count in (1, 2, 4, 8):
        ranks = [Ranks(rank, count, 8) for rank in range(count)]
        assert [slice_ for each in ranks for slice_ in each.own] == list(range(8))
        parts = [tree_sum([slices[slice_] for slice_ in each.own], joined) for each in ranks]
        assert tree_sum(parts, joined) == tree_sum(slices, joined)
        assert 2 ** ranks[0].levels == 8 // count


def test_a_thread_for_communication_keeps_the_order_and_ends() -> None:
    thread, done, may_go = CommunicationThread(), list[int](), threading.Event()
    thread.start([lambda: may_go.wait(60), lambda: done.append(1)])
    thread.start([lambda: done.append(2)])
    assert done == []  # what is given next may be computed meanwhile
    may_go.set()
    thread.finish()
    assert done == [1, 2]
    for key in ("a", "b"):
        thread.start([lambda: done.append(0)], key)
    may_go.clear()
    thread.start([lambda: may_go.wait(60)], "c")
    thread.finish("b")  # and what was started before it
    thread.finish("a")
    assert done == [1, 2, 0, 0]
    may_go.set()
    del done[2:]
    thread.start([lambda: done.append(1 // 0), lambda: done.append(3)])
    with pytest.raises(ZeroDivisionError):
        thread.finish()
    assert done == [1, 2] and thread.close() and "exchange" not in {each.name for each in threading.enumerate()}


class Posted(dict[str, str]):
    """A store of one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value


@contextmanager
def beside(wait: AbstractContextManager[None]) -> Iterator[threading.Thread]:
    """A thread that is in a wait."""
    entered, ended = threading.Event(), threading.Event()

    def body() -> None:
        with wait:
            entered.set()
            ended.wait(60)

    thread = threading.Thread(target=body)
    thread.start()
    entered.wait(60)
    yield thread
    ended.set()
    thread.join()


def test_a_rank_waits_when_its_own_thread_does_be_it_through_threads_that_it_joins() -> None:
    """One that saves waits for other ranks as well, and a rank that hangs meanwhile is the one that hangs."""
    store = Posted()
    failures = FailureStore(store, 0, 2, 60.0)  # type: ignore[arg-type]

    def told() -> str:
        failures._beat()
        return store["rank/0"].split()[1]

    assert told() == "works"
    with beside(failures.waiting()) as saving:
        assert told() == "works"
        with failures.waiting():
            assert told() == "waits"
            with failures.waiting():
                pass
            assert told() == "waits"
        with failures.joining(saving):
            assert told() == "waits"
        assert told() == "works"
        with beside(failures.joining(saving)) as next_save, failures.joining(next_save):
            assert told() == "waits"
    with failures.waiting():
        with beside(failures.waiting()):
            pass
        assert told() == "waits"
    assert told() == "works"


def test_where_a_process_stands() -> None:
    assert place({}) is None
    given = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    found = place({**given, "MASTER_PORT": "29500"})
    assert found is not None and (found.rank, found.count, found.local_rank, found.local_count) == (3, 4, 1, 2)
    with pytest.raises(ConfigError, match="RANK is set but not MASTER_PORT"):
        place(given)
    slurm = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "12345"}
    found = place({**slurm, "SLURM_STEP_NODELIST": "gpu[07-09,12]", "SLURM_STEP_TASKS_PER_NODE": "2(x4)"})
    assert found is not None and (found.rank, found.local_count) == (5, 2)
    assert (found.address, found.port) == ("gpu07", 22345)
    assert [first_host(names) for names in ("a,b", "n[3]", "x[1-2]-ib,y")] == ["a", "n3", "x1-ib"]
    assert place({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None  # a batch script is no step


def test_a_stream_of_exchanges_lies_on_the_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins of streams note the order: exchanges wait for what came before, and the device for them at the end."""
    noted: list[object] = []

    class Stream:
        def __init__(self, gpu: torch.device, name: str = "exchanges") -> None:
            self.name = f"{name} on {gpu}"

        def wait_stream(self, other: Stream) -> None:
            noted.append(f"{self.name} wait for {other.name}")

        def record_event(self) -> str:
            return self.name

        def wait_event(self, end: str) -> None:
            noted.append(f"{self.name} wait for {end}")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: Stream(gpu, "steps"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    communication = CommunicationStream(torch.device("cuda", 3))
    communication.finish()  # nothing was started, so there is nothing to wait for
    communication.start([lambda: noted.append("sent")])
    communication.finish()
    first, last = "exchanges on cuda:3 wait for steps on cuda:3", "steps on cuda:3 wait for exchanges on cuda:3"
    assert noted == [first, "sent", last]
