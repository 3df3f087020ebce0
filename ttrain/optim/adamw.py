"""Adam with decoupled weight decay."""

from __future__ import annotations

from ttrain.graph import Value
from ttrain.optim.base import Group, record_update
from ttrain.optim.settings import AdamWConfig


class AdamW:
    """AdamW (Loshchilov and Hutter, 2019) in torch.optim.AdamW's form; the formula is at op adamw_update."""

    slots = ("first_moment", "second_moment")
    rounds = True

    def __init__(self, config: AdamWConfig) -> None:
        self.config = config

    def update(self, group: Group) -> list[Value]:
        """New values of the parameters; moments are overwritten in place."""
        beta1, beta2 = self.config.betas
        return record_update(
            "adamw", group, self.slots, (group.lr, group.step, group.factor),
            beta1=beta1, beta2=beta2, eps=self.config.eps, weight_decay=self.config.weight_decay * group.decays,
        )  # fmt: skip
