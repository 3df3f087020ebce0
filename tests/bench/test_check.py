"""Contenders that do the same work agree; one that does any other work is found out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from tests.bench.pretend import ONE_THREAD, SMALL_GPT, SMALL_LLAMA, SMALL_MLP, case
from ttrain.bench.baselines import PyTorchContender
from ttrain.bench.check import STEPS, Agreement, agreement, first_steps
from ttrain.bench.contender import Contender
from ttrain.bench.ranks import RanksContender
from ttrain.bench.worker import make_contender
from ttrain.bench.workload import GPT_WORK, MLP_WORK, Case, GPTWork
from ttrain.core.errors import TtrainError
from ttrain.engine.settings import EngineConfig
from ttrain.graph.kinds import Kind
from ttrain.optim.settings import AdamWConfig


def compared(given: Case, contender: Contender, reference: Contender | None = None) -> Agreement:
    reference = reference or PyTorchContender("eager", given, ONE_THREAD)
    losses = []
    for entry in (contender, reference):
        entry.build()
        losses.append(first_steps(entry).losses)
    return agreement(given, contender, losses[0], reference, losses[1])


@pytest.mark.parametrize("resident", [False, True], ids=["uploaded", "resident"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure"])
@pytest.mark.parametrize("engine", ["dynamic", "static"])
@pytest.mark.parametrize("work", [SMALL_GPT, SMALL_MLP, replace(SMALL_GPT, bias=True)], ids=["gpt", "mlp", "gpt-bias"])
def test_our_engines_do_what_plain_pytorch_does(work: Any, engine: str, precision: str, resident: bool) -> None:
    given = Case(work, precision, 3, resident)
    found = compared(given, make_contender(engine, given, ONE_THREAD, EngineConfig()))
    assert found.problem(precision, "eager") is None
    assert found.loss < {"fp32": 1e-6, "bf16": 2e-3, "bf16_pure": 1e-2}[precision]


@pytest.mark.parametrize("rank", [0, 2], ids=["whole", "adapters"])
def test_our_llama_does_what_that_of_transformers_does(rank: int) -> None:
    pytest.importorskip("peft", reason="the package peft is not installed")
    given = Case(replace(SMALL_LLAMA, rank=rank), "bf16", 3)
    found = compared(given, make_contender("static", given, ONE_THREAD, EngineConfig()))
    assert found.problem("bf16", "eager") is None
    assert found.loss < 2e-3
    assert [path for path in given.model.parameters() if given.trains(path)][-1].endswith("lora.b.weight") == bool(rank)


def test_two_processes_do_what_one_does() -> None:
    """Ours and PyTorch's, each with half of the batch."""
    given = case()
    order = {"device": asdict(ONE_THREAD), "engine": asdict(EngineConfig()), "plugins": []}
    contenders = [RanksContender(name, given, order) for name in ("static zero1 x2", "eager ddp x2")]
    try:
        for contender in contenders:
            found = compared(given, contender)
            assert found.problem("fp32", "eager") is None
            assert found.loss < 1e-6
    finally:
        for contender in contenders:
            contender.close()


def test_a_rank_that_ends_is_told() -> None:
    contender = RanksContender("static ddp x2", case(), {"device": {"name": "nowhere"}, "engine": {}, "plugins": []})
    with pytest.raises(TtrainError, match="rank 0 of static ddp x2 ended by itself"):
        contender.build()
    contender.close()


def test_weights_kept_in_bf16_have_no_other_copy() -> None:
    """As precision=bf16_pure trains; what was held in fp32 would take twice the bytes."""
    ours, theirs = (make_contender(name, Case(SMALL_MLP, "bf16_pure", 3), ONE_THREAD, EngineConfig()) for name in
                    ("static", "eager"))  # fmt: skip
    ours.build(), theirs.build()
    numbers = 2 * (8 * 8 + 8)
    state = ours.session.state  # type: ignore[attr-defined]
    assert (state.nbytes(Kind.PARAMETER), state.nbytes(Kind.COPY)) == (2 * numbers, 0)
    held = theirs._parameters.values()  # type: ignore[attr-defined]
    assert sum(parameter.nbytes for parameter in held) == 2 * numbers


