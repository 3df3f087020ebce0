"""objective=grpo: group relative policy optimization (Shao et al., 2024) on completions that the model itself wrote.

Rows have a `prompt`, and what the rewards look at. train/sampling/rollouts.py writes the completions of a step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.data.batches import Baseline, Batch
from ttrain.data.examples import ExampleDataset, RowEncoder
from ttrain.graph import Graph, Value
from ttrain.models.base import LOSS_WEIGHT, SCALAR, Model, valid_targets
from ttrain.nn.lora import without_adapters
from ttrain.objectives.base import RowObjective
from ttrain.objectives.rewards import Row
from ttrain.objectives.settings import GRPOConfig

_EPS = 1e-4  # added to the standard deviation that divides rewards, as in TRL


class GRPO(RowObjective):
    """Makes completions likelier that are better than others of their prompt, and worse ones less likely.

    Fields of a step: `tokens` and `targets` int64 [rows, context], of which targets outside of completions are -1;
    `old_log_probs` fp32 [rows, context], those of the targets when they were drawn; `advantages` fp32 [rows, 1];
    `weights` fp32 [rows, context], the factor of each token's loss in its mean.
    """

    config: GRPOConfig

    def fields(self, model: Model, rows: int) -> dict[str, TensorSpec]:
        tokens = model.batch_specs(rows)["tokens"]
        each, fp32 = TensorSpec((rows, 1), DType.FP32), tokens.with_dtype(DType.FP32)
        return {"tokens": tokens, "targets": tokens, "old_log_probs": fp32, "advantages": each, "weights": fp32}

    def derive(self, fields: Batch) -> dict[str, int]:
        """Add `weights`, so that the mean of the weighted losses over all tokens is the mean that loss_type names.

        dapo takes the mean over all tokens, so all weights are 1. grpo takes the mean over completions of the means
        over their tokens. dr_grpo divides the sum by the most tokens that all completions could have.
        """
        mask, count = fields["targets"] >= 0, valid_targets(fields)  # mask [rows, context]
        weights, kind = mask.astype(np.float64), self.config.loss_type
        if kind == "grpo":
            weights *= count / len(mask) / np.maximum(mask.sum(1, keepdims=True), 1)
        elif kind == "dr_grpo":
            weights *= count / (len(mask) * self.config.max_completion_length)
        fields["weights"] = weights.astype(np.float32)
        return {LOSS_WEIGHT: count}

    def loss(self, model: Any, graph: Graph, rows: int, training: bool) -> tuple[Value, dict[str, Value]]:
        """Return the clipped loss, and the metrics of TRL as means over tokens, such as policy/entropy and policy/kl.

        The loss of a token of advantage A is -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) with r = p / p_old,
        plus beta (q / p - log(q / p) - 1) with the reference's probability q (Schulman's estimate of the KL).
        """
        config, (_, targets, old, advantages, weights) = self.config, self.given(model, graph, rows).values()
        flat = ops.reshape(targets, (targets.spec.size,))

        def by_token(policy: Any, training: bool) -> list[Value]:
            """Log-probabilities of the targets, and entropies, each [rows, context]."""
            hidden = policy.hidden(graph, rows, training) * (1 / config.temperature)  # [rows * context, width]
            found = policy.log_probs(hidden, flat, entropy=True)
            return [ops.reshape(each, targets.shape) for each in found]

        with graph.scope("loss"):
            new, entropy = by_token(model, training)
            change = new - old
            ratio = ops.exp(change)
            low = ops.full(graph, SCALAR, 1 - config.epsilon)
            high = ops.full(graph, SCALAR, 1 + (config.epsilon_high or config.epsilon))
            clipped = -ops.maximum(-ops.maximum(ratio, low), -high)
            plain = -(ratio * advantages)
            losses = ops.maximum(plain, -(clipped * advantages))
            metrics = {"policy/entropy": entropy, "clip_ratio/region_mean": ops.greater(losses, plain)}
            metrics["sampling/sampling_logp_difference/mean"] = ops.maximum(change, -change)
            if config.beta:
                with without_adapters(model):
                    reference = model if self.frozen is None else self.frozen.at_length(model.length)
                    further = by_token(reference, False)[0] - new
                metrics["policy/kl"] = ops.expm1(further) - further
                losses = losses + config.beta * metrics["policy/kl"]
            weight, mask = graph.input(LOSS_WEIGHT, SCALAR), ops.greater(weights, ops.full(graph, SCALAR, 0.0))
            sums = {name: weight * ops.reduce_sum(each * mask, (0, 1)) for name, each in metrics.items()}
            return weight * ops.reduce_sum(losses * weights, (0, 1)), sums

    def encode(self, row: Row, encoder: RowEncoder) -> dict[str, NDArray[Any]]:
        """Return the fields of a prompt before its completion is written.

        The only target is that of the prompt's last token; log-probabilities and advantage are 0. Raises ValueError for
        a bad prompt.
        """
        if not row.get("prompt"):
            raise ValueError("it has no 'prompt'")
        prompt, most = encoder.prompt(row["prompt"]), self.config.max_completion_length
        if len(prompt) + most > encoder.context:
            raise ValueError(f"its prompt of {len(prompt)} tokens leaves no {most} of model.context={encoder.context}")
        tokens, targets = encoder.fit(prompt, [encoder.end])
        none = {"old_log_probs": np.zeros(len(tokens), np.float32), "advantages": np.zeros(1, np.float32)}
        return {"tokens": tokens, "targets": targets, **none}

    def baseline(self, dataset: ExampleDataset) -> Baseline:
        return Baseline("no reward", 0.0)


def advantages_of(rewards: NDArray[np.float64], generations: int, scale: str) -> tuple[NDArray[Any], dict[str, float]]:
    """Return the advantages fp32 [n] of weighted rewards [n], `generations` of each prompt in turn, and metrics.

    An advantage is the reward less the mean of its group. scale_rewards divides it by the standard deviation of the
    group, by that of the batch, or by nothing. frac_reward_zero_std is the share of the deviations that are 0; nothing
    is learned of such groups.
    """
    groups = rewards.reshape(-1, generations)  # [prompts, generations]
    whole, std = rewards.std(ddof=1), groups.std(axis=1, ddof=1, keepdims=True)
    std = np.full_like(std, whole) if scale == "batch" else std
    found = groups - groups.mean(axis=1, keepdims=True)
    found = found if scale == "none" else found / (std + _EPS)
    metrics = {"reward": rewards.mean(), "reward_std": whole, "frac_reward_zero_std": np.isclose(std, 0).mean()}
    return found.ravel().astype(np.float32), {name: float(value) for name, value in metrics.items()}
