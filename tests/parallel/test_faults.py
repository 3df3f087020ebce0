"""A rank that raises, hangs, is killed or is not like the others ends all of them, by name and reason."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.forks import FAULTS, LATE, begun, outcomes

INFINITE = (
    "Step 4: train/loss is inf. The first tensor with NaN or Inf is the activation that squared_error makes in loss "
)
INFINITE += "(1 of 1 elements) on rank 1. The last good checkpoint is "


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By fault, what became of two ranks. Others run while those that take long to end idle."""
    folder, others = tmp_path_factory.mktemp("forks"), [name for name in FAULTS if name not in LATE]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        late = begun(LATE, folder)
        late["absent"].wait()  # whose time-out counts from its start
        parts = [outcomes(begun(others[start : start + 6], folder), folder) for start in range(0, len(others), 6)]
        return {name: result for part in (*parts, outcomes(late, folder)) for name, result in part.items()}


@pytest.mark.parametrize(
    ("fault", "codes", "said"),
    [
        ("raises", [1, 1], "ttrain: rank 1: the cable was pulled"),
        ("leader_raises", [1, 1], "ttrain: rank 0: the cable was pulled"),
        ("hangs", [1, 1], "ttrain: rank 1: it hangs: the others have waited for it for 3 s (parallel.timeout)."),
        ("killed", [1, -9], "ttrain: rank 1: it shows no sign of life: it was killed, hangs, or its machine is out of"),
        ("leader_killed", [-9, 1], "ttrain: rank 0: it shows no sign of life: it was killed, hangs, or its machine is"),
        ("late", [1, 1], "ttrain: rank 1: the cable was pulled"),
        ("stopped", [130, 130], "ttrain: Stopped by SIGINT after step 3; the state is saved. Continue with: python"),
        ("config", [2, 2], "ttrain: rank 1: another config than on rank 0: optimizer.lr is 0.5 here and 0.001 there."),
        ("mistake", [2, 2], "ttrain: rank 0: train.batch_size=4: must be a multiple of the number of ranks=2"),
        ("own_mistake", [2, 2], "ttrain: rank 1: train.stepz: unknown key. Did you mean 'steps'?"),
        ("version", [2, 2], 'ttrain: rank 1: another version than on rank 0: ttrain is "0.1" here and "0.0" there.'),
        ("data", [2, 2], 'ttrain: rank 1: another data than on rank 0: sha256 is "1" here and "0" there.'),
        ("overflow", [1, 1], "ttrain: rank 0: Step 4: train/loss is inf. From the loss backwards, the first bad"),
        ("skipped", [1, 1], f"ttrain: rank 0: 1 updates in a row were skipped. {INFINITE}"),
        ("divided", [1, 1], f"ttrain: rank 0: 1 updates in a row were skipped. {INFINITE}"),
        ("absent", [1, 0], "ttrain: rank 1: it did not start within 3 s"),
    ],
)
def test_a_fault_of_one_rank_ends_all(found: dict[str, Any], fault: str, codes: list[int], said: str) -> None:
    result = found[fault]
    assert result["ended"], "a rank did not end by itself"
    assert result["codes"] == codes
    told = [line for lines in result["said"] for line in lines]
    assert len(told) == 1 and told[0].startswith(said)
    if fault == "stopped":
        assert result["saved"] == ["step_00000002", "step_00000003"]
    if fault in ("config", "mistake", "own_mistake", "version", "data", "absent"):
        assert result["saved"] == []


def test_a_share_that_is_not_written_is_told_and_the_next_save_is_whole(found: dict[str, Any]) -> None:
    result = found["no_room"]
    assert result["codes"] == [0, 0] and result["said"] == [[], []]
    assert len(result["notes"]) == 1 and "The checkpoint of step 2 could not be saved" in result["notes"][0]
    assert "no room on this machine" in result["notes"][0]
    assert result["saved"] == ["step_00000004", "step_00000006"]


def test_a_fault_in_the_program_is_told_with_its_rank(found: dict[str, Any]) -> None:
    assert found["fails"]["ended"] and found["fails"]["codes"][0] == 1
    assert found["fails"]["notes"] == ["This was rank 1 of 2."]
