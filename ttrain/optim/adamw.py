"""Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ttrain.graph import Value
from ttrain.graph.op import op
from ttrain.optim.settings import AdamWConfig


class AdamW:
    """AdamW (Loshchilov and Hutter, 2019) in torch.optim.AdamW's form; the formula is at op adamw_update."""

    slots = ("first_moment", "second_moment")

    def __init__(self, config: AdamWConfig) -> None:
        self.config = config

    def update(
        self,
        parameters: Sequence[Value],
        gradients: Sequence[Value],
        state: Mapping[str, Sequence[Value]],
        *,
        lr: Value,
        step: Value,
        factor: Value | None,
        decays: bool,
    ) -> list[Value]:
        """New values of the parameters; moments are overwritten in place."""
        beta1, beta2 = self.config.betas
        moments = (state[slot] for slot in self.slots)
        outputs = op("adamw_update").record(
            *parameters, *gradients, *(value for slot in moments for value in slot), lr, step, factor,
            count=len(parameters), beta1=beta1, beta2=beta2, eps=self.config.eps,
            weight_decay=self.config.weight_decay if decays else 0.0,
        )  # fmt: skip
        return list(outputs[: len(parameters)])
