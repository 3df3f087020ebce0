"""Adam with decoupled weight decay, of every element or only of those that the update takes towards zero."""

from __future__ import annotations

from math import log

from ttrain.graph import Value
from ttrain.nn.module import Parameter
from ttrain.ops import expm1, relu, sign, sqrt
from ttrain.ops.update import Rule, update_rule
from ttrain.optim.base import EXAMPLE, Optimizer, rule_cases
from ttrain.optim.settings import AdamWConfig


@update_rule
def adamw(
    parameter: Value,
    gradient: Value,
    first: Value,
    second: Value,
    lr: Value,
    step: Value,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    cautious: bool = False,
) -> tuple[Value, Value, Value]:
    """AdamW (Loshchilov and Hutter, 2019) in torch.optim.AdamW's form.

    p <- p (1 - lr weight_decay);  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;
    p <- p - lr / (1 - b1^step) * m / (sqrt(v / (1 - b2^step)) + eps).

    A `cautious` decay leaves out the elements that the update moves away from zero: those with m p < 0.
    """
    first = beta1 * first + (1 - beta1) * gradient
    second = beta2 * second + (1 - beta2) * (gradient * gradient)
    rate = lr if beta1 == 0 else lr / unbiased(beta1, step)
    root = sqrt(second) if beta2 == 0 else sqrt(second) * (1.0 / sqrt(unbiased(beta2, step)))
    change, decay = rate * first / (root + eps), weight_decay * lr
    if cautious:
        decay = decay * (1.0 - relu(sign(-1.0 * first * parameter)))
    return parameter * (1.0 - decay) - change, first, second


def unbiased(beta: float, step: Value) -> Value:
    """1 - beta^step, the weight that a mean of `step` values has; exact where beta is near 1."""
    return -expm1(log(beta) * step)


class AdamW(Optimizer[AdamWConfig]):
    """The rule of every parameter is adamw, cautious where it decays with caution."""

    def rule(self, parameter: Parameter, decays: bool) -> Rule:
        beta1, beta2 = self.config.betas
        settings = {"beta1": beta1, "beta2": beta2, "eps": self.config.eps}
        settings["weight_decay"] = self.config.weight_decay * decays
        if self.config.cautious and settings["weight_decay"]:
            settings["cautious"] = True
        return Rule("adamw", ("first_moment", "second_moment"), tuple(settings.items()))


for _config, _decays in (
    (AdamWConfig(), True),
    (AdamWConfig(betas=[0.0, 0.95]), False),
    (AdamWConfig(cautious=True), True),
):
    rule_cases(AdamW(_config).rule(EXAMPLE, _decays), positive=(1,))
