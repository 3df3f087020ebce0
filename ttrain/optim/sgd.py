"""Stochastic gradient descent."""

from __future__ import annotations

from ttrain.graph import Value
from ttrain.nn.module import Parameter
from ttrain.ops.update import Rule, update_rule
from ttrain.optim.base import EXAMPLE, Optimizer, rule_cases
from ttrain.optim.settings import SGDConfig


@update_rule
def sgd(parameter: Value, gradient: Value, lr: Value, step: Value, weight_decay: float) -> Value:
    """p <- p - lr (g + weight_decay p). The step's number is not read."""
    return parameter - _decayed(parameter, gradient, weight_decay) * lr


@update_rule
def sgd_momentum(
    parameter: Value,
    gradient: Value,
    velocity: Value,
    lr: Value,
    step: Value,
    momentum: float,
    nesterov: float,
    weight_decay: float,
) -> tuple[Value, Value]:
    """SGD as torch.optim.SGD computes it, with momentum and dampening 0.

    g <- g + weight_decay p; u <- momentum u + g; p <- p - lr (g + momentum u with Nesterov's look ahead, else u).
    """
    change = _decayed(parameter, gradient, weight_decay)
    velocity = momentum * velocity + change
    change = change + momentum * velocity if nesterov else velocity
    return parameter - change * lr, velocity


def _decayed(parameter: Value, gradient: Value, weight_decay: float) -> Value:
    return gradient + weight_decay * parameter if weight_decay else gradient


class SGD(Optimizer[SGDConfig]):
    """The rule of every parameter is sgd, with momentum sgd_momentum."""

    def rule(self, parameter: Parameter, decays: bool) -> Rule:
        config, decay = self.config, ("weight_decay", self.config.weight_decay * decays)
        if not config.momentum:
            return Rule("sgd", (), (decay,))
        settings = (("momentum", config.momentum), ("nesterov", float(config.nesterov)), decay)
        return Rule("sgd_momentum", ("velocity",), settings)


for _momentum, _nesterov, _decay in ((0.0, False, 0.1), (0.9, False, 0.1), (0.9, True, 0.0)):
    _config = SGDConfig(momentum=_momentum, nesterov=_nesterov, weight_decay=_decay)
    rule_cases(SGD(_config).rule(EXAMPLE, True))
