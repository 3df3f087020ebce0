"""Adafactor: the second moment of a matrix is kept as the means of its rows and columns, in little memory."""

from __future__ import annotations

from math import prod

from ttrain import ops
from ttrain.core.spec import DType
from ttrain.graph import Value
from ttrain.nn.module import Parameter
from ttrain.ops.update import Rule, update_rule
from ttrain.optim.base import EXAMPLE, Optimizer, rule_cases
from ttrain.optim.settings import AdafactorConfig


@update_rule
def adafactor(
    parameter: Value,
    gradient: Value,
    rows: Value,
    columns: Value,
    lr: Value,
    step: Value,
    beta2_decay: float,
    eps: float,
    least_rms: float,
    threshold: float,
    padding: int,
) -> tuple[Value, Value, Value]:
    """Adafactor of a matrix g (Shazeer and Stern, 2018). See _change.

    R <- mean of g^2 over each row, C over each column, both averaged over steps with beta2 = 1 - step^beta2_decay; u =
    g / sqrt(R C / mean(R)).
    """
    g = ops.cast(gradient, DType.FP32)
    square, kept = g * g, g.shape[-2] / (g.shape[-2] - padding)  # the rows that pad have no part in a mean over rows
    rows = _averaged(rows, ops.mean(square, -1), step, beta2_decay)
    columns = _averaged(columns, ops.mean(square, -2) * kept, step, beta2_decay)
    variance = rows / ops.at_least(ops.mean(rows, -2) * kept, eps) * columns
    u = g / ops.sqrt(ops.at_least(variance, eps * eps))
    return _change(parameter, u, lr, step, least_rms, threshold, padding), rows, columns


@update_rule
def adafactor_vector(
    parameter: Value,
    gradient: Value,
    variance: Value,
    lr: Value,
    step: Value,
    beta2_decay: float,
    eps: float,
    least_rms: float,
    threshold: float,
    padding: int,
) -> tuple[Value, Value]:
    """Adafactor of a tensor without rows and columns: it keeps the mean of g^2 over steps."""
    g = ops.cast(gradient, DType.FP32)
    variance = _averaged(variance, g * g, step, beta2_decay)
    u = g / ops.sqrt(ops.at_least(variance, eps * eps))
    return _change(parameter, u, lr, step, least_rms, threshold, padding), variance


@update_rule
def subtract_change(parameter: Value, change: Value, lr: Value, step: Value, weight_decay: float) -> Value:
    """p <- p (1 - lr weight_decay) - change."""
    return parameter * (1.0 - weight_decay * lr) - change


def _averaged(mean: Value, new: Value, step: Value, beta2_decay: float) -> Value:
    share = ops.exp(beta2_decay * ops.log(step))  # 1 at step 1, so the zeros of the start count for nothing
    return mean + share * (new - mean)


def _change(
    parameter: Value, u: Value, lr: Value, step: Value, least_rms: float, threshold: float, padding: int
) -> Value:
    """Change of a parameter: rate * max(least_rms, rms(p)) / max(1, rms(u) / threshold) * u.

    Here u = g / sqrt(variance); the rate is the smaller of lr and 1 / sqrt(step). The last `padding` rows are zeros
    that count for no mean.
    """
    shape = parameter.shape
    count = prod((*(size - padding for size in shape[:1]), *shape[1:]))
    rate = -1.0 * ops.maximum(-1.0 * lr, -1.0 / ops.sqrt(step))
    rms, size = (ops.global_norm([x]) * count**-0.5 for x in (parameter, u))
    return u * (rate * ops.at_least(rms, least_rms) / ops.at_least(size * (1 / threshold), 1.0))


class Adafactor(Optimizer[AdafactorConfig]):
    """The rule of a matrix is adafactor, of a vector adafactor_vector."""

    def rule(self, parameter: Parameter, decays: bool) -> Rule:
        config = self.config
        named = ((name, getattr(config, name)) for name in ("beta2_decay", "eps", "least_rms", "threshold"))
        settings = (*named, ("padding", parameter.padding))
        apply = Rule("subtract_change", (), (("weight_decay", config.weight_decay * decays),))
        if parameter.spec.rank < 2:
            return Rule("adafactor_vector", ("variance",), settings, apply, (("variance", None),))
        return Rule("adafactor", ("rows", "columns"), settings, apply, (("rows", -1), ("columns", -2)))


rule_cases(Rule("subtract_change", (), (("weight_decay", 0.1),)))
for _shape in ((4, 8), (7,)):
    _rule = Adafactor(AdafactorConfig()).rule(Parameter(_shape, EXAMPLE.initializer), True)
    rule_cases(_rule, range(len(_rule.slots)), _shape)
