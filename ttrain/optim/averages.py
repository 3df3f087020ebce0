"""Averages of the weights over steps, which evaluations read: `<parameter path>/average`, fp32.

That of schedule-free AdamW, over the iterates, takes the place of a learning rate that falls.
"""

from __future__ import annotations

from ttrain.graph import Value
from ttrain.nn.module import Parameter
from ttrain.ops import at_least, maximum, sqrt
from ttrain.ops.update import Rule, update_rule
from ttrain.optim.adamw import unbiased
from ttrain.optim.base import AVERAGE, EXAMPLE, Optimizer, rule_cases
from ttrain.optim.settings import ScheduleFreeConfig


@update_rule
def ema(parameter: Value, gradient: Value, lr: Value, step: Value, decay: float) -> Value:
    """Average of weights: average <- average + max(1 - decay, 1 / step) (weights - average).

    `parameter` is the average, `gradient` the weights. It is the mean of all steps until there are 1 / (1 - decay) of
    them, so it does not remember its start.
    """
    share = at_least(1.0 / step, 1 - decay)
    return parameter + share * (gradient - parameter)


@update_rule
def swap_average(parameter: Value, gradient: Value, average: Value, lr: Value, step: Value) -> tuple[Value, Value]:
    """parameter <-> average."""
    return maximum(average, average), maximum(parameter, parameter)  # of equal numbers: an output is no input itself


def ema_rule(decay: float) -> Rule:
    """Updates averages by weights."""
    return Rule("ema", (), (("decay", decay),))


SWAP = Rule("swap_average", (AVERAGE,))


@update_rule
def schedule_free(
    parameter: Value,
    gradient: Value,
    average: Value,
    second: Value,
    lr: Value,
    step: Value,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    average_after: float,
) -> tuple[Value, Value, Value]:
    """Schedule-free AdamW (Defazio et al., 2024) on y = (1 - b1) z + b1 x, where gradients are taken; x is the average.

    v <- b2 v + (1 - b2) g^2;  z <- z - lr (g / (sqrt(v / (1 - b2^step)) + eps) + weight_decay y);
    x <- x + (z - x) / n with the number n of steps beyond `average_after`, or 1. z is not kept:
    z - x = (y - x) / (1 - b1).
    """
    second = beta2 * second + (1 - beta2) * (gradient * gradient)
    root = sqrt(second) * (1.0 / sqrt(unbiased(beta2, step)))
    first = at_least(2.0 - step, 0.0)  # 1 at step 1, when x is zero instead of y
    x = average + first * (parameter - average)
    descent = lr * (gradient / (root + eps) + weight_decay * parameter)
    share = 1.0 / at_least(step - average_after, 1.0)
    moved = share * ((parameter - x) * (1 / (1 - beta1)) - descent)
    return parameter + beta1 * moved - (1 - beta1) * descent, x + moved, second


class ScheduleFree(Optimizer[ScheduleFreeConfig]):
    """The rule of every parameter is schedule_free."""

    def rule(self, parameter: Parameter, decays: bool) -> Rule:
        config, (beta1, beta2) = self.config, self.config.betas
        settings = (
            ("beta1", beta1), ("beta2", beta2), ("eps", config.eps),
            ("weight_decay", config.weight_decay * decays), ("average_after", config.average_after),
        )  # fmt: skip
        return Rule("schedule_free", (AVERAGE, "second_moment"), settings, fp32_slots=((AVERAGE, None),))


rule_cases(ScheduleFree(ScheduleFreeConfig(betas=[0.5, 0.999])).rule(EXAMPLE, True), positive=(1,))
for _rule in (ema_rule(0.9), SWAP):
    rule_cases(_rule)
