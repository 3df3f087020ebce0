"""PyTorch as contenders: what a user would pick, with the settings that PyTorch itself recommends for speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ttrain.bench.contender import Contender
from ttrain.bench.reference import reference_of
from ttrain.bench.workload import Case
from ttrain.config import build
from ttrain.core.spec import DType
from ttrain.device.settings import DeviceConfig
from ttrain.optim.settings import AdamWConfig, OptimizerConfig, SGDConfig

_DESCRIPTIONS = {
    "eager": "eager model, fused optimizer",
    "compile": "torch.compile(model), fused optimizer",
    "compile_all": "torch.compile(model), torch.compile of clipping and optimizer step",
}


class PyTorchContender(Contender):
    """Forward under autocast where bf16 computes, backward, clip_grad_norm_, optimizer step, zero_grad.

    The weights are bf16 too where the precision is bf16_true.
    """

    def __init__(self, name: str, case: Case, device: DeviceConfig) -> None:
        super().__init__(case, device)
        self.name, self.description = name, _DESCRIPTIONS[name]

    def build(self) -> None:
        case = self.case
        # The device sets the same number of threads as for our engines.
        self.device = build.build_device(self._device_config)
        self._device: torch.device = getattr(self.device, "device", torch.device("cpu"))
        held = torch.bfloat16 if case.dtypes.master is DType.BF16 else None
        model = reference_of(case.work).to(self._device, held)
        self._parameters = dict(model.named_parameters())
        for parameter in self._parameters.values():
            if not parameter.requires_grad and parameter.dim() > 1:  # as a user loads a model that stays as it is
                parameter.data = parameter.data.to(torch.bfloat16 if case.dtypes.compute is DType.BF16 else None)
        self._load()
        self._model: Callable[..., torch.Tensor] = self._wrapped(model)
        trained = [parameter for parameter in self._parameters.values() if parameter.requires_grad]
        fused = self.name != "compile_all"  # the fused update is one kernel already, and nothing that can be compiled
        self._optimizer = make_optimizer(trained, case.work.optimizer, fused)
        self._update = torch.compile(self._clip_and_step) if self.name == "compile_all" else self._clip_and_step
        self._batches = [
            [torch.from_numpy(array).to(self._device) for array in batch.values()] for batch in case.batches
        ]

    def _wrapped(self, model: torch.nn.Module) -> Callable[..., torch.Tensor]:
        """Return the callable that takes the model's place."""
        return model if self.name == "eager" else torch.compile(model)

    def _load(self) -> None:
        """Load the first weights of our model; every parameter must get one."""
        missing = set(self._parameters)
        for path, values in self.case.first_weights():
            name = self.case.work.reference_name(path)
            with torch.no_grad():
                self._parameters[name].copy_(torch.from_numpy(values))
            missing.remove(name)
        assert not missing, f"the reference has parameters of its own: {missing}"

    def _clip_and_step(self) -> None:
        limit = self.case.work.optimizer.clip_norm
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters.values(), limit)
        self._optimizer.step()

    def step(self, number: int) -> Any:
        batch = self._batches[number % len(self._batches)]
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self.case.dtypes.compute is DType.BF16):
            loss = self._model(*batch)
        loss.backward()
        self._update()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def weight(self, path: str) -> np.ndarray:
        return self._parameters[self.case.work.reference_name(path)].detach().float().cpu().numpy().copy()

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class DistributedContender(PyTorchContender):
    """One of several ranks under DistributedDataParallel, on gloo or NCCL; it has an equal share of every batch."""

    def build(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("nccl" if self._device_config.name == "cuda" else "gloo")
        super().build()
        rank, count = dist.get_rank(), dist.get_world_size()
        self._batches = [[array.chunk(count)[rank].contiguous() for array in batch] for batch in self._batches]

    def _wrapped(self, model: torch.nn.Module) -> Callable[..., torch.Tensor]:
        return super()._wrapped(torch.nn.parallel.DistributedDataParallel(model))

    def loss(self, handle: torch.Tensor) -> float:
        """Its mean over the ranks."""
        import torch.distributed as dist

        dist.all_reduce(handle)
        return float(handle) / dist.get_world_size()

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


def make_optimizer(parameters: list[torch.nn.Parameter], config: OptimizerConfig, fused: bool) -> torch.optim.Optimizer:
    """torch's optimizer for our config; weight decay for matrices only, as decay_rule=matrices says."""
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    how: dict[str, Any] = {"fused": True} if fused else {}
    if isinstance(config, AdamWConfig):
        beta1, beta2 = config.betas
        return torch.optim.AdamW(groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, **how)
    assert isinstance(config, SGDConfig)
    if any(p.dtype is torch.bfloat16 and p.device.type == "cpu" for p in parameters):
        how = {}  # torch 2.13's fused SGD on the CPU leaves bf16 weights as they are
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, **how)
