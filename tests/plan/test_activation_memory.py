"""Activations that backward reads: planned bytes against those of PyTorch's autograd for an equal model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.models.session import plan_of
from tests.ttnn.runs import adamw
from ttrain.bench.baselines import PlainGPT
from ttrain.device.settings import DeviceConfig
from ttrain.device.torch.device import open_device
from ttrain.models.gpt import GPT
from ttrain.models.settings import GPTConfig
from ttrain.train.forecast.step_cost import activation_bytes, peak
from ttrain.train.steps.step_graph import StepGraph

ROWS, CONTEXT, VOCABULARY = 4, 256, 50257
LAYERS, HEADS, WIDTH = 12, 12, 768


def held_by_autograd() -> int:
    """Bytes of the distinct storages, parameters aside, that autograd keeps from forward. Nothing is computed."""
    with FakeTensorMode():
        model = PlainGPT(LAYERS, HEADS, WIDTH, CONTEXT, VOCABULARY, bias=True)
        parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}  # the storages themselves, so that none is freed and counted twice

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in parameters:
                kept[storage._cdata] = storage
            return tensor

        tokens = torch.zeros(ROWS, CONTEXT, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(tokens, tokens)
        assert loss.ndim == 0
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.slow
def test_gpt2_activations_take_at_most_half_of_what_autograd_holds_and_packing_wastes_little() -> None:
    steps = StepGraph(GPT(GPTConfig(preset="124M", vocabulary=VOCABULARY, context=CONTEXT)), adamw(), ROWS)
    plan = plan_of(open_device(DeviceConfig(name="cpu", matmul="aten")), steps.trace_train)
    ours, theirs = activation_bytes(plan), held_by_autograd()
    print(f"gpt2-124M, {ROWS} x {CONTEXT} tokens, fp32: plan {ours / 2**20:.0f} MiB, autograd {theirs / 2**20:.0f} MiB")
    assert 0 < ours <= theirs / 2
    assert plan.arena_bytes <= 1.05 * peak(plan.blocks)[0]
