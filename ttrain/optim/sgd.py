"""Stochastic gradient descent."""

from __future__ import annotations

from ttrain.core.errors import ConfigError
from ttrain.graph import Value
from ttrain.optim.base import Group, record_update
from ttrain.optim.settings import SGDConfig


class SGD:
    """SGD in torch.optim.SGD's form, with momentum (dampening 0) and Nesterov; the formula is at op sgd_update.

    Raises ConfigError for nesterov without momentum.
    """

    rounds = True

    def __init__(self, config: SGDConfig) -> None:
        if config.nesterov and not config.momentum:
            raise ConfigError("optimizer.nesterov=true: needs optimizer.momentum above 0.")
        self.config = config
        self.slots: tuple[str, ...] = ("velocity",) if config.momentum else ()

    def update(self, group: Group) -> list[Value]:
        """New values of the parameters; velocities are overwritten in place. The step's number is not read."""
        return record_update(
            "sgd", group, self.slots, (group.lr, group.factor), momentum=self.config.momentum,
            nesterov=self.config.nesterov, weight_decay=self.config.weight_decay * group.decays,
        )  # fmt: skip
