"""Lion: the sign of a momentum, so every element moves by the learning rate."""

from __future__ import annotations

from ttrain.graph import Value
from ttrain.nn.module import Parameter
from ttrain.ops import sign
from ttrain.ops.update import Rule, update_rule
from ttrain.optim.base import EXAMPLE, Optimizer, rule_cases
from ttrain.optim.settings import LionConfig


@update_rule
def lion(
    parameter: Value,
    gradient: Value,
    momentum: Value,
    lr: Value,
    step: Value,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> tuple[Value, Value]:
    """p <- p (1 - lr weight_decay) - lr sign(b1 m + (1 - b1) g);  m <- b2 m + (1 - b2) g (Chen et al., 2023)."""
    direction = sign(beta1 * momentum + (1 - beta1) * gradient)
    return parameter * (1.0 - weight_decay * lr) - lr * direction, beta2 * momentum + (1 - beta2) * gradient


class Lion(Optimizer[LionConfig]):
    """The rule of every parameter is lion."""

    def rule(self, parameter: Parameter, decays: bool) -> Rule:
        beta1, beta2 = self.config.betas
        decay = ("weight_decay", self.config.weight_decay * decays)
        return Rule("lion", ("momentum",), (("beta1", beta1), ("beta2", beta2), decay))


rule_cases(Lion(LionConfig()).rule(EXAMPLE, True))
