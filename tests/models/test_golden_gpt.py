"""The transformer against an independent PyTorch implementation with the same weights and batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.plain_gpt import PlainGPT
from tests.models.session import Session, relative_error, tensor_by_tensor_equal, token_batch
from ttrain.core.spec import TensorSpec
from ttrain.graph import op
from ttrain.models.gpt import GPT
from ttrain.models.settings import GPTConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.groups import learning_rates
from ttrain.optim.schedules import schedule
from ttrain.optim.settings import AdamWConfig, ScheduleConfig

SIZE = {"layers": 3, "heads": 4, "width": 32, "context": 24, "vocabulary": 61}
VARIANTS = {"plain": {}, "no-bias": {"bias": False}, "untied": {"tied": False}, "exact-gelu": {"activation": "gelu"}}
ROWS, STEPS = 4, 20


def pair(variant: str, **changes: Any) -> tuple[GPT, PlainGPT]:
    """Our model and the oracle of one variant."""
    options = VARIANTS[variant]
    torch.manual_seed(0)
    approximate = "none" if options.get("activation") == "gelu" else "tanh"
    plain = PlainGPT(**SIZE, bias=options.get("bias", True), tied=options.get("tied", True), approximate=approximate)
    return GPT(GPTConfig(**SIZE, **options, **changes)), plain


def session(model: GPT, plain: PlainGPT, engine: str, optimizer: AdamWConfig, rows: int = ROWS) -> Session:
    return Session(model, AdamW(optimizer), rows, engine=engine, values=model.from_original(plain.state_dict()))


def batches(count: int) -> list[dict[str, np.ndarray]]:
    return [
        token_batch(SIZE["vocabulary"], ROWS, SIZE["context"], index % 5, masked=index % 3) for index in range(count)
    ]


def nanogpt_rate(step: int, peak: float, warmup: int, steps: int, lowest: float) -> float:
    """The schedule of nanoGPT's training script, from its description: linear warm-up, then half a cosine.

    Its lr_decay_iters counts from 0, so the last of `steps` steps is `steps - 1`, where the lowest rate is reached.
    """
    index = step - 1
    if index < warmup:
        return peak * (index + 1) / (warmup + 1)
    return lowest + 0.5 * (1 + np.cos(np.pi * (index - warmup) / (steps - 1 - warmup))) * (peak - lowest)


def plain_run(plain: PlainGPT) -> list[float]:
    """20 steps of torch.optim.AdamW with warm-up, cosine, clipping, and decay on matrices only."""
    matrices = [p for p in plain.parameters() if p.dim() >= 2]
    vectors = [p for p in plain.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step, batch in enumerate(batches(STEPS), 1):
        for group in optimizer.param_groups:
            group["lr"] = nanogpt_rate(step, 1e-2, 5, STEPS, 1e-3)
        loss = plain.loss(*(torch.from_numpy(batch[key]) for key in ("tokens", "targets")))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def our_run(model: GPT, plain: PlainGPT, engine: str) -> tuple[list[float], Session]:
    config = AdamWConfig(lr=1e-2, weight_decay=0.1, clip_norm=0.5, betas=[0.9, 0.95])
    rates = learning_rates(model.parameters(), config, schedule(ScheduleConfig(warmup=5, min_lr_ratio=0.1), STEPS))
    ours = session(model, plain, engine, config)
    losses = [ours.train(batch, step, rates(step))["loss"] for step, batch in enumerate(batches(STEPS), 1)]
    return losses, ours


def without_key_bias(path: str) -> Callable[[np.ndarray], np.ndarray]:
    """Leaves out the biases of the keys, which add the same to every score of a query.

    Softmax does not see them, so their gradient is zero but for rounding, and Adam turns the sign of rounding errors
    into full steps: no two implementations agree on them, and nothing depends on them.
    """
    width = SIZE["width"]
    return lambda value: np.delete(value, slice(width, 2 * width)) if path.endswith("qkv.bias") else value


@pytest.mark.parametrize("variant", VARIANTS)
def test_twenty_adamw_steps_equal_pytorch_on_both_engines(variant: str) -> None:
    model, plain = pair(variant)
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    expected = plain_run(plain)
    wanted = model.from_original({name: value.clone() for name, value in plain.state_dict().items()})
    plain.load_state_dict(start)
    runs = {engine: our_run(model, plain, engine) for engine in ("dynamic", "static")}
    for engine, (losses, ours) in runs.items():
        np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=engine)
        for path, value in ours.parameters().items():
            assert relative_error(*map(without_key_bias(path), (value, wanted[path]))) < 1e-4, (engine, path)
    assert runs["dynamic"][0] == runs["static"][0]
    assert tensor_by_tensor_equal(runs["dynamic"][1].parameters(), runs["static"][1].parameters())
    assert expected[-1] < 0.95 * expected[0]
    assert runs["static"][1].engine.counters.allocations_after_first == 0
    assert runs["static"][1].engine.counters.nodes_after_first == 0


@pytest.mark.parametrize("engine", ["dynamic", "static"])
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_dropout_sits_where_nanogpt_has_it_and_backward_sees_the_same_masks(recompute: str, engine: str) -> None:
    p, seed = 0.25, 2**40 + 17
    model, plain = pair("plain", dropout=p, recompute=recompute)
    ours = session(model, plain, engine, AdamWConfig(clip_norm=None), rows=1)
    batch = token_batch(SIZE["vocabulary"], 1, SIZE["context"], 0)
    streams = iter(range(1 + 3 * SIZE["layers"]))  # in the order in which a forward pass reaches them

    def mask(spec: TensorSpec) -> torch.Tensor:
        return op("dropout_mask").reference(seed, spec, p, next(streams)).float()

    plain.drop = lambda x: x * mask(TensorSpec(tuple(x.shape)))
    loss = plain.loss(torch.from_numpy(batch["tokens"]), torch.from_numpy(batch["targets"]))
    loss.backward()
    assert ours.train(batch, 1, {"lr": 0.0}, seed)["loss"] == pytest.approx(loss.item(), rel=1e-5)
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for path, gradient in model.from_original(gradients).items():
        assert relative_error(ours.state.read(f"{path}/gradient"), gradient) < 1e-5, path
