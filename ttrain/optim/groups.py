"""Groups of parameters: those that are trained, and those that share one update.

Parts of a model are named by prefixes of parameter names, which end at dots: `blocks.0` is the first block. A `*`
stands for any one part between dots, as in `blocks.*.norm`, and `*` alone for everything. Where several prefixes lead
to a parameter the longest wins, and of equally long ones that with fewer `*`. Tied parameters are one and have one
name.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ttrain.core.errors import ConfigError
from ttrain.core.names import did_you_mean
from ttrain.core.spec import DType
from ttrain.nn.module import Parameter, Role
from ttrain.ops.update import Rule
from ttrain.optim.base import Optimizer
from ttrain.optim.settings import OptimizerConfig

LEARNING_RATE = "lr"  # step input of the parameters that no prefix of lr_multipliers claims; others read lr/<prefix>
ADAMW_RATE = "lr/adamw"  # likewise, of what muon leaves to AdamW, where optimizer.adamw_lr is given


@dataclass(frozen=True)
class FlatParameter:
    """Parameters that one update op takes together; an engine lays their state side by side."""

    lr: str  # name of the step input
    decays: bool
    dtype: DType  # that layers read the parameters in
    clipped: bool  # whether their gradients are multiplied by the clip factor
    rule: Rule
    parameters: tuple[Parameter, ...]

    @property
    def name(self) -> str:
        """Label within a state."""
        label = f"{self.lr}/{self.rule.name}/{'decay' if self.decays else 'no_decay'}/{self.dtype}"
        return label + "/unclipped" * (not self.clipped)


def flat_parameters(parameters: Mapping[str, Parameter], optimizer: Optimizer, compute: DType) -> list[FlatParameter]:
    """Return all trained parameters, each in one flat parameter, in the model's order within it.

    Raises ConfigError as check_prefixes does.
    """
    config = optimizer.config
    check_prefixes(parameters, config)
    found: dict[tuple[str, bool, DType, bool, Rule], list[Parameter]] = {}
    for path, parameter in trained(parameters, config).items():
        dtype = parameter.read_spec(compute).dtype
        decaying, clipped = decays(parameter, config.decay_rule), in_clip_scope(path, config)
        key = (_rate(path, parameter, config)[0], decaying, dtype, clipped, optimizer.rule(parameter, decaying))
        found.setdefault(key, []).append(parameter)
    return [FlatParameter(*key, tuple(members)) for key, members in found.items()]


def width_factor(parameter: Parameter, config: OptimizerConfig) -> float:
    """Learning-rate factor of a parameter in a model wider than its base (muP: Yang et al., 2022, table 8)."""
    hidden, other = config.width_powers
    return float(parameter.width_ratio ** (hidden if parameter.role is Role.HIDDEN else other))


def decays(parameter: Parameter, rule: str) -> bool:
    """True if weight decay applies: to matrices (rank 2 and up), to all or to none."""
    return rule == "all" or (rule == "matrices" and parameter.spec.rank >= 2)


def leads_to(prefix: str, path: str) -> bool:
    """True if a prefix names a parameter or a module that it lies in."""
    wanted, parts = prefix.split("."), path.split(".")
    return len(wanted) <= len(parts) and all(want in ("*", part) for want, part in zip(wanted, parts, strict=False))


def longest(path: str, prefixes: Iterable[str]) -> str | None:
    """The prefix that wins for a parameter; None where none leads to it."""
    leading = [prefix for prefix in prefixes if leads_to(prefix, path)]
    return max(leading, key=lambda prefix: (prefix.count(".") + 1, -prefix.split(".").count("*")), default=None)


def frozen(path: str, freeze: Iterable[str], unfreeze: Iterable[str]) -> bool:
    """True if a parameter is not trained."""
    given = set(freeze)
    return longest(path, [*given, *unfreeze]) in given


def trained(parameters: Mapping[str, Parameter], config: OptimizerConfig) -> dict[str, Parameter]:
    """Return the parameters that updates change."""
    changing = {path: p for path, p in parameters.items() if p.trainable}
    return {path: p for path, p in changing.items() if not frozen(path, config.freeze, config.unfreeze)}


def frozen_count(parameters: Mapping[str, Parameter], config: OptimizerConfig) -> int:
    """Return the number of elements that are not trained."""
    changing = trained(parameters, config)
    return sum(parameter.count for path, parameter in parameters.items() if path not in changing)


def in_clip_scope(path: str, config: OptimizerConfig) -> bool:
    """True if a parameter's gradient counts for the norm that is clipped, and is scaled."""
    return not config.clip_scope or longest(path, config.clip_scope) is not None


def orthogonalised(parameter: Parameter) -> bool:
    """True if Muon updates a parameter by its own rule: a matrix between features of the model, or a stack of such."""
    return parameter.role is Role.HIDDEN and parameter.spec.rank >= 2


def _rate(path: str, parameter: Parameter, config: OptimizerConfig) -> tuple[str, float, float]:
    """Return the learning-rate input of a parameter, its peak, and its factor.

    The input is `lr/<prefix>` of the prefix that wins, else `lr`. With muP `/width_<factor>` follows where the factor
    is not 1: rates are step inputs, which devices read on the host.
    """
    prefix, width = longest(path, config.lr_multipliers), width_factor(parameter, config)
    own = getattr(config, "adamw_lr", None)
    name, peak = (LEARNING_RATE, config.lr) if own is None or orthogonalised(parameter) else (ADAMW_RATE, own)
    name += ("" if prefix is None else f"/{prefix}") + ("" if width == 1 else f"/width_{width:g}")
    return name, peak, width if prefix is None else config.lr_multipliers[prefix] * width


