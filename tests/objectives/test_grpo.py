"""objective=grpo: its loss, gradients, metrics and advantages against TRL's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.session import open_cpu
from ttrain import ops
from ttrain.autodiff import backward
from ttrain.core.spec import DType, TensorSpec
from ttrain.engine.dynamic import DynamicEngine
from ttrain.engine.state import State
from ttrain.graph import Graph
from ttrain.models.base import loss_weights
from ttrain.objectives.grpo import GRPO, advantages_of
from ttrain.objectives.settings import GRPOConfig

ROWS, CONTEXT, PROMPT, VOCABULARY, MOST = 4, 9, 3, 5, 7
LENGTHS = (7, 1, 4, 2)  # tokens of the completions; the first one has not ended
METRICS = {"policy/entropy": "entropy", "clip_ratio/region_mean": "clip_ratio/region_mean"}


class Scores:
    """A model whose hidden states are its logits, an input."""

    def batch_specs(self, rows: int) -> dict[str, TensorSpec]:
        return dict.fromkeys(("tokens", "targets"), TensorSpec((rows, CONTEXT), DType.INT64))

    def modules(self) -> list[Any]:
        return []

    def hidden(self, graph: Graph, rows: int, training: bool) -> Any:
        name = "reference" if "logits" in graph.inputs else "logits"  # that is asked for after the model
        return graph.input(name, TensorSpec((rows * CONTEXT, VOCABULARY), DType.FP32))

    def log_probs(self, hidden: Any, targets: Any, entropy: bool) -> Any:
        return ops.log_probs(hidden, targets, entropy)


def batch_of(seed: int = 0) -> dict[str, Any]:
    """Return a step's batch, with the logits of the model and of the reference."""
    drawn = np.random.default_rng(seed)
    targets, old = np.full((ROWS, CONTEXT), -1), np.zeros((ROWS, CONTEXT), np.float32)
    logits, reference = drawn.normal(size=(2, ROWS, CONTEXT, VOCABULARY)).astype(np.float32)
    for row, length in enumerate(LENGTHS):
        targets[row, PROMPT - 1 : PROMPT - 1 + length] = drawn.integers(0, VOCABULARY, length)
    chosen = np.take_along_axis(torch.tensor(logits).log_softmax(-1).numpy(), np.maximum(targets, 0)[..., None], 2)
    old[targets >= 0] = (chosen[..., 0] + 0.3 * drawn.normal(size=targets.shape))[targets >= 0]
    advantages = np.array([[1.5], [-0.5], [-1.0], [0.7]], np.float32)
    return {
        "tokens": np.maximum(targets, 0), "targets": targets, "old_log_probs": old, "advantages": advantages,
        "logits": logits, "reference": reference,
    }  # fmt: skip


def ours(config: GRPOConfig, batch: dict[str, Any], parts: int = 1) -> tuple[dict[str, float], np.ndarray]:
    """Return loss and metrics of a batch in so many micro-batches, and the gradient of the logits."""
    objective, rows, model = GRPO(config), ROWS // parts, Scores()
    device = open_cpu()
    engine = DynamicEngine(device, State(device, []))

    def trace(graph: Graph) -> None:
        loss, metrics = objective.loss(model, graph, rows, True)
        for name, value in {"loss": loss, **metrics}.items():
            graph.output(name, value)
        graph.output("gradient", backward(loss, [graph.inputs["logits"]])[0])

    step, sums, gradients = engine.build("step", trace), dict[str, float](), []
    fields, counts = objective.prepare(model)(
        {name: batch[name] for name in ("tokens", "targets", "old_log_probs", "advantages")}
    )  # type: ignore[arg-type]
    wide = {name: batch[name].reshape(-1, VOCABULARY) for name in ("logits", "reference")}
    for at in range(0, ROWS, rows):
        own = {name: array[at : at + rows] for name, array in fields.items()}
        own |= {name: array[at * CONTEXT : (at + rows) * CONTEXT] for name, array in wide.items()}
        outputs = dict(step({name: own[name] for name in own if name in step.inputs} | loss_weights(counts)))
        gradients.append(np.asarray(outputs.pop("gradient")))
        for name, value in outputs.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums, np.concatenate(gradients)


