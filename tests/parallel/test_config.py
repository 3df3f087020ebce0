"""Configs of several processes: one sentence for each mistake, before any process starts."""

from __future__ import annotations

import pytest
import torch

from ttrain.config.compose import load
from ttrain.core.errors import ConfigError
from ttrain.parallel.settings import gpu_index, place

RANKS = {
    "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("parallel.processes=2", "parallel.processes=2: parallel=none is one process."),
        ("parallel.slices=2 device=n300", "parallel.slices=2: runs on device=cpu or cuda, not on device=n300."),
        ("parallel=ddp parallel.processes=3", "parallel.processes=3: must be a power of two, such as 2 or 4."),
        ("parallel=ddp parallel.slices=6", "parallel.slices=6: must be a power of two, such as 4 or 8."),
        ("parallel=ddp parallel.processes=4 parallel.slices=2", "parallel.slices=2: must be at least the number of"),
        ("parallel.slices=4 train.batch_size=20 train.gradient_accumulation=2", "train.batch_size=20: must be a"),
        ("parallel=zero1 device=n300", "parallel=zero1: runs on device=cpu or cuda, not on device=n300."),
        ("parallel=ddp parallel.processes=1024 train.batch_size=1024 device=cuda", "device=cuda: 1024 ranks on this"),
        ("parallel=ddp parallel.processes=2 recover.oom=shrink", "recover.oom=shrink: one of several ranks can't"),
        ("parallel=ddp parallel.processes=2 task=sample run.dir=x", "parallel.processes=2: task=sample is one"),
        (
            "recipe=grpo-arithmetic parallel=zero3 parallel.processes=2 device=cpu",
            "parallel=zero3: with objective=grpo",
        ),
        ("parallel=auto", "parallel=auto: task=plan alone chooses a mode. Give parallel=ddp, zero1, zero3 or none."),
        # Steps that are measured have the slices of training.
        ("task=lr_finder parallel.slices=4 train.batch_size=6 device=cpu", "train.batch_size=6: must be a multiple of"),
        ("task=profile parallel.slices=4 train.batch_size=6 device=cpu", "train.batch_size=6: must be a multiple of"),
    ],
)
def test_a_mistake_is_one_sentence(overrides: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(overrides.split())
    assert len(caught.value.problems) == 1 and caught.value.problems[0].startswith(expected)


@pytest.mark.parametrize(
    ("task", "more"),
    [
        ("sample", "run.dir=x"), ("export", "run.dir=x export.file=y.pt"), ("prepare", "data.path=x prepare.dir=y"),
        ("lr_finder", ""), ("profile", ""),
    ],
)  # fmt: skip
def test_a_task_of_one_process_takes_the_mode_and_refuses_more(task: str, more: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"task={task} parallel=zero1 parallel.processes=2 parallel.world=4 device=cpu {more}".split())
    assert caught.value.problems == [
        "parallel.world=4: is for task=plan. Give parallel.processes, or use torchrun.",
        f"parallel.processes=2: task={task} is one process. Leave it out.",
    ]


def test_what_was_started_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="parallel=none: 2 processes run. Start one, or give parallel=ddp, zero1 or"):
        load([])
    with pytest.raises(ConfigError, match="parallel.processes=4: 2 were started on this machine already. Leave it"):
        load(["parallel=ddp", "parallel.processes=4"])
    with pytest.raises(ConfigError, match="task=sample: is one process, and 2 were started. Start one."):
        load(["task=sample", "run.dir=x"])
    assert load(["parallel=ddp", "device=cpu"]).parallel.name == "ddp"


def test_a_rank_takes_the_gpu_of_its_local_rank_or_the_only_one_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM may show each task a GPU of its own, which is number 0 to all of them."""
    for name, value in {**RANKS, "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match="device=cuda: 2 ranks on this machine need a GPU each, and it has 1"):
        load(["parallel=ddp", "device=cuda"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert load(["parallel=ddp", "device=cuda"]).device.name == "cuda"
    here = place()
    assert here is not None
    assert [gpu_index(here, visible) for visible in (1, 2, 8)] == [0, 1, 1]