def learning_rates(
    parameters: Mapping[str, Parameter], config: OptimizerConfig, schedule: Callable[[int], float]
) -> Callable[[int], dict[str, float]]:
    """Return a function of the step (from 1) that gives every learning-rate input.

    Each is its peak * schedule(step), times the factors of its group and of the model's width.

    `lr` comes first, and is there unless every trained parameter belongs to a prefix.
    """
    check_prefixes(parameters, config)
    every = {_rate(path, parameter, config) for path, parameter in trained(parameters, config).items()}
    rates = sorted(every, key=lambda rate: (rate[0] != LEARNING_RATE, rate[0]))
    return lambda step: {name: peak * schedule(step) * factor for name, peak, factor in rates}


def check_groups(parameters: Mapping[str, Parameter], config: OptimizerConfig) -> None:
    """Raise ConfigError for what a new run can't mean: what `check_prefixes` refuses, and keys that change nothing."""
    check_prefixes(parameters, config)
    _refuse(_idle(parameters, config))


def check_prefixes(parameters: Mapping[str, Parameter], config: OptimizerConfig) -> None:
    """Raise ConfigError with every prefix that leads to no parameter, and where nothing is left to train or clip."""
    _refuse(_unknown(parameters, config))
    _refuse(_contradictions(parameters, config))


def _refuse(problems: Iterable[str]) -> None:
    if found := list(problems):
        raise ConfigError(found)


def _contradictions(parameters: Mapping[str, Parameter], config: OptimizerConfig) -> Iterator[str]:
    """Yield the problems of known prefixes that exclude one another."""
    frozen_too = [path for path in parameters if longest(path, config.freeze) is not None]  # if nothing were unfrozen
    if both := sorted(set(config.freeze) & set(config.unfreeze)):
        yield f"optimizer.freeze and optimizer.unfreeze both name {both[0]}. Take it out of one of them."
    elif useless := [prefix for prefix in config.unfreeze if not _leads_to_any(prefix, frozen_too)]:
        yield f"optimizer.unfreeze={useless}: nothing in it is frozen. Name it in optimizer.freeze, or neither."
    changing = trained(parameters, config)
    if not changing:
        yield f"optimizer.freeze={config.freeze}: nothing is left to train. Name something in unfreeze."
    elif config.clip_scope and config.clip_norm is None:
        told = f"optimizer.clip_scope={config.clip_scope}: nothing is clipped with optimizer.clip_norm=null"
        yield f"{told}. Give a clip_norm, or clip_scope=[]."
    elif not any(in_clip_scope(path, config) for path in changing):
        yield f"optimizer.clip_scope={config.clip_scope}: all of it is frozen. Name something that is trained."


def _idle(parameters: Mapping[str, Parameter], config: OptimizerConfig) -> Iterator[str]:
    """Yield a problem for each key that changes nothing of what is trained."""
    changing = trained(parameters, config)
    fix = "Leave it out, or let some of it be trained."
    if any(not parameter.trainable for parameter in parameters.values()):
        example = next((path for path in changing if path.endswith(".b.weight")), next(iter(changing)))
        fix = f"With lora.rank the adapters alone are trained, such as {example}. Name some, or leave it out."
    for key in ("clip_scope", "unfreeze"):
        for prefix in getattr(config, key):
            if not _leads_to_any(prefix, changing):
                yield f"optimizer.{key}.{prefix}: nothing of it is trained. {fix}"
    rated = {longest(path, config.lr_multipliers) for path in changing}
    for prefix in (prefix for prefix in config.lr_multipliers if prefix not in rated):
        yield (
            f"optimizer.lr_multipliers.{prefix}: changes no rate, since nothing of it is trained, or longer prefixes "
            f"name all that is. {fix}"
        )
    own = getattr(config, "adamw_lr", None)
    if own is not None and all(map(orthogonalised, changing.values())):
        yield f"optimizer.adamw_lr={own}: {config.name} updates all that is trained at optimizer.lr. {fix}"


def _unknown(parameters: Mapping[str, Parameter], config: OptimizerConfig) -> Iterator[str]:
    """Yield a problem for each prefix that leads to no parameter."""
    parts = [path.split(".") for path in parameters]
    top = {part[0] for part in parts}
    inside = {".".join(part[:length]) for part in parts for length in range(2, len(part) + 1)}
    for key in ("lr_multipliers", "clip_scope", "freeze", "unfreeze"):
        for prefix in getattr(config, key):
            if not _leads_to_any(prefix, parameters):
                near = difflib.get_close_matches(prefix, inside, n=1) if "." in prefix else []
                hint = f"Did you mean {near[0]!r}?" if near else did_you_mean(prefix, top)
                yield f"optimizer.{key}.{prefix}: no parameter's name begins so. {hint}"


def _leads_to_any(prefix: str, paths: Iterable[str]) -> bool:
    return any(leads_to(prefix, path) for path in paths)
