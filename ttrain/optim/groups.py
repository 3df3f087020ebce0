"""Which parameters share one update: learning-rate group, decay and the dtype that layers read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ttrain.core.errors import ConfigError
from ttrain.core.names import did_you_mean
from ttrain.core.spec import DType
from ttrain.nn.module import Parameter
from ttrain.optim.settings import OptimizerConfig

LEARNING_RATE = "lr"  # step input of the parameters that no prefix of group_lr claims; others read lr/<prefix>


@dataclass(frozen=True)
class ParameterRun:
    """Parameters that one update op takes together; an engine lays their state side by side."""

    lr: str  # name of the step input
    decays: bool
    dtype: DType  # that layers read the parameters in
    parameters: tuple[Parameter, ...]

    @property
    def name(self) -> str:
        """Label of the run within a state."""
        return f"{self.lr}/{'decay' if self.decays else 'no_decay'}/{self.dtype}"


def parameter_runs(parameters: Mapping[str, Parameter], config: OptimizerConfig, compute: DType) -> list[ParameterRun]:
    """All parameters, each in one run; within a run they keep the model's order.

    Raises ConfigError where a prefix of `group_lr` names no parameter.
    """
    check_prefixes(parameters, config.group_lr)
    found: dict[tuple[str, bool, DType], list[Parameter]] = {}
    for path, parameter in parameters.items():
        dtype = parameter.read_spec(compute).dtype
        key = (lr_input(path, config.group_lr), decays(parameter, config.decay_rule), dtype)
        found.setdefault(key, []).append(parameter)
    return [ParameterRun(*key, tuple(members)) for key, members in found.items()]


def decays(parameter: Parameter, rule: str) -> bool:
    """Whether weight decay applies: to matrices (rank 2 and up), all or none."""
    return rule == "all" or (rule == "matrices" and parameter.spec.rank >= 2)


def lr_input(path: str, prefixes: Iterable[str]) -> str:
    """The learning-rate input of a parameter: `lr/<prefix>` of the longest prefix that leads to it, else `lr`."""
    matching = [prefix for prefix in prefixes if path == prefix or path.startswith(f"{prefix}.")]
    return f"{LEARNING_RATE}/{max(matching, key=len)}" if matching else LEARNING_RATE


def learning_rates(
    parameters: Mapping[str, Parameter], config: OptimizerConfig, schedule: Callable[[int], float]
) -> Callable[[int], dict[str, float]]:
    """Step (from 1) -> every learning-rate input: lr * schedule(step), times the group's own factor.

    `lr` comes first, and is there unless every parameter belongs to a prefix.
    """
    check_prefixes(parameters, config.group_lr)
    names = {lr_input(path, config.group_lr) for path in parameters}
    factors = {LEARNING_RATE: 1.0, **{f"{LEARNING_RATE}/{key}": value for key, value in config.group_lr.items()}}
    used = {name: factor for name, factor in factors.items() if name in names}
    return lambda step: {name: config.lr * schedule(step) * factor for name, factor in used.items()}


def check_prefixes(parameters: Mapping[str, Parameter], prefixes: Iterable[str]) -> None:
    """Raise ConfigError naming every prefix of group_lr that leads to no parameter."""
    parts = [path.split(".") for path in parameters]
    valid = {".".join(part[:length]) for part in parts for length in range(1, len(part) + 1)}
    top = {part[0] for part in parts}
    problems = [
        f"optimizer.group_lr.{prefix}: no parameter's name begins so. {did_you_mean(prefix, top)}"
        for prefix in prefixes
        if prefix not in valid
    ]
    if problems:
        raise ConfigError(problems)