def theirs(config: GRPOConfig, batch: dict[str, Any]) -> tuple[dict[str, float], np.ndarray]:
    """Return what TRL's trainer makes of the same batch."""
    trainer = pytest.importorskip("trl").GRPOTrainer
    logits = torch.tensor(batch["logits"], requires_grad=True)
    span = slice(PROMPT - 1, PROMPT - 1 + MOST)
    completions = torch.tensor(np.maximum(batch["targets"], 0))[:, span]
    mask = torch.tensor(batch["targets"] >= 0)[:, span].int()

    def likely(scores: Any) -> Any:
        return scores[:, span].log_softmax(-1).gather(2, completions[..., None])[..., 0]

    entropies = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)[:, span]

    class Lists(dict[str, list[float]]):
        def __missing__(self, key: str) -> list[float]:
            return self.setdefault(key, [])

    metrics = Lists()
    self = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *given, **more: (likely(logits), entropies.detach(), None),
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token", beta=config.beta,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1), use_vllm=False,
        loss_type=config.loss_type, epsilon_low=config.epsilon, epsilon_high=config.epsilon_high or config.epsilon,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        current_gradient_accumulation_steps=1, aux_loss_enabled=False, _entropy_bonus_enabled=False,
        max_completion_length=config.max_completion_length, model=SimpleNamespace(training=True),
        _metrics={"train": metrics},
    )  # fmt: skip

    inputs = {
        "prompt_ids": torch.zeros(ROWS, PROMPT, dtype=torch.long), "prompt_mask": torch.ones(ROWS, PROMPT),
        "completion_ids": completions, "completion_mask": mask, "num_items_in_batch": mask.sum(),
        "advantages": torch.tensor(batch["advantages"])[:, 0],
        "old_per_token_logps": torch.tensor(batch["old_log_probs"])[:, span],
        "ref_per_token_logps": likely(torch.tensor(batch["reference"])),
    }  # fmt: skip
    loss = trainer._compute_loss(self, SimpleNamespace(), inputs)
    loss.backward()
    assert logits.grad is not None
    return {"loss": loss.item(), **{name: each[0] for name, each in metrics.items()}}, logits.grad.numpy()


@pytest.mark.parametrize("given", [{}, {"beta": 0.3}, {"epsilon": 0.1, "epsilon_high": 0.4}], ids=str)
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_loss_gradients_and_metrics_are_those_of_trl(loss_type: str, given: Any) -> None:
    config = GRPOConfig(loss_type=loss_type, max_completion_length=MOST, **given)
    batch = batch_of()
    (found, gradient), (wanted, reference) = ours(config, batch), theirs(config, batch)
    names = {"loss": "loss", **METRICS, **({"policy/kl": "kl"} if config.beta else {})}
    assert found.pop("sampling/sampling_logp_difference/mean") > 0.1
    assert found.keys() == names.keys()
    for name, their in names.items():
        assert found[name] == pytest.approx(wanted[their], abs=1e-5), name
    assert found["clip_ratio/region_mean"] > 0
    np.testing.assert_allclose(gradient.reshape(reference.shape), reference, atol=1e-5)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_micro_batches_add_up(loss_type: str) -> None:
    config, batch = GRPOConfig(loss_type=loss_type, max_completion_length=MOST), batch_of(1)
    (whole, gradient), (parts, others) = ours(config, batch), ours(config, batch, parts=4)
    assert parts == pytest.approx(whole, abs=1e-6)
    np.testing.assert_allclose(others, gradient, atol=1e-6)


def test_a_temperature_divides_the_logits() -> None:
    batch = batch_of(2)
    hot = {**batch, "logits": batch["logits"] / 2}
    (found, _), (wanted, _) = ours(GRPOConfig(temperature=2.0), batch), ours(GRPOConfig(), hot)
    assert found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_those_of_trl(scale: str) -> None:
    rewards = np.array([1, 0, 0, 1, 0.5, 0.5, 0.5, 0.5, -2, 1, 0, 3], np.float64)
    found, metrics = advantages_of(rewards, 4, scale)
    groups = torch.tensor(rewards).view(-1, 4)  # as in GRPOTrainer._generate_and_score_completions
    std = torch.tensor(rewards).std() if scale == "batch" else groups.std(dim=1, keepdim=True)
    wanted = groups - groups.mean(dim=1, keepdim=True)
    wanted = wanted if scale == "none" else wanted / (std + 1e-4)
    np.testing.assert_allclose(found, wanted.flatten().numpy(), atol=1e-6)
    assert metrics["reward"] == pytest.approx(rewards.mean())
    assert metrics["reward_std"] == pytest.approx(torch.tensor(rewards).std().item())
    assert metrics["frac_reward_zero_std"] == pytest.approx(0 if scale == "batch" else 1 / 3)