def test_a_batch_that_stays_is_uploaded_once_and_is_the_same_for_every_step() -> None:
    counts = {}
    for resident in (False, True):
        contender: Any = make_contender("static", Case(SMALL_MLP, "fp32", 3, resident), ONE_THREAD, EngineConfig())
        contender.build()
        before = contender.device.counters.uploads
        losses = [contender.step(number) for number in range(1, 6)]
        counts[resident] = (contender.device.counters.uploads - before) / 5
        first = Case(SMALL_MLP, "fp32", 3).batches[0]
        if resident:
            assert losses == sorted(losses, reverse=True)  # plain SGD on one batch falls at every step
            for name, values in first.items():
                assert np.array_equal(contender.session.state.read(f"data/{name}"), values)
    assert counts[False] - counts[True] == 2  # inputs and targets


class OtherOptimizer(GPTWork):
    """The same work with another optimizer setting."""

    changes: dict[str, Any] = {}

    @property
    def optimizer(self) -> AdamWConfig:
        return replace(super().optimizer, **self.changes)


def with_optimizer(**changes: Any) -> Callable[[Case], Case]:
    kind = type("Changed", (OtherOptimizer,), {"changes": changes})
    values = {name: getattr(SMALL_GPT, name) for name in SMALL_GPT.__dataclass_fields__}
    return lambda given: replace(given, work=kind(**values))


@pytest.mark.parametrize(
    "change",
    [
        with_optimizer(clip_norm=None),
        with_optimizer(weight_decay=0.0),
        with_optimizer(lr=1.01e-3),
        with_optimizer(betas=[0.9, 0.95]),
        lambda given: replace(given, seed=4),
        lambda given: replace(given, work=replace(SMALL_GPT, rows=5)),
    ],
    ids=["no clipping", "no decay", "lr", "betas", "other batches", "more rows"],
)
def test_other_work_is_found_out(change: Callable[[Case], Case]) -> None:
    given = case()
    found = compared(given, PyTorchContender("eager", change(given), ONE_THREAD))
    assert found.problem("fp32", "eager") is not None


def test_problems_are_told_with_their_bounds() -> None:
    assert Agreement(0.0, 0.0).problem("fp32", "eager") is None
    assert "losses differ from eager's by up to 0.1" in str(Agreement(0.1, 0.0).problem("fp32", "eager"))
    assert "the weights' way differs from eager's by 0.5" in str(Agreement(0.0, 0.5).problem("fp32", "eager"))
    assert Agreement(float("nan"), 0.0).problem("bf16", "eager") is not None
    assert Agreement(0.0, float("nan")).problem("bf16", "eager") is not None


def test_losses_of_earlier_steps_are_not_run_again() -> None:
    contender = PyTorchContender("eager", case(), ONE_THREAD)
    contender.build()
    first = contender.loss(contender.step(1))
    losses = first_steps(contender, [first]).losses
    again = PyTorchContender("eager", case(), ONE_THREAD)
    again.build()
    assert losses == first_steps(again).losses
    assert len(losses) == STEPS


def test_sizes_are_those_that_are_named() -> None:
    parameters = {size: Case(work, "fp32", 0).model.parameter_count for size, work in GPT_WORK.items()}
    assert parameters["char"] == 65 * 128 + 64 * 128 + 4 * (12 * 128**2 + 2 * 128) + 128
    assert parameters["gpt2"] == 124_439_808 - (1024 - 256) * 768  # GPT-2's own count, with 256 positions
    assert parameters["smollm2"] == 134_515_008
    adapters = 30 * 8 * sum(sides for sides in (2 * 1152, 2 * 768, 3 * 2112))  # q and o, k and v, gate, up and down
    assert parameters["smollm2-lora"] == 134_515_008 + adapters
    assert {size: (work.rows, work.width) for size, work in MLP_WORK.items()} == {
        "tiny": (32, 64), "256": (256, 256), "1024x512": (1024, 512),
    }  # fmt: skip
