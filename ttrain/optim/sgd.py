"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ttrain.core.errors import ConfigError
from ttrain.graph import Value
from ttrain.graph.op import op
from ttrain.optim.settings import SGDConfig


class SGD:
    """SGD in torch.optim.SGD's form, with momentum (dampening 0) and Nesterov; the formula is at op sgd_update.

    Raises ConfigError for nesterov without momentum.
    """

    def __init__(self, config: SGDConfig) -> None:
        if config.nesterov and not config.momentum:
            raise ConfigError("optimizer.nesterov=true: needs optimizer.momentum above 0.")
        self.config = config
        self.slots: tuple[str, ...] = ("velocity",) if config.momentum else ()

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
        """New values of the parameters; velocities are overwritten in place. `step` is not read."""
        velocities = [value for slot in self.slots for value in state[slot]]
        outputs = op("sgd_update").record(
            *parameters, *gradients, *velocities, lr, factor,
            count=len(parameters), momentum=self.config.momentum, nesterov=self.config.nesterov,
            weight_decay=self.config.weight_decay if decays else 0.0,
        )  # fmt: skip
        return list(outputs[: len(parameters)]) if isinstance(outputs, tuple) else [outputs]
