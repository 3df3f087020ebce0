"""One, two and four ranks compute the same bits, in all modes and on every engine; PyTorch's DDP nearly the same."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.forked import forks
from tests.parallel.forks import free_port
from tests.parallel.ranks_worker import CASES, Case, cases_of, ranks_of, session_of, work
from ttrain.config import build
from ttrain.core.spec import DType
from ttrain.device.settings import DeviceConfig
from ttrain.train.forecast.plan_report import plan_report

COUNTS = (1, 2, 4)
pytestmark = pytest.mark.timeout(900)  # the first test waits for all runs


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case by all counts of ranks; processes are forked from one that has imported everything."""
    folder = tmp_path_factory.mktemp("ranks")
    context = forks()
    for count in COUNTS:
        port = free_port()
        ranks = [context.Process(target=work, args=(rank, count, port, folder)) for rank in range(count)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(400)
        assert [rank.exitcode for rank in ranks] == [0] * count
    return folder


def loaded(folder: Path, name: str, count: int, rank: int = 0) -> dict[str, np.ndarray]:
    with np.load(folder / f"{name}.{count}.{rank}.npz") as file:
        return dict(file)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_number_of_ranks_gives_the_same_bits(case: Case, results: Path) -> None:
    alone = loaded(results, case.name, 1)
    held = alone.pop("held")
    assert np.isfinite(alone["losses"]).all() and len({tuple(row) for row in alone["losses"]}) == len(alone["losses"])
    for count in [count for count in COUNTS[1:] if case in cases_of(count)]:
        shards = []
        for rank in range(count):
            found = loaded(results, case.name, count, rank)
            shards.append(found.pop("held"))
            assert found.keys() == alone.keys()
            assert [name for name in alone if found[name].tobytes() != alone[name].tobytes()] == []
        whole, own = np.sum(shards, axis=0), np.max(shards, axis=0)
        if case.divides:
            assert (whole[:3] == held[:3]).all() and (own[:3] <= 0.75 * held[:3]).all()
        elif case.shards:
            assert whole[1] == held[1] and own[1] < 0.75 * held[1]  # tiny tensors are not cut
            assert (whole[0] < count * held[0]) == (case.compute is DType.BF16)  # masters beside the copies
        else:
            assert (whole[:3] == count * held[:3]).all()


def test_modes_and_micro_batches_compute_the_same_and_slices_draw_their_own(results: Path) -> None:
    ddp, zero1 = (loaded(results, f"gpt-static-{mode}", 2) for mode in ("ddp", "zero1"))
    assert all(ddp[name].tobytes() == zero1[name].tobytes() for name in ddp if name != "held")
    plain = loaded(results, "gpt-plain-ddp", 2)
    assert abs(ddp["losses"][0, 0] - plain["losses"][0, 0]) > 1e-4  # there is dropout in the one


def test_pytorch_ddp_computes_the_same(results: Path) -> None:
    ours, theirs = loaded(results, "gpt-plain-ddp", 2), loaded(results, "pytorch", 2)
    np.testing.assert_allclose(ours["losses"][:, :2], theirs.pop("losses"), rtol=1e-5)
    for name, value in theirs.items():
        assert np.linalg.norm(ours[name] - value) <= 1e-5 * np.linalg.norm(value), name


PLANNED = (
    "gpt-plain-ddp",
    "gpt-static-zero1",
    "gpt-bf16-zero1",
    "gpt-muon-zero1",
    "gpt-static-zero3",
    "gpt-bf16-zero3",
    "nf4-zero3",
)


@pytest.mark.parametrize("name", PLANNED)
def test_a_rank_allocates_what_is_planned(name: str, results: Path) -> None:
    """Beside the bytes of tensors that a plan shows there are gaps between them, of less than 64 elements each."""
    case, count = next(case for case in CASES if case.name == name), 2
    for rank in range(count):
        with closing(build.planned_device(DeviceConfig("cpu", threads=1))) as device:
            session = session_of(case, device, ranks_of(case, rank, count))
            report = plan_report(session.graph, session.state, session.build_training())
            placed = device.counters.allocated_bytes
        assert loaded(results, case.name, count, rank)["held"][3] == placed + report.held["arena"]
        tensors = sum(len(session.state.tensor(name).placed) for name in session.state.names())
        assert 0 <= placed + report.held["arena"] - (report.memory - report.held["libraries"]) < 4 * 64 * tensors
