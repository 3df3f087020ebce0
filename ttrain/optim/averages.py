"""Averages of the weights over steps, which evaluations read instead of them: `<parameter path>/average`, fp32."""

from __future__ import annotations

from ttrain.graph import Value
from ttrain.ops import at_least, maximum
from ttrain.ops.update import Rule, update_rule
from ttrain.optim.base import AVERAGE, rule_cases


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
for _rule in (ema_rule(0.9), SWAP):
    rule_cases(_rule)
