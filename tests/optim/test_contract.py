"""Every optimizer through one suite: equal to torch.optim on given gradients, whatever the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.session import BF16
from tests.optim.updates import Parameters, Updates, gradient
from ttrain.config.build import made
from ttrain.core.spec import DType
from ttrain.optim.settings import AdamWConfig, SGDConfig

STEPS = 6
CPU_ENGINES = ("dynamic", "static")


def torch_adamw(groups: Any, config: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=tuple(config.betas), eps=config.eps)


def torch_sgd(groups: Any, config: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=1.0, momentum=config.momentum, nesterov=config.nesterov)


# One row an optimizer setting: how we build it, and what torch calls it.
TABLE: dict[str, tuple[Any, Callable[[Any, Any], torch.optim.Optimizer]]] = {
    "adamw": (AdamWConfig(lr=0.02), torch_adamw),
    "adamw-no-decay": (AdamWConfig(lr=0.02, weight_decay=0.0, betas=[0.8, 0.999], eps=1e-5), torch_adamw),
    "adamw-beta-zero": (AdamWConfig(lr=0.02, betas=[0.0, 0.99]), torch_adamw),
    "sgd": (SGDConfig(lr=0.05), torch_sgd),
    "sgd-decay": (SGDConfig(lr=0.05, weight_decay=0.1), torch_sgd),
    "sgd-momentum": (SGDConfig(lr=0.05, momentum=0.9, weight_decay=0.1), torch_sgd),
    "sgd-nesterov": (SGDConfig(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1), torch_sgd),
}


def factor(step: int) -> float:
    """A learning rate that moves and is zero once."""
    return [1.0, 0.3, 0.0, 0.7, 2.0, 0.1][step - 1]


class Run(Updates):
    """Updates on gradients that the test writes, with torch.optim beside it."""

    def __init__(
        self, row: str, changes: dict[str, Any], engine: str, compute: DType = DType.FP32, **options: Any
    ) -> None:
        config, build_torch = TABLE[row]
        optimizer = made("optimizer", replace(config, **changes))
        super().__init__(Parameters(compute), optimizer, engine, rate=factor, **options)
        self.tensors = {path: torch.nn.Parameter(torch.from_numpy(self.state.read(path))) for path in self.paths}
        self.torch = build_torch([self._group(path, tensor) for path, tensor in self.tensors.items()], self.config)
        self.clipped = list(self.tensors.values())

    def _group(self, path: str, tensor: torch.Tensor) -> dict[str, Any]:
        rule = self.config.decay_rule
        decays = rule == "all" or (rule == "matrices" and tensor.dim() >= 2)
        return {"params": [tensor], "weight_decay": self.config.weight_decay if decays else 0.0, "path": path}

    def both(self, step: int, own_factor: Callable[[str], float] = lambda path: 1.0) -> dict[str, float]:
        """One update on both sides. `own_factor` is what the test expects of lr_multipliers."""
        for path, tensor in self.tensors.items():
            tensor.grad = torch.from_numpy(gradient(path, tuple(tensor.shape), step))
        whole = torch.cat([tensor.grad.flatten() for tensor in self.tensors.values() if tensor.grad is not None]).norm()
        norm = torch.nn.utils.clip_grad_norm_(self.clipped, self.config.clip_norm or 1e30)
        for group in self.torch.param_groups:
            group["lr"] = self.config.lr * factor(step) * own_factor(group["path"])
        self.torch.step()
        outputs = self.advance(step)
        assert outputs["grad_norm"] == pytest.approx(whole.item(), rel=1e-5)
        assert outputs.get("clipped_norm", outputs["grad_norm"]) == pytest.approx(norm.item(), rel=1e-5)
        return outputs

    def check(self) -> None:
        for path, tensor in self.tensors.items():
            np.testing.assert_allclose(self.state.read(path), tensor.detach(), rtol=2e-5, atol=2e-6, err_msg=path)


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize(
    "changes", [{"clip_norm": None}, {"clip_norm": 0.5}, {"clip_norm": 1e6, "decay_rule": "all"}], ids=str
)
def test_updates_equal_torch_and_engines_one_another_to_the_bit(row: str, changes: dict[str, Any]) -> None:
    runs = [Run(row, changes, engine) for engine in CPU_ENGINES]
    for step in range(1, STEPS + 1):
        assert len({run.both(step)["grad_norm"] for run in runs}) == 1
        runs[0].check()
    for name in runs[0].state.names():
        assert np.array_equal(*(run.state.read(name) for run in runs)), name


@pytest.mark.parametrize("row", TABLE)
def test_groups_have_learning_rates_of_their_own(row: str) -> None:
    run = Run(row, {"lr_multipliers": {"head": 0.5, "head.bias": 0.0, "one": 3.0}}, "static")
    own = {"head.weight": 0.5, "head.bias": 0.0, "one": 3.0}
    for step in range(1, STEPS + 1):
        run.both(step, lambda path: own.get(path, 1.0))
    run.check()
    frozen = gradient("head.bias", (70,), 99)
    assert np.array_equal(run.state.read("head.bias"), frozen)


@pytest.mark.parametrize("row", TABLE)
def test_masters_stay_fp32_under_bf16_compute(row: str) -> None:
    run = Run(row, {}, "static", BF16)
    for step in range(1, STEPS + 1):
        run.both(step)
    run.check()
    for path, parameter in run.model.parameters().items():
        if parameter.has_copy(BF16):
            copy, master = run.state.read(f"{path}/compute"), run.state.read(path)
            assert np.array_equal(copy, torch.from_numpy(master).bfloat16().float().numpy()), path
